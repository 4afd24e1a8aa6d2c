"""Rollouts that others wrote, made into files of attempts that the page reads. None of their libraries is needed.

    TRL         completions/completions_00007.parquet (log_completions=True), or its rows as JSONL
    verl        7.jsonl (trainer.rollout_data_dir, trainer.validation_data_dir)
    verifiers   results.jsonl beside metadata.json (vf-eval, prime-rl), traces.jsonl (its version 1)
    inspect_ai  logs: .eval, .json

What no column of ours holds whole stays in one more, `fields`, under the name that it had. A row that cannot be read is
left out and told with its place and field. Source: what the libraries' writers write; the reading is ours.

Not here: logs as kept evaluations (adapters/inspect_logs.py) and dumps to learn from again (run/dumps.py)."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow
from pyarrow import parquet

from rocstar.errors import ConfigError
from rocstar.record.call_errors import error_of_output
from rocstar.record.rollouts import COLUMNS, attempts_schema
from rocstar.types import RIGHT_ABOVE, Status, Verdict, problem_id
from rocstar.view.sources import Library, RunSource

ENDINGS = (".parquet", ".jsonl", ".eval", ".json")
OF_A_STEP = re.compile(r"(completions_)?\d+")  # files of one folder that are read as one
STEP_FOLDER = re.compile(r"step_(\d+)")
LONGEST_FIELD = 20_000  # characters; of a longer one the page tells its length
BATCH, ROW_GROUP = 1_000, 500  # rows: made at once, and read for one attempt
LAST_STEP = 2**31
ZSTD = 93  # of a zip; Python reads it from 3.14 on
SHOWN = 5  # refusals that are told in words
MARKS = {"c": 1.0, "yes": 1.0, "true": 1.0, "i": 0.0, "n": 0.0, "no": 0.0, "false": 0.0, "p": 0.5}
"""Letters and words that inspect_ai reads as numbers."""
KNOWN = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "error"}
"""Of a message; what else one has is kept among the fields."""
Fields = dict[str, Any]


class Unread(ValueError):
    """A row that is left out."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")


def opened_others(place: Path, folder: Path, tell: Callable[[str], None]) -> Library | None:
    """What is at a path, made into files below `folder`; None where that is a folder without such rollouts, or with
    runs. tell: is called with what was left out. Raises ConfigError for a file without them, OSError."""
    if not place.is_file() and ((place / "run.json").exists() or not place.is_dir() or Library(base=place).sources()):
        return None
    base, dumps, sources = place if place.is_dir() else place.parent, defaultdict[Path, list[Path]](list), []
    for file in [place] if place.is_file() else sorted(filter(_may_be_read, place.rglob("*"))):
        dumps[file.parent if OF_A_STEP.fullmatch(file.stem) else file].append(file)
    for number, (key, files) in enumerate(dumps.items()):
        made = _Made(folder / str(number))
        for file in files:
            made.take(file)
        told, name = made.told(files), ":".join(key.relative_to(base).parts) or place.resolve().name
        sources += [RunSource(name=f"file:{name}", root=made.root, others=told)] if made.rows else []
        for said in told["refused"]:
            tell(f"left out: {said}")
    if place.is_file() and not sources:
        raise ConfigError(f"{place} holds no rollouts of TRL, verl, verifiers or inspect_ai that can be read")
    only = f"/run/{quote(sources[0].name, safe='')}/attempts" if len(sources) == 1 else "/"
    return Library(base=place, first=only, opened=tuple(sources)) if sources else None


def _may_be_read(file: Path) -> bool:
    if file.suffix not in ENDINGS or not file.is_file():
        return False
    with file.open("rb") as opened:
        return file.suffix != ".json" or b'"eval"' in opened.read(2_000)


