"""The `rocstar` commands on models of published families: shapes of Qwen2.5, Qwen3, Qwen3.5, Llama, LFM2 and Gemma 3
with random weights, in folders as Hugging Face models come, with real tokenizers and each model's own chat template.

    python benchmarks/model_families.py                 # all: some minutes on two cores
    python benchmarks/model_families.py llama           # one of them: about a minute

Each is carried through `train` (SFT, then RL), `eval` and `chat`; then transformers loads what was exported. Runs that
are killed and resumed: kill_stages.py. Qwen shapes take Qwen2.5's published tokenizer (151,936 embedding rows) from
$ROCSTAR_DATA/qwen2_tokenizer and are left out where it is absent; Llama, LFM2 and Gemma shapes take a byte-level BPE
trained here, with Llama 3's markers. Prints a table and last one JSON line; exits 1 where anything is not as it should
be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from frame import ROOT, environment, newest_model, parser, read_rows, report, rocstar
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(ROOT))

from rocstar.config.sections import Recipe
from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import MODEL_PREAMBLE
from rocstar.dialogue.templates import template_for
from rocstar.learning.models import load_model
from rocstar.learning.policy import Policy
from rocstar.parts.build import AttemptParts
from rocstar.protocols import ToolSpec, tool_schema
from rocstar.serving.agent import VisibleText
from tests.dialogue.folders import DATA, LLAMA, LLAMA_MARKERS, THINKING, published_qwen
from tests.files import jsonl

NUMBERS = range(2, 6)
SFT_STEPS, RL_STEPS = 60, 4
RESPONSE_TOKENS = 96
HANGS_AFTER = 3600  # seconds of one command; it takes minutes, and on a busy machine many
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
QWEN_ROWS = 151_936  # Qwen2.5 and Qwen3: more than the tokenizer has ids
EOS = {"qwen": ["<|im_end|>", "<|endoftext|>"], "llama": ["<|eot_id|>"]}
RECIPE = f"""\
[run]
name = "family"
keep_checkpoints = 1

[model]
path = "model"
device = "cpu"

[data]
source = "files"
train_files = ["problems.jsonl"]
test_files = ["problems.jsonl"]

[rollout]
problems_per_step = 4
attempts_per_problem = 4
max_response_tokens = {RESPONSE_TOKENS}
max_turns = 3
engine_rows = 16

[sandbox]
preload = []

[resample]
keep = 4

[learning]
learning_rate = 4e-4
warmup_steps = 0
updates_per_step = 2

[evaluate]
problems = 0

[[stage]]
name = "show"
kind = "sft"
steps = {SFT_STEPS}
[stage.sft]
rows_file = "rows.jsonl"
batch_rows = 12
optimizer = "muon"
adamw_learning_rate = 1e-2
warmup_steps = 2
decay = "linear"
decay_share = 0.3

