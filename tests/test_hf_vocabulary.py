"""The word table of a published BLOOM through conversion: 250,680 token ids in 250,880 rows, or not padded at all."""

import json
import sys

import pytest
import torch
from launching import ROOT
from test_hf_conversion import assert_bit_equal, expected_tensors, tensors_of

sys.path.insert(0, str(ROOT / "tools"))
from convert_checkpoint import main as convert

from megatron.checkpoint import files

IDS, ROWS = 250_680, 250_880


@pytest.fixture(scope="module", params=[IDS, ROWS])
def bloom(request, tmp_path_factory):
    """A narrow BLOOM with the true number of ids, or with the rows of the published ones, none of them zero; its folder."""
    import transformers

    torch.manual_seed(11)
    model = transformers.BloomForCausalLM(transformers.BloomConfig(
        vocab_size=request.param, hidden_size=8, n_head=4, n_layer=1)).to(torch.bfloat16).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    folder = tmp_path_factory.mktemp("bloom")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text(json.dumps({"of": name}))
    return request.param, model, folder


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_padded_word_table_comes_back_as_it_was(tp, bloom, tmp_path, capsys):
    """deepspeedai/DeepSpeedExamples#421: the vocabulary of BLOOM had another size after fine-tuning."""
    rows, model, folder = bloom
    assert convert(["from-hf", "--load", str(folder), "--save", str(tmp_path / "ours"), "--target-tp", str(tp),
                    "--pad-vocab-size-to", str(ROWS)]) == 0
    shares = [files.read(files.layer_file(tmp_path / "ours" / "global_step0", 1, rank))["word_embeddings.weight"] for rank in range(tp)]
    table = torch.cat(shares)
    wanted = model.transformer.word_embeddings.weight
    assert table.shape == (ROWS, 8) and torch.equal(table[:rows], wanted) and not table[rows:].any()
    assert convert(["to-hf", "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "back")]) == 0
    assert_bit_equal(tensors_of(tmp_path / "back"), expected_tensors(model))
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert after == before and after["vocab_size"] == rows
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert (f"{ROWS - IDS} rows of padding dropped" in capsys.readouterr().out) == (rows == IDS)
