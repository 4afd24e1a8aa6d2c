"""`rocstar replay`: RL steps once more from what a run kept, and what other methods would have learnt from them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import AsJson, Runs, print_json, stop
from rocstar.errors import ConfigError
from rocstar.support.exits import FAILED, need

if TYPE_CHECKING:
    from rocstar.run.replay import Replay, Span

SHOWN = 48  # characters before a token
COLUMNS = (
    "gradient: its norm, as applied; clipped: share of tokens at a bound; attempts: learnt from; tokens: of theirs, "
    "those with a gradient; of forks: share of the gradient that the fifth of the tokens with the highest entropy "
    "carries"
)


def replay(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name, path or `last`.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE[,VALUE]...]...",
            help="learning.* and resample.*: also learn from the step so. Several values are tried one by one.",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="This one; default: all RL steps.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write what it needs, for another machine, and stop.")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """Learn from recorded attempts again, without engine or sandbox, and compare with the record to the bit.

    Example: rocstar replay last --step 115 learning.loss=gspo,cispo"""
    need("train")
    if step is None and (settings or bundle):
        what = "--bundle" if bundle else f"{settings[0] if settings else ''!r}"
        raise ConfigError(f"{what} is of one step; say which with --step N")
    if bundle and (settings or as_json):
        raise ConfigError("--bundle only writes a folder; give settings and --json to `rocstar replay` of that folder")
    from rocstar.record.folder import RunFolder
    from rocstar.record.replays import keep
    from rocstar.run.replay import span_of, spans_of, write_bundle

    run = RunFolder.find(name, runs)
    spans = spans_of(run) if step is None else [span_of(run, step)]
    if bundle is not None:
        write_bundle(spans[0], bundle)
        print(f"{bundle}: rocstar replay {quote(str(bundle))} --step {step}")
        return
    result = _replayed(spans, _variants(settings or []), as_json=as_json)
    if step is None:
        keep(run, None, {"steps": result["steps"]})
    if as_json:
        print_json(result)
    if other := [one["step"] for one in result["steps"] if one["differs"]]:
        of = f"{len(other)} of {len(result['steps'])} steps"
        stop(FAILED, f"{of} came out otherwise, the first of them step {other[0]}")


def _variants(settings: Sequence[str]) -> list[tuple[str, ...]]:
    from rocstar.analysis.sweep import values_of

    return list(itertools.product(*map(values_of, settings))) if settings else []


def _replayed(spans: Sequence[Span], variants: Sequence[Sequence[str]], *, as_json: bool) -> dict[str, Any]:
    from rocstar.run.replay import Replay
    from rocstar.support.screen import Screen

    found: dict[str, Any] = {"run": spans[0].run.name, "steps": [], "tried": [], "tokens": []}
    with Screen() as screen, screen.never_silent(screen.working):
        for span in spans:
            with closing(Replay(span, variants)) as replay:
                for number in span.steps:
                    if variants and number == span.last:
                        found |= _tried(replay, number)
                    found["steps"].append(replay.step(number))
                    step = found["steps"][-1]
                    if not as_json and step["differs"]:
                        differs = "; ".join(f"{what} ({how})" for what, how in step["differs"].items())
                        print(f"step {number} differs: {differs}")
                    elif not as_json:
                        weights = ", weights as in its checkpoint" if step["weights"] else ""
                        print(f"step {number}: to the bit as recorded, {step['metrics']} metrics among it{weights}")
    if not as_json:
        same, heaviest = sum(not one["differs"] for one in found["steps"]), _heaviest(found["tokens"])
        lines = [f"{same} of {len(found['steps'])} steps to the bit as recorded"] if len(found["steps"]) > 1 else []
        print("\n".join([*lines, *_table(found["tried"]), *heaviest]))
    return found


def _tried(replay: Replay, step: int) -> dict[str, Any]:
    """One set of settings at a time: each holds a gradient of the model's size."""
    from rocstar.record.replays import keep

    made = replay.tried(step)
    own = next(made)  # the run's own settings
    results = [{**one.summary(own.gradient), "heaviest": one.attempts()} for one in itertools.chain([own], made)]
    keep(replay.run, step, {"tried": results})
    plain = [{key: value for key, value in one.items() if key != "heaviest"} for one in results]  # a number a token
    return {"tried": plain, "tokens": own.heaviest(replay.policy.codec.decode)}


def _table(tried: Sequence[Mapping[str, Any]]) -> list[str]:
    if not tried:
        return []
    width = max(len(one["settings"]) for one in tried)
    head = f"{'':{width}}     loss  gradient  cosine  clipped  attempts  tokens  of forks"
    return ["", head, *(f"{one['settings']:{width}} {_figures(one)}" for one in tried), COLUMNS]


def _figures(one: Mapping[str, Any]) -> str:
    numbers = [
        (one["loss"], "8.4f"),
        (one["gradient_norm"], "9.4f"),
        (one["cosine"], "7.4f"),
        (one["clip_share"], "8.2%"),
        (one["attempts"], "9"),
        (one["tokens"], "7"),
        (one["fork_share"], "9.1%"),
    ]
    return " ".join("-".rjust(int(form[0])) if value is None else format(value, form) for value, form in numbers)


def _heaviest(tokens: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        *(["", "tokens that carry most of the gradient, as the run did:"] if tokens else []),
        *(
            f"{one['share']:7.2%}  {one['problem_id'][:8]} #{one['index']:<3} advantage {one['advantage']:+.2f}, "
            f"probability {one['probability']:.3f}: {one['before'][-SHOWN:]!r} {one['token']!r}"
            for one in tokens
        ),
    ]
