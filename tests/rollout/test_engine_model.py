"""The simulator on examples small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocstar.errors import ConfigError
from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.policies import RoundRobin
from rocstar.forecast.simulate import StepReport, lower_bound, simulate
from rocstar.forecast.workload import PlannedAttempt, TurnLengths


def engine(
    capacity: int = 1000, *, step: float = 0.0, cached: float = 0.0, sequence: float = 0.0, prefill: float = 0.0
) -> EngineModel:
    return EngineModel(
        capacity_tokens=capacity,
        step_seconds=step,
        seconds_per_cached_token=cached,
        seconds_per_sequence=sequence,
        seconds_per_prefill_token=prefill,
        watermark=0.0,
    )


def attempt(*turns: tuple[int, int, float], group: str = "a", prompt: int = 10) -> PlannedAttempt:
    return PlannedAttempt(
        group=group, prompt_tokens=prompt, turns=tuple(TurnLengths(*turn) for turn in turns), limit=100
    )


def roll(attempts: list[PlannedAttempt], *engines: EngineModel, deaths: dict[str, float] | None = None) -> StepReport:
    named = {f"engine{number}": model for number, model in enumerate(engines)}
    return simulate(attempts, named, RoundRobin(), deaths=deaths)


def test_the_step_that_feeds_a_prompt_samples_the_first_token_and_each_other_takes_one_more() -> None:
    report = roll([attempt((5, 0, 0.0))], engine(step=1.0, prefill=0.1))
    assert report.makespan == pytest.approx((1 + 10 * 0.1) + 4 * 1)


def test_a_batch_advances_together_until_its_shortest_ends() -> None:
    report = roll([attempt((3, 0, 0.0)), attempt((5, 0, 0.0))], engine(sequence=1.0))
    assert report.makespan == pytest.approx(3 * 2 + 2 * 1)


def test_a_step_reads_all_that_is_cached_for_those_that_decode() -> None:
    report = roll([attempt((3, 0, 0.0), prompt=2)], engine(cached=1.0))
    assert report.makespan == pytest.approx(2 + 3 + 4)


def test_siblings_on_one_engine_feed_their_prompt_once() -> None:
    report = roll([attempt((1, 0, 0.0)), attempt((1, 0, 0.0))], engine(prefill=1.0))
    assert report.makespan == pytest.approx(10)


def test_long_prompts_are_fed_in_chunks_beside_decoding() -> None:
    small = replace(engine(step=1.0), chunk_tokens=5)
    report = roll([attempt((5, 0, 0.0), prompt=5), attempt((5, 0, 0.0), group="b", prompt=10)], small)
    assert report.makespan == pytest.approx(1 + 2 + 4)


def test_after_a_tool_only_its_reply_is_fed() -> None:
    report = roll([attempt((2, 4, 3.0), (2, 0, 0.0))], engine(prefill=1.0))
    assert report.makespan == pytest.approx(10 + 3 + 4)
    assert report.recomputed_tokens == 0


def test_when_the_cache_is_full_the_latest_request_is_fed_again_later() -> None:
    attempts = [attempt((10, 0, 0.0), group=group, prompt=1) for group in "ab"]
    report = roll(attempts, engine(13, step=1.0))
    # Fed at 1; four steps hold 12 of 13 tokens; the second goes with 6, the first ends after 5 more; 6 fed; 4 steps.
    assert report.makespan == pytest.approx(1 + 4 + 5 + 1 + 4)
    assert (report.evictions, report.recomputed_tokens) == (1, 6)


def test_half_of_the_requests_go_where_the_engine_does_that() -> None:
    attempts = [attempt((10, 0, 0.0), group=group, prompt=1) for group in "abcd"]
    assert roll(attempts, replace(engine(24, step=1.0), evicted_share=0.5)).evictions == 2


def torch_like(pages: int, **costs: float) -> EngineModel:
    """Pages of four tokens, five seconds of patience."""
    rules = {"page_tokens": 4, "oldest_first": True, "patience_seconds": 5.0}
    return replace(engine(4 * pages, step=1.0), **rules, **costs)


def test_a_cache_is_given_out_in_pages_and_the_newest_gives_way() -> None:
    attempts = [attempt((10, 0, 0.0), group=group, prompt=1) for group in "ab"]
    report = roll(attempts, torch_like(4))
    # One page each until both hold 4 tokens, at 3; two each until 8, at 7; then the newest goes, with 7 sampled. The
    # first ends at 10; the second is fed 8 by 11, with its eighth token, and samples two more.
    assert report.makespan == pytest.approx(13)
    assert (report.evictions, report.recomputed_tokens) == (1, 8)


def test_who_waits_for_a_tool_keeps_its_cache_only_where_the_newest_gives_way() -> None:
    waits, works = attempt((4, 3, 10.0), (2, 0, 0.0), prompt=1), attempt((14, 0, 0.0), group="b", prompt=1)
    newest = roll([waits, works], torch_like(5))
    # From 4 on the first waits with two pages; at 11 the second has three, needs one more and goes. The first is back
    # at 14 and has ended at 16; the second is fed its 12 by 17, and samples two more.
    assert newest.ends == pytest.approx((16, 19))
    assert (newest.evictions, newest.recomputed_tokens) == (1, 12)
    waiting = roll([waits, works], engine(18, step=1.0))
    assert waiting.ends == pytest.approx((16, 14))
    assert (waiting.evictions, waiting.recomputed_tokens) == (1, 5)


def test_with_nothing_to_compute_an_engine_waits_for_a_tool_as_long_as_its_patience() -> None:
    """The newer fits only without the older's cache, whose tool takes longer than the patience."""
    waits, newcomer = attempt((6, 1, 50.0), (1, 0, 0.0), prompt=1), attempt((3, 0, 0.0), group="b", prompt=12)
    report = roll([waits, newcomer], torch_like(5))
    assert report.ends == pytest.approx((6 + 50 + 1, 6 + 5 + 3))
    assert (report.evictions, report.recomputed_tokens) == (1, 7)


