"""The page in a real Chromium: hostile transcripts are shown and nothing of them runs, no layout breaks, keys work."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from rocstar.runs.rollouts import write_rollouts
from rocstar.view.app import application
from rocstar.view.sources import Library
from tests.view.recorded import add_step, attempt, create, decode

TRANSCRIPTS = int(os.environ.get("ROCSTAR_HOSTILE_TRANSCRIPTS", "40"))  # 200 take 20 CPU seconds more
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCRIPTS = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload=window.hacked=1><style>*{display:none}</style>",
    "</pre></div></main><h1 style='position:fixed;inset:0'>gone</h1>",
    "<iframe src='javascript:parent.hacked=1'></iframe><a href='javascript:window.hacked=1'>x</a>",
    "<base href='http://evil.example/'><meta http-equiv=refresh content='0;url=http://evil.example/'>",
    "{{constructor.constructor('window.hacked=1')()}} ${window.hacked=1} ` \\u003cscript\\u003e",
    "\u202e\u2066reversed\u2069\u202c \u200f\u200e שלום مرحبا \ufeff\u200b",
    "".join(map(chr, range(32))) + "\x7f\x85\x9f\x1b[31mred\x1b[0m\x00end",
    "a\u0301" * 300 + "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "\ud800 lone \udfff surrogates 🙂👩‍👩‍👧‍👦 \U0010ffff",
    "\u2028line\u2029paragraph\r\nreturn\rback",
    "x" * 1_000_000,
    "<" * 5000 + "\n" * 2000,
    '"}}\n</tool_call>\n<tool_call>{"name": "python"}',
)


def transcripts(count: int) -> list[str]:
    """Each kind on its own first, then mixed by chance."""
    draw = random.Random(7)
    long = SCRIPTS.index("x" * 1_000_000)
    short = [text for place, text in enumerate(SCRIPTS) if place != long]
    mixed = ["".join(draw.sample(short, 3)) + chr(draw.randrange(0x3000)) for _ in range(count - len(SCRIPTS))]
    return [*SCRIPTS, *mixed]


@contextmanager
def served(base: Path, cache: Path) -> Iterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(application(Library.open(None, base), cache=cache), port=0, log_level="error")
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(5)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Told:
    """What a page did that it should not have."""

    def __init__(self, page: Any, address: str) -> None:
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: self.wrong.append("dialog"))
        page.on(
            "request", lambda asked: None if asked.url.startswith((address, "data:")) else self.wrong.append(asked.url)
        )


def test_hostile_transcripts_are_shown_as_text_and_nothing_of_them_runs(chromium: Any, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    texts = transcripts(TRANSCRIPTS)
    made = [
        attempt(text, stdout=text, code=text[:9000], question=f"Q{n} {text[:3000]}") for n, text in enumerate(texts)
    ]
    write_rollouts(run, 1, made, lambda ids: decode(ids))
    with served(run.path.parent, tmp_path / "cache") as address:
        page = chromium.new_page(viewport={"width": 400, "height": 800})
        told = Told(page, address)
        for number in range(len(texts)):
            page.goto(f"{address}/#/run/made/attempt?at=rollouts:1:{number}")
            page.wait_for_selector("main h1:has-text('attempt')")
            page.wait_for_function(
                "n => document.querySelector('.turn.user .text')?.textContent.startsWith('Q' + n)", arg=number
            )
            state = page.evaluate(
                "[document.documentElement.scrollWidth, window.hacked, "
                "document.querySelectorAll('main script, main iframe, main img, main base').length]"
            )
            assert state == [400, None, 0], (number, texts[number][:80])
        for view in ("attempts", "groups"):
            page.goto(f"{address}/#/run/made/{view}?q=hacked")
            page.wait_for_selector(".row a.open")
            assert page.evaluate("[document.documentElement.scrollWidth, window.hacked]") == [400, None]
        page.close()
    assert told.wrong == []


def test_keys_lead_from_the_list_to_an_attempt_its_group_and_back(chromium: Any, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    add_step(run, 1)
    with served(run.path.parent, tmp_path / "cache") as address:
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        told = Told(page, address)
        page.goto(f"{address}/#/run/made/attempts?sort=-tokens")
        page.wait_for_selector(".row a.open")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.policy")
        page.wait_for_selector(".strip a")
        page.keyboard.press("g")
        page.wait_for_selector(".funnel .good")  # the same choice, recomputed
        assert "the same choice" in page.inner_text(".funnel")
        page.select_option(".what-if select", "all") if page.is_visible(".what-if select") else page.click(
            ".what-if summary"
        )
        page.keyboard.press("u")
        page.wait_for_selector("[aria-label=Groups] .row a.open")
        page.keyboard.press("/")
        page.keyboard.type("needle")
        page.wait_for_function("location.hash.includes('q=needle')")
        page.close()
    assert told.wrong == []
