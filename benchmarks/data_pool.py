"""What does the pool of recipes/data/math_pool.toml hold, what did it cost, and is it clear of the benchmarks?

Builds the pool twice (CPU seconds, same bytes), loads it as training does, then looks for shared 8-grams once more with
code of its own: plain sets, seven ways to cut a text into words, among them two that the build does not use. With
`--rows N` a synthetic source of N rows is built instead and the peak memory printed. With `--sample K` K dropped
rows are drawn by a fixed seed. Data are in ../shared/data or $ROCSTAR_DATA. Prints tables and, last, one JSON line.

    python benchmarks/data_pool.py [--sample 50]
    python benchmarks/data_pool.py --rows 100000
"""

from __future__ import annotations

import json
import random
import re
import resource
import string
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frame import ROOT, Table, data_folder, parser, print_figures, read_rows, report, spent

from rocstar.answers.extract import lenient_answer
from rocstar.cli.verbs.data import verifier
from rocstar.config.layers import load
from rocstar.data.pool.build import benchmark_questions, build_pool
from rocstar.data.pool.config import PoolConfig
from rocstar.data.pool.datasheet import Datasheet
from rocstar.data.problems import load_problems
from rocstar.evaluation.contamination import beside_known
from rocstar.types import Problem, seed_for

RECIPE = ROOT / "recipes" / "data" / "math_pool.toml"
SEED = 20250828  # of the drawn rows; any number does, as long as it stays
SHOWN_CHARS = 100
# Statements of these contests are their organisers' (c); rows that are theirs are shown by their place only.
NOT_SHOWN = ("aime", "amc", "hmmt", "cmimc")


def cuts() -> dict[str, Callable[[str], list[str]]]:
    """Ways to cut a text into words, written anew here so as not to repeat a mistake of the build."""
    blank = str.maketrans(dict.fromkeys(string.punctuation, " "))
    removed = str.maketrans("", "", string.punctuation)
    return {
        "white space": lambda text: text.lower().split(),
        "letters and digits": lambda text: re.findall(r"[a-z0-9]+", text.lower()),
        "word characters": lambda text: re.findall(r"\w+", text.lower()),
        "punctuation to blank": lambda text: text.lower().translate(blank).split(),
        "punctuation removed": lambda text: text.lower().translate(removed).split(),
        "punctuation trimmed": lambda text: [
            w for w in (p.strip(string.punctuation) for p in text.lower().split()) if w
        ],
        "each symbol a word": lambda text: re.findall(r"\w+|[^\w\s]", text.lower()),
    }


def grams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}


def overlaps(questions: list[str], benchmarks: list[str]) -> dict[str, int]:
    """Pool questions that share an 8-gram with any benchmark question, by cut."""
    found = {}
    for name, cut in cuts().items():
        theirs = set().union(*(grams(cut(text)) for text in benchmarks))
        found[name] = sum(not theirs.isdisjoint(grams(cut(text))) for text in questions)
    return found


def built(config: PoolConfig) -> tuple[Datasheet, float]:
    with spent() as seconds, verifier(lenient_answer) as check:
        sheet = build_pool(config, check, lambda sentence: print(sentence, file=sys.stderr))
    return sheet, seconds.cpu


def recipe(out: str) -> PoolConfig:
    """As `rocstar data build` reads it."""
    return beside_known(load(RECIPE, PoolConfig, [f"data={data_folder()}", f"out={out}"]))[0]


def synthetic(file: Path, rows: int) -> None:
    """Word problems of seeded numbers and words; one in ten repeats another, one in ten has no integer answer."""
    rng = random.Random(SEED)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(20_000)]
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in synthetic_rows(rng, words, rows))


