"""What TRL's GRPOTrainer and verl's agent loop make of faults of their tools and rewards: `rocstar faults` beside them.

    .adapters/bin/python benchmarks/faults_peers.py trl|verl

Their own code runs the conversation of rocstar/faults/stand_ins.py: TRL's tool loop, rewards and one training step, and
verl's ToolAgentLoop and NaiveRewardManager. Completions come from the kit's engine, for which each gets a method of
ours; so faults of engines would be faults of that method and are left out. The tool is a function that asks the kit's
service and lets errors pass, as both document; the reward function is the kit's.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from frame import parser

from rocstar.faults.kit import ATTEMPTS, SIBLINGS, TrainerAnswer, at_addresses, faults_named, findings
from rocstar.faults.stand_ins import PROGRAM, QUESTION, RIGHT, WRONG, reply_to, reward_of
from tests.adapters.tiny_model import tokenizer_of

TOOL_SECONDS = 5.0
SECONDS = 60.0  # of one fault


def asked(url: str, body: dict[str, Any], seconds: float | None = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=seconds) as answer:
        return json.load(answer)


def completed(given: Mapping[str, str], tokenizer: Any, prompt_ids: list[int]) -> list[int]:
    """Token ids of the engine's next words."""
    body = {"messages": [{"role": "user", "content": tokenizer.decode(prompt_ids)}]}
    words = asked(f"{given['FAULTS_ENGINE']}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return [*tokenizer(words)["input_ids"], tokenizer.eos_token_id]


def tool_of(given: Mapping[str, str]) -> Callable[[str], str]:
    def python(code: str) -> str:
        """Runs a Python program.

        Args:
            code: The program.
        """
        answer = asked(f"{given['FAULTS_TOOLS']}/run_code", {"code": code}, TOOL_SECONDS)
        return str(answer["run_result"]["stdout"])

    return python


def tokenizer() -> Any:
    return tokenizer_of([QUESTION, reply_to("", [PROGRAM]), RIGHT, WRONG])


async def trl(given: Mapping[str, str]) -> TrainerAnswer:
    """One step of GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    worth: list[float | None] = []

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *others: Any, **named: Any) -> Any:
            return [completed(given, self.processing_class, ids) for ids in prompt_ids], None

        def _calculate_rewards(self, *given: Any) -> Any:
            found = super()._calculate_rewards(*given)
            worth.extend(None if one != one else one for one in found[:, 0].tolist())  # TRL takes nan for None
            return found

    words = tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(words), num_key_value_heads=2, max_position_embeddings=2048, **sizes)
    prompts = [[{"role": "user", "content": QUESTION.format(n)}] for n in range(ATTEMPTS // SIBLINGS)]
    quiet = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "max_steps": 1}
    batch = {"per_device_train_batch_size": ATTEMPTS, "steps_per_generation": 1, "num_generations": SIBLINGS}
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        trainer = Trainer(
            model=Qwen2ForCausalLM(config),
            processing_class=words,
            args=GRPOConfig(output_dir=folder, max_completion_length=400, **quiet, **batch),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            reward_funcs=lambda completions, **columns: reward_of_texts(completions),
            tools=[tool_of(given)],
        )
        reward = reward_of(given["FAULTS_REWARD"])

        def reward_of_texts(completions: Any) -> list[float]:
            return reward([one[-1]["content"] or "" for one in completions])

        try:
            await asyncio.to_thread(trainer.train)
        except Exception as error:
            return TrainerAnswer(rewards=worth, halted=True, words=f"{type(error).__name__}: {error}")
    return TrainerAnswer(rewards=worth, words="a warning: All reward functions returned None" if None in worth else "")


async def verl(given: Mapping[str, str]) -> TrainerAnswer:
    """The attempts of one step and their rewards."""
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from transformers.utils import get_json_schema
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.tools.function_tool import FunctionTool
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.replica import TokenOutput

    words, tool = tokenizer(), tool_of(given)
    limits = {"max_user_turns": 4, "max_assistant_turns": 4, "max_parallel_calls": 1, "format": "hermes"}
    limits |= {"max_tool_response_length": 400, "tool_response_truncate_side": "middle"}
    rollout = {"multi_turn": limits, "prompt_length": 1024, "response_length": 1024, "full_determinism": False}
    config = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
    schema = OpenAIFunctionToolSchema.model_validate(get_json_schema(tool))
    tools = ToolListWrap([FunctionTool(name="python", fn=tool, tool_schema=schema)])
    reward = reward_of(given["FAULTS_REWARD"])

    class Engines:
        async def generate(self, prompt_ids: list[int], **others: Any) -> TokenOutput:
            return TokenOutput(token_ids=await asyncio.to_thread(completed, given, words, prompt_ids))

    def score(solution_str: str, **others: Any) -> float:
        return reward([solution_str])[0]

    judge = NaiveRewardManager(config.config, words, score)

    async def attempt(number: int) -> float:
        loop = ToolAgentLoop(
            config, Engines(), words, None, RLHFDataset, DictConfigWrap(OmegaConf.create({})), tools=tools
        )
        made = await loop.run({}, raw_prompt=[{"role": "user", "content": QUESTION.format(number)}])
        ids = torch.tensor([made.response_ids])
        row = {"data_source": "", "reward_model": {"ground_truth": ""}, "extra_info": {}}
        fields = {name: np.array([value], dtype=object) for name, value in row.items()}
        data = DataProto.from_dict({"responses": ids, "attention_mask": torch.ones_like(ids)}, non_tensors=fields)
        return float((await judge.run_single(data))["reward_score"])

    try:
        return TrainerAnswer(rewards=await asyncio.gather(*(attempt(number) for number in range(ATTEMPTS))))
    except Exception as error:
        return TrainerAnswer(rewards=(), halted=True, words=f"{type(error).__name__}: {error}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("peer", choices=["trl", "verl"])
    peer = options.parse_args().peer
    loop = asyncio.new_event_loop()  # which waits for no thread that hangs, unlike asyncio.run
    chosen = [fault for fault in faults_named([], at_addresses=True) if not fault.startswith("engine")]
    trainer = partial(at_addresses, {"trl": trl, "verl": verl}[peer])
    found = loop.run_until_complete(findings(trainer, chosen, seconds=SECONDS))
    for one in found:
        figures = f"rewarded {one.rewarded:2} shown {one.shown:2} lost {one.lost:2}"
        print(f"{one.fault:20} {figures} {one.run:8} {one.words:.90}")
    print(json.dumps({"peer": peer, "faults": [asdict(one) for one in found]}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
