"""The page in a real Chromium: hostile transcripts are shown and nothing of them runs, no layout breaks, keys work."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from rocstar.analysis.sweep import planned
from rocstar.config.sections import ResampleSection
from rocstar.learning.resample import resampler_of, seed_of_choice
from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal
from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.view.app import application
from rocstar.view.others import opened_others
from rocstar.view.sources import Library
from tests.view.recorded import (
    RECIPE,
    SEED,
    add_evaluation,
    add_step,
    add_tokenizer,
    attempt,
    chosen,
    create,
    decode,
    problem,
)

TRANSCRIPTS, A_STEP, LINE = 30, 10, "x" * 1_000_000
WIDTHS = (1440, 400)
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
    "<" * 5000 + "\n" * 2000,
    '"}}\n</tool_call>\n<tool_call>{"name": "python"}',
)


def transcripts(count: int) -> list[str]:
    """Each kind on its own first, then mixed by chance."""
    draw = random.Random(7)
    mixed = ["".join(draw.sample(SCRIPTS, 3)) + chr(draw.randrange(0x3000)) for _ in range(count - len(SCRIPTS) - 1)]
    return [*SCRIPTS, *mixed, LINE]


@contextmanager
def served(library: Library, cache: Path) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(application(library, cache=cache), port=0, log_level="error"))
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
    """One browser for all tests of this file: its start costs more than most of them."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Seen:
    """A page, and what it did that it should not have."""

    def __init__(self, browser: Any, address: str, width: int, **more: Any) -> None:
        self.wrong: list[str] = []
        self.address = address
        self.page = page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce", **more)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: self.wrong.append("dialog"))
        page.on(
            "request", lambda asked: None if asked.url.startswith((address, "data:")) else self.wrong.append(asked.url)
        )

    def open(self, view: str, wanted: str) -> Any:
        self.page.goto(f"{self.address}/#{view}")
        self.page.wait_for_selector(wanted)
        return self.page


