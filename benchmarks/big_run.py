"""A run folder of many attempts, for `view.py` to measure the page of `rocstar view` on: a copy of a real run, whose
rollouts come again and again as those of further steps.

    python benchmarks/big_run.py FOLDER --run runs/quickstart --attempts 100000

Attempts keep their tokens, texts, calls and choices, and so the lengths that they have in that run. Each repetition has
problem ids of its own. Further steps are of the last stage, with the metrics of those that they repeat.
"""

from __future__ import annotations

import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

from frame import parser, read_rows, report, spent
from pyarrow import parquet

from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal
from rocstar.record.rollouts import ROW_GROUP_TOKENS, read_table


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="where the run folder `big` is made")
    arguments.add_argument("--run", type=Path, required=True, help="folder of a run with rollouts")
    arguments.add_argument("--attempts", type=int, default=100_000, help="at the least")
    options = arguments.parse_args()
    source, run = RunFolder(options.run), RunFolder(options.folder / "big")
    with spent() as seconds:
        shutil.copytree(source.path, run.path, ignore=shutil.ignore_patterns("checkpoints"))
        run.checkpoints.symlink_to(source.checkpoints.resolve())  # for the tokenizer
        attempts = add_steps(run, options.attempts)
    files = list(run.rollouts.iterdir())
    size = sum(file.stat().st_size for file in files)
    print(f"{run.path}: {attempts:,} attempts in {len(files)} steps, {size / 2**20:,.0f} MiB")
    report(run=str(run.path), attempts=attempts, steps=len(files), bytes=size, seconds=round(seconds.wall, 1))


def add_steps(run: RunFolder, attempts: int) -> int:
    """Repeats the steps of a run until it has so many attempts; how many it has then."""
    metrics = {row["step"]: row for row in read_rows(run.metrics)}
    tables = [(step, read_table(file)) for step in metrics if (file := run.rollout_file(step)).exists()]
    if not tables:
        raise SystemExit(f"{run.path} has no rollouts; give a run that was made with run.save_rollouts")
    there, last = sum(len(table) for _, table in tables), metrics[max(metrics)]
    with Journal(run.metrics) as journal:
        for number, (repeated, table) in enumerate(cycle(tables)):
            if there >= attempts:
                break
            step, stage_step = (last[key] + 1 + number for key in ("step", "stage_step"))
            tokens = 1 + len(table["token_ids"].combine_chunks().flatten())
            rows = max(1, len(table) * ROW_GROUP_TOKENS // tokens)  # in a row group, as a run writes it
            further = renamed(table, step, f"-{1 + number // len(tables)}")
            parquet.write_table(further, run.rollout_file(step), compression="zstd", row_group_size=rows)
            journal.append({**metrics[repeated], "step": step, "stage": last["stage"], "stage_step": stage_step})
            there += len(table)
    return there


def renamed(table: Any, step: int, suffix: str) -> Any:
    """The rollouts under another step, their problem ids with the suffix."""
    import pyarrow
    from pyarrow import compute

    ids = compute.binary_join_element_wise(table["problem_id"], suffix, "")
    for name, values in {"step": pyarrow.array([step] * len(table)), "problem_id": ids}.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), values)
    return table


if __name__ == "__main__":
    main()