[[stage]]
name = "learn"
kind = "rl"
steps = {RL_STEPS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and the template it is trained under."""

    config: type[Any]
    tokenizer: str
    """qwen or llama."""
    chat_template: str | None
    """Takes the place of the tokenizer's own."""
    tied: bool
    dtype: torch.dtype
    template: str = "model"
    """rollout.template."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its config that others lack."""


LINEAR = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2}
CASES = {
    "qwen3.5": Case(
        config=Qwen3_5TextConfig,
        tokenizer="qwen",
        chat_template=THINKING,
        tied=True,
        dtype=torch.float32,
        more={**LINEAR, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "lfm2": Case(
        config=Lfm2Config,
        tokenizer="llama",
        chat_template=LLAMA,
        tied=True,
        dtype=torch.float32,
        more={"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "gemma3": Case(
        config=Gemma3TextConfig,
        tokenizer="llama",
        chat_template=LLAMA,
        tied=True,
        dtype=torch.float32,
        more={"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2.5": Case(config=Qwen2Config, tokenizer="qwen", chat_template=None, tied=True, dtype=torch.bfloat16),
    "qwen3": Case(config=Qwen3Config, tokenizer="qwen", chat_template=THINKING, tied=False, dtype=torch.float32),
    "llama": Case(config=LlamaConfig, tokenizer="llama", chat_template=LLAMA, tied=False, dtype=torch.float32),
    "qwen2.5-paper": Case(
        config=Qwen2Config, tokenizer="qwen", chat_template=None, tied=True, dtype=torch.float32, template="paper"
    ),
}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    asked = arguments.parse_args()
    if unknown := set(asked.names) - set(CASES):
        arguments.error(f"there is no {', '.join(unknown)}; the names are {', '.join(CASES)}")
    rows = []
    for name in asked.names or list(CASES):
        case = CASES[name]
        if case.tokenizer == "qwen" and not (DATA / "qwen2_tokenizer").is_dir():
            print(f"{name}: left out, {DATA / 'qwen2_tokenizer'} is absent; set ROCSTAR_DATA", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = Check(name, case, Path(folder) / "place").row()
        rows.append(row)
        print(table_line(row), flush=True)
    report(rows=rows)
    return int(any(row["failed"] for row in rows))


def table_line(row: dict[str, Any]) -> str:
    figures = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("name", "failed", "passed"))
    told = "".join(f"\n    FAILED {text}" for text in row["failed"])
    return f"{row['name']}: {len(row['passed'])} checks passed; {figures}{told}"


class Check:
    """One case carried through all commands."""

    def __init__(self, name: str, case: Case, place: Path) -> None:
        """place: a folder that is made, in which commands are run."""
        self.name, self.case, self.place = name, case, place
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.figures: dict[str, Any] = {}

    def row(self) -> dict[str, Any]:
        began = time.monotonic()
        torch.set_num_threads(1)
        disable_progress_bar()
        try:
            make_place(self.place, self.case)
            self.train()
            self.exports()
            self.generation(self.evaluate_and_chat())
        except Exception as error:
            self.failed.append(f"{type(error).__name__}: {error}")
        seconds = round(time.monotonic() - began)
        return {"name": self.name, **self.figures, "seconds": seconds, "passed": self.passed, "failed": self.failed}

    def check(self, holds: bool, what: str) -> None:
        (self.passed if holds else self.failed).append(what)

    # -- commands ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        told = self._run("train", "recipe.toml")
        rows = list(read_rows(self.run / "metrics.jsonl"))
        self.check(len(rows) == SFT_STEPS + RL_STEPS, "train carries out all steps")
        self.check(rows[SFT_STEPS - 1]["loss"] < rows[0]["loss"] / 5, "SFT learns the conversations by heart")
        learnt = rows[SFT_STEPS:]
        updates = sum(row["learn/updates"] for row in learnt)
        gap = max(row.get("policy/logprob_gap_max", 0.0) for row in learnt)
        calls = sum(row["tool/calls"] for row in learnt) / len(learnt)
        self.figures |= {"rl_updates": updates, "calls_per_attempt": round(calls, 2)}
        self.figures["logprob_gap_max"] = float(f"{gap:.1g}")
        self.check(updates > 0, "RL makes updates")
        self.check(calls > 0, "attempts call the tool")
        self.check(gap < 1e-3, "engine and learner agree on logprobs")
        self.check("Traceback" not in told, "train says nothing of tracebacks")

    def evaluate_and_chat(self) -> dict[str, Any]:
        """What `chat` tells."""
        model = str(newest_model(self.run))
        limits = ("--n", "2", "--max-response-tokens", str(RESPONSE_TOKENS), "--template", self.case.template)
        result = json.loads(self._run("eval", model, "--data", "problems.jsonl", *limits, "--json"))
        accuracy = result["avg@2"]["value"]
        self.figures["avg@2"] = round(accuracy, 2)
        self.check(accuracy > 0, "eval of the exported folder finds right answers")
        told: dict[str, Any] = json.loads(self._run("chat", "family", "-p", question(4), "--json"))
        return told

    def _run(self, *arguments: str) -> str:
        child = {"cwd": self.place, "env": environment(**ONE_THREAD), "timeout": HANGS_AFTER}
        done = subprocess.run(rocstar(*arguments), capture_output=True, text=True, **child)
        if done.returncode:
            raise RuntimeError(f"rocstar {' '.join(arguments)}: exit {done.returncode}: {done.stderr[-600:]}")
        return done.stdout

    @property
    def run(self) -> Path:
        return self.place / "runs" / "family"

    # -- exports ----------------------------------------------------------------------------------------------------

    def exports(self) -> None:
        """Every exported folder holds the trained policy, in the dtype the model came in."""
        folders = sorted((self.run / "checkpoints").glob("step=*"))
        self.check(len(folders) >= 2, "each stage leaves a checkpoint")
        for checkpoint in folders:
            options = {"dtype": "auto", "output_loading_info": True}
            loaded, told = AutoModelForCausalLM.from_pretrained(checkpoint / "model", **options)
            self.check(not any(told[key] for key in ("missing_keys", "unexpected_keys")), "exports hold all weights")
            self.check(loaded.dtype == self.case.dtype, "exports come in the model's dtype")
            mine = self._trained(checkpoint)
            ids = torch.arange(40).reshape(2, 20) * 7 % loaded.config.vocab_size
            with torch.no_grad():
                equal = torch.equal(loaded(input_ids=ids).logits, mine(input_ids=ids).logits)
            self.check(equal, f"logits of {checkpoint.name} are those of the trained policy")

    def _trained(self, checkpoint: Path) -> Any:
        """The source's architecture with the learner's fp32 weights, in the source's dtype."""
        source = self.place / "model"
        nothing: Any = None
        policy = Policy(load_model(source), Codec.load(source), nothing)
        policy.restore(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=self.case.dtype)
        model.load_state_dict(policy.model.state_dict())  # rounds
        return model

    def generation(self, chatted: Mapping[str, Any]) -> None:
        """The exported folder under transformers: its chat template, and generate() that ends as a rollout does."""
        source, exported = self.place / "model", newest_model(self.run)
        tools = python_tool()
        template, codec = template_for(self.case.template, source, tools), Codec.load(exported)
        tokenizer = AutoTokenizer.from_pretrained(exported)
        if self.case.template == "model":
            ours, theirs = (rendered(AutoTokenizer.from_pretrained(folder)) for folder in (exported, source))
            self.check(ours == theirs, "apply_chat_template of the export is the source's")
        prompt = codec.encode_segments(template.opening(question(4), tools), template.reserved)
        text = codec.decode(prompt)
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
        self.check(encoded == prompt, "transformers encodes as rollouts do")
        model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=RESPONSE_TOKENS, do_sample=False)
        written = made[0, len(prompt) :].tolist()
        ended = written[-1] in codec.stop_ids(template) and len(written) < RESPONSE_TOKENS
        self.check(ended, "generate() ends by itself")
        said = VisibleText(codec, template).rest(written).strip()
        programs = [call.arguments for call in template.calls.parse(codec.decode(written))]
        called = [call["arguments"] for call in chatted["calls"][: len(programs)]]
        self.check(said in chatted["text"] and called == programs, "chat shows what generate() writes")
        self.check("boxed" in chatted["text"], "chat ends with an answer")


# What is trained


def question(a: int) -> str:
    return f"Add {a} and 3"


def conversations(a: int, answer: str) -> list[dict[str, Any]]:
    """A right one, twice, and a wrong guess, so that RL sees both. `answer` has a place for the number."""
    asked = {"role": "user", "content": question(a)}
    calls = [{"type": "function", "function": {"name": "python", "arguments": {"code": f"print({a}+3)"}}}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    right = [asked, said, {"role": "tool", "content": str(a + 3)}, final(answer, a + 3)]
    return [{"messages": right}, {"messages": right}, {"messages": [asked, final(answer, a)]}]


def final(answer: str, number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": answer % number}


def make_place(place: Path, case: Case) -> None:
    """Recipe, data and model, in the folder that commands are run in."""
    place.mkdir()
    (place / "recipe.toml").write_text(RECIPE.replace("[rollout]", f'[rollout]\ntemplate = "{case.template}"'))
    answer = "<answer>\\boxed{%d}</answer>" if case.template == "paper" else "\\boxed{%d}"
    jsonl(place / "rows.jsonl", *(row for a in NUMBERS for row in conversations(a, answer)))
    jsonl(place / "problems.jsonl", *({"question": question(a), "answer": str(a + 3)} for a in NUMBERS))
    make_model(place / "model", case)


def make_model(folder: Path, case: Case) -> None:
    folder.mkdir()
    codec = make_tokenizer(folder, case)
    eos = [codec.token_id(text) for text in EOS[case.tokenizer]]
    torch.manual_seed(0)
    config = case.config(
        vocab_size=QWEN_ROWS if case.tokenizer == "qwen" else codec.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=2048,
        tie_word_embeddings=case.tied,
        bos_token_id=None,
        eos_token_id=eos[0],
        pad_token_id=None,
        **case.more,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=case.dtype)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)


def make_tokenizer(folder: Path, case: Case) -> Codec:
    """Its files in `folder`."""
    if case.tokenizer == "qwen":
        published_qwen(folder)
        if case.chat_template:
            (folder / "chat_template.jinja").write_text(case.chat_template)
    else:
        rows = [json.dumps(row) for a in NUMBERS for row in conversations(a, "\\boxed{%d}")]
        schemas = [json.dumps(tool_schema(spec), indent=4) for spec in python_tool()]
        texts = [*rows, *schemas, MODEL_PREAMBLE] * 5
        codec = train_bpe(texts, vocab_size=1000, markers=("<|end_of_text|>", *LLAMA_MARKERS), word_merges=True)
        codec._saved.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": case.chat_template}
        settings |= {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Codec.load(folder)


# Small things


def python_tool() -> Sequence[ToolSpec]:
    return AttemptParts(Recipe()).specs


def rendered(tokenizer: Any) -> str:
    """A conversation with a call in it, as the tokenizer's own template writes it."""
    messages = conversations(4, "\\boxed{%d}")[0]["messages"]
    tool = {"type": "function", "function": {"name": "python", "description": "Runs.", "parameters": {}}}
    return str(tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True))


if __name__ == "__main__":
    raise SystemExit(main())
