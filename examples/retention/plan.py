"""What the experiment consists of: sizes, ways to fine-tune, learning rates, seeds, amounts of data."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 4096
LENGTH = 128
"""tokens of a row"""


@dataclass(frozen=True)
class Size:
    """A model in BLOOM's layout: ALiBi, LayerNorm behind the embedding, tied head."""

    name: str
    layers: int
    hidden: int
    heads: int
    pretraining_lr: float

    @property
    def block_weights(self) -> int:
        """Weights of the matrices in blocks: all but embedding, biases and LayerNorms."""
        return 12 * self.layers * self.hidden**2

    @property
    def cost(self) -> float:
        """Operations of one token forward: matrices and logits."""
        return 2 * (self.block_weights + VOCABULARY * self.hidden)


@dataclass(frozen=True)
class Method:
    """A way to fine-tune: flags beside those of all runs, and the learning rates tried."""

    name: str
    title: str
    flags: tuple[str, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """One experiment."""

    sizes: tuple[Size, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    pretraining_steps: int
    pretraining_rows: int
    steps: int
    rows: int
    points: int
    """measurements along a fine-tuning, at equal distances, the last at its end"""
    language_tokens: int
    """held-out tokens measured per language"""
    prompts: int
    """held-out prompts measured per template"""
    training_prompts: int
    """at most so many of each template are trained on"""


XS = Size("XS", 2, 32, 4, 5e-3)
S = Size("S", 3, 48, 4, 4e-3)
M = Size("M", 4, 80, 4, 3e-3)
L = Size("L", 5, 128, 4, 2e-3)
XL = Size("XL", 6, 224, 8, 2e-3)
XXL = Size("XXL", 8, 384, 8, 1e-3)

FULL = Method("full", "full", (), (1e-4, 3e-4, 1e-3))
BITFIT = Method("bitfit", "BitFit", ("--bitfit",), (1e-3, 3e-3, 1e-2))
BITFIT_TWO = Method("bitfit-qm", "BitFit (query, mlp_intermediate)",
                    ("--bitfit", "--bitfit-bias-terms", "query", "mlp_intermediate"), (3e-3, 1e-2, 3e-2))
METHODS = (FULL, BITFIT, BITFIT_TWO)

WHOLE = Plan(sizes=(XS, S, M, L), methods=METHODS, seeds=(1, 2, 3), pretraining_steps=700, pretraining_rows=16,
             steps=64, rows=4, points=4, language_tokens=500, prompts=32, training_prompts=700)
MORE = Plan(**{**vars(WHOLE), "sizes": (XS, S, M, L, XL, XXL)})
FAST = Plan(**{**vars(WHOLE), "sizes": (XS, S), "seeds": (1, 2), "pretraining_steps": 150,
               "steps": 40, "points": 2, "language_tokens": 300, "prompts": 12,
               "methods": tuple(Method(each.name, each.title, each.flags, each.rates[1:]) for each in METHODS)})


@dataclass(frozen=True)
class Job:
    """One run of the trainer: a pretraining (``method`` None) or a fine-tuning."""

    size: Size
    method: Method | None = None
    rate: float = 0.0
    seed: int = 1

    @property
    def name(self) -> str:
        if self.method is None:
            return f"base-{self.size.name}"
        return f"{self.size.name}-{self.method.name}-{self.rate:g}-seed{self.seed}"


def jobs(plan: Plan) -> list[Job]:
    """All jobs in the order they are started in: small sizes first, each pretrained two sizes before its fine-tunings."""
    sizes = sorted(plan.sizes, key=lambda size: size.cost)
    order = [Job(size) for size in sizes[:2]]
    for i, size in enumerate(sizes):
        order += [Job(later) for later in sizes[i + 2:i + 3]]
        order += [Job(size, method, rate, seed) for seed in plan.seeds for method in plan.methods
                  for rate in method.rates]
    return order


def cost(plan: Plan, job: Job) -> float:
    """Operations, roughly: what the time left is reckoned from."""
    languages, templates, options = 22, 5, 4
    rows = plan.pretraining_rows if job.method is None else plan.rows
    steps = plan.pretraining_steps if job.method is None else plan.steps
    backward = 1 if job.method and job.method.flags else 2
    train = steps * rows * LENGTH * job.size.cost * (1 + backward)
    tokens = languages * plan.language_tokens + templates * plan.prompts * 40
    measurements = (plan.points if job.method else 1) * tokens + templates * plan.prompts * options * 40
    start = 8e10  # model, engine, files: as long as so many operations
    return train + measurements * job.size.cost + start
