"""TRL: Python as a tool or as an environment of GRPOTrainer, and a GRPOTrainer that draws more than it trains on (RoC).

    sandbox = SandboxThread()                                   # or SandboxThread("http://127.0.0.1:8700")
    GRPOTrainer(..., tools=[python_tool(sandbox)])              # each call a program of its own
    RocTrainer(..., environment_factory=python_environments(sandbox), keep=8, args=GRPOConfig(num_generations=16))

An environment is a notebook of one attempt, and knows which calls failed: RoC's penalty counts those. With `tools=` TRL
passes on no failures, so every attempt has p_err 0. The reward is `rocstar.adapters.rewards.TrlReward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from trl import GRPOTrainer

from rocstar.adapters.python_tool import SandboxThread
from rocstar.adapters.roc import Drawn, is_kept, penalty_of_messages, reasons_of
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.tools.notebook import NotebookTool
from rocstar.types import RIGHT_ABOVE, Reason, ToolResult, problem_id

Completion = str | Sequence[Mapping[str, Any]]
Penalty = Callable[[Completion, "PythonEnvironment | None"], float]
"""(a completion as TRL hands it to reward functions, its environment) -> p_total, lower is better."""


class PythonEnvironment:
    """A notebook of one attempt. TRL makes as many as it has attempts at once and calls `reset` before each; all public
    functions of this class are tools."""

    def __init__(self, sandbox: SandboxThread) -> None:
        self._sandbox = sandbox
        self._notebook: NotebookTool | None = None
        self._results: list[ToolResult] = []
        self.outage: str | None = None  # why the sandbox failed under this attempt; None where it did not

    def reset(self, **columns: Any) -> None:
        """Begin a new attempt."""
        if self._notebook is not None:
            self._sandbox.submit(self._notebook.close()).result()
        self._notebook, self._results, self.outage = None, [], None

    def python(self, code: str) -> str:
        """
        Runs a cell of a Python notebook and returns what it printed and the value of its last expression.

        Args:
            code: The cell.
        """
        try:
            if self._notebook is None:
                self._notebook = self._sandbox.notebook()
            result = self._sandbox.submit(self._notebook.run(self._sandbox.call(code))).result()
        except SandboxUnavailable as error:
            self.outage = str(error)
            raise  # TRL shows the model a sentence and goes on; RocTrainer leaves the attempt out
        self._results.append(result)
        return self._sandbox.shown(result)

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Results of this attempt's cells, in order."""
        return tuple(self._results)


def python_environments(sandbox: SandboxThread) -> Callable[[], PythonEnvironment]:
    """For `environment_factory=`."""
    return lambda: PythonEnvironment(sandbox)


def python_tool(sandbox: SandboxThread) -> Callable[[str], str]:
    """For `tools=[...]`: every call is a program of its own. An outage is an exception, of which TRL shows the model a
    sentence."""

    def python(code: str) -> str:
        """
        Runs a Python program and returns what it printed and the value of its last expression.

        Args:
            code: The program.
        """
        return sandbox.shown(sandbox.run(code))

    return python


def attempt_penalty(
    completion: Completion, environment: PythonEnvironment | None, prompt: object = "<answer>"
) -> float:
    """p_err + p_format of the paper, which is 0 where the prompt does not speak of an `<answer>` block. A call that
    never reached the environment (no such tool, wrong arguments) failed too. Source: paper §2.2.3."""
    asked = "<answer>" in str(prompt)
    if isinstance(completion, str):
        written = [{"role": "assistant", "content": completion}]
        return penalty_of_messages(written, calls=0, failed_calls=0, asked=asked)
    replies = sum(message.get("role") == "tool" for message in completion)
    results = environment.results if environment else ()
    failed = sum(result.is_error for result in results) + (max(0, replies - len(results)) if environment else 0)
    return penalty_of_messages(completion, calls=max(replies, len(results)), failed_calls=failed, asked=asked)


class RocTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """GRPOTrainer with RoC: of `num_generations` attempts at a problem it learns from `keep`.

    Rows of dropped attempts leave the batch before the loss, and the advantages of the others are over those that are
    kept. A batch keeps its size: a group with equal rewards, or with fewer comparable attempts than `keep`, is filled
    up with rows whose tokens count nowhere. Which attempt met which fate stands in the metrics `roc/*`, in the
    completions table (column `roc`) and in `reasons`. Source: paper §2.2.3; a group without signal trains nothing, as
    in rocstar."""

    def __init__(
        self,
        *args: Any,
        keep: int,
        penalty: Penalty | None = None,
        success_above: float = RIGHT_ABOVE,
        **kwargs: Any,
    ) -> None:
        """keep: G; `num_generations` is what is drawn, 2G in the paper. penalty: instead of `attempt_penalty`.
        success_above: a larger sum of rewards is a success. Raises ConfigError for what does not fit."""
        super().__init__(*args, **kwargs)
        self.keep = keep
        self.reasons: tuple[Reason, ...] = ()
        """Why each attempt of this process's last batch was kept or dropped, in its order."""
        self._penalty, self._success_above = penalty, success_above
        self._rows: list[int] = []
        refuse(self, keep)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """[N, F] over all processes, nan where an attempt was dropped: TRL's baseline then looks past it."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if not self.model.training:
            return rewards
        first = self.accelerator.process_index * len(prompts)
        drawn = self._drawn(rewards[first : first + len(prompts)], prompts, completions)
        seed, step, above = self.args.seed, self.state.global_step, self._success_above
        self.reasons = tuple(reasons_of(drawn, self.keep, seed=seed, step=step, success_above=above))
        kept = [is_kept(reason) for reason in self.reasons]
        self._rows = chosen_rows(kept, self.num_generations, self.keep)
        self._tell(drawn)
        ignored = ignored_rewards(kept, self.num_generations)
        everywhere = self.accelerator.gather(torch.tensor(ignored, device=rewards.device))
        return rewards.masked_fill(everywhere[:, None], torch.nan)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        rows = torch.tensor(self._rows, device=output["completion_mask"].device)
        count = len(self.reasons)
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count:  # one for each attempt
                output[name] = value[rows]
        filler = torch.tensor([not is_kept(self.reasons[row]) for row in self._rows], device=rows.device)
        output["completion_mask"] = output["completion_mask"].masked_fill(filler[:, None], 0)
        learnt = output["completion_mask"] * output.get("tool_mask", 1)
        output["num_items_in_batch"] = self.accelerator.gather(learnt.sum()).sum()
        return output

    def _drawn(self, rewards: Any, prompts: Any, completions: Any) -> list[Drawn]:
        """Siblings stand together in TRL's batch; equal prompts are distinguished by position."""
        environments = self.environments or [None] * len(prompts)
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        known = ~torch.isnan(rewards).all(dim=1)
        return [
            Drawn(
                group=(row // self.num_generations, problem_id(str(prompts[row - row % self.num_generations]))),
                reward=total[row].item() if known[row] else None,
                penalty=self._penalty(completions[row], environments[row])
                if self._penalty
                else attempt_penalty(completions[row], environments[row], prompts[row]),
                outage=getattr(environments[row], "outage", None) is not None,
            )
            for row in range(len(prompts))
        ]

    def _tell(self, drawn: Sequence[Drawn]) -> None:
        """Shares of the attempts drawn by reason, and their mean reward, which TRL's `reward` no longer is."""
        metrics, count = self._metrics["train"], len(drawn)
        rewards = [one.reward for one in drawn if one.reward is not None]
        metrics["roc/reward_drawn"].append(sum(rewards) / len(rewards) if rewards else torch.nan)
        metrics["roc/kept"].append(sum(map(is_kept, self.reasons)) / count)
        found = Counter(self.reasons)
        for reason in Reason:
            metrics[f"roc/{reason}"].append(found[reason] / count)
        self._log_completion_extra("roc", [str(reason) for reason in self.reasons])


def refuse(trainer: GRPOTrainer, keep: int) -> None:
    """Raises ConfigError for settings with which attempts cannot be kept by group."""
    drawn, args = trainer.num_generations, trainer.args
    local = args.per_device_train_batch_size * args.steps_per_generation
    if not 2 <= keep <= drawn:
        raise ConfigError(f"keep {keep} must be at least 2 and at most num_generations, which is {drawn}")
    if local % drawn:
        raise ConfigError(
            f"per_device_train_batch_size * steps_per_generation is {local}, no multiple of num_generations {drawn}: "
            "the siblings of a problem would lie in several processes; make it one"
        )
    if local // drawn * keep % args.steps_per_generation:
        raise ConfigError(
            f"{local // drawn} problems of which {keep} attempts are kept make {local // drawn * keep} rows, which do "
            f"not divide into {args.steps_per_generation} steps_per_generation; change one of them"
        )
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError("RoC compares sums of rewards; set multi_objective_aggregation to sum_then_normalize")
    if trainer._is_vlm:
        raise ConfigError("RoC cannot pick rows of a batch with images; use a text model")


def chosen_rows(kept: Sequence[bool], drawn: int, keep: int) -> list[int]:
    """`keep` rows of each group of `drawn` rows in order: the kept ones, and as many others as are missing."""
    rows: list[int] = []
    for first in range(0, len(kept), drawn):
        group = sorted(range(first, first + drawn), key=lambda row: not kept[row])  # stable: kept ones come first
        rows += sorted(group[:keep])
    return rows


def ignored_rewards(kept: Sequence[bool], drawn: int) -> list[bool]:
    """[N] rows that no baseline looks at: those that are not kept, of groups of which some are."""
    some = [any(kept[first : first + drawn]) for first in range(0, len(kept), drawn)]
    return [some[row // drawn] and not kept[row] for row in range(len(kept))]
