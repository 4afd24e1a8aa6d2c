"""Alarms of an RL stage: signs of collapse, and signs that the reward is won without solving the problem. Pure: metrics
of the stage in, alarms out. Thresholds and form are ours; most alarms are for failures that the paper reports (§4.3.1,
§5.3).

Each alarm looks at the mean over the last WINDOW steps, so that one odd step raises none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import pi, sqrt
from statistics import NormalDist, fmean

from rocstar.run.stages import Row, window_mean, window_means

WINDOW = 5  # steps
LONG_WINDOW = 20  # steps; with few attempts a step, only many steps distinguish a fall from chance
RIGHT = "verdict/right"  # custom rewards may be of any scale
FEW_RIGHT, SOME_RIGHT = 0.02, 0.05  # shares of attempts
LOST_STEPS, LOST_RIGHT = 3, 30  # steps without a right attempt, where so many were expected
MANY_CALLS = 20  # if all fail in one step, that is no chance
LEAST_FALL = 0.04  # of the share of right attempts, even if steps hardly differ
CHANCE = 0.001  # probability of a false alarm after a given step
QUIET_STEPS = 20  # an alarm that was absent for so long is reported again


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    name: str
    """One word or two, for events.jsonl."""
    evidence: str
    """The observation, with figures."""
    action: str
    """What to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """An alarm for a metric whose mean reaches a level."""

    metric: str
    name: str
    says: str
    """Evidence; `{}` is the mean."""
    action: str
    least: float
    tools_only: bool = False
    """Ignored if attempts have no tools."""

    def alarm(self, rows: Sequence[Row], tools: bool, window: int = WINDOW) -> Alarm | None:
        mean = window_mean(rows, self.metric, window)
        if mean is None or (self.tools_only and not tools):
            return None
        return (
            Alarm(name=self.name, evidence=self.says.format(mean), action=self.action) if mean >= self.least else None
        )


FAILED_CALLS = Level(
    metric="tool/error_rate",
    name="failed calls",
    least=0.8,
    tools_only=True,
    says="{:.0%} of the tool calls fail",
    action="look at what they fail with (rocstar analyze RUN): a module that the sandbox lacks, "
    "limits of [sandbox] that are too tight, or a form of calls that a longer cold start must show",
)
LEVELS = (
    Level(
        metric="agent/failed",
        name="agent failures",
        least=0.1,
        says="{:.0%} of the agents ended with an error or out of time; their attempts count as rollout.truncated says",
        action="read what they say in events.jsonl (agent_failures), and mend the agent or raise rollout.agent_seconds",
    ),
    Level(
        metric="verdict/undecided",
        name="undecided attempts",
        least=0.01,
        says="{:.1%} of the attempts have no verdict, so they leave their groups and nothing is learnt from them",
        action="read some (rollouts/*.parquet, verdict undecided): mend references that cannot be read, give the "
        "verifier's workers more time, and see that no kind of answer brings it about",
    ),
    Level(
        metric="len/truncated",
        name="truncation",
        least=0.3,
        says="{:.0%} of the attempts were cut by the token limit",
        action="raise rollout.max_response_tokens; until then they count as rollout.truncated says, or an agent's own "
        "reward",
    ),
    Level(
        metric="tool/none_share",
        name="no tool",
        least=0.95,
        tools_only=True,
        says="{:.0%} of the attempts never called a tool",
        action="a longer cold start (more steps of an sft stage) shows the model how; calls of an agent are seen where "
        "its requests offer its tools",
    ),
    FAILED_CALLS,
    Level(
        metric="group/solved_share",
        name="too easy",
        least=0.9,
        says="every attempt was right in {:.0%} of the groups, which teach nothing",
        action="end the stage (rocstar runs end-stage RUN) and let data.drop_solved_attempts leave such problems out",
    ),
    Level(
        metric="policy/logprob_gap",
        name="logprob gap",
        least=0.02,
        says="engine and learner differ by {:.3f} nats on a token's logprob in the mean",
        action="look at [[engine]] dtype and version; learning.importance_cap limits the harm",
    ),
    Level(
        metric="staleness/logprob_gap",
        name="stale logprob gap",
        least=0.2,
        says="tokens of older weights differ by {:.2f} nats from the learner's logprob in the mean, more than a few "
        "updates change",
        action="lower rollout.max_staleness_steps or learning.learning_rate, or look at [[engine]] dtype and version",
    ),
    Level(
        metric="learn/skipped",
        name="skipped updates",
        least=0.2,
        says="{:.0%} of the updates were skipped because a gradient was not finite",
        action="branch from an earlier step with a lower learning.learning_rate or learning.max_grad_norm",
    ),
    Level(
        metric="suspect/constant_print",
        name="constant printing",
        least=0.5,
        tools_only=True,
        says="in {:.0%} of the right attempts with tool calls, all that programs did was to print a constant",
        action="read some (rollouts/*.parquet): the tool is called for its own sake, and RoC rewards that it is called",
    ),
    Level(
        metric="suspect/unfounded_answer",
        name="unfounded answers",
        least=0.5,
        says="in {:.0%} of the right attempts the answer stands nowhere but in its box",
        action="read some: the answer may be guessed, or be given away by the prompt",
    ),
    Level(
        metric="suspect/several_boxes",
        name="several answers",
        least=0.3,
        says="{:.0%} of the right attempts give several answers in boxes",
        action='read some, and take evaluate.verifier = "boxed_strict"',
    ),
)

