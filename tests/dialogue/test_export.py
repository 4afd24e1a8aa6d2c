"""What a saved folder holds beside the weights, and that `generate` ends where a rollout would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import COMPACT, PAPER
from rocstar.dialogue.templates import template_for
from tests.dialogue.folders import LLAMA, LLAMA_MARKERS, PYTHON, byte_level, folder_of


def source(folder: Path, **facts: Any) -> Codec:
    """A codec read from a folder whose model names its end-of-sequence tokens as given."""
    byte_level("<|endoftext|>", "<|eom|>", "<|im_start|>", "<|im_end|>").save(folder, COMPACT)
    for name, held in facts.items():
        (folder / f"{name}.json").write_text(json.dumps(held))
    return Codec.load(folder)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_end_of_sequence_token_of_the_model_stops_a_completion(tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}}
    codec = source(
        tmp_path, tokenizer_config=settings, generation_config={"eos_token_id": [1, 2]}, config={"eos_token_id": 3}
    )
    stop = codec.token_id("<|im_end|>")
    assert codec.stop_ids(COMPACT) == (stop, codec.token_id("<|endoftext|>"), 2, 3)
    none = source(tmp_path / "none", generation_config={"eos_token_id": [-1, 2**70, True, "2"]})
    assert none.stop_ids(COMPACT) == (stop,)


def test_generation_settings_of_the_source_model_are_kept(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "do_sample": True, "eos_token_id": [2]}
    codec = source(tmp_path, generation_config=generation)
    codec.save(tmp_path / "out", COMPACT)
    kept = read(tmp_path / "out" / "generation_config.json")
    assert kept == {**generation, "eos_token_id": [codec.token_id("<|im_end|>"), 2]}
    assert Codec.load(tmp_path / "out").stop_ids(COMPACT) == codec.stop_ids(COMPACT)


def test_a_models_own_chat_template_is_saved_unchanged(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    byte_level(*LLAMA_MARKERS).save(tmp_path, template_for("model", folder_of(tmp_path / "t", LLAMA), [PYTHON]))
    folder_of(tmp_path, LLAMA, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    folder_of(tmp_path, None, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    template = template_for("model", tmp_path, [PYTHON])
    Codec.load(tmp_path).save(tmp_path / "out", template)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.chat_template == LLAMA and saved.eos_token == "<|eot_id|>"


def test_a_template_of_ours_replaces_the_models(tmp_path: Path) -> None:
    folder_of(tmp_path, None)
    byte_level("<|im_start|>", "<|im_end|>").save(tmp_path, COMPACT)
    (tmp_path / "chat_template.jinja").write_text("theirs")
    Codec.load(tmp_path).save(tmp_path / "out", PAPER)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    assert "<reason>" in read(tmp_path / "out" / "tokenizer_config.json")["chat_template"]


@pytest.mark.parametrize("last", ["<|im_end|>", "<|eom|>"])
def test_generate_of_a_saved_model_stops_by_itself(last: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    codec = source(tmp_path, generation_config={"eos_token_id": [2]})
    assert codec.token_id("<|eom|>") == 2
    config = transformers.Qwen3Config(
        vocab_size=codec.vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, intermediate_size=16, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():  # the most likely token is always `last`
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()[codec.token_id(last)] = 1.0
        for layer in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            layer.weight.zero_()
    model.save_pretrained(tmp_path / "out")
    codec.save(tmp_path / "out", COMPACT)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([codec.encode("What is 6*7?")])
    made = loaded.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert made.tolist() == [codec.token_id(last)]


def test_rows_of_an_embedding_that_no_token_names_are_counted(tmp_path: Path) -> None:
    codec = byte_level("<|im_end|>")
    assert codec.covered(codec.vocab_size) == codec.vocab_size == codec.covered(10_000)
    assert codec.covered(7) == 7
