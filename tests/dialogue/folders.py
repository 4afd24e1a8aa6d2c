"""Tokenizers of several kinds and chat templates of published shapes, small enough to make on the spot.

The templates are ours, cut down to what decides the layout: LLAMA follows the shape of Llama 3.1's, THINKING that of
Qwen3's. Qwen2.5's own comes with the shared data."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.protocols import ToolSpec

DATA = Path(os.environ.get("ROCSTAR_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
PYTHON = ToolSpec(
    name="python",
    description='Runs a program; its "output" <|im_end|> is shown.',
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
TEXTS = ["What is 6*7? print(6*7) 42", "Say 'hello', Paris 漢字 é 🙂", '{"name": "python", "arguments": {"code": "1"}}']
LLAMA_MARKERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")

LLAMA = """{{- bos_token }}
{%- if tools %}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + strftime_now("%d %b %Y") + "\\nFunctions:\\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + "\\n" }}{%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}
"""

THINKING = """{%- if tools %}
    {{- "<|im_start|>system\\nFunctions:" }}
    {%- for tool in tools %}{{- "\\n" + tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(question=0) %}
{%- for message in messages %}{%- if message.role == "user" %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if "</think>" in content and loop.index0 < ns.question %}
            {%- set content = content.split("</think>")[-1].lstrip("\\n") %}
        {%- endif %}
        {{- "<|im_start|>assistant\\n" + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or (content and not content.endswith("\\n")) %}{{- "\\n" }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""


def folder_of(path: Path, chat_template: Any, **settings: Any) -> Path:
    """A folder with a chat template and nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    held = {"chat_template": chat_template, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(held), encoding="utf-8")
    return path


def byte_level(*markers: str) -> Codec:
    return train_bpe(TEXTS * 9, vocab_size=500, markers=markers, word_merges=True)


def sentencepiece_like(*markers: str) -> Codec:
    """BPE with `▁` for spaces, one put before every text, bytes for unknown characters; as Llama 2's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] not in bytes_]
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return Codec(tokenizer)


def unigram(*markers: str) -> Codec:
    """Its markers stand in the model's own vocabulary with the best score, and blanks behind them belong to them."""
    letters = sorted(
        {letter for text in TEXTS for letter in text.replace(" ", "▁")} | set("<|>_abcdefghijklmnopqrstuvwxyz\n/")
    )
    vocab = [("<unk>", -20.0), *((marker, 0.0) for marker in markers), *((letter, -9.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False, rstrip=True) for marker in markers])
    return Codec(tokenizer)


def published_qwen(path: Path) -> Path:
    """Qwen2.5's tokenizer as vocab.json, merges.txt and tokenizer_config.json; skips the test where it is absent."""
    source = DATA / "qwen2_tokenizer"
    if not source.is_dir():
        pytest.skip(f"{source} is absent; set ROCSTAR_DATA to the folder that holds qwen2_tokenizer")
    for name in ("vocab.json", "merges.txt"):
        (path / name).write_bytes(gzip.decompress((source / f"{name}.gz").read_bytes()))
    (path / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return path