def synthetic_rows(rng: random.Random, words: list[str], rows: int) -> Iterator[dict[str, str]]:
    earlier: list[tuple[str, str]] = []
    for number in range(rows):
        if earlier and rng.random() < 0.1:
            text, answer = rng.choice(earlier)
        else:
            text = " ".join(rng.choices(words, k=rng.randint(20, 60))) + f" {rng.randrange(10**6)}?"
            answer = str(rng.randrange(1000)) if rng.random() < 0.9 else f"x + {number}"
        if len(earlier) < 1000:
            earlier.append((text, answer))
        yield {"question": text, "answer": answer}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(rows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.jsonl"
        synthetic(source, rows)
        before = peak_mib()
        config = PoolConfig.model_validate(
            {"data": folder, "out": f"{folder}/pool", "source": [{"name": "synthetic", "path": source.name}]}
        )
        sheet, cpu_seconds = built(config)
        size = source.stat().st_size
    figures = {
        "rows": rows,
        "source_mib": round(size / 2**20, 1),
        "kept": sheet.total("kept"),
        "cpu_seconds": round(cpu_seconds, 1),
        "before_mib": round(before, 1),
        "peak_mib": round(peak_mib(), 1),
    }
    print_figures(figures)
    return figures


def sample(out: Path, count: int) -> None:
    """Draw dropped rows, uniformly over all of them, by a hash of seed and place: a row that some change of a rule adds
    or takes away does not move the others."""
    drawn = sorted(read_rows(out / "dropped.jsonl"), key=lambda row: seed_for(SEED, row["source"], row.get("line", 0)))[
        :count
    ]
    for number, row in enumerate(drawn, start=1):
        question = " ".join(row.get("question", "").split())
        theirs = any(name in f"{row['source']} {row['evidence']}" for name in NOT_SHOWN)
        shown = "(not shown)" if theirs else question[:SHOWN_CHARS]
        place = f"{row['source']} {row.get('line', '')}"
        cells = (str(number), place, row["rule"], row["evidence"], shown)
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


def countings(sheet: Datasheet, problems: list[Problem]) -> dict[str, int]:
    """The same pool counted more strictly and less so."""
    changed = ("asked_from", "reworded")
    return {
        "kept_word_for_word": sum(not any(name in p.metadata for name in changed) for p in problems),
        "kept_with_the_answer_as_published": sum("asked_from" not in p.metadata for p in problems),
        "kept_were_stock_phrases_forgiven": sheet.total("kept") + sheet.total("benchmark_phrase"),
    }


def measure_pool(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        first, cpu_seconds = built(recipe(f"{folder}/first"))
        build_peak = peak_mib()
        again, _ = built(recipe(f"{folder}/again"))
        problems = load_problems(Path(folder) / "first" / "problems.jsonl")
        if count:
            sample(Path(folder) / "first", count)
    benchmarks = list(benchmark_questions(Datasheet(config=first.config, rules=[])))
    shared = overlaps([problem.question for problem in problems], [b.question for b in benchmarks])
    read, kept = first.total("read"), first.total("kept")
    table = Table("rows", "all", *first.sources)
    for fate, rows, by_source in first.funnel():
        table.row(fate, rows, *(by_source[name] for name in first.sources))
    counted = countings(first, problems)
    print_figures({**counted, "pool problems that share an 8-gram, words cut at": shared})
    per_40k = cpu_seconds * 40_000 / read
    print(f"\nCPU {cpu_seconds:.1f} s for {read:,} rows, {per_40k:.1f} s per 40,000; peak {build_peak:.0f} MiB")
    return {
        "read": read,
        "kept": kept,
        "rewritten": first.asked.total(),
        "reworded": first.reworded.total(),
        **counted,
        "all_integer": all(re.fullmatch(r"-?\d+", problem.answer) for problem in problems),
        "same_bytes": first.outputs == again.outputs and first.json_bytes() == again.json_bytes(),
        "cpu_seconds": round(cpu_seconds, 1),
        "cpu_seconds_per_40000": round(per_40k, 1),
        "peak_mib": round(build_peak),
        "overlapping": shared,
        "benchmark_questions": len(benchmarks),
        "funnel": {fate: rows for fate, rows, _ in first.funnel()},
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, help="build a synthetic source of so many rows, print the peak memory")
    arguments.add_argument("--sample", type=int, default=0, help="draw so many dropped rows")
    options = arguments.parse_args()
    report(**(measure_memory(options.rows) if options.rows else measure_pool(options.sample)))


if __name__ == "__main__":
    main()
