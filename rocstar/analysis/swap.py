"""Does a model read its tool's replies? Recorded attempts continue from their first reply of a tool, with another text
in its place. A model that does not read it continues as before; one that does uses a false word instead of the true
one. The texts:

    true      what the tool said
    swapped   a tool's reply in another attempt, after a call with the same outcome (failed, or not)
    blank     nothing
    false     the tool's reply with one word changed: to another reply's, else to another number of as many digits

Up to that reply an attempt is replayed token by token, its calls are run again, and the rest is sampled as in the
evaluation, from the same seed for each text. The first attempt of each problem that used a tool is used, so intervals
are over problems. Source: ours.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rocstar.analysis.screen import SWAP_FIGURES
from rocstar.analysis.sources import Source, evaluation_source, find_source
from rocstar.cluster import Machines, opened_machines
from rocstar.config.recipe import resolved_from_json
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError
from rocstar.evaluation.intervals import figure, mean_over_problems
from rocstar.evaluation.subject import LocalModel
from rocstar.parts.modelfolder import model_facts
from rocstar.record.evaluations import SAMPLES
from rocstar.record.rollouts import SHORT_COLUMNS, attempt_rows, problem_of, trajectory_of
from rocstar.rollout.collect import Roller, verified_groups
from rocstar.rollout.environment import Conversation
from rocstar.rollout.episode import run_episode
from rocstar.run.material import task_of
from rocstar.run.tasks import heldout_problems
from rocstar.types import Problem, Sampling, Trajectory, Turn, Verdict, seed_for

_PART = re.compile(r"\w+|\s+|[^\w\s]+")


class ReplyText(StrEnum):
    """The text that replaces a tool's reply; see the head of this file."""

    TRUE = "true"
    SWAPPED = "swapped"
    BLANK = "blank"
    FALSE = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Falsehood:
    text: str
    true_word: str
    false_word: str
    """Its replacement in the text."""


class Replies:
    """The tools' replies in a set of attempts."""

    def __init__(self, replies: Iterable[tuple[bool, str]]) -> None:
        """said: (whether the call failed, the reply)."""
        self._alike: dict[bool, list[str]] = defaultdict(list)
        self._of_length: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        for failed, text in replies:
            parts = tuple(_PART.findall(text))
            self._alike[failed].append(text)
            self._of_length[len(parts)].add(parts)

    def another(self, failed: bool, text: str, rng: random.Random) -> str | None:
        """Another reply to a call with the same outcome, sampled by frequency; None if there is none."""
        others = [other for other in self._alike[failed] if other != text]
        return rng.choice(others) if others else None

    def false(self, text: str, read: str, rng: random.Random) -> Falsehood | None:
        """Replace a word of the text by one that stands neither in it nor in `read`, which is all that the attempt has
        read and written before; None where there is nothing to replace."""
        parts = _PART.findall(text)
        known = {*parts, *_PART.findall(read)}
        others = sorted(self._of_length[len(parts)])
        found = [(place, other[place]) for other in others if (place := _only_difference(parts, other)) is not None]
        for some in (found, _last_number(parts, rng)):
            if new := [(place, word) for place, word in some if word.isalnum() and word not in known]:
                place, word = rng.choice(new)
                changed = "".join([*parts[:place], word, *parts[place + 1 :]])
                return Falsehood(text=changed, true_word=parts[place], false_word=word)
        return None


def holds(text: str, word: str) -> bool:
    """Whether the word stands in the text as a whole word."""
    return word in _PART.findall(text)


def _only_difference(parts: Sequence[str], other: Sequence[str]) -> int | None:
    places = [place for place, (ours, theirs) in enumerate(zip(parts, other, strict=True)) if ours != theirs]
    return places[0] if len(places) == 1 else None


