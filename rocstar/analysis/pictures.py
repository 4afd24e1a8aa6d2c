"""Pictures of reports, one line a run. Needs matplotlib.

    fig4.png        failed calls in right attempts, by step (paper, Fig. 4)
    fig8.png        reward, length, cut attempts and entropy of training, by step (Fig. 8)
    fig9.png        accuracy and length of evaluations, by step (Fig. 9)
    fig10_11.png    attempts whose tokens are shaded by entropy, the marked ones framed (Fig. 10, 11)

A picture that has nothing to show is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
Values = list[tuple[int, float]]
"""(step, value)"""
ValuesOf = Callable[[Report], Values]
CHARACTERS, LINES = 135, 26  # of one example
CHARACTER, LINE = 0.0072, 0.036  # width and height of one on the page
COLOURS = {
    **{"reflection": "crimson", "forking": "darkorange", "call": "steelblue", "answer": "seagreen", "mark": "gray"},
}


def draw(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Write them into a folder, which is made; the files. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Callable[[Sequence[Report]], Any]] = {
        "fig4": lambda some: _lines(some, {"failed calls in right attempts": failed_calls_in_right}),
        "fig8": _fig8,
        "fig9": _fig9,
        "fig10_11": _fig10_11,
    }
    files = []
    for name, drawn in made.items():
        if figure := drawn(reports):
            figure.savefig(file := folder / f"{name}.png", dpi=120, bbox_inches="tight")
            pyplot.close(figure)
            files.append(file)
    return files


def values_of(part: str, key: str, **same: Any) -> ValuesOf:
    """A function that takes (step, value) from a list of a report, without the rows that have no value, or not the same
    one of another key."""

    def values(report: Report) -> Values:
        rows = (row for row in report[part] if all(row[name] == value for name, value in same.items()))
        return [(row["step"], row[key]) for row in rows if row[key] is not None]

    return values


def failed_calls_in_right(report: Report) -> Values:
    """Fig. 4: from the attempts where they were kept, else from the metrics."""
    key = "failed_call_share_in_right"
    return values_of("by_step", key)(report) or values_of("training", key)(report)


def _fig8(reports: Sequence[Report]) -> Any:
    titles = {"reward": "reward", "tokens": "tokens of an attempt", "cut": "share cut"}
    temperatures = dict.fromkeys(row["temperature"] for report in reports for row in report["training"])
    panels = {title: values_of("training", key) for key, title in titles.items()}
    for one in temperatures:  # entropies at different ones cannot be compared
        title = "entropy" + ("" if one is None else f" at temperature {one:g}") + ", nats"
        panels[title] = values_of("training", "entropy", temperature=one)
    return _lines(reports, panels)


def _fig9(reports: Sequence[Report]) -> Any:
    def accuracy(report: Report) -> Values:
        rows = report["evaluations"]
        return [(row["step"], row["accuracy"]["value"]) for row in rows if row["accuracy"]]

    panels = {"accuracy of evaluations": accuracy, "tokens of an attempt": values_of("evaluations", "tokens")}
    return _lines(reports, panels)


def _lines(reports: Sequence[Report], panels: Mapping[str, ValuesOf]) -> Any:
    """One panel beside the other, one line a run; None where no run has two points."""
    from matplotlib import pyplot

    found = {title: [(report["source"], of(report)) for report in reports] for title, of in panels.items()}
    if all(len(points) < 2 for lines in found.values() for _, points in lines):
        return None
    figure, row = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.8), squeeze=False)
    for axes, (title, lines) in zip(row[0], found.items(), strict=True):
        for colour, (name, points) in enumerate(lines):
            if points:
                style = {"color": f"C{colour}", "marker": "." if len(points) < 10 else ""}
                axes.plot(*zip(*points, strict=True), label=name, **style)
        axes.set(title=title, xlabel="step", ylim=(0, None))
    row[0][0].legend()
    return figure


def _fig10_11(reports: Sequence[Report]) -> Any:
    from matplotlib import pyplot

    examples = [example for report in reports for example in report.get("tokens", {}).get("examples", {}).values()]
    if not examples:
        return None
    figure, column = pyplot.subplots(len(examples), 1, figsize=(12, 6 * len(examples)), squeeze=False)
    for axes, example in zip(column[:, 0], examples, strict=True):
        verdict = {True: "right", False: "wrong", None: "undecided"}[example["right"]]
        axes.set_title(
            f"{example['figure']}: step {example['step']}, problem {example['problem']}, {verdict}", loc="left"
        )
        axes.axis("off")
        _write(axes, example["tokens"])
    return figure


def _write(axes: Any, tokens: Sequence[Mapping[str, Any]]) -> None:
    """Token by token in a typewriter's face, shaded by entropy, the letters of marked ones coloured by kind."""
    highest = max((token["entropy"] or 0.0 for token in tokens), default=0.0) or 1.0
    line = place = 0
    for token in tokens:
        shade = (1.0, 0.85, 0.2, 0.8 * (token["entropy"] or 0.0) / highest)
        colour = COLOURS.get(token["kind"] or "", "black")
        for number, part in enumerate(token["text"].split("\n")):
            line, place = (line + 1, 0) if number or place + len(part) > CHARACTERS else (line, place)
            if line >= LINES:
                return
            if part:
                axes.text(
                    place * CHARACTER, 1 - line * LINE, part.replace("$", r"\$"), family="monospace", fontsize=8,
                    color=colour, va="top", bbox={"facecolor": shade, "edgecolor": "none", "pad": 0.5},
                )  # fmt: skip
            place += len(part)
