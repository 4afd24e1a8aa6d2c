"""What `rocstar view FILE` takes to open rollouts that another trainer wrote: seconds from the command to a page that
lists and counts all rows, CPU seconds and memory of the server, and seconds of a few looks.

    python benchmarks/others.py --rows 100000                    # of verl, 1.3 kB each
    python benchmarks/others.py --rows 100000 --form verifiers   # messages with calls and results
    python benchmarks/others.py --rows 100000 --form TRL         # a parquet file

Wall seconds mean something on an idle machine only. Each row has an answer of 220 words by chance.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow
from frame import environment, free_port, parser, print_figures, report, rocstar, serving, spent
from pyarrow import parquet
from view import Server, answers

WORDS = "the sum of two primes equals a number so we compute it modulo seven and check each case boxed"
SIBLINGS = 8


def row_of(form: str, number: int, draw: random.Random) -> dict[str, Any]:
    question, said = f"What is {number // SIBLINGS} + 1?", " ".join(draw.choices(WORDS.split(), k=220))
    reward = float(draw.random() < 0.5)
    if form == "verl":
        return {"input": question, "output": said, "gts": "1", "score": reward, "step": 7, "acc": reward}
    prompt, answer = [{"role": "user", "content": question}], {"role": "assistant", "content": said}
    if form == "TRL":
        return {"step": 7, "prompt": prompt, "completion": [answer], "right": reward, "advantage": reward - 0.5}
    calls = {"tool_calls": [{"id": "c1", "name": "python", "arguments": '{"code": "print(1)"}'}]}
    turns = [*prompt, {**answer, **calls}, {"role": "tool", "tool_call_id": "c1", "content": "1"}, answer]
    nodes = [{"parent": n - 1 if n else None, "message": one, "sampled": n > 0} for n, one in enumerate(turns)]
    return {"traces": [{"task": {"data": {}, "key": question}, "nodes": nodes, "rewards": {"r": {"score": reward}}}]}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, default=100_000)
    arguments.add_argument("--form", choices=("verl", "TRL", "verifiers"), default="verl")
    asked, draw = arguments.parse_args(), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = (row_of(asked.form, number, draw) for number in range(asked.rows))
        file = Path(folder) / ("rows.parquet" if asked.form == "TRL" else "rows.jsonl")
        if asked.form == "TRL":
            parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        port, run, began = free_port(), f"run/{quote(f'file:{file.name}')}", time.monotonic()
        child: dict[str, Any] = {"env": environment(), "stderr": subprocess.DEVNULL}
        with serving(rocstar("view", str(file), "--no-browser"), port, lambda: answers(port), **child) as pid:
            server = Server(port, pid)
            figures: dict[str, Any] = {"mb": file.stat().st_size / 1e6, "first_page": time.monotonic() - began}
            while server.get(f"{run}/attempts", limit=100)["total"] < asked.rows:
                time.sleep(0.05)
            figures |= {"all_rows": time.monotonic() - began, "all_rows_cpu": server.cpu()}
            step, row = 0 if asked.form == "verifiers" else 7, min(4_000, asked.rows // 2)
            for name, path, query in (
                ("sorted", "attempts", {"sort": "-reward"}),
                ("searched", "attempts", {"q": "1234 + 1"}),
                ("attempt", "attempt", {"part": "rollouts", "step": step, "row": row}),
            ):
                with spent() as seconds:
                    server.get(f"{run}/{path}", **query)
                figures[name] = seconds.wall
            figures["peak_mib"] = server.memory()
    print_figures(figures)
    report(form=asked.form, rows=asked.rows, **figures)


if __name__ == "__main__":
    main()
