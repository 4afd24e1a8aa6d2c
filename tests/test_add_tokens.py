"""Tokens added to a base model, whose tokenizer has no marks of turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rocstar.cli.main import run
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import COMPACT, PAPER
from rocstar.errors import ConfigError
from rocstar.learning.models import load_model
from rocstar.parts.modelfolder import add_tokens
from tests.dialogue.folders import byte_level

IDS = torch.tensor([[5, 9, 70]])


def base(folder: Path, *, room: int, tied: bool) -> tuple[Path, int]:
    """A tiny model and the number of its tokenizer's ids. room: rows of the embedding that have no token."""
    codec = byte_level("</s>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = codec.vocab_size + room
    config = LlamaConfig(vocab_size=rows, tie_word_embeddings=tied, max_position_embeddings=64, eos_token_id=0, **sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    codec._saved.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    return folder, codec.vocab_size


@pytest.mark.parametrize(("room", "tied"), [(0, True), (0, False), (1, False), (9, True)])
def test_a_base_model_gets_the_marks_of_turns_and_computes_what_it_did(room: int, tied: bool, tmp_path: Path) -> None:
    source, known = base(tmp_path / "base", room=room, tied=tied)
    with pytest.raises(ConfigError, match=r"`rocstar model add-tokens`"):
        Codec.load(source).stop_ids(PAPER)
    assert run(["model", "add-tokens", str(source), str(tmp_path / "chat")]) == 0
    codec, before, after = Codec.load(tmp_path / "chat"), load_model(source), load_model(tmp_path / "chat")
    assert codec.encode("<|im_start|><|im_end|>") == [known, known + 1]
    assert codec.stop_ids(PAPER)[0] == known + 1 and Codec.load(source).token_id("</s>") in codec.stop_ids(PAPER)
    assert AutoTokenizer.from_pretrained(tmp_path / "chat")("<|im_end|>").input_ids == [known + 1]
    logits, exact = after(IDS).logits, before(IDS).logits
    assert torch.allclose(logits[..., :known], exact[..., :known], atol=1e-6)
    assert torch.allclose(logits[..., known : known + 2], exact[..., :known].mean(-1, keepdim=True), atol=1e-3)
    assert logits.shape[-1] == max(known + room, known + 2) == after.config.vocab_size
    assert after.config.dtype == torch.bfloat16 and after.config.tie_word_embeddings is tied
    codec.save(tmp_path / "saved", COMPACT)


def test_tokens_of_ones_own_and_what_is_refused(tmp_path: Path) -> None:
    source, known = base(tmp_path / "base", room=0, tied=True)
    made = add_tokens(str(source), tmp_path / "more", ["<tool_call>"])
    assert Codec.load(made).encode("a<tool_call>")[-1] == known
    with pytest.raises(ConfigError, match="is there already"):
        add_tokens(str(source), made, ["<a>"])
    with pytest.raises(ConfigError, match="has <tool_call> already"):
        add_tokens(str(made), tmp_path / "again", ["<tool_call>"])