class _Made:
    """Files of attempts of one dump, one for each step."""

    def __init__(self, root: Path) -> None:
        self.root, self.rows, self.left_out = root, 0, 0
        self.forms: Counter[str] = Counter()
        self.refused: list[str] = []
        self._about: Fields = {}
        self._files: dict[int, Path] = {}
        (root / "rollouts").mkdir(parents=True)

    def told(self, files: Sequence[Path]) -> Fields:
        """What the page says of the dump."""
        left = f"{self.left_out} of {self.rows + self.left_out} rows; these first:"
        refused = [left, *self.refused] if self.left_out else []
        about = {"written by": ", ".join(self.forms), "files": [str(file) for file in files], "attempts": self.rows}
        return {"refused": refused, "about": {**about, **self._about}}

    def take(self, file: Path) -> None:
        """Read one file, all of it or none."""
        there = STEP_FOLDER.findall(str(file))
        step, tables, batch, keys = int(there[-1]) if there else 0, list[Any](), list[Fields](), list[Fields]()
        try:
            self._about |= _about_of(file)
            for place, raw in _records(file):
                try:
                    found = list(_attempts(_loaded(raw)))
                    for one in found:
                        one["step"] = step if one["step"] is None else _whole(one, "step")
                except (AttributeError, KeyError, LookupError, RecursionError, TypeError, ValueError) as error:
                    why = error if isinstance(error, Unread) else f"{error} is missing or of another form"
                    self._refuse(f"{file}: {place}, {why}")
                    continue
                keys += [{name: one[name] for name in ("step", "problem_id", "index", "reward", "source")} for one in found]
                batch += found
                if len(batch) >= BATCH:
                    tables.append(_table(batch))
                    batch = []
            self._write(file, [*tables, _table(batch)], keys)
        except (pyarrow.ArrowException, zipfile.BadZipFile, OSError, KeyError, TypeError, ValueError) as error:
            self._refuse(f"{file}: all: {str(error).splitlines()[0][:300] if str(error) else type(error).__name__}")

    def _refuse(self, said: str) -> None:
        self.left_out += 1
        self.refused += [said] if len(self.refused) < SHOWN else []

    def _write(self, file: Path, tables: Sequence[Any], keys: Sequence[Fields]) -> None:
        """Siblings together, in the order in which their problem came; one that says no number has that of its row."""
        first: dict[tuple[int, str], int] = {}
        names = [(key["step"], key["problem_id"]) for key in keys]
        for place, name in enumerate(names):
            first.setdefault(name, place)
        order = sorted(range(len(keys)), key=lambda n: (names[n][0], first[names[n]], keys[n]["index"] or 0, n))
        siblings: Counter[tuple[int, str]] = Counter()
        numbers, steps = list[int](), Counter(step for step, _ in names)
        for place in order:
            numbers.append(siblings[names[place]])
            siblings[names[place]] += 1
        table = pyarrow.concat_tables(tables).take(order)
        table = table.set_column(table.schema.get_field_index("index"), "index", pyarrow.array(numbers, pyarrow.int32()))
        begin = 0
        with (self.root / "metrics.jsonl").open("a") as metrics:
            for step in sorted(steps):
                part, begin = table.slice(begin, steps[step]), begin + steps[step]
                if (other := self._files.setdefault(step, file)) != file:
                    self._refuse(f"{file}: step {step} was read from {other} already")
                    continue
                target = self.root / "rollouts" / f"step={step:06d}.parquet"
                parquet.write_table(part, target, compression="zstd", row_group_size=ROW_GROUP)
                some = [keys[n] for n in order[begin - steps[step] : begin]]
                rewards = [one["reward"] for one in some if one["reward"] is not None]
                mean = {"reward/mean": sum(rewards) / len(rewards)} if rewards else {}
                metrics.write(json.dumps({"step": step, "stage": some[0]["source"], **mean}) + "\n")
                self.forms.update(one["source"] for one in some)
                self.rows += len(some)


def _about_of(file: Path) -> Fields:
    """What is said of all rows."""
    beside = file.with_name("metadata.json")
    if file.suffix == ".eval":
        with zipfile.ZipFile(file) as log:
            heads = [info for info in log.infolist() if info.filename in ("header.json", "_journal/start.json")]
            return {key: value for info in heads for key, value in _loaded(_member(log, info)).items()}
    if file.suffix == ".json":
        return {key: value for key, value in _loaded(file.read_bytes()).items() if key != "samples"}
    return _loaded(beside.read_bytes()) if file.name == "results.jsonl" and beside.is_file() else {}


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """(place in the file, a row or the JSON of one)."""
    if file.suffix == ".parquet":
        with parquet.ParquetFile(file) as opened:
            rows = (row for batch in opened.iter_batches(BATCH) for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows))
    elif file.suffix == ".eval":
        with zipfile.ZipFile(file) as log:
            samples = (info for info in log.infolist() if info.filename.startswith("samples/"))
            yield from ((info.filename, _member(log, info)) for info in samples)
    elif file.suffix == ".json":
        yield from ((f"sample {number}", one) for number, one in enumerate(_loaded(file.read_bytes())["samples"]))
    else:
        with file.open("rb") as lines:
            yield from ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())


