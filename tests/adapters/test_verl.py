"""verl's own code calls our reward, our sandbox and our tool, and our filter chooses from its batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: scripts/adapters_env")

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.tools.tool_registry import initialize_tools_from_config
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.sandbox_fusion.utils import call_sandbox_api

from rocstar.adapters import rewards
from rocstar.adapters.roc import is_kept
from rocstar.adapters.verl import CALLS, FAILED, OUTAGES, PythonTool, roc_filter
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.sandbox.call import Limits
from rocstar.types import Reason
from tests.sandbox_service.support import running


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with running() as url:
        yield url


def test_verl_loads_our_reward_from_its_settings_and_calls_it() -> None:
    settings = {"reward": {"custom_reward_function": {"path": rewards.__file__, "name": "compute_score"}}}
    reward = get_custom_reward_fn(OmegaConf.create(settings))
    assert reward is not None
    given = {"data_source": "math", "ground_truth": r"\frac{1}{2}", "extra_info": {"num_turns": 2}}
    right = reward(solution_str=r"So \boxed{0.5}.", **given)
    assert right == {"score": 1.0, "acc": True, "pred": "0.5", "method": "number", "undecided": False}
    assert reward(solution_str=r"So \boxed{0.4}.", **given)["score"] == 0.0


def test_verls_sandbox_fusion_client_runs_programs_in_our_service(service: str) -> None:
    asked = {"compile_timeout": 5, "run_timeout": 5, "memory_limit_mb": 512}
    answer, error = call_sandbox_api(f"{service}/run_code", "print(int(input()) ** 2)", "12", **asked)
    assert error is None and answer is not None
    assert (answer["status"], answer["run_result"]["stdout"]) == ("Success", "144\n")
    answer, _ = call_sandbox_api(f"{service}/run_code", "1/0", "", **asked)
    assert answer is not None and answer["status"] == "Failed"


def test_verls_code_reward_judges_by_test_cases_in_our_service(service: str) -> None:
    cases = json.dumps({"inputs": ["2\n", "3\n", "4\n"], "outputs": ["4\n", "9\n", "16\n"]})
    for program, wanted in (("print(int(input()) ** 2)", 1.0), ("print(4)", 1 / 3)):
        said = f"```python\n{program}\n```"
        score = default_compute_score(
            "codecontests", said, cases, sandbox_fusion_url=f"{service}/run_code", memory_limit_mb=512
        )
        assert (score["score"] if isinstance(score, dict) else score) == pytest.approx(wanted)


def tools_from(folder: Path, **config: Any) -> PythonTool:
    """As verl's agent loop makes them."""
    file = folder / "tools.yaml"
    entry = {"class_name": "rocstar.adapters.verl.PythonTool", "config": {"type": "native", **config}}
    OmegaConf.save({"tools": [entry]}, file)
    (tool,) = initialize_tools_from_config(str(file))
    assert isinstance(tool, PythonTool)
    return tool


async def called(tool: PythonTool, fields: dict[str, Any], **arguments: Any) -> str:
    """As verl's agent loop calls one."""
    name, _ = await tool.create(create_kwargs={})
    response, reward, _ = await tool.execute(name, arguments, agent_data=SimpleNamespace(extra_fields=fields))
    await tool.release(name)
    assert reward == 0.0
    return str(response.text)


async def test_the_tool_that_verl_makes_from_a_file_runs_programs(tmp_path: Path, service: str) -> None:
    tool = tools_from(tmp_path, url=service, wall_seconds=2, shown_chars=200)
    assert tool.tool_schema.function.parameters.required == ["code"]
    fields: dict[str, Any] = {}
    assert await called(tool, fields, code="x = 6\nx * 7") == "42"
    assert "NameError" in await called(tool, fields, code="x")
    assert "'code' is missing" in await called(tool, fields, program="1")
    assert "ran too long" in await called(tool, fields, code="while True: pass")
    assert len(await called(tool, fields, code="print('y' * 5000)")) < 250
    assert fields == {CALLS: 5, FAILED: 3}
    many = await asyncio.gather(*(called(tool, {}, code=f"{n} + 1") for n in range(20)))
    assert many == [str(n + 1) for n in range(20)]
    tool.close()


