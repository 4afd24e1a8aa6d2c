"""TRL's side of benchmarks/step_trl.py: runs in an environment of its own, knows nothing of rocstar.

Makes one RL step of GRPOTrainer for each line that comes in on stdin, and prints its wall and CPU seconds. In the
conversation each of the first two turns ends with the scripted call, appended to what the model wrote."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

CHAT_TEMPLATE = (  # rocstar's compact template
    "{% for m in messages %}<|im_start|>"
    "{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Steps(TrainerCallback):
    """A step begins with a line on stdin and ends with one on stdout."""

    def on_step_begin(self, *unused: Any, **more: Any) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, *unused: Any, **more: Any) -> None:
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        print("STEP " + json.dumps({"wall": wall, "cpu": cpu}), flush=True)


class Conversing(GRPOTrainer):  # type: ignore[misc]
    """Every turn is of the same length, and the first two end with the call."""

    case: dict[str, Any]
    turn = 0

    def _generate(self, prompts: list[Any]) -> Any:
        self.turn = 0
        return super()._generate(prompts)

    def _generate_single_turn(self, *given: Any, **named: Any) -> tuple[list[list[int]], Any]:
        self.generation_config.max_new_tokens = self.case["turn_tokens"]
        written, logprobs = super()._generate_single_turn(*given, **named)
        self.turn += 1
        if self.turn <= self.case["calls"]:
            stop = self.case["stop"]
            written = [[*(token for token in ids if token != stop), *self.case["call_ids"]] for ids in written]
        return written, logprobs


def main() -> None:
    folder = Path(sys.argv[1])
    case = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    prompts = [{"prompt": [{"role": "user", "content": question}]} for question in case["questions"]]
    kind = Conversing if case["calls"] else GRPOTrainer
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(prompts * 1000),
        tools=[wait_and_add] if case["calls"] else None,
        callbacks=[Steps()],
        args=settings(case, folder),
    )
    trainer.case = case
    trainer.train()


def settings(case: dict[str, Any], folder: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case["trl_rows"],
        gradient_accumulation_steps=len(case["questions"]) * case["attempts"] // case["trl_rows"],
        num_generations=case["attempts"],
        max_completion_length=case["response_tokens"],
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        max_steps=100_000,
        use_cpu=True,
        bf16=case["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def wait_and_add(a: int) -> str:
    """Adds one, after 50 ms.

    Args:
        a: a number
    """
    time.sleep(0.05)
    return str(a + 1)


def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
    """Half of the attempts, by a token that they wrote."""
    return [float(ids[0] % 2) for ids in completion_ids]


if __name__ == "__main__":
    main()