FOLLOW = {
    "all cut": ("truncation", "no tool", "hardly any right", "reward collapse"),
    "reward collapse": ("no tool", "hardly any right"),
}
"""Alarms that are consequences of another one, and are not reported beside it."""


def alarms(rows: Sequence[Row], *, tools: bool = True, steps: int = WINDOW) -> list[Alarm]:
    """The alarms that hold after these steps. rows: metrics of the stage, one a step. tools: whether attempts have any.
    steps: of the stage; one shorter than WINDOW is judged as a whole, for levels only."""
    looked_at = [
        _all_cut(rows, tools),
        _all_calls_fail(rows, tools),
        *(level.alarm(rows, tools, min(WINDOW, steps)) for level in LEVELS),
        _hardly_any_right(rows),
        _reward_collapse(rows),
    ]
    found = {alarm.name: alarm for alarm in looked_at if alarm}
    follow = {follows for name in found for follows in FOLLOW.get(name, ())}
    return [alarm for name, alarm in found.items() if name not in follow]


def new_alarms(rows: Sequence[Row], *, tools: bool = True, steps: int = WINDOW) -> list[Alarm]:
    """The alarms that hold now and held after none of the QUIET_STEPS before, so one that comes and goes is reported
    once."""
    found = {alarm.name: alarm for alarm in alarms(rows, tools=tools, steps=steps)}
    for back in range(1, min(QUIET_STEPS, len(rows) - 1) + 1):
        if not found:
            break
        for alarm in alarms(rows[:-back], tools=tools, steps=steps):
            found.pop(alarm.name, None)
    return list(found.values())


def _all_cut(rows: Sequence[Row], tools: bool) -> Alarm | None:
    """Alarms at once: a single step in which no attempt ended is not chance. Some may be right if an agent returned an
    answer, or `rollout.truncated` is graded."""
    if not rows or rows[-1].get("len/truncated") != 1.0 or rows[-1].get(RIGHT):
        return None
    calls = tools and rows[-1].get("tool/none_share") != 1.0
    why = "some call the tool until the limit" if calls else "none ends its first turn"
    if rows[-1].get("len/tokens") == 0.0:
        why = "the text and the tools that the agent adds to the question leave no room for an answer"
    return Alarm(
        name="all cut",
        evidence=f"every attempt is cut by the token limit, because {why}, and none is right",
        action="if the model does not know the prompt that --dry-run shows, take its own template or a longer cold "
        "start (more steps of an sft stage); if it needs more room, raise rollout.max_response_tokens; if attempts of "
        "earlier steps ended, branch from one (rocstar train --branch RUN@STEP) with a lower learning.learning_rate",
    )