def _last_number(parts: Sequence[str], rng: random.Random) -> list[tuple[int, str]]:
    places = [place for place, part in enumerate(parts) if part.isascii() and part.isdigit()]
    return [(place, "".join(rng.choice("123456789") for _ in parts[place])) for place in places[-1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedAttempt:
    """An attempt up to the first reply of a tool, and the texts that may replace that reply."""

    problem: Problem
    attempt: Trajectory
    replies: Mapping[ReplyText, tuple[int, ...]] = field(default_factory=dict)
    """The available texts, as tokens; none before `variants_of` has made them."""
    false: Falsehood | None = None

    @property
    def last(self) -> Turn:
        return self.attempt.turns[-1]

    @property
    def failed(self) -> bool:
        return self.attempt.num_failed_calls > 0


def begun_attempts(file: Path, problems: Mapping[str, Problem]) -> Iterator[StartedAttempt]:
    """Yield the first attempt at each problem in which a tool replied. problems: by id, with the fields that rows lack.
    Raises DataError."""
    known = set()
    for row in attempt_rows(file, [*SHORT_COLUMNS, "prompt_ids", "token_ids"]):
        trajectory = trajectory_of(row)
        last = next((n for n, turn in enumerate(trajectory.turns) if turn.results and turn.reply_ids), None)
        if last is None or trajectory.fault is not None or trajectory.problem_id in known:
            continue
        known.add(trajectory.problem_id)
        attempt = replace(trajectory, turns=trajectory.turns[: last + 1])
        yield StartedAttempt(problem=problems.get(trajectory.problem_id, problem_of(row)), attempt=attempt)


def variants_of(attempts: Sequence[StartedAttempt], conversation: Conversation, seed: int) -> list[StartedAttempt]:
    """The attempts with their replies; none if a custom environment formats replies in its own way."""
    words = [[conversation.feedback(result) for result in begun.last.results] for begun in attempts]
    replies = Replies((begun.failed, text) for begun, texts in zip(attempts, words, strict=True) for text in texts)
    found = (_variant(begun, texts, replies, conversation, seed) for begun, texts in zip(attempts, words, strict=True))
    return [one for one in found if one.replies]


def _variant(
    begun: StartedAttempt, texts: Sequence[str], replies: Replies, conversation: Conversation, seed: int
) -> StartedAttempt:
    def ids(said: Sequence[str]) -> tuple[int, ...]:
        return conversation.after(begun.last.completion, conversation.template.reply(said))

    if ids(texts) != begun.last.reply_ids:
        return begun
    rng = random.Random(seed_for(seed, "told", begun.problem.id))
    false = replies.false(texts[-1], conversation.codec.decode(begun.attempt.token_ids), rng)
    others = [replies.another(begun.failed, text, rng) for text in texts]
    said: dict[ReplyText, Sequence[str | None]] = {
        ReplyText.TRUE: texts,
        ReplyText.SWAPPED: others,
        ReplyText.BLANK: [""] * len(texts),
        ReplyText.FALSE: [*texts[:-1], false.text if false else None],
    }
    whole = {kind: [text for text in some if text is not None] for kind, some in said.items()}
    as_tokens = {kind: ids(some) for kind, some in whole.items() if len(some) == len(texts)}
    return replace(begun, replies=as_tokens, false=false)


async def resumed(roller: Roller, begun: StartedAttempt, reply_ids: tuple[int, ...], sampling: Sampling) -> Trajectory:
    """The rest of an attempt after that reply; one that is longer than the true one costs nothing of its limits. Raises
    Unavailable where its calls cannot be run again."""
    attempt = begun.attempt
    environment = roller.environment(begun.problem, roller.conversation, roller.limits, sampling.seed)
    try:
        environment.opening()
        for turn in attempt.turns:
            await environment.reply(turn.completion)
    except BaseException:
        await environment.close()
        raise
    return await run_episode(
        roller.engine,
        environment,
        begun.problem,
        index=0,
        sampling=replace(sampling, stop_token_ids=roller.stop_token_ids),
        session_id=f"{sampling.seed:x}/{begun.problem.id}",
        note=roller.note,
        begun=replace(attempt, turns=(*attempt.turns[:-1], replace(begun.last, reply_ids=reply_ids))).token_ids,
    )


async def swap_test(variants: Sequence[StartedAttempt], roller: Roller, sampling: Sampling) -> list[dict[str, Any]]:
    """Figures of attempts by replacement text, separately for those after a failed call and after another one. Raises
    Unavailable. Keys: docs/analysis.md."""
    ended = {kind: await _ended(variants, kind, roller, sampling) for kind in ReplyText}
    return [
        {"after": after, "told": str(kind), **_figures(some, ended, kind, roller)}
        for after, failed in (("failed call", True), ("call that worked", False))
        if (some := [one for one in variants if one.failed is failed])
        for kind in ReplyText
    ]


async def _ended(
    variants: Sequence[StartedAttempt], kind: ReplyText, roller: Roller, sampling: Sampling
) -> dict[str, Trajectory]:
    """Attempts by problem: those with this text that were not ended by a service failure."""
    by_id = {one.problem.id: one for one in variants if kind in one.replies}

    async def attempt(problem: Problem, index: int, identity: tuple[int | str, ...]) -> Trajectory:
        one = by_id[problem.id]
        return await resumed(roller, one, one.replies[kind], replace(sampling, seed=seed_for(*identity)))

    groups = await verified_groups(
        [one.problem for one in by_id.values()],
        attempt,
        roller.verifier,
        attempts=1,
        seed=sampling.seed,
        note=roller.note,
        done=lambda group: None,
    )
    return {group.problem.id: made for group in groups for made in group.trajectories if made.outcome is not None}


def _figures(
    variants: Sequence[StartedAttempt],
    ended: Mapping[ReplyText, Mapping[str, Trajectory]],
    kind: ReplyText,
    roller: Roller,
) -> dict[str, Any]:
    """Figures over the attempts with this text; each is a share of the attempts that it applies to."""
    found: dict[str, list[bool]] = {name: [] for name in SWAP_FIGURES}
    for one in variants:
        attempt, control = ended[kind].get(one.problem.id), ended[ReplyText.TRUE].get(one.problem.id)
        if attempt is not None and control is not None:
            for name, holding in _facts(one, attempt, control, roller):
                found[name].append(holding)
    nothing = {"value": None, "interval": None, "n": 0}
    shares = {name: figure(mean_over_problems(some)) if some else nothing for name, some in found.items()}
    return {"attempts": len(found["right"]), **shares}


def _facts(one: StartedAttempt, attempt: Trajectory, control: Trajectory, roller: Roller) -> Iterator[tuple[str, bool]]:
    """control: the attempt with the true reply."""
    following = attempt.turns[0]
    yield "calls", bool(following.calls)
    if following.results:
        yield "call_works", not any(result.is_error for result in following.results)
    yield "same_next", following.completion.token_ids == control.turns[0].completion.token_ids
    yield "right", attempt.outcome is not None and attempt.outcome.verdict is Verdict.RIGHT
    if one.false:
        text = roller.codec.decode(following.completion.token_ids)
        yield "true_word", holds(text, one.false.true_word)
        yield "false_word", holds(text, one.false.false_word)


LIMITS = ("max_turns", "max_response_tokens", "max_parallel_calls")
"""Limits in an evaluation's setup, as `[rollout]` calls them."""


def swapped(name: str, runs: Path) -> Iterator[dict[str, Any]]:
    """The test on an evaluation, or on all of a run's whose weights are there, by step. Raises ConfigError, DataError,
    Unavailable."""
    source = find_source(name, runs)
    if source.run:
        folders = [source.run.evaluation(one, step) for one, step, _ in source.run.evaluations()]
        there = [evaluation_source(folder, runs) for folder in folders if (folder / SAMPLES).is_file()]
        found = [one for one in there if _complaint(one) is None]
        complaint = None if found else "it has no evaluation that kept its attempts and has its weights"
    else:
        found, complaint = [source], _complaint(source)
    if complaint:
        raise ConfigError(f"--swap cannot go on from {name}: {complaint}")
    for one in found:
        yield _tested(one)


def _complaint(source: Source) -> str | None:
    """Why its attempts cannot be continued; None where they can."""
    if source.result is None:
        return "it is no evaluation; name a run or RUN/EVALUATION"
    setup, recipe = source.result["setup"], _recipe(source)
    if source.model is None:
        return "the weights that made it are not there"
    if "benchmark" in setup["data"]:
        return "a benchmark has rules of its own"
    theirs = setup["template"]["name"], setup["environment"], setup["verifier"], setup["sandbox"]["tools"]
    ours = recipe.rollout.template, recipe.rollout.environment, recipe.evaluate.verifier, recipe.sandbox.tools
    return None if theirs == ours else "its template, environment, verifier or tools are not those of its run"


def _recipe(source: Source) -> Recipe:
    """The settings in force, with the limits of the evaluation."""
    assert source.result is not None
    recipe = resolved_from_json(source.trainer.resolved).as_evaluated() if source.trainer else Recipe()
    limits = {name: source.result["setup"][name] for name in LIMITS}
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=limits)})


