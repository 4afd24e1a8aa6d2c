import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.dialogue.bpe import fixed_phrases, train_bpe
from rocstar.dialogue.calls import HERMES
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import Author, Segment, text_of
from rocstar.dialogue.templates import template_for, template_named
from rocstar.errors import ConfigError
from tests.dialogue.folders import PYTHON, published_qwen

COMPACT = template_named("compact")
TEXTS = ["print(1)<|im_end|>", "say hello <|im_end|>"] * 5


CODEC = train_bpe(
    TEXTS, vocab_size=200, markers=COMPACT.markers, word_merges=False, atoms=fixed_phrases(COMPACT, "python")
)
PARTS = ["print", "9", " " * 40, "hello ", "\u00e4", "\U0001f937\u200d\u2640\ufe0f", "\u1100\u1161"]


@given(st.text() | st.lists(st.sampled_from(PARTS)).map("".join))
def test_a_text_has_at_least_as_many_tokens_as_it_is_said_to_have(text: str) -> None:
    assert CODEC.least_tokens(text) <= len(CODEC.encode(text))


def test_of_a_long_text_of_short_tokens_many_are_known() -> None:
    assert CODEC.least_tokens("9" * 1000) == 500


def test_transformers_loads_a_saved_codec_unchanged(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    codec = CODEC
    codec.save(tmp_path, COMPACT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = text_of((*COMPACT.opening("hello 12", ()), *COMPACT.reply(["2"])))
    ids = codec.encode(text)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)[
        "input_ids"
    ] == codec.encode(text_of(COMPACT.opening("hello", ())))
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == codec.token_id(COMPACT.stop)
    assert tokenizer.pad_token_id is not None
    assert len(tokenizer) == codec.vocab_size


def test_a_marker_that_is_no_single_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'<reason>' is \d tokens in this tokenizer and must be one"):
        CODEC.token_id("<reason>")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Codec.load(tmp_path)
    with pytest.raises(ConfigError, match=r"model no longer exists; for a live run, take its newest"):
        Codec.load(tmp_path / "model")  # pruned by the run while an evaluation of it began


def test_settings_of_training_stored_in_the_file_change_no_ids(tmp_path: Path) -> None:
    CODEC.save(tmp_path, COMPACT)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    stored["model"]["dropout"] = 0.9
    path.write_text(json.dumps(stored))
    assert Codec.load(tmp_path).encode("print(1) hello") == CODEC.encode("print(1) hello")


def test_a_tokenizer_that_fails_on_a_text_is_told_with_the_text(tmp_path: Path) -> None:
    """Its regex takes too long there, which is a panic of Rust and no Exception, or the text is no Unicode."""
    CODEC.save(tmp_path, COMPACT)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    slow = {"type": "Split", "pattern": {"Regex": r"(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    parts = {"type": "Sequence", "pretokenizers": [slow, stored["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**stored, "pre_tokenizer": parts}))
    codec = Codec.load(tmp_path)
    assert codec.decode(codec.encode("aab")) == "aab"
    with pytest.raises(ConfigError, match=r"the tokenizer fails on 'aaa.*retry-limit.*; take another model"):
        codec.encode("a" * 60 + "!")
    with pytest.raises(ConfigError, match="the tokenizer fails on"):
        codec.encode_segments([Segment("\ud800", Author.TEMPLATE)], ())


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        CODEC.save(tmp_path, COMPACT)


def test_a_published_tokenizer_serves_the_paper_template_and_its_older_files_are_saved_in_the_newer_one(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    raw, out = published_qwen(tmp_path), tmp_path / "out"
    paper, codec = template_named("paper"), Codec.load(raw)
    assert codec.token_id(paper.stop) == 151645
    text = text_of(paper.opening("What is 6·7?", ())) + "So</reason><answer>\\boxed{42}</answer>" + paper.stop
    assert codec.decode(codec.encode(text)) == text
    with pytest.raises(ConfigError):
        codec.token_id("<reason>")
    own = template_for("model", raw, [PYTHON])
    codec.save(out, own)
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (raw, out))
    assert after["chat_template"] == before["chat_template"] and after["eos_token"] == before["eos_token"]
    odd = "Où? 12345 cafe\u0301 <|im_start|><tool_call>"
    again = Codec.load(out)
    assert again.encode(odd) == codec.encode(odd) and again.stop_ids(own) == (codec.token_id("<|im_end|>"),)
    codec.save(out, paper)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer(text)["input_ids"] == codec.encode(text)
    assert tokenizer.eos_token == paper.stop
    message = {"role": "user", "content": "What is 6·7?"}
    rendered = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert rendered == text_of(paper.opening("What is 6·7?", ()))


def test_a_gpt2_tokenizer_is_read_from_its_older_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    CODEC._saved.model.save(str(tmp_path))
    token = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(CODEC.token_id("<|im_end|>")): token | {"special": True}}
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "print(1) say hello<|im_end|> \n"
    ids = Codec.load(tmp_path).encode(text)
    assert ids == transformers.GPT2Tokenizer.from_pretrained(tmp_path)(text)["input_ids"]


def test_older_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    CODEC._saved.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(ConfigError, match="holds a RobertaTokenizer without tokenizer"):
        Codec.load(tmp_path)


def test_a_settings_file_that_is_no_json_is_refused_in_a_sentence(tmp_path: Path) -> None:
    CODEC.save(tmp_path, COMPACT)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        Codec.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[" * 100_000),
        ("config.json.gz", b"\x1f\x8bxx"),
        ("tokenizer_config.json.gz", b"{}"),
        ("chat_template.jinja", b"\xff"),
        ("vocab.json", b'{"a":'),
        ("vocab.json", b"[]"),
        ("merges.txt", b"\xff\xfe"),
        ("merges.txt", b"q z"),
        ("tokenizer_config.json", b'{"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"x": null}}'),
    ],
)
def test_a_file_of_a_folder_that_is_broken_is_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    assert Codec.load(tmp_path).encode("ab") == [2]
    if name.endswith(".gz"):
        (tmp_path / name.removesuffix(".gz")).unlink(missing_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name.partition(".")[0]):
        Codec.load(tmp_path)


def test_a_call_is_the_template_s_but_for_its_arguments() -> None:
    """So what wraps them is the one token that stands for it."""
    ids = CODEC.encode_segments(HERMES.render("python", {"code": "1 + 1"}), COMPACT.reserved)
    phrases = {CODEC.encode(phrase)[0] for phrase in fixed_phrases(COMPACT, "python")}
    assert (ids[0] in phrases, ids[-1] in phrases, phrases & set(ids[1:-1])) == (True, True, set())
