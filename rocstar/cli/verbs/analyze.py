"""`rocstar analyze`: what a model does, from the attempts of a run or an evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocstar.cli.verbs.common import AsJson, Runs, print_json

if TYPE_CHECKING:
    from rocstar.analysis.sources import Entropies, Source
    from rocstar.analysis.tokens import Piece


def analyze(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|EVALUATION|FILE...",
            help="A run, a name of `evals list`, an evaluation's folder, or a rollout file; several are shown one "
            "after the other, and in one picture.",
        ),
    ],
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Compute the entropy of every token by a pass of the model's weights.")
    ] = False,
    swap: Annotated[
        bool,
        typer.Option("--swap", help="Only this: what changes when a tool's first reply is swapped, blank or false."),
    ] = False,
    every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Read the attempts of a run's last step and each Nth before it.")
    ] = 1,
    pictures: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also draw them; needs matplotlib.")] = None,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """Errors and what comes after them, tool use, lengths, entropy and kinds of tokens, by step.

    Example: rocstar analyze last --pictures pictures"""
    from rocstar.analysis.report import analyse
    from rocstar.analysis.screen import page
    from rocstar.analysis.sources import find_source
    from rocstar.support.exits import need, visible
    from rocstar.support.screen import Screen

    if pictures is not None:
        need("plot")
    if swap:
        _swap(names, runs, as_json=as_json, others=entropy or pictures is not None or every > 1)
        return
    reports = []
    found = [find_source(name, runs) for name in names]
    sources = [replace(source, files=source.files[::-every][::-1]) for source in found]
    told = ""

    def progress(name: str, done: int, total: int) -> None:
        nonlocal told
        told = f"{name}: {done} of {total} files read"

    with Screen() as screen, screen.never_silent(lambda: told):
        for source in sources:
            progress(source.name, 0, len(source.files))
            piece, scorer = _tokens_of(source, entropy)
            report = analyse(source, piece=piece, entropies=scorer, progress=partial(progress, source.name))
            reports.append(report)
    if pictures is not None:
        from rocstar.analysis.pictures import draw

        draw(reports, pictures)
    if as_json:
        print_json({"reports": reports})
    else:
        print(visible("\n\n\n".join(map(page, reports))))


def _swap(names: list[str], runs: Path, *, as_json: bool, others: bool) -> None:
    """Raises ConfigError where there are no attempts with the weights that made them."""
    from rocstar.errors import ConfigError
    from rocstar.support.exits import need, visible

    if others:
        raise ConfigError("--swap is an analysis of its own; leave --entropy, --every and --pictures out")
    need("train")
    from rocstar.analysis.swap import swapped

    found = [one for name in names for one in swapped(name, runs)]
    if as_json:
        print_json({"swap": found})
    else:
        from rocstar.analysis.screen import swap_page

        print(visible("\n\n".join(map(swap_page, found))))


def _tokens_of(source: Source, entropy: bool) -> tuple[Piece | None, Entropies | None]:
    """How tokens are read, and the pass that scores them; nothing where there are no tokens to read. Raises ConfigError
    where a pass is asked for and there are no weights."""
    from rocstar.analysis.sources import piece_of
    from rocstar.errors import ConfigError

    if entropy and source.model is None:
        raise ConfigError(f"--entropy needs the weights that wrote {source.name}, and there is no model folder of them")
    if source.model is None:
        return None, None
    if not entropy:
        return piece_of(source.model), None
    if source.result is None:
        raise ConfigError(
            f"--entropy needs the weights that wrote the attempts, and those of {source.name} were written by many; "
            "its kept attempts have the learner's entropies already, so leave --entropy out, or name an evaluation"
        )
    return piece_of(source.model), entropies_of(source.model, source.temperatures()(0) or 1.0)


def entropies_of(folder: Path, temperature: float) -> Entropies:
    """Entropies in nats of the distribution at `temperature` under a model folder's weights, [T] for each row of ids, 0
    where a token is not counted. Raises ConfigError for a folder that is no model."""
    from rocstar.config.sections import LearningSection
    from rocstar.dialogue.codec import Codec
    from rocstar.dialogue.template import COMPACT
    from rocstar.learning.memory import CPU_TOKENS
    from rocstar.learning.models import load_model
    from rocstar.learning.policy import Policy
    from rocstar.learning.update import Updater
    from rocstar.parts.modelfolder import find_model

    policy = Policy(load_model(find_model(str(folder))), Codec.load(folder), COMPACT)
    section = LearningSection(tokens_per_microbatch=CPU_TOKENS)
    learner = Updater(policy, section, [], lambda done: 1.0, temperature=temperature)
    return lambda ids, counted: learner.numbers(ids, counted)[1]
