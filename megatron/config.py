"""Settings of a run, as frozen dataclasses.

``megatron.arguments`` is the only module that knows the command line; it
validates the flags and fills these. Everything else receives the part it needs
as an argument. A field carries the name of its flag (dashes become
underscores); a flag spelled ``--no-x`` fills the positive field ``x``.

Lengths are counted in tokens, sizes of batches in samples (one sample is one
row of ``seq_length`` tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: the spelling used for dtypes in settings and log lines
DTYPES = ("fp32", "bf16", "fp16")
#: which biases --bitfit can train, in the terms of arXiv 2106.10199 and the order they are kept in
BIAS_TERMS = ("query", "key", "value", "attention_output", "mlp_intermediate", "mlp_output", "layernorm")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of the network; says nothing about parallelism."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    ffn_hidden_size: int = 0
    """inner width of the MLP; 0 means 4 * hidden_size"""
    kv_channels: int = 0
    """width of one head; 0 means hidden_size / num_attention_heads"""
    vocab_size: int = 0
    """true number of token ids (highest id + 1); 0 until the tokenizer is read"""
    padded_vocab_size: int = 0
    """rows of the embedding table over all TP ranks; 0 until the tokenizer is read"""
    position_embedding_type: str = "absolute"
    """absolute, rotary or alibi"""
    max_position_embeddings: int | None = None
    embed_layernorm: bool = False
    layernorm_epsilon: float = 1e-5
    apply_residual_connection_post_layernorm: bool = False
    fp32_residual_connection: bool = False
    activation: str = "gelu_tanh"
    """gelu_tanh, gelu_erf, or a gated form: liglu, geglu, reglu, swiglu"""
    query_key_layer_scaling: bool = True
    attention_softmax_in_fp32: bool = True
    masked_softmax_fusion: bool = True
    """False asks for the explicit attention path instead of torch's fused one"""
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02
    use_cpu_initialization: bool = False
    """draw every weight at its full size on the CPU, then slice: same weights at any TP"""
    params_dtype: str = "fp32"
    fp16_lm_cross_entropy: bool = False
    checkpoint_activations: bool = False
    checkpoint_num_layers: int = 1
    reset_attention_mask: bool = False
    """documents of one row do not attend to each other: segment ids travel along the pipeline"""
    prefix_lm: bool = False
    """the segment ids are marks, 2 * segment + is_input, and inputs see each other in both directions"""

    def __post_init__(self) -> None:
        if not self.ffn_hidden_size:
            object.__setattr__(self, "ffn_hidden_size", 4 * self.hidden_size)
        if not self.kv_channels:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} does not divide by num_attention_heads "
                    f"{self.num_attention_heads}; give kv_channels or change one of them")
            object.__setattr__(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        if self.params_dtype not in DTYPES:
            raise ValueError(f"params_dtype {self.params_dtype!r} is not one of {', '.join(DTYPES)}")

    @property
    def gated(self) -> bool:
        """Whether the MLP's first projection has two halves (GLU variants)."""
        return self.activation.endswith("glu")

    @property
    def projection_size(self) -> int:
        """Width of the concatenated heads, kv_channels * num_attention_heads."""
        return self.kv_channels * self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the grid and how its ranks talk."""

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    launcher: str = ""
    """where the numbers above come from, see megatron.world; empty if not from there"""
    master_addr: str = ""
    """where rank 0 listens; empty for MASTER_ADDR of the environment, or this host in a world of one"""
    master_port: int = 0
    """0 for MASTER_PORT of the environment, or any in a world of one"""
    distributed_timeout_minutes: float = 30.0
    """how long ranks wait for each other, at the start and in every exchange"""
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    pp_partition_method: str = "type:transformer"
    distributed_backend: str = "nccl"
    """nccl or gloo; nccl falls back to gloo where no accelerator is visible"""
    scatter_gather_tensors_in_pipeline: bool = True
    """split activations over TP before they cross a stage boundary"""
    sync_tp_duplicated_parameters: bool = False
    """overwrite copies that differ over TP with those of TP rank 0"""
    check_tp_duplicated_parameters: int = 0
    """iterations between comparisons of these copies; 0: each one when they are synced, else none"""

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule (units: samples) and loss scaling."""

    optimizer: str = "adam"
    """adam or sgd"""
    lr: float | None = None
    min_lr: float = 0.0
    lr_decay_style: str = "linear"
    """constant, linear or cosine"""
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_decay_tokens: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    override_lr_scheduler: bool = False
    use_checkpoint_lr_scheduler: bool = False
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    bitfit: bool = False
    """train only the biases (BitFit, arXiv 2106.10199); everything else is frozen"""
    bitfit_bias_terms: tuple[str, ...] = BIAS_TERMS
    """which biases train under bitfit, in the order of BIAS_TERMS"""
    zero_stage: int = 1
    """as asked for; the engine always shards optimizer state (stage 1) and says so"""
    loss_scale: float | None = None
    """fp16 only; None means dynamic"""
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop: batch sizes, length, when to evaluate and when to stop."""

    micro_batch_size: int
    global_batch_size: int
    rampup_batch_size: tuple[int, int, int] | None = None
    """(start, increment, samples over which the global batch grows)"""
    train_iters: int | None = None
    train_samples: int | None = None
    """exactly one of train_iters and train_samples is set"""
    loss_normalization: str = "micro-batch"
    """micro-batch, global-tokens or global-targets; see megatron.model.loss"""
    seed: int = 1234
    eval_iters: int = 100
    eval_interval: int = 1000
    eval_only: bool = False
    exit_interval: int | None = None
    exit_duration_in_mins: int | None = None
    kill_switch_path: str | None = None
    exit_signal_handler: bool = False
    """SIGTERM and SIGUSR1 save and end the run"""
    max_skipped_iterations: int | None = None
    """skipped updates in a row that end the run"""
    skip_train_iteration_range: tuple[tuple[int, int], ...] = ()
    """inclusive, sorted, merged"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved and what a load restores."""

    save: str | None = None
    save_interval: int | None = None
    load: str | None = None
    save_rng: bool = True
    load_optim: bool = True
    load_rng: bool = True
    finetune: bool = False
    reset_progress: bool = False
    allow_fresh_start: bool = False
    """--load of an empty or missing folder is an error unless this is set"""
    trust_checkpoint: bool = False
    """unpickle files that need more than the safe classes"""
    average_duplicated_parameters: bool = False
    """copies over TP that differ in a loaded checkpoint are averaged instead of refused"""
    verify_checkpoint: bool = False
    """compare checksums, not sizes alone, with the manifest before loading"""
    keep_last: int | None = None
    """tags kept in the --save folder; None keeps all"""
    async_save: bool = False
    """write files while training goes on"""
    save_delta_only: bool = False
    """biases, optimizer state and progress alone; the frozen weights stay in the base"""


@dataclass(frozen=True, kw_only=True)
class SplitGroup:
    """One named group of weighted dataset ranges (``NAME: W S:E PATH, ...``)."""

    name: str
    paths: tuple[str, ...]
    weights: tuple[float, ...]
    splits: tuple[tuple[float, float], ...]
    """(start, end) fractions of each dataset's documents, 0 <= start < end <= 1"""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from."""

    data_path: tuple[str, ...] = ()
    """one prefix, or weight and prefix in turn"""
    split: str = "969, 30, 1"
    train_groups: tuple[SplitGroup, ...] = ()
    valid_groups: tuple[SplitGroup, ...] = ()
    test_groups: tuple[SplitGroup, ...] = ()
    data_impl: str = "infer"
    mmap_warmup: bool = False
    dataloader_type: str = "single"
    """single or cyclic"""
    num_workers: int = 2
    valid_num_workers: int = 2
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    norm_target_loss: bool = False
    """packed pairs: every target weighs 1, whatever its length"""
    prefixlm: bool = False
    """packed pairs: the inputs of a pair see each other in both directions"""
    mtf_overlong: str = "drop"
    """packed pairs longer than a row: drop, truncate-inputs or error"""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer made the data, and how its vocabulary is padded."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """GPT2BPETokenizer or PretrainedFromHF"""
    tokenizer_name_or_path: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_extra_ids: int = 0
    make_vocab_size_divisible_by: int = 128
    pad_vocab_size_to: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Console and TensorBoard."""

    log_interval: int = 100
    log_params_norm: bool = False
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_batch_size_to_tensorboard: bool = False
    log_learning_rate_to_tensorboard: bool = True
    log_loss_scale_to_tensorboard: bool = True
    log_validation_ppl_to_tensorboard: bool = False
    log_path: str | None = None
    log_level: str | None = None
    log_level_replica: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything one run was asked for."""

    model: ModelConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    logging: LoggingConfig
    deepspeed: Mapping[str, Any] | None = None
    """contents of the file given with --deepspeed_config, already checked against the flags"""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """every flag as parsed, for the argument dump, TensorBoard and the checkpoint"""
