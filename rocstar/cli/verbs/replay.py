"""`rocstar replay`: RL steps once more from what a run kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import AsJson, Runs, print_json, stop
from rocstar.errors import ConfigError
from rocstar.support.exits import FAILED, need

if TYPE_CHECKING:
    from rocstar.run.replay import Span


def replay(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name, path or `last`.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="From the checkpoint before to this step.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write what it needs, for another machine, and stop.")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """Learn from recorded attempts again, without engine or sandbox, and compare with the record to the bit.

    Example: rocstar replay last --step 115"""
    need("train")
    if bundle and step is None:
        raise ConfigError("--bundle is of one step; say which with --step N")
    if bundle and as_json:
        raise ConfigError("--bundle only writes a folder; give --json to `rocstar replay` of that folder")
    from rocstar.record.folder import RunFolder
    from rocstar.run.replay import span_of, spans_of, write_bundle
    from rocstar.support.screen import plural

    run = RunFolder.find(name, runs)
    spans = spans_of(run) if step is None else [span_of(run, step)]
    if bundle is not None:
        write_bundle(spans[0], bundle)
        print(f"{bundle}: rocstar replay {quote(str(bundle))} --step {step}")
        return
    result = _replayed(spans, as_json=as_json)
    if as_json:
        print_json(result)
    elif step is None and (left := sum(span.begun - span.stage_begun for span in spans)):
        print(f"{plural(left, 'step')} came before the first checkpoint that their stage keeps, and were not replayed")
    if other := [one["step"] for one in result["steps"] if one["differs"]]:
        of = f"{len(other)} of {len(result['steps'])} steps"
        stop(FAILED, f"{of} came out otherwise, the first of them step {other[0]}")


def _replayed(spans: Sequence[Span], *, as_json: bool) -> dict[str, Any]:
    from rocstar.run.replay import Replay
    from rocstar.support.screen import Screen

    steps: list[dict[str, Any]] = []
    with Screen() as screen, screen.never_silent(screen.working):
        for span in spans:
            with closing(Replay(span)) as replay:
                for number in span.steps:
                    steps.append(step := replay.step(number))
                    if not as_json and step["differs"]:
                        differs = "; ".join(f"{what} ({how})" for what, how in step["differs"].items())
                        print(f"step {number} differs: {differs}")
                    elif not as_json:
                        weights = ", weights as in its checkpoint" if step["weights"] else ""
                        print(f"step {number}: to the bit as recorded, {step['metrics']} metrics among it{weights}")
    if not as_json and len(steps) > 1:
        print(f"{sum(not one['differs'] for one in steps)} of {len(steps)} steps to the bit as recorded")
    return {"run": spans[0].run.name, "steps": steps}