def test_one_tool_serves_loops_one_after_another(tmp_path: Path) -> None:
    tool = tools_from(tmp_path)  # a daemon of its own
    assert [asyncio.run(called(tool, {}, code=str(n))) for n in range(3)] == ["0", "1", "2"]
    tool.close()


async def test_an_outage_is_counted_and_raised(tmp_path: Path) -> None:
    tool, fields = tools_from(tmp_path, url="http://127.0.0.1:9"), {}
    with pytest.raises(SandboxUnavailable):
        await called(tool, fields, code="1")
    assert fields == {CALLS: 1, OUTAGES: 1}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"wall_second": 3}, "no setting wall_second; it has"),
        ({"wall_seconds": "5"}, r"got `str` - at `\$.wall_seconds`"),
        ({"wall_seconds": -1}, "limit wall_seconds must be from 0.01 to 1000000, got -1"),
        ({"memory_bytes": 1}, "limit memory_bytes must be from "),
        ({"url": "127.0.0.1:8700"}, "'127.0.0.1:8700' is no address of a sandbox"),
        ({"url": "https://h:1"}, "'https://h:1' is no address of a sandbox"),
        ({"url": "http://h:99999"}, "'http://h:99999' is no address of a sandbox"),
    ],
)
def test_what_no_call_could_be_made_with_is_refused_at_once(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        tools_from(tmp_path, **config)


def test_a_program_may_compute_for_as_long_as_it_may_run(tmp_path: Path) -> None:
    assert tools_from(tmp_path, wall_seconds=30)._sandbox.limits == Limits(wall_seconds=30, cpu_seconds=30)
    assert tools_from(tmp_path, wall_seconds=30, cpu_seconds=2)._sandbox.limits.cpu_seconds == 2
    assert tools_from(tmp_path)._sandbox.limits == Limits()


def batch_of(rewards: list[float], uids: list[str], **columns: list[Any]) -> DataProto:
    scores = torch.zeros(len(rewards), 3)
    scores[:, 2] = torch.tensor(rewards)
    tensors = {"token_level_rewards": scores, "response_mask": torch.ones(len(rewards), 3)}
    arrays = {name: np.array(values, dtype=object) for name, values in {"uid": uids, **columns}.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)


def test_a_batch_of_verl_is_filtered_before_its_advantages() -> None:
    rewards, uids = [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], ["a"] * 8 + ["b"] * 4
    failed = [0, 0, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0]
    batch = batch_of(rewards, uids, row=list(range(12)), **{CALLS: [4] * 12, FAILED: failed})
    clean = 0
    for step in range(30):
        kept, reasons = roc_filter(batch, 4, seed=1, step=step)
        assert [is_kept(reason) for reason in reasons].count(True) == len(kept) == 4
        assert reasons[8:] == [Reason.DROPPED_EQUAL_REWARDS] * 4
        assert [int(row) for row in kept.non_tensor_batch["row"]] == [n for n in range(12) if is_kept(reasons[n])]
        clean += sum(int(row) < 2 for row in kept.non_tensor_batch["row"])
        advantages, _ = compute_grpo_outcome_advantage(
            kept.batch["token_level_rewards"], kept.batch["response_mask"], kept.non_tensor_batch["uid"]
        )
        assert advantages.sum().abs() < 1e-4 and advantages.abs().sum() > 1
    assert clean > 53  # of 60: two clean successes against two whose calls all failed, 1/0.01 against 1/1.01


def test_rows_without_a_verdict_or_with_an_outage_leave() -> None:
    batch = batch_of([1, 0, 0, 1], ["a"] * 4, undecided=[False, False, True, False], **{OUTAGES: [None, None, None, 1]})
    kept, reasons = roc_filter(batch, 2, seed=0, step=0)
    assert reasons[2:] == [Reason.DROPPED_UNDECIDED, Reason.DROPPED_ENVIRONMENT] and len(kept) == 2


def test_a_batch_without_rewards_or_with_other_than_one_penalty_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="filter after rewards"):
        roc_filter(DataProto.from_dict(tensors={"x": torch.ones(2, 1)}), 2, seed=0, step=0)
    with pytest.raises(ConfigError, match="1 penalties for a batch of 2 rows"):
        roc_filter(batch_of([1.0, 0.0], ["p"] * 2), keep=2, seed=1, step=0, penalties=[1.0])
