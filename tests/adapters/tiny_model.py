"""A model of 0.1 million parameters that writes tool calls by itself, after seconds of plain likelihood on four
conversations in TRL's own chat template. What it writes afterwards is sampled, never scripted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.chat_template_utils import qwen2_5_chat_template

Message = dict[str, Any]
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
FACTORS = ((12, 13),)  # so small a model learns one problem by heart in seconds; more would take minutes


def question(a: int, b: int) -> list[Message]:
    return [{"role": "user", "content": f"{a} * {b}?"}]


def conversations() -> list[list[Message]]:
    """Of each problem a clean attempt, two whose first program fails, and one that guesses wrong."""
    made = []
    for a, b in FACTORS:
        answer = {"role": "assistant", "content": f"\\boxed{{{a * b}}}"}
        clean = [called(f"{a} * {b}"), replied(str(a * b)), answer]
        stumbling = [called(f"{a} * c"), replied(FAILED), *clean]
        guess = [{"role": "assistant", "content": f"\\boxed{{{a + b}}}"}]
        made += [[*question(a, b), *attempt] for attempt in (clean, stumbling, stumbling, guess)]
    return made


FAILED = (
    "Traceback (most recent call last):\n  File \"<cell 1>\", line 1, in <module>\nNameError: name 'c' is not defined"
)


def called(code: str) -> Message:
    function = {"name": "python", "arguments": {"code": code}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def replied(text: str) -> Message:
    return {"role": "tool", "name": "python", "content": text}


def make(tools: Sequence[Callable[..., str]], steps: int = 120) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The model and its tokenizer. tools: whose schemas stand in prompts, one at a time."""
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=qwen2_5_chat_template)
    texts = [plain.apply_chat_template(one, tools=[tool], tokenize=False) for one in conversations() for tool in tools]
    tokenizer = tokenizer_of(texts)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    config = Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **heads)
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    warm_up(model, tokenizer, texts, steps, len(tools))
    return model, tokenizer


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=700, special_tokens=list(MARKS[:3]), initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(list(MARKS[3:]))
    tokenizer.chat_template = qwen2_5_chat_template
    return tokenizer


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], steps: int, tools: int
) -> None:
    """Likelihood of what comes after the question, so that few steps are enough; of one tool's texts in each step."""
    start = "<|im_start|>assistant\n"
    begins = [len(tokenizer(text[: text.index(start) + len(start)])["input_ids"]) for text in texts]
    batch = tokenizer(list(texts), padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, begin in enumerate(begins):
        labels[row, :begin] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        rows = slice(step % tools, None, tools)
        optimizer.zero_grad()
        model(**{name: given[rows] for name, given in batch.items()}, labels=labels[rows]).loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
