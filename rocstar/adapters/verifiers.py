"""Environments of verifiers: its own episode makes each attempt, and its model is our gateway. So one turn and several,
tools, simulated users and groups of agents are the environment's affair, and the reward too. Tested with 0.4.0.

    data.source = "rocstar.adapters.verifiers:TasksetProblems"
    rollout.agent = "rocstar.adapters.verifiers:solve" """

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from statistics import fmean

import verifiers.v1 as vf

from rocstar.adapters.environments import EnvironmentTask, as_reward, faults_of, options_in, source_of
from rocstar.agents.agent import Client
from rocstar.config.sections import TaskSection
from rocstar.errors import ConfigError
from rocstar.types import Problem, problem_id

MOST_TASKS = 10_000  # of a taskset; some have no end


class TasksetProblems(EnvironmentTask):
    def asked(self, data: TaskSection) -> list[Problem]:
        source = source_of("verifiers", data.options)
        try:
            _trained_seat(_config(source))
            return [
                Problem(id=name, question=it.prompt_text or it.name or f"task {it.idx}", answer="", source=source)
                for name, it in ((name, task.data) for name, task in tasks_of(source).items())
            ]
        except (AttributeError, ImportError, TypeError, ValueError) as error:  # pydantic's is a ValueError
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"data.options = {dict(data.options)} is no verifiers environment: {reason}") from error


async def solve(problem: Problem, client: Client) -> dict[str, float]:
    """The mean reward of the traces of the trained seat, and as its parts those of their weighted rewards and of their
    metrics: `rewards_NAME`, `metrics_NAME`. Raises Unavailable where the environment fails."""
    config = _config(problem.source)
    seat = _trained_seat(config)
    endpoint = vf.EvalClientConfig(base_url=client.base_url, headers={"x-api-key": client.api_key})
    with faults_of(client):
        environment = vf.load_environment(config)
        async with environment.serving():
            context = vf.ModelContext(model=client.model, client=endpoint)
            episode = await environment.run_episode(tasks_of(problem.source)[problem.id], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it says not why")
        traces = [trace for trace in episode.traces if trace.agent.name == seat]
        if any(not trace.rewards or None in trace.rewards.values() for trace in traces):
            raise ValueError("it left a trace unscored")
        parts = defaultdict(list)
        for trace in traces:
            for name, reward in trace.rewards.items():
                parts[f"rewards_{name}"].append(reward.value)
            for name, metric in trace.metrics.items():
                if metric is not None:
                    parts[f"metrics_{name}"].append(metric)
        means = {name: fmean(values) for name, values in parts.items()}
        return {**means, "reward": as_reward(fmean(trace.reward for trace in traces))}


@functools.lru_cache(maxsize=4)
def tasks_of(source: str) -> Mapping[str, vf.Task]:
    """By the id of their problem."""
    taskset = vf.load_environment(_config(source)).taskset
    return {problem_id(task.key): task for task in islice(taskset, MOST_TASKS)}


def _config(source: str) -> vf.EnvConfig:
    options = options_in(source)
    if not options.get("id"):
        # Where the settings do not say who plays and where, verifiers' own defaults are a shell and a paid cloud.
        agent = options["agent"] = {"runtime": {"type": "subprocess"}, **options.get("agent", {})}
        if vf.default_harness_id(options.get("taskset", {}).get("id", "")) == "bash":  # the taskset brings none
            agent.setdefault("harness", {"id": "null"})
    return vf.resolve_env_config(options)


def _trained_seat(config: vf.EnvConfig) -> str:
    """The agent that our model plays. Raises ValueError where that are several, or it runs programs without a wall."""
    seats = {name: seat for name, seat in config if isinstance(seat, vf.AgentConfig) and seat.client is None}
    if len(seats) != 1:
        raise ValueError(f"its agents {', '.join(seats) or 'none'} have no client of their own; leave one so")
    ((name, seat),) = seats.items()
    harness = seat.harness or vf.configs.env.default_agent_harness(config.taskset.id)
    if vf.load_harness(harness).EXECUTES_CODE and seat.runtime.type == "subprocess":
        raise ValueError(f"{harness.id} would run the model's programs on this machine; name a {name}.runtime for it")
    return str(name)