def test_each_request_costs_its_part_of_the_step_that_it_begins_in() -> None:
    model = replace(engine(), seconds_per_request=1.0)
    assert roll([attempt((2, 0, 0.0), (2, 0, 0.0)), attempt((2, 0, 0.0))], model).makespan == pytest.approx(3)


def test_an_engine_that_dies_leaves_its_work_to_the_other() -> None:
    attempts = [attempt((10, 0, 0.0), group=group) for group in "ab"]
    report = roll(attempts, engine(step=1.0), engine(step=1.0), deaths={"engine1": 5.5})
    # The second attempt starts over on the first engine at its next boundary, 6: fed by 7, then nine steps.
    assert report.makespan == pytest.approx(16)
    assert (len(report.ends), report.recomputed_after_loss) == (2, 10)


def test_the_last_engine_that_dies_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no engine takes them"):
        roll([attempt((10, 0, 0.0))], engine(step=1.0), deaths={"engine0": 3.0})


def test_an_attempt_larger_than_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 110 tokens of KV cache and an engine has 100"):
        roll([attempt((100, 0, 0.0))], engine(100))


def test_idle_time_is_what_is_left_of_the_makespan() -> None:
    attempts = [attempt((8, 0, 0.0)), attempt((4, 0, 0.0))]
    report = roll(attempts, engine(step=1.0), engine(step=1.0))
    assert report.idle_share == pytest.approx({"engine0": 0.0, "engine1": 0.5})


def test_the_bound_of_one_attempt_alone_is_its_decoding_and_its_waits() -> None:
    alone = attempt((2, 4, 3.0), (2, 0, 0.0))
    assert lower_bound([alone], [engine(step=1.0)]) == pytest.approx(2 + 3 + 2)