def _all_calls_fail(rows: Sequence[Row], tools: bool) -> Alarm | None:
    """Alarms at once, as `_all_cut` does: the sandbox, or the form of calls, changed or was never right."""
    last = rows[-1] if rows else {}
    calls = (last.get("tool/calls") or 0.0) * (last.get("roc/attempts") or 0.0)
    return FAILED_CALLS.alarm(rows, tools, 1) if calls >= MANY_CALLS and last.get("tool/error_rate") == 1.0 else None


def _hardly_any_right(rows: Sequence[Row]) -> Alarm | None:
    """Graded rewards may teach before any attempt is right; a reward that fell is a collapse."""
    right, reward = (list(window_means(rows, name, WINDOW)) for name in (RIGHT, "reward/mean"))
    if not right or max(right) >= SOME_RIGHT or max([right[-1], *reward[-1:]]) >= FEW_RIGHT:
        return None
    cut, failed = (window_mean(rows, name, WINDOW) or 0.0 for name in ("len/truncated", "tool/error_rate"))
    return Alarm(
        name="hardly any right",
        evidence=f"{right[-1]:.1%} of the attempts of {WINDOW} steps are right, {cut:.0%} are cut by the token limit, "
        f"and {failed:.0%} of the tool calls fail, so hardly a group teaches anything",
        action="where many are cut, raise rollout.max_response_tokens; read some (rocstar runs rollouts RUN --wrong "
        "--full): where the answers are good, the prompt does not ask for the form that evaluate.verifier reads, "
        "the references have another, or your own reward function errs (rocstar reward test); where they are not, take "
        "easier problems or a longer cold start (more steps of an sft stage)",
    )


def _reward_collapse(rows: Sequence[Row]) -> Alarm | None:
    """A total loss is reported before WINDOW steps: one update at a hundred times the right learning rate causes it."""
    shares, last = list(window_means(rows, RIGHT, 1)), rows[-LOST_STEPS:]
    # Steps without a right attempt count before that: where a problem is solved only now and then, they are usual.
    before = len(shares) - next((back for back, share in enumerate(reversed(shares)) if share), len(shares))
    usual = fmean(shares[max(0, before - LONG_WINDOW) : before] or [0.0])
    expected = usual * sum(row.get("roc/attempts") or 0.0 for row in last)
    if expected >= LOST_RIGHT and len(last) == LOST_STEPS and all(row.get(RIGHT) == 0.0 for row in last):
        return Alarm(
            name="reward collapse",
            evidence=f"no attempt of the last {LOST_STEPS} steps is right, where {usual:.1%} were before",
            action="see whether calls or verdicts fail; if they do not, begin again, or branch from an earlier step "
            "(rocstar train --branch RUN@STEP), with a lower learning.learning_rate",
        )
    for window in (WINDOW, LONG_WINDOW):
        means = list(window_means(rows, RIGHT, window))
        best = max(means, default=0.0)
        fall = best - means[-1] if best >= SOME_RIGHT else 0.0
        if fall < max(0.3 * best, LEAST_FALL) or fall < _fall_by_chance(shares, window):
            continue
        return Alarm(
            name="reward collapse",
            evidence=f"the share of right attempts is {means[-1]:.3f} and was {best:.3f}",
            action="branch from the best step (rocstar train --branch RUN@STEP) and end the stage there; the paper "
            "found no setting that prevents it",
        )
    return None


def _fall_by_chance(shares: Sequence[float], window: int) -> float:
    """How far chance alone may bring the share of right attempts in one window of steps below that of an earlier one,
    over all pairs of windows. The noise of a step is estimated from how much each step differs from the next."""
    noise = fmean(abs(later - earlier) for earlier, later in pairwise(shares)) * sqrt(pi) / 2  # of normal noise
    noise *= 1 + 1 / (len(shares) - 1)  # few steps estimate it badly
    windows = len(shares) - window + 1
    pairs = max(1.0, windows * (windows - 1) / 2)
    return NormalDist().inv_cdf(1 - CHANCE / pairs) * noise * sqrt(2 / window)
