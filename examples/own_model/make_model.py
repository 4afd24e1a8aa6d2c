"""Writes a model folder as Hugging Face models come: tiny, random weights, a tokenizer trained on the files here.

    python make_model.py model

So that the example runs anywhere. With a model of your own, skip this and set `model.path` in recipe.toml.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rocstar.dialogue.segments import text_of
from rocstar.dialogue.templates import template_named

HERE = Path(__file__).parent
MARKERS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
]


def make_model(folder: Path) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen's: any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def texts() -> list[str]:
    """The demonstrations, and the prompt around them: few tokens for the words that every attempt begins with."""
    rows = [json.loads(line) for line in (HERE / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()]
    messages = [message for row in rows for message in row["messages"]]
    calls = [json.dumps(call["function"]) for message in messages for call in message.get("tool_calls", ())]
    return [*(message["content"] for message in messages), *calls, text_of(template_named("paper").opening("", ()))]


if __name__ == "__main__":
    make_model(Path(sys.argv[1] if len(sys.argv) > 1 else "model"))