def _member(log: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.compress_type != ZSTD:
        return log.read(info)
    assert log.fp
    log.fp.seek(info.header_offset)
    head = log.fp.read(30)
    log.fp.seek(int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"), 1)
    packed = pyarrow.BufferReader(log.fp.read(info.compress_size))
    return bytes(pyarrow.CompressedInputStream(packed, "zstd").read())


def _loaded(raw: bytes | Fields) -> Fields:
    try:
        found = raw if isinstance(raw, dict) else msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError):  # NaN, or half a surrogate pair, which json reads
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise Unread("all", f"it is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise Unread("all", "it is no JSON object")
    return found


def _attempts(row: Fields) -> Iterator[Fields]:
    for needed, read in FORMS:
        if needed <= row.keys():
            return read(row)
    raise Unread(", ".join(list(row)[:9]) or "all", "no rows of TRL, verl, verifiers or inspect_ai have these fields")


def _trl(row: Fields) -> Iterator[Fields]:
    """TRL writes the rewards of its functions beside what they logged, and no sum: that of all floats is taken."""
    rewards = {name: value for name, value in row.items() if isinstance(value, float) and name != "advantage"}
    told = {"reward": sum(rewards.values()) if rewards else None, "method": " + ".join(rewards) or None}
    yield _row("TRL", row, row.pop("prompt"), row.pop("completion"), **told, advantage=_number(row, "advantage"))


def _verl(row: Fields) -> Iterator[Fields]:
    told = {"gold": row.pop("gts", None), "reward": _number(row, "score"), "method": "score"}
    yield _row("verl", row, row.pop("input"), row.pop("output"), named=("input", "output"), **told)


def _verifiers(row: Fields) -> Iterator[Fields]:
    timing, usage = row.get("timing") or {}, row.get("token_usage") or {}
    seconds = timing["total_ms"] / 1000 if "total_ms" in timing else timing.get("total")
    tokens, name = usage.get("output_tokens"), row.get("example_id", row.get("id"))
    yield _row(
        "verifiers",
        row,
        row.pop("prompt"),
        row.pop("completion") or [],
        problem_id=None if name is None else str(name),
        gold=row.pop("answer", None),
        reward=_number(row, "reward"),
        method="reward",
        advantage=_number(row, "advantage"),
        stop=row.pop("stop_condition", None),
        fault=_text(row.pop("error", None)) or None,
        seconds=seconds if isinstance(seconds, int | float) else None,
        response_tokens=None if tokens is None else int(tokens),
    )


def _traces(row: Fields) -> Iterator[Fields]:
    """One attempt for each branch of a trace, from its root to a leaf."""
    work = (row.get("run") or {}).get("work") or {}
    for trace in row["traces"]:
        nodes, task = trace["nodes"], trace["task"]
        for leaf in sorted({*range(len(nodes))} - {node.get("parent") for node in nodes}):
            path = [leaf]
            while (before := nodes[path[0]].get("parent")) is not None:
                if before >= path[0]:
                    raise Unread("nodes", f"node {path[0]} comes before its parent {before}")
                path.insert(0, before)
            begun = next((n for n, place in enumerate(path) if nodes[place].get("sampled")), len(path))
            said, rewards = [nodes[place]["message"] for place in path], (trace.get("rewards") or {}).values()
            marks = [one["score"] * one.get("weight", 1.0) for one in rewards if one]
            yield _row(
                "verifiers",
                {**{key: value for key, value in row.items() if key not in ("traces", "task")}, **trace},
                said[:begun],
                said[begun:],
                problem_id=task.get("key") or task.get("hash"),
                gold=task["data"].get("answer"),
                reward=sum(marks) if marks else None,
                method=" + ".join(trace.get("rewards") or {}) or None,
                stop=trace.get("stop_condition"),
                fault="; ".join(f"{one['type']}: {one['message']}" for one in trace.get("errors") or ()) or None,
                response_tokens=sum(sum(nodes[place].get("mask") or ()) for place in path) or None,
                step=work.get("step"),
            )


def _inspect(row: Fields) -> Iterator[Fields]:
    """The first scorer's mark is the reward; letters and words count as inspect_ai counts them."""
    kept = row.pop("attachments", None) or {}
    row = _attached(row, kept) if kept else row
    said = row.pop("messages") or []
    begun = next((n for n, one in enumerate(said) if one["role"] == "assistant"), len(said))
    scorer, score = next(iter((row.get("scores") or {}).items()), (None, {}))
    mark, usage, limit = score.get("value"), (row.get("model_usage") or {}).values(), row.get("limit") or {}
    value = MARKS.get(mark.lower()) if isinstance(mark, str) else mark
    yield _row(
        "inspect_ai",
        row,
        said[:begun] or row["input"],
        said[begun:],
        problem_id=str(row.pop("id")),
        index=row.pop("epoch") - 1,
        gold=row.pop("target", None),
        reward=float(value) if isinstance(value, int | float) and math.isfinite(value) else None,
        extracted=_text(score.get("answer")) or None,
        method=scorer,
        stop=limit.get("type"),
        fault=(row.get("error") or {}).get("message"),
        seconds=row.get("total_time"),
        response_tokens=sum(one["output_tokens"] for one in usage) or None,
    )


def _attached(value: Any, kept: Mapping[str, str]) -> Any:
    """With the long texts that a log keeps apart."""
    if isinstance(value, str) and value.startswith("attachment://"):
        return kept.get(value.removeprefix("attachment://"), value)
    if isinstance(value, dict):
        return {key: _attached(inner, kept) for key, inner in value.items()}
    return [_attached(inner, kept) for inner in value] if isinstance(value, list) else value


FORMS: tuple[tuple[set[str], Callable[[Fields], Iterator[Fields]]], ...] = (
    ({"traces"}, _traces),
    ({"input", "output", "score", "step"}, _verl),
    ({"messages", "input", "epoch", "id"}, _inspect),
    ({"prompt", "completion", "example_id"}, _verifiers),
    ({"prompt", "completion", "advantage", "step"}, _trl),
    ({"prompt", "completion", "reward"}, _verifiers),
)
"""Fields that tell a form, and what reads it; the first that fits."""


def _row(
    form: str,
    fields: Fields,
    prompt: Any,
    said: Any,
    *,
    named: tuple[str, str] = ("prompt", "completion"),
    **columns: Any,
) -> Fields:
    """A row of COLUMNS and `fields`."""
    asked, answered = _messages(named[0], prompt, "user"), _messages(named[1], said, "assistant")
    alone = len(asked) == 1 and asked[0]["role"] == "user"
    question = _utf8(_said(asked[0]) if alone else "\n\n".join(f"{one['role']}: {_said(one)}" for one in asked))
    turns, texts = _turns(answered)
    results = [result for turn in turns for result in turn["results"] if result]
    for place, message in enumerate([*asked, *answered]):
        if left := {name: message[name] for name in message.keys() - KNOWN}:
            fields[f"message {place}"] = left
    step, reward = fields.pop("step", None), columns.get("reward")
    reward = None if reward is None or math.isnan(reward) else reward
    verdict = None if reward is None else Verdict.RIGHT if reward > RIGHT_ABOVE else Verdict.WRONG
    told = {
        **dict.fromkeys(COLUMNS),
        "step": step,
        "source": form,
        "question": question,
        "turns": _json(turns),
        "text": texts,
        "verdict": verdict and str(verdict),
        "calls": None if isinstance(said, str) else sum(len(turn["calls"]) for turn in turns),
        "failed_calls": None if isinstance(said, str) else sum(one["status"] != Status.OK for one in results),
        **{name: _utf8(value) if isinstance(value, str) else value for name, value in columns.items()},
        "reward": reward,
        "gold": _text(columns.get("gold")),
        "fields": _json({key: _short(value) for key, value in fields.items()}),
    }
    return {**told, "problem_id": told["problem_id"] or problem_id(question)}


def _messages(field: str, value: Any, role: str) -> list[Fields]:
    """A text is one message of a role. Parquet gives each message the keys of all, empty where it has none."""
    found = [{"role": role, "content": value}] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, dict) and "role" in one for one in found):
        raise Unread(field, "it is neither a text nor a list of messages")
    return [{key: inner for key, inner in one.items() if inner is not None} for one in found]


