"""Every block of every tutorial runs as printed and prints what the page shows; see session.py for how."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, links
from tests.tiny_run import once
from tests.tutorials.session import PAGES, carry_out, fits, package_of, page_before

IN_ORDER = sorted(PAGES, key=lambda page: page_before(page) is not None)  # who waits for another page comes later


def carried_out(page: Path, base: Path) -> Path:
    """The folder that a page leaves, which is carried out once, after the one that it goes on from."""

    def make(folder: Path) -> None:
        before = page_before(page)
        shutil.copytree(carried_out(before, base), folder) if before else folder.mkdir()
        for one, code, said in carry_out(page, folder):
            assert code == one.exits, f"{one.block.place} ended with {code}:\n{said}"
            if one.output is not None:
                like = fits(one.output, said, numbers_vary=one.numbers_vary)
                assert like, f"{one.block.place} printed:\n{said}"

    return once(base, page.stem, make)[0]


@pytest.mark.parametrize("page", IN_ORDER, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_printed(page: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if (package := package_of(page)) and find_spec(package) is None:
        pytest.skip(f"{page.name} needs the package {package}, which is not installed")
    carried_out(page, tmp_path_factory.getbasetemp())


def test_the_first_run_learns(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = carried_out(PAGES[0], tmp_path_factory.getbasetemp())
    summary = json.loads((folder / "runs" / "first" / "summary.json").read_text())
    assert summary["accuracy_before"]["value"] + 0.3 < summary["accuracy_after"]["interval"][0]


def test_the_index_names_every_tutorial_in_order() -> None:
    index = ROOT / "docs" / "tutorials" / "README.md"
    named = [target for target in links(index) if target[:2].isdigit()]
    assert named == [page.name for page in PAGES]


def test_an_output_fits_only_what_was_printed() -> None:
    assert fits("step 1  loss ...\n...\ndone", "step 1  loss 5.5  \nstep 2\n\ndone\n")
    assert not fits("step 1  loss ...\ndone", "step 2  loss 5.5\ndone")
    assert not fits("right 12", "right 123")


def test_numbers_may_vary_where_a_page_says_so_and_words_may_not() -> None:
    page, told = "reward .172  cut 2%\n  ────  ", "reward 1.000  cut 12%\n ──────"
    assert fits(page, told, numbers_vary=True) and not fits(page, told)
    assert not fits("kept 8 of 12", "kept 8 off 12", numbers_vary=True)
    assert fits("in set-...", "in set-5d8cb", numbers_vary=True)