@contextmanager
def seen(browser: Any, what: Path | Library | str, width: int = 1440, **more: Any) -> Iterator[Seen]:
    """The page over a folder of runs, or one that is served; nothing that it must not do may have happened by the
    end."""
    with ExitStack() as stack:
        library = Library.open(None, what) if isinstance(what, Path) else what
        if isinstance(library, Library):
            address = stack.enter_context(served(library, library.base.parent / "cache"))
        else:
            address = library
        one = Seen(browser, address, width, **more)
        try:
            yield one
        finally:
            one.page.close()
    assert one.wrong == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with everything that the page has a view for, beside others and a sweep; to be read only."""
    base = tmp_path_factory.mktemp("recorded") / "runs"
    create(base, "other")
    run = create(base)
    add_step(run, 1)
    add_step(run, 2, attempts=8)
    add_evaluation(run, "before", 0, 1)
    add_evaluation(run, "after", 2, 2)
    add_tokenizer(run)
    with Journal(run.events) as events:
        events.append({"time": 0.0, "event": "warning", "step": 2, "evidence": "many were cut", "action": "allow more"})
        events.append({"event": "stage_end", "name": "first", "steps": 2, "reason": "the reward is flat"})
    recipe = run.path.parent / "swept.toml"
    recipe.write_text(RECIPE.format(name="swept", seed=0, method="roc", more=""))
    for one in planned(str(recipe), [f"run.folder={run.path.parent}", "run.seed=0,1"]):
        made = RunFolder.create(one.recipe, run.path.parent, [])
        add_evaluation(made, "after", 3, one.recipe.run.seed)
        made.summary.write_text("{}")
    write_attempts(create(base, "own").rollout_file(1), 1, own_attempts(), decode)
    return run


@pytest.fixture(scope="module")
def shown(recorded: RunFolder) -> Iterator[str]:
    """The address of the page over `recorded`, for tests that only look."""
    base = recorded.path.parent
    with served(Library.open(None, base), base.parent / "cache") as address:
        yield address


def own_attempts() -> list[AttemptRecord]:
    """One at a problem with a system text, one that a function judged, and one without an answer."""
    made = attempt("4", question="What is 2 + 2?")
    own = ({"role": "system", "content": "Add."}, {"role": "user", "content": made.problem.question})
    assert made.trajectory.outcome is not None
    unread = replace(made.trajectory.outcome, extracted=None, parts={"form": 0.5, "short": 1.0})
    judged = [
        replace(made, trajectory=replace(made.trajectory, outcome=replace(unread, method=method)))
        for method in ("function", "no_answer")
    ]
    return [replace(made, problem=replace(made.problem, messages=own)), *judged]


# In the page, one after the other: a round trip for each of them would cost more than what is looked at.
SHOW_EACH = """async (expected) => {
  const frame = () => new Promise(requestAnimationFrame), wrong = [];
  for (const [n, text] of expected.entries()) {
    location.hash = `#/run/made/attempt?at=rollouts:${Math.floor(n / 20)}:${n % 20}`;
    const shown = () => document.querySelector(".turn.user .text")?.textContent.startsWith(`Q${n} `);
    for (let frames = 0; !shown() && frames < 6000; frames++) await frame();
    const foreign = document.querySelectorAll("main script, main iframe, main img, main base, main meta, main style");
    const state = [shown(), document.documentElement.scrollWidth, window.hacked ?? null, foreign.length];
    const told = document.querySelector("main").textContent.includes(text);
    if (JSON.stringify(state) !== "[true,400,null,0]" || !told) wrong.push([n, ...state, told]);
  }
  return wrong;
}"""


def test_hostile_transcripts_are_shown_as_text_and_nothing_of_them_runs(chromium: Any, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    texts = transcripts(TRANSCRIPTS)
    made = [
        attempt(text, stdout=text, code=text[:9000], question=f"Q{n} {text[:3000]}") for n, text in enumerate(texts)
    ]
    for step in range(TRANSCRIPTS // A_STEP):  # few at once: an attempt is read with its neighbours
        write_attempts(run.rollout_file(step), step, made[step * A_STEP :][:A_STEP], decode)
    literal = [text[:30] if text.isascii() and text.isprintable() else "" for text in texts]
    assert sum(map(bool, literal)) >= 8
    with seen(chromium, run.path.parent, 400) as one:
        one.open("/run/made/attempt?at=rollouts:0:0", ".turn.user .text")
        assert one.page.evaluate(SHOW_EACH.replace("20", str(A_STEP)), literal) == []
        for view in ("attempts", "groups"):
            page = one.open(f"/run/made/{view}?q=hacked", ".row a.open")
            assert page.evaluate("[document.documentElement.scrollWidth, window.hacked]") == [400, None]


VIEWS = {
    "/?sort=-after": "table.runs",
    "/run/made?smooth=5&x=rl": ".chart canvas",
    "/run/made/attempts": ".row a.open",
    "/run/made/groups": ".row a.open",
    "/run/made/evaluations": "table a.open",
    "/run/made/time": ".of-steps rect",
    "/run/made/events": "tr.alarm",
    "/run/made/settings?from=all&q=resample": ".settings td",
    "/glossary?q=kept": ".glossary dd",
    "/run/made/group?at=rollouts:2:2&w.method=uniform": ".tried .fate",
    "/run/made/attempt?at=rollouts:2:5": ".turn.policy .text",
    "/run/made/attempt?at=rollouts:2:5&with=rollouts:2:6&colour=entropy": ".two .token",
    "/eval/made/after/2": ".row a.open",
    "/eval/made/after/2?against=made/before/0": "table.plain a.open",
}


# Of what passes axe then names one element for each rule, which takes it less time.
VIOLATIONS = """axe.run({ resultTypes: ["violations"] })
  .then((found) => found.violations.map((one) => [one.id, one.nodes[0].html]))"""


def test_each_view_is_accessible_and_fits_a_wide_and_a_narrow_screen(chromium: Any, shown: str) -> None:
    package = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    axe = (Path(package.__file__).parent / "axe.min.js").read_text()
    found: dict[tuple[str, int], Any] = {}
    for width, scheme in zip(WIDTHS, ("light", "dark"), strict=True):
        with seen(chromium, shown, width, color_scheme=scheme) as one:
            one.open("/", "table.runs").evaluate(axe)
            for view, wanted in VIEWS.items():
                page = one.open(view, wanted)
                wide = page.evaluate("document.documentElement.scrollWidth")
                broken = page.evaluate(VIOLATIONS)
                if broken or wide > width:
                    found[view, width] = broken, wide
    assert found == {}


# [sibling, recorded fate, fate under other settings] of each row
FATES = """[...document.querySelectorAll("table.siblings tbody tr")].map(row => [
  +row.cells[0].textContent,
  ...["fate", "what if: fate"].map(name => row.querySelector(`[data-label="${name}"]`).textContent),
])"""


def test_what_if_on_the_page_is_what_training_chose_in_every_group(chromium: Any, shown: str) -> None:
    groups = chosen(1, [problem(number) for number in range(3)], 16, ResampleSection(keep=8))  # as `add_step` does
    other = resampler_of(ResampleSection(method="uniform", keep=6))
    with seen(chromium, shown) as one:
        for number, group in enumerate(groups, 1):
            view = f"/run/made/group?at=rollouts:1:{number}&w.method=uniform&w.keep=6"
            page = one.open(view, ".funnel .good")  # "the same choice", recomputed with the run's seed
            assert f"the same choice, all {len(group.choices)}" in page.inner_text(".funnel .good")
            page.wait_for_selector("td.tried .fate:has-text('.')")
            tried = other(group.group, random.Random(seed_of_choice(SEED, 1, group.group.problem.id)))
            rows = page.evaluate(FATES)
            expected = [
                [index, str(was.reason), str(now.reason)]
                for index, was, now in zip(range(len(rows)), group.choices, tried.choices, strict=True)
            ]
            assert sorted(rows) == expected


def test_keys_lead_from_the_list_to_an_attempt_its_group_and_back(chromium: Any, shown: str) -> None:
    with seen(chromium, shown) as one:
        page = one.open("/run/made/attempts?step=1&sort=-tokens", ".row a.open")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.policy")
        page.wait_for_selector(".strip a")
        page.keyboard.press("g")
        page.wait_for_selector(".funnel .good")  # the same choice, recomputed
        assert "the same choice" in page.inner_text(".funnel")
        page.keyboard.press("u")
        page.wait_for_selector("[aria-label=Groups] .row a.open")
        page.keyboard.press("/")
        page.keyboard.type("needle")
        page.wait_for_function("() => location.hash.includes('q=needle')")


def test_an_attempt_shows_the_messages_before_its_question_and_no_answer_only_where_there_was_none(
    chromium: Any, shown: str
) -> None:
    with seen(chromium, shown) as one:
        page = one.open("/run/own/attempt?at=rollouts:1:0", ".turn.policy")
        told = [turn.inner_text() for turn in page.query_selector_all(".turn.user")]
        assert told[:2] == ["system\nAdd.", "problem\nWhat is 2 + 2?"]
        for row, answer in ((1, "not extracted"), (2, "none")):  # a function judged the first
            page = one.open(f"/run/own/attempt?at=rollouts:1:{row}", f".facts .answer:text-is('{answer}')")
            assert "form 0.5 · short 1" in page.inner_text(".facts")


def test_a_run_that_is_being_written_goes_on_without_being_opened_again(chromium: Any, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    add_step(run, 1)
    with seen(chromium, run.path.parent) as one:
        page = one.open("/run/made/attempts", ".row a.open")
        page.wait_for_function("() => document.querySelector('.count').textContent.startsWith('48 ')")
        add_step(run, 2)
        page.wait_for_function("() => document.querySelector('.count').textContent.startsWith('96 ')")
        page.wait_for_function("() => document.querySelector('.row a.open').textContent.startsWith('2')")
        page = one.open("/", "table.runs tbody tr")
        add_step(run, 3)
        page.wait_for_function("() => document.querySelector('[data-label=steps]').textContent.includes('3 / 3')")


def test_tokens_of_a_long_attempt_are_drawn_as_they_come_into_view(chromium: Any, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    words = "".join(random.Random(3).choices("abcdefgh ", k=9000)) + "z"
    made = attempt(words)
    strongest = [0.1] * (len(made.trajectory.token_ids) - 1) + [9.0]
    write_attempts(run.rollout_file(1), 1, [replace(made, entropies=strongest)], decode)
    add_tokenizer(run)
    with seen(chromium, run.path.parent, 400) as one:
        page = one.open("/run/made/attempt?at=rollouts:1:0&colour=entropy", ".turn.policy .token")
        assert 1500 < page.locator(".token[data-i]").count() < 8000  # a screen and what is near it
        assert page.evaluate(POLICY).endswith(words)
        page.keyboard.press("[")  # the last of the strong ones, far out of view
        assert page.locator(".token.here").inner_text() == "z"
        assert page.locator(".token.here").evaluate("e => e.getBoundingClientRect().bottom < innerHeight")
        page.evaluate("scrollTo(0, document.body.scrollHeight / 2)")
        column = (
            "[...Array(60).keys()].map(n => document.elementFromPoint(100, 400 + 2 * n))"  # some fall between lines
        )
        page.wait_for_function(f"() => {column}.some(found => found?.matches('.token'))")
        assert page.evaluate(POLICY).endswith(words)


POLICY = "document.querySelector('.tokens .turn.policy').textContent"


def test_shares_are_rounded_as_on_the_screen_and_a_wrong_address_is_told(chromium: Any, shown: str) -> None:
    shares = [0.9725, 0.2125, 0.0625, *(n / 801 for n in range(802)), *(n / 400 for n in range(401))]
    with seen(chromium, shown) as one:
        page = one.open("/bogus/x", "[role=alert]")
        assert "there is no page bogus here" in page.inner_text("main")
        shown = page.evaluate(
            "async (all) => { const lib = await import('./lib.js'); return all.map((v) => lib.percent(v)) }", shares
        )
        numbers = page.evaluate(
            "async (all) => { const lib = await import('./lib.js'); return all.map((v) => lib.number(v)) }",
            [1e300, 2e9],
        )
    assert shown == [f"{share:.1%}" for share in shares] and numbers == ["1.00e+300", "2,000,000,000"]


def test_the_head_of_a_run_says_what_training_changed_and_which_stages_are_over(chromium: Any, shown: str) -> None:
    with seen(chromium, shown) as one:
        page = one.open("/run/made", ".headline .figure")
        assert page.locator(".headline .figure").count() == 2 and "0.0 points" in page.inner_text(".headline")
        assert page.get_by_text("problem by problem").get_attribute("href").endswith("against=made%2Fbefore%2F0")
        assert "2 steps of at most 3" in page.inner_text(".stages .over")
        assert "ended by its rule: the reward is flat" in page.inner_text(".stages .over")
        page.wait_for_selector(".headline .term")
        assert "drawn as in training" in page.get_by_text("right answers", exact=True).first.get_attribute("title")


def test_the_list_of_runs_is_sorted_by_its_heads_and_groups_a_sweep(chromium: Any, shown: str) -> None:
    names = "[...document.querySelectorAll('.runs tbody a.open')].map(a => a.textContent)"
    with seen(chromium, shown) as one:
        page = one.open("/", "tr.sweep")
        assert "sweep swept · 2 runs, 2 finished" in page.inner_text("tr.sweep")
        assert sorted(page.evaluate(names)) == ["made", "other", "own", "seed=0", "seed=1"]
        page.get_by_role("button", name="run", exact=True).click()
        page.wait_for_function("() => location.hash.includes('sort=-run')")
        page.wait_for_selector(".runs tbody a.open:has-text('swept-seed=1')")  # it is drawn after the address changes
        assert page.evaluate(names) == ["swept-seed=1", "swept-seed=0", "own", "other", "made"]
        page.get_by_role("button", name="run ↓", exact=True).click()
        page.wait_for_function(f"() => {names}[0] === 'made'")
        lefts = (
            "[...document.querySelectorAll('.runs [data-label=after] svg')].map(e => e.getBoundingClientRect().left)"
        )
        assert len(set(page.evaluate(lefts))) == 1  # bars begin at one x


SMOOTHED = """async () => {
  const { smoothed } = await import("./curves.js");
  return [smoothed({ x: [1, 2, 3, 4], y: [1, 3, 5, 7] }, 2), smoothed({ x: [1], y: [4] }, 1)];
}"""
# [text, as it is shown, how many formulas]
DRAWN = """async (texts) => {
  const { withMath } = await import("./math.js"), { html, render } = await import("./lib.js");
  return texts.map((text) => {
    const box = document.createElement("p");
    render(html`<span>${withMath(text)}</span>`, box);
    return [box.textContent, box.querySelectorAll("math").length];
  });
}"""
FORMULAS = {
  r"half is $\frac{1}{2}$, \(x^2\)": ("half is 12, x2", 2),
  r"so \[\sum_{i=1}^n i\] and $$y$$": ("so ∑i=1ni and y", 2),
  r"\begin{align*}a&=b\\c&=d\end{align*}": ("a=bc=d", 1),
  r"<answer>\boxed{\frac{3}{4}}</answer>": ("<answer>34</answer>", 1),
  "it costs $5 and $6, not $10 or $5-$10": (None, 0),
  r"a \$x\$ b, $ y $, $z$9": (None, 0),
  r"$\frac{1}{$ and $\nosuchthing{x}$": (None, 0),
  r"$\def\a{\a\a}\a$": (None, 0),
  "$" + "x^{" * 100 + "y" + "}" * 100 + "$": (None, 0),
  "$x" + "+x" * 3000 + "$": (None, 0),
  r"$\href{javascript:window.hacked=1}{x}$": (None, 0),
  "\\[" * 20000 + "\\boxed{" * 20000: (None, 0),
}  # fmt: skip


# An answer whose reading is broken off: what `ask` then tells.
BROKEN_OFF = """async () => {
  const { ask } = await import("./lib.js"), stop = new AbortController(), real = window.fetch;
  const start = (control) => { stop.signal.onabort = () => control.error(stop.signal.reason); };
  const body = new ReadableStream({ start });
  window.fetch = async () => { setTimeout(() => stop.abort(), 5); return new Response(body, { status: 200 }); };
  try { return await ask("sources", {}, stop.signal); } catch (error) { return error.name; }
  finally { window.fetch = real; }
}"""


def test_formulas_are_drawn_and_what_is_none_stays_as_it_was_written(chromium: Any, shown: str) -> None:
    with seen(chromium, shown) as one:
        page = one.open("/", "table.runs")
        assert page.evaluate(BROKEN_OFF) == "AbortError", "an answer whose reading is broken off is no answer"
        found = page.evaluate(DRAWN, list(FORMULAS))
        assert found == [[text if told is None else told, n] for text, (told, n) in FORMULAS.items()]
        assert page.evaluate(SMOOTHED) == [
            {"x": [1, 2, 3, 4], "y": [1, 2, 4, 6], "raw": [1, 3, 5, 7]},
            {"x": [1], "y": [4]},
        ]
        page.evaluate("location.hash = '#/?tex=written'")
        assert page.evaluate(DRAWN, ["$x^2$"]) == [["$x^2$", 0]]


def test_hostile_formulas_make_no_element_but_mathml_and_no_layout_break(chromium: Any, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    texts = [
        r"$\rule{900em}{900em}\kern-900em\kern900em\hspace{9999pt} a$", r"\(\class{skip}{x}\style{position:fixed}{y}\)",
        r"$\htmlId{app}{x}\includegraphics{http://evil.example/x}$", r"$\color{red}\raisebox{-999em}{x}$",
        r"$\text{<img src=x onerror=window.hacked=1>}\href{javascript:alert(1)}{z}\url{http://evil.example}$",
        "$" + "x^{" * 40 + "y" + "}" * 40 + "$", r"\[" + "a+" * 900 + r"b\]",
        r"\begin{matrix}" + "a&" * 300 + r"\end{matrix}",
    ]  # fmt: skip
    write_attempts(run.rollout_file(1), 1, [attempt(text, index=n) for n, text in enumerate(texts)], decode)
    with seen(chromium, run.path.parent, 400) as one:
        for n in range(len(texts)):
            page = one.open(f"/run/made/attempt?at=rollouts:1:{n}", ".turn.policy .text")
            page.evaluate("new Promise(requestAnimationFrame)")
            assert page.evaluate("[document.documentElement.scrollWidth, window.hacked ?? null]") == [400, None]
            foreign = (
                "document.querySelectorAll('.math :is(a, img, svg, script), .math [href], .math [id], .math [class]')"
            )
            assert page.evaluate(f"{foreign}.length") == 0


def test_the_time_of_each_step_is_split_and_a_range_of_steps_is_shown_alone(chromium: Any, tmp_path: Path) -> None:
    run = create(tmp_path / "runs")
    with Journal(run.metrics) as metrics:
        metrics.append({"step": 1, "stage": "sft", "step/seconds": 2.0, "seconds/sft": 1.5, "seconds/cold start": 3.0})
        for step in range(2, 302):
            wall = {"seconds/rollout": 8.0, "seconds/learning": 4.0, "seconds/record": 1.0, "seconds/saving": 2.0}
            shares = {"tool/seconds_share": 0.25, "step/overlap_seconds": 1.0, "step/seconds": 15.0}
            metrics.append({"step": step, "stage": "first", **wall, **shares})
    with seen(chromium, run.path.parent) as one:
        page = one.open("/run/made/time?steps=2..4", ".of-steps rect")
        told = "step 2: 17.0 s = attempts: engines 6.0 s, attempts: tools 2.0 s, learning 3.0 s, "
        told += "learning beside attempts 1.0 s, checkpoints 2.0 s, setting up, records 1.0 s, idle and other 2.0 s"
        titles = page.evaluate("[...document.querySelectorAll('.of-steps title')].map(e => e.textContent)")
        assert titles == [told, told.replace("step 2", "step 3"), told.replace("step 2", "step 4")]
        tall = page.evaluate(
            "[...document.querySelectorAll('.of-steps a:first-child rect')].map(e => +e.getAttribute('height'))"
        )
        assert tall == [6, 2, 3, 1, 2, 1, 2]
        page.click("button:has-text('all steps')")
        page.wait_for_selector(".of-steps a:nth-child(151)")  # means of two steps
        assert " ".join(page.inner_text("tbody tr:first-child").split()) == "sft 1 5.0 s 1.5 s 30% 3.0 s 60% 500 ms 10%"
        page.evaluate(
            "document.querySelectorAll('.of-steps a')[2].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        )
        page.wait_for_function("location.hash.endsWith('steps=5..6')")
        page.wait_for_function("document.querySelectorAll('.of-steps a').length === 2")


def test_rollouts_of_others_are_shown_as_text_with_all_that_was_written(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "dump" / "7.jsonl"
    file.parent.mkdir()
    hostile = "".join(SCRIPTS)
    rows = [
        {"input": hostile, "output": hostile, "gts": hostile, "score": n / 4, "step": 7, hostile: [hostile]}
        for n in range(3)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "cut")
    library = opened_others(file, tmp_path / "made", lambda said: None)
    assert library is not None
    with seen(chromium, library, 400) as one:
        page = one.open(f"{library.first}?sort=reward", ".row a.open")
        assert "1 of 4 rows" in page.text_content("main") and "0.25" in page.text_content(".rows")
        page.click(".row:nth-child(2) a.open")
        page.wait_for_selector("details .settings th")
        said = page.text_content("main")
        assert "reward 0.25" in " ".join(said.split()) and "window.hacked = 1" in page.text_content("details th")
        for view in ("", "/groups", "/settings"):
            page = one.open(f"{library.first.removesuffix('/attempts')}{view}", ".tabs")
        state = page.evaluate("[document.documentElement.scrollWidth, window.hacked]")
        assert state == [400, None]
