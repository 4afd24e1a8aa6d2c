"""verl: Python as a tool of its agent loops, and RoC as a filter of a batch before advantages.

    tools:                                      # the file of actor_rollout_ref.rollout.multi_turn.tool_config_path
      - class_name: rocstar.adapters.verl.PythonTool
        config: {type: native, url: "http://127.0.0.1:8700", wall_seconds: 5}

    batch, reasons = roc_filter(batch, keep=8, seed=1, step=3)     # after rewards, before compute_advantage

verl opens and releases a tool around every single call and never says that an attempt is over, so programs share no
names: each is fresh. The reward is `rocstar.adapters.rewards.compute_score`, given to verl by its path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from verl import DataProto
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from rocstar.adapters.python_tool import SandboxThread
from rocstar.adapters.roc import Drawn, is_kept, reasons_of
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.learning.quality import penalty_of
from rocstar.sandbox.call import Limits
from rocstar.tools.arguments import bad_call, text_arguments
from rocstar.tools.python import DESCRIPTION
from rocstar.types import RIGHT_ABOVE, Reason

CALLS, FAILED, OUTAGES = "rocstar_calls", "rocstar_failed_calls", "rocstar_outages"
"""What an attempt's calls came to, in verl's `extra_fields`; verl makes columns of a batch of them."""
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The program."}},
    "required": ["code"],
}
SETTINGS = {"type", "url", "slots", "shown_chars"}  # keys of a tool in verl's file besides the limits of a program


class VerlPythonTool(BaseTool):  # type: ignore[misc, unused-ignore]
    """Runs programs in a sandbox service, or in a daemon of verl's own process where `url` is left out."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """config: `url`, `slots`, `shown_chars`, and the fields of `sandbox.call.Limits`; `wall_seconds` alone is the
        limit of CPU, too. Raises ConfigError."""
        limits = {name: value for name, value in config.items() if name in Limits.__struct_fields__}
        if unknown := config.keys() - limits.keys() - SETTINGS:
            known = ", ".join((*sorted(SETTINGS), *Limits.__struct_fields__))
            raise ConfigError(f"the Python tool has no setting {', '.join(sorted(unknown))}; it has {known}")
        try:
            checked = msgspec.convert(limits, Limits)
            if "cpu_seconds" not in limits and "wall_seconds" in limits:
                checked = msgspec.structs.replace(checked, cpu_seconds=checked.wall_seconds)
        except msgspec.ValidationError as error:  # else each call of the model would get this as its result
            raise ConfigError(f"a limit of the Python tool is of another type: {error}") from None
        given = {name: config[name] for name in ("slots", "shown_chars") if name in config}
        self._sandbox = SandboxThread(config.get("url", ""), limits=checked, **given)
        function = {"name": "python", "description": DESCRIPTION, "parameters": PARAMETERS}
        own = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
        super().__init__(config, tool_schema or own)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """(what the model reads, no reward, no metrics). Raises SandboxUnavailable, of which verl shows the model a
        sentence: `roc_filter` leaves such an attempt out."""
        fields = getattr(kwargs.get("agent_data"), "extra_fields", {})
        fields[CALLS] = fields.get(CALLS, 0) + 1
        call = self._sandbox.call("")
        asked = type(call)(id=call.id, tool=self.name, arguments=parameters, raw="")
        complaint = text_arguments(asked, PARAMETERS)
        try:
            if complaint:
                result = bad_call(asked, complaint)
            else:
                result = await asyncio.wrap_future(self._sandbox.submit(self._sandbox.program(parameters["code"])))
        except SandboxUnavailable:
            fields[OUTAGES] = fields.get(OUTAGES, 0) + 1
            raise
        fields[FAILED] = fields.get(FAILED, 0) + result.is_error
        return ToolResponse(text=self._sandbox.shown(result)), 0.0, {}

    def close(self) -> None:
        """End the sandbox of this process. verl does not call it: its process ends."""
        self._sandbox.close()


PythonTool = VerlPythonTool  # its name in verl's files


def roc_filter(
    batch: DataProto,
    keep: int,
    *,
    seed: int,
    step: int,
    penalties: Sequence[float] | None = None,
    success_above: float = RIGHT_ABOVE,
) -> tuple[DataProto, list[Reason]]:
    """The kept rows of a batch, in its order, and [N] reasons for all rows.

    Siblings share `uid`; a row's reward is the sum of its `token_level_rewards`, or `rm_scores`, and above
    `success_above` it is a success; `undecided` of our
    reward function and an outage of our tool leave a row out. penalties: [N] p_total; None for p_err alone, by the
    columns that PythonTool fills. How many rows are kept differs from batch to batch: pad it to what the workers divide
    (`pad_dataproto_to_divisor`). Raises ConfigError for a batch without rewards or `uid`."""
    scores = next((batch.batch[name] for name in ("token_level_rewards", "rm_scores") if name in batch.batch), None)
    if scores is None or "uid" not in batch.non_tensor_batch:
        raise ConfigError("RoC needs `uid` and `token_level_rewards` or `rm_scores`; filter after rewards are computed")
    if penalties is not None and len(penalties) != len(batch):
        raise ConfigError(f"there are {len(penalties)} penalties for a batch of {len(batch)} rows; give one for each")
    rewards = scores.sum(dim=-1).tolist()
    outages, undecided = _column(batch, OUTAGES), _column(batch, "undecided")
    calls, failed = _column(batch, CALLS), _column(batch, FAILED)
    if penalties is None:
        pairs = zip(calls, failed, strict=True)
        penalties = [penalty_of(calls=made, failed_calls=bad, answer_blocks=1, turns=1).errors for made, bad in pairs]
    drawn = [
        Drawn(
            group=batch.non_tensor_batch["uid"][row],
            reward=None if undecided[row] else rewards[row],
            penalty=float(penalties[row]),
            outage=bool(outages[row]),
        )
        for row in range(len(batch))
    ]
    reasons = reasons_of(drawn, keep, seed=seed, step=step, success_above=success_above)
    return batch.select_idxs([row for row, reason in enumerate(reasons) if is_kept(reason)]), reasons


def _column(batch: DataProto, name: str) -> list[int]:
    """[N] a count of our own; 0 if an attempt has none, or none were counted."""
    found = batch.non_tensor_batch.get(name)
    return [0] * len(batch) if found is None else [int(value or 0) for value in found]
