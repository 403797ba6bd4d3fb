"""Tokenizers against a slow BPE of our own, transformers' GPT-2 and plain bytes."""

import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import regex

from megatron.config import DataConfig, TokenizerConfig
from megatron.data.gpt_dataset import build_datasets
from megatron.errors import RunError
from megatron.tokenizer import MissingToken, build_tokenizer, segments
from megatron.tokenizer.padding import padded_vocab_size
from megatron.tokenizer.sentences import split_sentences

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import preprocess_data
import train_tokenizer

EOD = "<|endoftext|>"
TEXTS = [
    "Hello there, it's 3 o'clock; they'LL say they'll've gone.", "  two  spaces\t\ttabs \n\n new  lines  ",
    "Привет, мир! Как дела? 42 раза", "你好，世界。今天天气很好！", "नमस्ते दुनिया १२३", "مرحبا بالعالم ٤٥", "שלום עולם",
    "สวัสดีชาวโลก", "한국어 문장입니다.", "e\u0301 ﬁ ½ ² \u00a0nbsp\u3000ideographic \u200bzero", "a🙂👩‍👩‍👧b 🇺🇸", "\x00\x1f\x7f\u0085",
    "<s></s> <|endoftext|><unk>", "", " ", "\n", "x" * 300, "can't won't I'm 've 's's''s", "snake_case __init__ 1_000",
]


def byte_table():
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(others)}


PATTERN = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", regex.V0)


def slow_bpe(text, vocab, merges):
    """Byte-level BPE as GPT-2 defines it, step by step."""
    table, rank, ids = byte_table(), {pair: i for i, pair in enumerate(merges)}, []
    for word in PATTERN.findall(text):
        parts = [table[b] for b in word.encode()]
        while True:
            best = min(itertools.pairwise(parts), key=lambda pair: rank.get(pair, 1 << 60), default=None)
            if best not in rank:
                break
            merged, i = [], 0
            while i < len(parts):
                if tuple(parts[i:i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        ids += [vocab.get(part, 0) for part in parts]
    return ids


def write_files(folder, vocab, merges, header="#version: 0.2"):
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join([header, *map(" ".join, merges)]) + "\n", encoding="utf-8")
    return TokenizerConfig(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))


