"""What the page of `rocstar view` costs on a big run: seconds to each view, CPU seconds and memory of the server.

    python benchmarks/big_run.py /tmp/big --attempts 100000
    python benchmarks/view.py /tmp/big                    # HTTP, and Chromium where playwright and chromium are here
    python benchmarks/view.py /tmp/big --write 5          # the same while steps are being written
    python benchmarks/view.py /tmp/big --axe axe.min.js   # and the accessibility check of each view
    python benchmarks/view.py runs --run quickstart --screenshots docs/images   # a picture of each view of a real run

Wall seconds mean something on an idle machine only; CPU seconds of the server are beside them. The table of attempts is
made anew (`cold`), then asked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import psutil
from frame import environment, free_port, parser, peak_bytes, report, rocstar, serving, spent

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LONG_TOKENS = 12_000
VIOLATIONS = "axe.run().then(r => r.violations.map(v => `${v.id} x${v.nodes.length} ${v.nodes[0].html.slice(0, 90)}`))"


class Server:
    """`rocstar view` in a process of its own."""

    def __init__(self, port: int, pid: int) -> None:
        self.address, self.process, self.peak = address_of(port), psutil.Process(pid), 0

    def get(self, path: str, **query: Any) -> Any:
        text = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
        with urlopen(f"{self.address}/api/{path}?{text}") as answer:
            found = json.load(answer)
        self.peak = max(self.peak, self.memory())
        return found

    def cpu(self) -> float:
        return float(sum(self.process.cpu_times()[:2]))

    def memory(self) -> int:
        """MiB at the most so far."""
        return peak_bytes(self.process.pid) // 2**20


def address_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def answers(port: int) -> bool:
    with urlopen(f"{address_of(port)}/icon.svg") as answer:
        return bool(answer.status == 200)


def main() -> None:
    options = _options()
    folder, port = options.folder, free_port()
    name = options.run or next(folder.glob("*/run.json")).parent.name
    figures: dict[str, Any] = {}
    command, began = rocstar("view", str(folder), "--no-browser"), time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        child = {"env": environment(XDG_CACHE_HOME=cache), "stderr": subprocess.DEVNULL}
        with serving(command, port, lambda: answers(port), **child) as pid, writing(folder / name, options.write):
            server = Server(port, pid)
            figures["start"] = {"wall": time.monotonic() - began, "cpu": server.cpu()}
            figures |= over_http(server, name)
            if CHROMIUM:
                figures |= in_chromium(server, name, options.axe, options.screenshots)
            figures["peak_mib"] = server.memory()
            with spent() as stopping:
                os.kill(pid, signal.SIGINT)
                server.process.wait()
            figures["ctrl_c"] = {"wall": stopping.wall}
    for what, figure in figures.items():
        print(f"{what:<34}{_told(figure)}")
    report(**figures)


def over_http(server: Server, name: str) -> dict[str, Any]:
    run = f"run/{name}"
    figures = {"runs list": _timed(server, lambda: server.get("sources"))}
    figures["first attempts, no table yet"] = _timed(server, lambda: _first(server, run))
    figures["table of all attempts"] = _timed(server, lambda: _settle(server, run))
    long = server.get(f"{run}/attempts", tokens=f"{LONG_TOKENS}..", limit=1)["rows"]
    first = server.get(f"{run}/groups", part="rollouts", sort="step", limit=1)["rows"][0]["step"]
    queries: dict[str, Callable[[], Any]] = {
        "list": lambda: server.get(f"{run}/attempts"),
        "list, sorted by tokens": lambda: server.get(f"{run}/attempts", sort="-tokens"),
        "list, in the middle": lambda: server.get(f"{run}/attempts", offset=50_000),
        "filter right with errors": lambda: server.get(f"{run}/attempts", verdict="right", failed="1.."),
        "filter by error": lambda: server.get(f"{run}/attempts", error="ZeroDivisionError", sort="-tokens"),
        "counts of all filters": lambda: server.get(f"{run}/facets", verdict="wrong"),
        "groups": lambda: server.get(f"{run}/groups", sort="share"),
        "search, first answer": lambda: server.get(f"{run}/attempts", q="modulo 204"),
        "search, all files": lambda: _settle(server, run, q="modulo 204"),
        "what if": lambda: server.get(f"{run}/what-if", part="rollouts", step=first, grp=1, method="uniform"),
    }
    if long:
        place = {"part": "rollouts", "step": long[0]["step"], "row": long[0]["row"]}
        queries[f"attempt of {long[0]['tokens']} tokens"] = lambda: server.get(f"{run}/attempt", **place)
    return figures | {what: _timed(server, ask) for what, ask in queries.items()}


def in_chromium(server: Server, name: str, axe: Path | None, screenshots: Path | None) -> dict[str, Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return {}
    views = views_of(server, name)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        figures: dict[str, Any] = {"chromium: first page, cold": _shown(server, page, *views["runs"])}
        for what, (address, wanted) in views.items():
            page.goto(f"{server.address}/#/nothing")  # what follows is asked from within the page, as a click would
            page.wait_for_selector(".problem")
            figures[f"chromium: {what}"] = _shown(server, page, address, wanted)
            if axe:
                page.evaluate(axe.read_text())
                figures[f"axe: {what}"] = page.evaluate(VIOLATIONS) or "clean"
            if screenshots:
                _photograph(browser, server, screenshots / f"view-{what}", address, wanted)
        browser.close()
    return figures


def views_of(server: Server, name: str) -> dict[str, tuple[str, str]]:
    """Address of each view of a run, and what stands there when it is shown."""
    run = f"#/run/{name}"

    def one(**query: Any) -> dict[str, Any]:
        kept = server.get(f"run/{name}/attempts", part="rollouts", limit=1, **query)["rows"]
        return dict(kept[0]) if kept else one()

    short, long = one(kept="yes", verdict="right", failed="1..", sort="step"), one(kept="yes", sort="-tokens")
    at, group = [f"rollouts:{short['step']}:{short[place]}" for place in ("row", "grp")]
    longest = f"rollouts:{long['step']}:{long['row']}"
    others = ",".join(s["name"] for s in server.get("sources")["sources"] if s["kind"] == "run" and s["name"] != name)
    views = {
        "runs": ("#/", "table.runs"),
        "run": (run, ".chart canvas"),
        "time": (f"{run}/time", ".of-steps rect"),
        "attempts": (f"{run}/attempts", ".row a.open"),
        "filtered": (f"{run}/attempts?verdict=right&failed=1..", ".row a.open"),
        "groups": (f"{run}/groups", ".row a.open"),
        "group": (f"{run}/group?at={group}", "table.siblings tbody tr"),
        "what-if": (f"{run}/group?at={group}&w.method=uniform", "tr.changed"),
        "attempt": (f"{run}/attempt?at={at}", ".turn.policy .text"),
        "attempt-long": (f"{run}/attempt?at={longest}", ".turn.policy .text"),
        "tokens-long": (f"{run}/attempt?at={longest}&colour=entropy", ".turn.policy .block"),
        "settings": (f"{run}/settings?q=resample", ".settings th"),
    }
    if others:
        views["compared"] = (f"{run}?x=rl&with={quote(others)}", ".chart canvas")
    if evals := next(s["evals"] for s in server.get("sources")["sources"] if s["name"] == name):
        views["evaluation"] = (f"#/eval/{name}/{evals[0]['name']}/{evals[0]['step']}", ".row a.open")
        views["events"] = (f"{run}/events", "table.events")
    if alike := [(a, b) for a in evals for b in evals if a["asked"] == b["asked"] and a["step"] < b["step"]]:
        first, last = max(alike, key=lambda pair: pair[1]["step"] - pair[0]["step"])
        against = quote(f"{name}/{first['name']}/{first['step']}")
        views["paired"] = (f"#/eval/{name}/{last['name']}/{last['step']}?against={against}", "table.plain a.open")
    return views


def _shown(server: Server, page: Any, address: str, wanted: str) -> dict[str, float]:
    def show() -> None:
        page.goto(f"{server.address}/{address}")
        page.wait_for_selector(wanted)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    return _timed(server, show)


def _photograph(browser: Any, server: Server, stem: Path, address: str, wanted: str) -> None:
    from PIL import Image

    stem.parent.mkdir(parents=True, exist_ok=True)
    for width in (1440, 400):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(f"{server.address}/{address}")
        page.wait_for_selector(wanted)
        page.wait_for_timeout(1500)
        page.screenshot(path=f"{stem}-{width}.png")
        page.close()
        Image.open(f"{stem}-{width}.png").quantize(64).save(f"{stem}-{width}.png", optimize=True)  # a quarter as large


@contextmanager
def writing(run: Path, seconds: float) -> Iterator[None]:
    """Copies the first step under new numbers, one every so many seconds, as a run would add steps; they go again."""
    if not seconds:
        yield
        return
    over, made = threading.Event(), []
    source = min(run.glob("rollouts/*.parquet"))

    def write() -> None:
        while not over.wait(seconds):
            target = run / "rollouts" / f"step={900_000 + len(made):06d}.parquet"
            shutil.copy(source, target.with_suffix(".new"))
            target.with_suffix(".new").rename(target)
            made.append(target)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for file in made:
            file.unlink()


def _first(server: Server, run: str) -> None:
    while not server.get(f"{run}/attempts")["total"]:
        time.sleep(0.02)


def _settle(server: Server, run: str, **query: str) -> None:
    while True:
        found = server.get(f"{run}/attempts", limit=1, **query)
        if not found["indexing"] and found.get("searched", 0) >= found.get("of", 0):
            return
        time.sleep(0.2)


def _timed(server: Server, work: Callable[[], Any]) -> dict[str, float]:
    with spent(server.cpu) as seconds:
        work()
    return {"wall": round(seconds.wall, 3), "cpu": round(seconds.cpu, 3)}


def _told(figure: Any) -> str:
    if isinstance(figure, dict):
        return "   ".join(f"{name} {value:8.3f} s" for name, value in figure.items())
    return "\n    ".join(figure) if isinstance(figure, list) else str(figure)


def _options() -> Any:
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="of runs")
    arguments.add_argument("--run", help="name of the run that is looked at; default: the first")
    arguments.add_argument("--write", type=float, default=0.0, help="seconds between steps added meanwhile; 0: none")
    arguments.add_argument("--axe", type=Path, help="axe.min.js of axe-core")
    arguments.add_argument("--screenshots", type=Path, help="folder for a picture of each view at 1440 and 400 px")
    return arguments.parse_args()


if __name__ == "__main__":
    main()