def _turns(messages: Sequence[Fields]) -> tuple[list[Fields], list[str]]:
    """Turns with their calls and results; what anybody else said stands in a turn's `replies`."""
    turns, texts = list[Fields](), list[str]()
    for message in messages:
        if message["role"] == "assistant" or not turns:
            own = message["role"] == "assistant"
            calls = [_call(one, place) for place, one in enumerate(message.get("tool_calls") or ())] if own else []
            texts.append(_utf8(_said(message)) if own else "")
            size = len(texts[-1])
            places = [[0, size, None]] * (size > 0) + [[size, size, number] for number in range(len(calls))]
            none = dict.fromkeys(("sampled_tokens", "reply_tokens", "engine_seconds", "tool_seconds"))
            turn = {**none, "finish": "stop", "version_spans": [], "calls": calls, "results": [None] * len(calls)}
            turns.append({**turn, "segments": places, "replies": []})
            if own:
                continue
        turn, asked = turns[-1], message.get("tool_call_id")
        free = [place for place, result in enumerate(turn["results"]) if result is None]
        named = [place for place in free if turn["calls"][place]["id"] == asked]
        if message["role"] == "tool" and free:
            turn["results"][(named or free)[0]] = _result(message)
        else:
            turn["replies"].append({"role": message["role"], "text": _said(message)})
    return turns, texts


