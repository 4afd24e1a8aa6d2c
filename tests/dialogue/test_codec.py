import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.dialogue.bpe import fixed_phrases, train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.templates import template_named
from rocstar.errors import ConfigError

COMPACT = template_named("compact")
TEXTS = ["print(1)<|im_end|>", "say hello <|im_end|>"] * 5
DATA = Path(os.environ.get("ROCSTAR_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def small() -> Codec:
    atoms = fixed_phrases(COMPACT, "python")
    return train_bpe(TEXTS, vocab_size=200, markers=COMPACT.markers, word_merges=False, atoms=atoms)


CODEC = small()


PARTS = ["print", "9", " " * 40, "hello ", "\u00e4", "\U0001f937\u200d\u2640\ufe0f", "\u1100\u1161"]


@given(st.text() | st.lists(st.sampled_from(PARTS)).map("".join))
def test_a_text_has_at_least_as_many_tokens_as_it_is_said_to_have(text: str) -> None:
    assert CODEC.least_tokens(text) <= len(CODEC.encode(text))


def test_of_a_long_text_of_short_tokens_many_are_known() -> None:
    assert CODEC.least_tokens("9" * 1000) == 500


def test_transformers_loads_a_saved_codec_unchanged(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    codec = small()
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
        small().token_id("<reason>")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Codec.load(tmp_path)
    with pytest.raises(ConfigError, match=r"model is not there any more; of a run that goes on, take its newest"):
        Codec.load(tmp_path / "model")  # pruned by the run while an evaluation of it began


def test_a_length_limit_stored_in_the_file_never_cuts_text(tmp_path: Path) -> None:
    small().save(tmp_path, COMPACT)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(stored))
    assert Codec.load(tmp_path).decode(Codec.load(tmp_path).encode("print(1) hello")) == "print(1) hello"


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    source = DATA / "qwen2_tokenizer"
    if not source.is_dir():
        pytest.skip(f"{source} is absent; set ROCSTAR_DATA to the folder that holds qwen2_tokenizer")
    raw, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("qwen")
    for name in ("vocab.json", "merges.txt"):
        (raw / name).write_bytes(gzip.decompress((source / f"{name}.gz").read_bytes()))
    shutil.copyfile(source / "tokenizer_config.json", raw / "tokenizer_config.json")
    transformers.AutoTokenizer.from_pretrained(raw).save_pretrained(folder)
    return folder


def test_a_published_tokenizer_serves_the_paper_template(qwen_folder: Path, tmp_path: Path) -> None:
    import transformers

    paper, codec = template_named("paper"), Codec.load(qwen_folder)
    assert codec.token_id(paper.stop) == 151645
    text = text_of(paper.opening("What is 6·7?", ())) + "So</reason><answer>\\boxed{42}</answer>" + paper.stop
    assert codec.decode(codec.encode(text)) == text
    with pytest.raises(ConfigError):
        codec.token_id("<reason>")
    codec.save(tmp_path, paper)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(text)["input_ids"] == codec.encode(text)
    assert tokenizer.eos_token == paper.stop
    message = {"role": "user", "content": "What is 6·7?"}
    rendered = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert rendered == text_of(paper.opening("What is 6·7?", ()))


def test_a_gpt2_tokenizer_is_read_from_its_older_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small()._saved.model.save(str(tmp_path))
    token = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(small().token_id("<|im_end|>")): token | {"special": True}}
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "print(1) say hello<|im_end|> \n"
    ids = Codec.load(tmp_path).encode(text)
    assert ids == transformers.GPT2Tokenizer.from_pretrained(tmp_path)(text)["input_ids"]


def test_older_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    small()._saved.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(ConfigError, match="holds a RobertaTokenizer without tokenizer"):
        Codec.load(tmp_path)


def test_a_settings_file_that_is_no_json_is_refused_in_a_sentence(tmp_path: Path) -> None:
    small().save(tmp_path, COMPACT)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is no JSON"):
        Codec.load(tmp_path)
