"""The checks of commands that are not run find what is wrong with them."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
from pydantic import ValidationError

from rocstar.cli.main import USAGE_ERROR
from rocstar.errors import ConfigError
from tests.docs import commands
from tests.docs.pages import PAGES, ROOT, blocks, without_comment

README = ROOT / "README.md"


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("rocstar trian recipes/quickstart.toml", USAGE_ERROR),
        ("rocstar train recipes/quickstart.toml --dry", USAGE_ERROR),
        ("export A=1; torchrun --nproc-per-node 8 --no-python rocstar train mine.toml --gpus 8", USAGE_ERROR),
        ("rocstar plan recipes/quickstart.toml --gpus many", USAGE_ERROR),
        ("rocstar train mine.toml rollout.max_turn=2", ValueError),
        ("rocstar train mine.toml engine.local.thread=2", ValueError),
        ("rocstar train mine.toml rollout.max_turns=many", ValidationError),
        ("rocstar train mine.toml resample.format_penalty=rok", ValidationError),
        ("rocstar train mine.toml run.seed=0..2", ValidationError),
        ("rocstar sweep mine.toml run.seed=0,many", ValidationError),
        ("rocstar sweep mine.toml run.seed=2..0", ConfigError),
        ("rocstar train recipes/quickstart.toml resample.keep=10000", ConfigError),
        ("rocstar train mine.toml stage.a.learning.clip_low=0.1 engine.v.url=URL data.train_files=a.jsonl", None),
        ("rocstar sweep mine.toml run.seed=0..2 learning.learning_rate=1e-6,3e-6", None),
        ("ls recipes/slowstart.toml", ValueError),
        ("python benchmarks/scheduling.py --jobs 2 --jobz 3", ValueError),
        ("pip install 'rocstar[view,vue]'", ValueError),
        ("pip install 'rocstar[view]' && python benchmarks/scheduling.py --jobs 2", None),
    ],
)
def test_what_is_wrong_with_a_command_is_found(command: str, error: type[Exception] | None) -> None:
    with pytest.raises(error) if error else nullcontext():
        commands.check(command, README)


def test_no_page_installs_rocstar_under_a_name_that_a_registry_would_have_to_know() -> None:
    tutorials = (ROOT / "docs" / "tutorials").glob("*.md")
    named = re.compile(r"pip install (-\S+ )*'?rocstar\b")
    assert [page.name for page in (*PAGES, *tutorials) if named.search(page.read_text())] == []


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("rocstar chat last -p 'a # b'   # one question", "rocstar chat last -p 'a # b'"),
        ("jq 'a#b' x#y  # z", "jq 'a#b' x#y"),
        ("# only a comment", ""),
    ],
)
def test_a_comment_ends_a_command_where_a_shell_ends_it(line: str, command: str) -> None:
    assert without_comment(line) == command


def test_marks_hold_for_the_commands_that_they_name() -> None:
    page = ROOT / "docs" / "learning.md"
    *_, block = [block for block in blocks(page) if block.language == "sh"]
    assert [block.need(command) for command in block.commands] == ["hours", "cluster", "gpu"]
