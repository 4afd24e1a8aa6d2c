"""Tasks of inspect_ai: the task's solver makes each attempt with our gateway as its model, its first scorer gives the
reward. Its tools run in this process. Tested with 0.3.285.

    data.source = "rocstar.adapters.inspect_tasks:Samples"
    rollout.agent = "rocstar.adapters.inspect_tasks:solve" """

from __future__ import annotations

import functools
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from inspect_ai import Task
from inspect_ai._eval.context import init_task_context
from inspect_ai._eval.task.generate import task_generate
from inspect_ai.dataset import Sample
from inspect_ai.log._samples import active_sample
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelName, get_model
from inspect_ai.model._model import init_active_model
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState, chain
from inspect_ai.util._store import init_subtask_store
from pydantic import BaseModel

from rocstar.adapters.environments import EnvironmentTask, as_reward, faults_of, options_in, source_of
from rocstar.agents.agent import Client
from rocstar.config.sections import TaskSection
from rocstar.errors import ConfigError
from rocstar.record.messages import mark_of
from rocstar.run.tasks import checked_options
from rocstar.support.plugins import load, own_code
from rocstar.types import Problem, problem_id

LIMITS = dict.fromkeys(("message_limit", "token_limit", "time_limit", "working_limit", "cost_limit"))
NOT_HELD = (*LIMITS, "turn_limit", "sandbox", "approval", "review", "sentinel", "early_stopping")
"""Settings of a task that attempts here can't obey."""


class SampleOptions(BaseModel):
    task: str  # `package.module:name` or `file.py:name`, a function decorated with `@task`
    arguments: dict[str, Any] = {}


class Samples(EnvironmentTask):
    def asked(self, data: TaskSection) -> list[Problem]:
        source = source_of("inspect_ai", checked_options(SampleOptions, data).model_dump())
        return [
            Problem(id=name, question=_text(sample), answer=Target(sample.target).text, source=source)
            for name, sample in made(source)[1].items()
        ]


async def solve(problem: Problem, client: Client) -> float:
    """Raises Unavailable if solver or scorer fail, and the error of a limit of the run."""
    task, samples = made(problem.source)
    sample = deepcopy(samples[problem.id])  # an attempt may change its own
    sample.id = sample.id or problem.id
    with faults_of(client):
        model = get_model(
            f"openai-api/rocstar/{client.model}", base_url=client.base_url, api_key=client.api_key, memoize=False,
            config=GenerateConfig(max_retries=0, max_connections=1 << 16),
        )  # fmt: skip
        said = [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else list(sample.input)
        state = TaskState(
            model=ModelName(model), sample_id=sample.id, epoch=1, input=sample.input, messages=said,
            target=Target(sample.target), choices=sample.choices, metadata=dict(sample.metadata or {}),
        )  # fmt: skip
        init_task_context(model, task.model_roles, task.config)
        init_subtask_store(state.store)
        init_transcript(transcript := Transcript())

        async def generate(state: TaskState, tool_calls: Any = "loop", cache: Any = False, **options: Any) -> TaskState:
            return await task_generate(model, state, tool_calls, cache, task.config.merge(GenerateConfig(**options)))

        async with active_sample(
            task=task.name, log_location="", model=client.model, sample=sample, epoch=1, fails_on_error=True,
            transcript=transcript, eval_id="", sample_uuid=state.uuid, **LIMITS,
        ):  # fmt: skip
            try:
                state = await chain(task.setup or [], task.solver)(state, generate)
                init_active_model(get_model("none"), task.config)  # the policy must not judge itself
                score = await task.scorer[0](state, state.target)
            finally:
                if task.cleanup:
                    await task.cleanup(state)
        value = score.value if score else None
        if (reward := mark_of(value)) is None:
            raise ValueError(f"the score {value!r:.60} is no number or letter")
        return as_reward(reward)


@functools.lru_cache(maxsize=4)
def made(source: str) -> tuple[Task, Mapping[str, Sample]]:
    """A task, and its samples by the id of their problem. Raises ConfigError."""
    options = SampleOptions(**options_in(source))
    said = f"data.options.task = {options.task!r}"
    function = load(options.task, setting="data.options.task")
    with own_code(f"{said} failed", function):
        task = function(**options.arguments)
    if not isinstance(task, Task):
        raise ConfigError(f"{said} gave a {type(task).__name__}; let it return an inspect_ai Task")
    if not task.scorer:
        raise ConfigError(f"{said} has no scorer, so nothing decides what is right")
    if kept := [name for name in NOT_HELD if getattr(task, name, None) is not None]:
        raise ConfigError(f"{said} sets {', '.join(kept)}, which rollout.agent can't keep; make the task without")
    if any(sample.sandbox for sample in task.dataset):
        raise ConfigError(f"{said} has samples with a sandbox of their own, which rollout.agent can't keep")
    samples = {problem_id(f"{_text(each)}\n{Target(each.target).text}\n{each.id}"): each for each in task.dataset}
    return task, samples


def _text(sample: Sample) -> str:
    """Its input and its choices."""
    asked = [sample.input] if isinstance(sample.input, str) else [message.text for message in sample.input]
    return "\n\n".join((*asked, *(sample.choices or ())))