def random_files(rng, drop=0.0):
    """A vocabulary over few letters with merges of merges; ``drop`` of the pieces get no id."""
    pieces = [byte_table()[b] for b in b"ab c'st1\n"]
    merges = []
    while len(merges) < 40:
        pair = (rng.choice(pieces), rng.choice(pieces))
        if pair not in merges and len(pair[0] + pair[1]) < 7:
            merges.append(pair)
            pieces.append("".join(pair))
    kept = [piece for piece in dict.fromkeys([*byte_table().values(), *pieces]) if rng.random() >= drop]
    order = [*kept, EOD]
    rng.shuffle(order)
    return {piece: i for i, piece in enumerate(order)}, merges


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that train_tokenizer.py wrote for TEXTS."""
    folder = tmp_path_factory.mktemp("trained")
    with open(folder / "in.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS * 3)
    argv = ["--input", str(folder / "in.jsonl"), "--vocab-size", "420", "--output-dir", str(folder / "out")]
    assert train_tokenizer.main(argv) == 0
    return folder / "out"


def gpt2_config(folder):
    return TokenizerConfig(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))


def hf_config(path, **more):
    return TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(path), **more)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_gpt2_ids_equal_a_slow_bpe_also_where_pieces_have_no_id(tmp_path, drop):
    rng = random.Random(7)
    for round_number in range(6):
        vocab, merges = random_files(rng, drop)
        tokenizer = build_tokenizer(write_files(tmp_path, vocab, merges))
        texts = ["".join(rng.choices("ab c'st1\n", k=rng.randrange(1, 40))) for _ in range(60)]
        for text in texts + TEXTS:
            assert tokenizer.tokenize(text) == slow_bpe(text, vocab, merges), (round_number, text)


def test_gpt2_ids_equal_transformers(trained):
    from transformers import GPT2TokenizerFast

    vocab = json.loads((trained / "vocab.json").read_text())
    lines = (trained / "merges.txt").read_text().split("\n")[1:-1]
    theirs = GPT2TokenizerFast(vocab=vocab, merges=[tuple(line.split(" ")) for line in lines])
    ours = build_tokenizer(gpt2_config(trained))
    for text in TEXTS:
        if EOD not in text:  # theirs recognises it, this format does not
            assert ours.tokenize(text) == theirs(text)["input_ids"], text


def test_special_tokens_typed_in_the_text_are_text_to_gpt2(trained):
    ours = build_tokenizer(gpt2_config(trained))
    assert ours.eod == 4 and ours.eod not in ours.tokenize(f"a {EOD} b")
    assert ours.detokenize(ours.tokenize(f"a {EOD} b")) == f"a {EOD} b"


@pytest.mark.parametrize("make", [gpt2_config, hf_config])
def test_text_survives_the_way_there_and_back(trained, make):
    ours = build_tokenizer(make(trained))
    assert [ours.detokenize(ours.tokenize(text)) for text in TEXTS] == TEXTS


@pytest.mark.parametrize("make", [gpt2_config, hf_config])
def test_cut_characters_decode_to_replacement_marks(trained, make):
    ours = build_tokenizer(make(trained))
    vocab = json.loads((trained / "vocab.json").read_text())
    ids = {b: vocab[char] for b, char in byte_table().items()}
    rng = random.Random(3)
    for _ in range(200):
        data = bytes(rng.choices([*range(256), 0xE4, 0xBD, 0xF0, 0x9F], k=8))
        assert ours.detokenize([ids[b] for b in data]) == data.decode("utf-8", errors="replace")


def test_the_first_line_of_the_merges_is_skipped_whatever_it_is(tmp_path):
    vocab = {**{c: i for i, c in enumerate(byte_table().values())}, "ab": 256, "cd": 257, EOD: 258}
    tokenizer = build_tokenizer(write_files(tmp_path, vocab, [("c", "d")], header="a b"))
    assert tokenizer.tokenize("abcd") == [vocab["a"], vocab["b"], 257]


def test_a_long_text_is_cut_only_where_words_begin(trained):
    ours = build_tokenizer(gpt2_config(trained))
    text = " ".join(["a     b \n   c", *TEXTS] * 4)
    whole = ours.tokenize(text)
    for size in (1, 2, 3, 7, 50):
        pieces = list(segments.segments(text, size))
        assert "".join(pieces) == text and len(pieces) > 20
        assert [word for piece in pieces for word in PATTERN.findall(piece)] == PATTERN.findall(text)
        assert [i for piece in pieces for i in ours.tokenize(piece)] == whole


def test_a_long_text_is_cut_for_other_tokenizers_only_where_that_changes_nothing(trained, tmp_path, monkeypatch):
    """The pattern of BLOOM with an added token that holds a space; then tokenizers that may not be cut."""
    from tokenizers import Regex, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Library

    bloom = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ends = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    changes = {"bloom": {"pre_tokenizer": bloom}, "gpt2": {}, "begins": {"post_processor": ends},
               "normalized": {"normalizer": normalizers.Replace(Regex("^."), "")},
               "whole": {"pre_tokenizer": pre_tokenizers.Metaspace()}, "prefix": {"pre_tokenizer": pre_tokenizers.ByteLevel()}}
    text = " ".join(["two words here and two words there, with 12 345 numbers", *TEXTS] * 6)
    for name, parts in changes.items():
        library = Library.from_file(str(trained / "tokenizer.json"))
        library.add_tokens(["two words"])
        for part, value in parts.items():
            setattr(library, part, value)
        library.save(str(tmp_path / f"{name}.json"))
        ours, encoded = build_tokenizer(hf_config(tmp_path / f"{name}.json")), []
        expected, encode = ours._encode(text), ours._encode
        monkeypatch.setattr(ours, "_encode", lambda part, encode=encode, encoded=encoded: encoded.append(part) or encode(part))
        for size in (1, 7, 50, 400):
            monkeypatch.setattr(segments, "SEGMENT", size)
            encoded.clear()
            assert ours.tokenize(text) == expected, (name, size)
            assert (len(encoded) > 10) == (name in ("bloom", "gpt2")), name


def test_a_long_text_is_cut_for_no_tokenizer_whose_words_depend_on_all_before_them(tmp_path, monkeypatch):
    """Every second "a" of a long row is joined to the one before it, however that comes about."""
    from tokenizers import AddedToken, Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    def splits(pattern):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), plain])

    plain, words = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex) for regex in (False, True))
    over_a_space, in_words = [("Ġ", "a"), ("a", "Ġa"), ("Ġa", "Ġa")], [("Ġ", "a")]
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(one + two for one, two in over_a_space)]
    cases = {"one word": (plain, over_a_space, []), "lines": (splits("[^\n]+"), over_a_space, []),
             "pairs": (splits(r"\S+ \S+ ?"), over_a_space, []), "added": (words, in_words, [AddedToken("a a")]),
             "grasping": (words, in_words, [AddedToken("bb", rstrip=True)])}
    for name, (pre_tokenizer, merges, added) in cases.items():
        library = Library(models.BPE({piece: i for i, piece in enumerate(vocab)}, merges))
        library.pre_tokenizer = pre_tokenizer
        library.add_tokens(added)
        library.save(str(tmp_path / f"{name}.json"))
        ours = build_tokenizer(hf_config(tmp_path / f"{name}.json"))
        for text in ("a" + " a" * 900, "c a" + " a" * 900, "b" * 400 + " a" * 9, " ".join(["b" * 401, "a", "b" * 400, "a"] * 2)):
            whole = ours._encode(text)
            for size in (1, 300, 401, 402, 1000):
                monkeypatch.setattr(segments, "SEGMENT", size)
                assert ours.tokenize(text) == whole, (name, size, text[:5])


def test_added_tokens_count_no_padding_is_made_up_and_data_of_another_tokenizer_are_refused(trained, tmp_path):
    """deepspeedai/DeepSpeed-MII#473 (size without added tokens), and elsewhere a begin token that was the end token."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(trained / "tokenizer.json"))
    size = library.get_vocab_size()
    library.add_special_tokens([AddedToken(f"<add{k}>") for k in range(3)])
    (tmp_path / "a").mkdir()
    library.save(str(tmp_path / "a" / "tokenizer.json"))
    config = json.loads((trained / "tokenizer_config.json").read_text())
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(
        {key: value for key, value in config.items() if key != "pad_token"} | {"bos_token": "<s>", "eos_token": "</s>"}))
    a, b = build_tokenizer(hf_config(tmp_path / "a")), build_tokenizer(hf_config(trained))
    assert a.vocab_size == size + 3 == max(library.get_vocab().values()) + 1 and b.vocab_size == size
    assert a.tokenize("<add2>") == [size + 2] and a.detokenize([size + 2]) == "<add2>"
    assert (a.bos, a.eos) == (1, 2) and not a.has("pad") and "share" not in a.describe()
    (tmp_path / "in.jsonl").write_text('{"text": "some words <add1> and more"}\n' * 20)
    assert preprocess_data.main(["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "d"), "--workers", "0",
                                 "--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(tmp_path / "a")]) == 0
    data, wanted = DataConfig(data_path=(str(tmp_path / "d_text_document"),), split="1"), dict(
        seq_length=8, seed=1, train_samples=4, valid_samples=0, test_samples=0, cache=False)
    assert build_datasets(data, vocab_size=a.vocab_size, **wanted).train is not None
    with pytest.raises(ValueError, match=rf"d_text_document holds the token id {size + 1}, .* {size} ids .*--tokenizer-type"):
        build_datasets(data, vocab_size=b.vocab_size, **wanted)


def test_size_is_the_highest_id_plus_one_with_holes_and_added_tokens(tmp_path, trained):
    """deepspeedai/DeepSpeed-MII#473: sizes that leave out special or added tokens."""
    vocab = {**{c: i for i, c in enumerate(byte_table().values())}, EOD: 999}
    assert build_tokenizer(write_files(tmp_path, vocab, [])).vocab_size == 1000
    plain = build_tokenizer(hf_config(trained))
    more = build_tokenizer(hf_config(trained, vocab_extra_ids=3))
    size = len(json.loads((trained / "vocab.json").read_text()))
    assert (plain.vocab_size, more.vocab_size) == (size, size + 3)
    assert more.tokenize("a<extra_id_2>")[-1] == size + 2
    assert len(plain.tokenize("<extra_id_2>")) > 1


def test_roles_are_ids_or_a_sentence(trained):
    hf, gpt2 = build_tokenizer(hf_config(trained)), build_tokenizer(gpt2_config(trained))
    assert (hf.bos, hf.eos, hf.eod, hf.pad) == (1, 2, 2, 3)
    assert not hf.has("mask") and hf.has("pad") and not gpt2.has("pad") and gpt2.has("eod")
    for tokenizer, role in ((hf, "mask"), (hf, "cls"), (hf, "sep"), (gpt2, "pad"), (gpt2, "bos"), (gpt2, "eos")):
        with pytest.raises(MissingToken, match=f"has no {role} token") as caught:
            getattr(tokenizer, role)
        assert isinstance(caught.value, AttributeError) and isinstance(caught.value, RunError)
    assert "pad 3" in hf.describe() and "share" not in hf.describe()


def test_roles_with_one_id_are_reported(trained, tmp_path):
    """deepspeedai/DeepSpeed-MII#473 and others: an id that means two things; preprocessing and training print this line."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (trained / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace('"pad_token": "<pad>"', '"pad_token": "</s>"'), encoding="utf-8")
    assert "eos and pad share id 2" in build_tokenizer(hf_config(tmp_path)).describe()


def test_a_tokenizer_json_is_read_with_its_config_or_alone(trained, tmp_path):
    (tmp_path / "alone.json").write_bytes((trained / "tokenizer.json").read_bytes())
    beside, alone = build_tokenizer(hf_config(trained / "tokenizer.json")), build_tokenizer(hf_config(tmp_path / "alone.json"))
    assert beside.eod == 2 and not alone.has("eod")
    assert [beside.tokenize(text) for text in TEXTS] == [alone.tokenize(text) for text in TEXTS]


def test_the_trained_files_give_the_same_ids_both_ways_on_ordinary_text(trained):
    hf, gpt2 = build_tokenizer(hf_config(trained)), build_tokenizer(gpt2_config(trained))
    for text in TEXTS:
        if "<s>" not in text:
            assert hf.tokenize(text) == gpt2.tokenize(text), text
    assert hf.tokenize("<s>") == [1]
    assert (trained / "merges.txt").read_text().startswith("#version")
    vocab = json.loads((trained / "vocab.json").read_text())
    assert [vocab[t] for t in ("<unk>", "<s>", "</s>", "<pad>", EOD)] == [0, 1, 2, 3, 4]
    assert len(vocab) == 420 and sorted(p.name for p in trained.iterdir()) == sorted(train_tokenizer.FILES)


def test_training_twice_gives_the_same_bytes(trained, tmp_path):
    train_tokenizer.train(str(trained.parent / "in.jsonl"), 420, str(tmp_path))
    for name in train_tokenizer.FILES:
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes(), name


@pytest.mark.parametrize("content, size, message", [
    ('{"text": "a"}\n{"text": \n', 300, r"in.jsonl:2 is not one JSON object"),
    ('{"text": "a"}\n{"body": "b"}\n', 300, r"in.jsonl:2 has no key 'text'"),
    ('{"text": ""}\n', 300, "no text under 'text'"), ("", 300, "is empty"),
    ('{"text": "a"}\n', 260, "--vocab-size 260 is too small"),
])
def test_training_refuses_bad_input_and_writes_nothing(tmp_path, capsys, content, size, message):
    (tmp_path / "in.jsonl").write_text(content)
    argv = ["--input", str(tmp_path / "in.jsonl"), "--vocab-size", str(size), "--output-dir", str(tmp_path / "out")]
    assert train_tokenizer.main(argv) == 1
    assert regex.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("vocab, merges, message", [
    ('{"a": 0}', "#\n", r"--vocab-file .* has no <\|endoftext\|> token"),
    ('{"a": 0, "<|endoftext|>": 0}', "#\n", "same id to two tokens"),
    ('{"a": "0"}', "#\n", "token -> id"), ("[]", "#\n", "token -> id"), ("{", "#\n", "is not JSON"),
    ('{"a": -1, "<|endoftext|>": 0}', "#\n", "token -> id"),
    ('{"<|endoftext|>": 0}', "#\na b c\n", "--merge-file .* line 2"),
    ('{"<|endoftext|>": 0}', "#\na b\n\nc d\n", "--merge-file .* line 3"),
    (None, "#\n", "--vocab-file .* No such file"), ('{"<|endoftext|>": 0}', None, "--merge-file .* No such file"),
])
def test_damaged_gpt2_files_are_refused_by_name(tmp_path, vocab, merges, message):
    for name, text in (("v", vocab), ("m", merges)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=message):
        build_tokenizer(TokenizerConfig(vocab_file=str(tmp_path / "v"), merge_file=str(tmp_path / "m")))


@pytest.mark.parametrize("config, message", [
    ({"tokenizer_type": "BertWordPieceCase"}, "is for BERT"), ({"tokenizer_type": "Other"}, "not one of"),
    ({}, "needs --vocab-file"), ({"vocab_file": "v"}, "needs --merge-file"),
    ({"vocab_file": "v", "merge_file": "m", "vocab_extra_ids": 2}, "--vocab-extra-ids 2 needs"),
    ({"vocab_extra_ids": -1}, "negative"),
    ({"tokenizer_type": "PretrainedFromHF"}, "needs --tokenizer-name-or-path"),
    ({"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": "/no/such/folder"}, "/no/such/folder: no tokenizer"),
])
def test_a_wrong_tokenizer_flag_is_named(config, message):
    with pytest.raises(RunError, match=message):
        build_tokenizer(TokenizerConfig(**config))


@pytest.mark.parametrize("make", [gpt2_config, hf_config])
def test_impossible_text_and_ids_are_refused(trained, make):
    ours = build_tokenizer(make(trained))
    with pytest.raises(ValueError, match=r"character 1 is the lone surrogate U\+D800"):
        ours.tokenize("a\ud800")
    for wrong in (-1, ours.vocab_size):
        with pytest.raises(ValueError, match=f"token id {wrong} is not one of"):
            ours.detokenize([0, wrong])


def test_importing_the_interface_loads_no_library():
    code = ("import sys, megatron.tokenizer, megatron.tokenizer.gpt2_bpe, megatron.tokenizer.pretrained\n"
            "print({'torch', 'transformers', 'tokenizers', 'deepspeed'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("size, tp, by, expected", [
    (250680, 4, 128, 250880), (50257, 1, 128, 50304), (50257, 2, 128, 50432), (201, 2, 1, 202), (128, 1, 128, 128),
    (129, 1, 128, 256), (201, 3, 1, 201), (1, 8, 128, 1024),
])
def test_padding_reaches_the_next_multiple(size, tp, by, expected):
    """NVIDIA/Megatron-LM#1754: a multiple of 1 still divides by TP."""
    assert padded_vocab_size(size, tp=tp, divisible_by=by, pad_to=None) == expected
    brute = next(n for n in range(size, size + by * tp + 1) if n % (by * tp) == 0)
    assert brute == expected


def test_padding_to_an_exact_size_is_checked():
    assert padded_vocab_size(250680, tp=4, divisible_by=128, pad_to=250880) == 250880
    for pad_to, tp, by, message in ((250600, 1, 1, "smaller than the tokenizer's 250680"), (250881, 1, 128, "next one is 251008"),
                                    (250880, 3, 128, "--tensor-model-parallel-size 3"), (250880, 1, 0, "at least 1")):
        with pytest.raises(RunError, match=message):
            padded_vocab_size(250680, tp=tp, divisible_by=by, pad_to=pad_to)


@pytest.mark.parametrize("text, sentences, with_newlines", [
    ("One. Two! Three?\nFour", ["One.", "Two!", "Three?", "Four"], ["One.", "Two!", "Three?\n", "Four"]),
    ("He said “no.” Then (yes.) He left.", ["He said “no.”", "Then (yes.)", "He left."], None),
    ("See e.g. this, J. Smith. End", ["See e.g. this, J. Smith.", "End"], None),
    ("3.14 is pi. 4 is not.", ["3.14 is pi.", "4 is not."], None),
    ("他来了。你好吗？很好", ["他来了。", "你好吗？", "很好"], None), ("यह है। वह है", ["यह है।", "वह है"], None),
    ("مرحبا؟ نعم", ["مرحبا؟", "نعم"], None), ("Title\n\nBody\ngoes on.\n", ["Title", "Body\ngoes on."], ["Title\n\n", "Body\ngoes on.\n"]),
    ("", [], []), (" \n ", [], []),
])
def test_sentences_end_at_terminals_of_any_script(text, sentences, with_newlines):
    assert split_sentences(text) == sentences
    assert split_sentences(text, keep_newlines=True) == (sentences if with_newlines is None else with_newlines)


@pytest.mark.parametrize("run", [" ", ".", "!", "。", "\n", "! ", "!\"", "\n ", "a.\n\n"])
def test_a_long_run_of_one_sign_takes_linear_time(run):
    began = time.process_time()
    split_sentences("a" + run * 50_000 + "a")
    assert time.process_time() - began < 5  # quadratic time would be minutes