def _call(call: Any, place: int) -> Fields:
    """OpenAI's form, also as JSON in a text, and the flat forms of verifiers and inspect_ai."""
    call = json.loads(call) if isinstance(call, str) else call
    inner = call["function"] if isinstance(call.get("function"), dict) else {"name": call.get("function"), **call}
    given = inner.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        arguments = None
    told = {"id": call.get("id") or f"call_{place}", "tool": inner["name"], "raw": _text(given)}
    return {**told, "arguments": arguments if isinstance(arguments, dict) else {}, "parse_error": call.get("parse_error")}


def _result(message: Fields) -> Fields:
    """A call has failed where the log says so, or the text is that of a traceback or a time-out."""
    text, error = _said(message), message.get("error") or {}
    failed = error.get("message") or (text if error_of_output(text) else "")
    unknown = dict.fromkeys(("run_seconds", "queue_seconds", "truncated_bytes", "isolation"))
    outputs = {"stdout": "" if failed == text else text, "value": "", "stderr": failed}
    return {**unknown, **outputs, "call_id": "", "status": Status.CODE_ERROR if failed or error else Status.OK}


def _said(message: Fields) -> str:
    """The text of a message, reasoning between tags; parts of other kinds as JSON."""
    content, thought = message.get("content"), message.get("reasoning_content")
    parts = content if isinstance(content, list) else [content or ""]
    texts = [one if isinstance(one, str) else _part(one) for one in parts]
    return "\n".join([*([f"<think>{thought}</think>"] if thought else []), *texts])


def _part(part: Fields) -> str:
    if part.get("type") == "text":
        return str(part["text"])
    return f"<think>{part['reasoning']}</think>" if part.get("type") == "reasoning" else _text(part)


def _table(rows: Sequence[Fields]) -> Any:
    schema = attempts_schema().append(pyarrow.field("fields", pyarrow.string()))
    columns = [pyarrow.array([row[field.name] for row in rows], field.type) for field in schema]
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _whole(row: Fields, name: str) -> int:
    if not isinstance(row[name], int) or not 0 <= row[name] < LAST_STEP:
        raise Unread(name, f"{row[name]!r} is no whole number from 0 on")
    return int(row[name])


def _number(row: Fields, name: str) -> float | None:
    """Taken out of the row where it is one."""
    value = row.pop(name, None)
    if value is not None and not isinstance(value, int | float):
        raise Unread(name, f"{_text(value)[:80]!r} is no number")
    return None if value is None or math.isnan(value) else float(value)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value, default=str)


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else "" if isinstance(value, int | float) else _json(value)
    return value if len(text) <= LONGEST_FIELD else f"{len(text)} characters, which stay in the file"


def _text(value: Any) -> str:
    return "" if value is None else _utf8(value if isinstance(value, str) else _json(value))


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