def _tested(source: Source) -> dict[str, Any]:
    recipe = _recipe(source)
    assert source.model is not None and source.result is not None
    setup = source.result["setup"]
    subject = LocalModel(model=source.model, recipe=recipe, run=source.trainer, step=setup["step"])
    held = heldout_problems(task_of(recipe, recipe)) if source.trainer else []
    begun = begun_attempts(source.files[0], {problem.id: problem for problem in held})
    variants = variants_of(list(begun), subject.conversation(), setup["seed"])
    found = {"evaluation": source.name, "problems": len(variants)}
    if not variants:
        return {**found, "rows": []}
    drawn = {name: setup[name] for name in ("temperature", "top_p", "top_k", "seed")}
    longest = max(len(reply) for one in variants for reply in one.replies.values())
    subject, most = subject.fitted([one.problem for one in variants])

    async def tested(machines: Machines) -> list[dict[str, Any]]:
        positions = min(most + longest, model_facts(subject.model).positions)
        async with subject.opened(positions, machines.sandbox, start_server=machines.start_server) as roller:
            return await swap_test(variants, roller, Sampling(max_new_tokens=1, **drawn))

    with opened_machines(recipe, subject.model.resolve() / "config.json", subject.placement) as machines:
        return {**found, "rows": asyncio.run(tested(machines))}
