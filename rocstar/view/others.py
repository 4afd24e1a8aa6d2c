"""Rollouts that others wrote, made into files of attempts that the page reads. None of their libraries is needed.

    TRL         completions/completions_00007.parquet (log_completions=True), or its rows as JSONL
    verl        7.jsonl (trainer.rollout_data_dir, trainer.validation_data_dir)
    verifiers   results.jsonl beside metadata.json (vf-eval, prime-rl), traces.jsonl (its version 1)
    inspect_ai  logs: .eval, .json

What no column of ours holds whole stays in one more, `fields`, under the name that it had. A row that cannot be read is
left out and told with its place and field. Source: what the libraries' writers write; the reading is ours.

Not here: logs as kept evaluations (adapters/inspect_logs.py) and dumps to learn from again (run/dumps.py)."""

from __future__ import annotations

import contextlib
import json
import math
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow
from pyarrow import parquet

from rocstar.errors import ConfigError
from rocstar.record.call_errors import error_of_output
from rocstar.record.rollouts import attempts_schema
from rocstar.types import RIGHT_ABOVE, Status, Verdict, problem_id
from rocstar.view.sources import Library, RunSource

ENDINGS = (".parquet", ".jsonl", ".eval", ".json")
PACKED = (".gz", ".bz2", ".xz", ".zst")
OF_A_STEP = re.compile(r"(completions_)?\d+")  # files of one folder that are read as one
STEP_FOLDER = re.compile(r"step_(\d+)")
LONGEST_FIELD = 20_000  # characters; of a longer one the page tells its length
BATCH, PART = 1_000, 5_000  # rows: made at once, and of a file, which the index takes up in one go
ROW_GROUP, GROUP_BYTES = 500, 1 << 22  # that are read for one attempt, at most
LARGEST = 2**31 - 1  # whole number that a column holds
ZSTD = 93  # of a zip; Python reads it from 3.14 on
SHOWN = 5  # refusals that are told in words
KEYS = ("step", "problem_id", "index", "reward", "source")  # by which a row finds its place
TEXTS = ("extracted", "method", "stop", "fault")
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
    shown = _utf8(str(place))
    if place.is_file() and place.suffix in PACKED:
        raise ConfigError(f"{shown} is compressed: decompress it, then name the file that comes out")
    base, sources = place if place.is_dir() else place.parent, list[RunSource]()
    dumps = defaultdict[Path, list[Path]](list)
    for file in [place] if place.is_file() else sorted(filter(_may_be_read, place.rglob("*"))):
        dumps[file.parent if OF_A_STEP.fullmatch(file.stem) else file].append(file)
    for number, (key, files) in enumerate(dumps.items()):
        made = _Made(folder / str(number))
        for file in files:
            made.take(file)
        told, plain = made.told(files), _utf8(f"file:{':'.join(key.relative_to(base).parts) or place.resolve().name}")
        numbered, taken = (f"{plain} ({n})" for n in count(2)), {source.name for source in sources}
        name = next(name for name in chain([plain], numbered) if name not in taken)
        sources += [RunSource(name=name, root=made.root, others=told)] if made.rows else []
        for said in told["refused"]:
            tell(f"left out: {said}")
    if place.is_file() and not sources:
        raise ConfigError(f"{shown} holds no rollouts of TRL, verl, verifiers or inspect_ai that can be read")
    only = f"/run/{quote(sources[0].name, safe='')}/attempts" if len(sources) == 1 else "/"
    return Library(base=Path(shown), first=only, opened=tuple(sources)) if sources else None


def _may_be_read(file: Path) -> bool:
    try:
        if file.suffix not in ENDINGS or not file.is_file():
            return False
        with file.open("rb") as opened:
            return file.suffix != ".json" or b'"eval"' in opened.read(2_000)
    except OSError:  # which `take` tells
        return True


class _Made:
    """Files of attempts of one dump, of each step in `rollouts`, and in `rollouts.2` and so on where it is large."""

    def __init__(self, root: Path) -> None:
        self.root, self.rows, self._left_out = root, 0, 0
        self._forms: Counter[str] = Counter()
        self._refused: list[str] = []
        self._about: Fields = {}
        self._steps: dict[int, tuple[Path, Fields]] = {}
        root.mkdir(parents=True)

    def told(self, files: Sequence[Path]) -> Fields:
        """What the page says of the dump, and its curves, once all is read."""
        lines = (json.dumps(row) + "\n" for _, (_, row) in sorted(self._steps.items(), key=lambda one: one[0]))
        (self.root / "metrics.jsonl").write_text("".join(lines))
        first = [f"{self._left_out} of {self.rows + self._left_out} rows; these first:"] if self._left_out else []
        names = [_utf8(str(file)) for file in files]
        about = {"written by": ", ".join(self._forms), "files": names, "attempts": self.rows}
        return {"refused": [*first, *self._refused], "about": {**about, **self._about}}

    def take(self, file: Path) -> None:
        """Read one file, and leave out what cannot be read."""
        there = STEP_FOLDER.findall(str(file))
        tables, batch, rows = list[Any](), list[Fields](), list[Fields]()
        try:
            self._about |= _about_of(file)
            floats = _floats(file)
            for place, raw in _records(file):
                try:
                    found = list(_attempts(_loaded(raw), int(there[-1]) if there else 0, floats))
                except Unread as error:
                    self._refuse(f"{file}: {place}, {error}")
                except KeyError as error:
                    self._refuse(f"{file}: {place}, {error.args[0]}: it is missing")
                except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                    self._refuse(f"{file}: {place}, all: it has another form ({error})")
                else:
                    rows += [{name: one[name] for name in KEYS} for one in found]
                    batch += found
                if len(batch) >= BATCH:
                    tables.append(_table(batch))
                    batch = []
            self._write(file, pyarrow.concat_tables([*tables, _table(batch)]), rows)
        except (pyarrow.ArrowException, zipfile.BadZipFile, OSError, KeyError, TypeError, ValueError) as error:
            self._refuse(f"{file}: all: it cannot be read ({str(error).partition(chr(10))[0][:300]})")

    def _refuse(self, said: str, rows: int = 1) -> None:
        self._left_out += rows
        self._refused += [_utf8(said)] if len(self._refused) < SHOWN else []

    def _write(self, file: Path, table: Any, rows: Sequence[Fields]) -> None:
        """Siblings stand together, in the order in which their problem came, and are numbered from 0."""
        groups: dict[tuple[int, str], list[int]] = defaultdict(list)
        for place in sorted(range(len(rows)), key=lambda n: rows[n]["index"] or 0):
            groups[rows[place]["step"], rows[place]["problem_id"]].append(place)
        steps: dict[int, list[list[int]]] = defaultdict(list)
        for (step, _), places in sorted(groups.items(), key=lambda one: min(one[1])):
            steps[step].append(places)
        for step, siblings in steps.items():
            if step in self._steps:
                said = f"{file}: step: {step} was read from {self._steps[step][0]} already"
                self._refuse(said, sum(map(len, siblings)))
                continue
            parts, size = defaultdict[int, list[tuple[int, int]]](list), 0
            for pair in (pair for places in siblings for pair in enumerate(places)):
                if not pair[0] % PART:  # a problem begins, or has more attempts than a file
                    number = size // PART
                parts[number].append(pair)
                size += 1
            for number, pairs in parts.items():
                self._write_part(f"rollouts.{number + 1}" if number else "rollouts", step, table, pairs)
            some = [rows[place] for places in siblings for place in places]
            rewards = [one["reward"] for one in some if one["reward"] is not None]
            mean = {"reward/mean": sum(rewards) / len(rewards)} if rewards else {}
            self._steps[step] = file, {"step": step, "stage": some[0]["source"], **mean}
            self._forms.update(one["source"] for one in some)
            self.rows += size

    def _write_part(self, name: str, step: int, table: Any, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: of a sibling's number and its place in the table."""
        numbers, order = zip(*pairs, strict=True)
        part = table.take(list(order))
        at = part.schema.get_field_index("index")
        part = part.set_column(at, "index", pyarrow.array(numbers, pyarrow.int32()))
        (self.root / name).mkdir(exist_ok=True)
        target = self.root / name / f"step={step:06d}.parquet"
        size = max(1, min(ROW_GROUP, len(part) * GROUP_BYTES // part.nbytes))
        parquet.write_table(part, target, compression="zstd", row_group_size=size)


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
    if isinstance(raw, dict):
        return raw
    try:
        found = _parsed(raw)
    except ValueError as error:
        raise Unread("all", f"it is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise Unread("all", "it is no JSON object")
    return found


def _parsed(text: bytes | str) -> Any:
    try:
        return msgspec.json.decode(text)
    except ValueError:  # NaN, or half a surrogate pair, which json reads
        return json.loads(text)


def _floats(file: Path) -> set[str]:
    """Of TRL's rows as JSONL, what is a float in any: there a reward of 1.0 may stand as 1."""
    found = set[str]()
    for _, line in _records(file) if file.suffix == ".jsonl" else ():
        if b'"advantage"' in line:
            with contextlib.suppress(RecursionError, ValueError):  # `take` tells it
                found |= {name for name, value in _loaded(line).items() if isinstance(value, float)}
    return found - {"step"}


def _attempts(row: Fields, step: int, floats: Set[str]) -> Iterator[Fields]:
    """Rows of COLUMNS and `fields`. step: of those that do not say theirs. floats: what TRL wrote as one."""
    for needed, read in FORMS:
        if needed <= row.keys():
            whole = [name for name in floats & row.keys() if read is _trl and type(row[name]) is int]
            found = list(read(row | {name: float(row[name]) for name in whole}))
            if not found:
                raise Unread(", ".join(needed), "there is no attempt in it")
            yield from (one if one["step"] is not None else {**one, "step": _whole("step", step)} for one in found)
            return
    raise Unread(", ".join(list(row)[:9]) or "all", "no rows of TRL, verl, verifiers or inspect_ai have these fields")


def _trl(row: Fields) -> Iterator[Fields]:
    """TRL writes the rewards of its functions beside what they logged, and no sum: that of all floats is taken, without
    NaN, as TRL takes it."""
    floats = {name: value for name, value in row.items() if isinstance(value, float) and name != "advantage"}
    rewards = {name: value for name, value in floats.items() if not math.isnan(value)}
    reward, method = sum(rewards.values()) if rewards else None, " + ".join(rewards) or None
    yield _row("TRL", row, reward=reward, method=method, advantage=row.pop("advantage"))


def _verl(row: Fields) -> Iterator[Fields]:
    told = {"gold": row.pop("gts", None), "reward": row.pop("score"), "method": "score"}
    yield _row("verl", row, "input", "output", **told)


def _verifiers(row: Fields) -> Iterator[Fields]:
    timing, usage = row.get("timing") or {}, row.get("token_usage") or {}
    row["completion"] = row["completion"] or []  # of a rollout that broke
    yield _row(
        "verifiers",
        row,
        problem_id=_text(row.get("example_id", row.get("id"))),
        gold=row.pop("answer", None),
        reward=row.pop("reward", None),
        method="reward",
        advantage=row.pop("advantage", None),
        stop=row.pop("stop_condition", None),
        fault=_text(row.pop("error", None)) or None,
        seconds=timing["total_ms"] / 1000 if "total_ms" in timing else timing.get("total"),
        response_tokens=usage["output_tokens"] if usage else None,
    )


def _traces(row: Fields) -> Iterator[Fields]:
    """One attempt for each branch of a trace, from its root to a leaf."""
    work = (row.get("run") or {}).get("work") or {}
    for trace in row.pop("traces"):
        nodes, task, rewards = trace["nodes"], trace["task"], trace.get("rewards") or {}
        marks = [one["score"] * one.get("weight", 1.0) for one in rewards.values() if one]
        errors = [f"{one['type']}: {one['message']}" for one in trace.get("errors") or ()]
        for place, node in enumerate(nodes):
            if (before := node.get("parent")) is not None and not 0 <= before < place:
                raise Unread("nodes", f"the parent of node {place} is {before}")
        leaves: list[int | None] = sorted({*range(len(nodes))} - {node.get("parent") for node in nodes})
        for leaf in leaves if nodes else [None]:  # one that broke before it began
            path = [] if leaf is None else [leaf]
            while path and (before := nodes[path[0]].get("parent")) is not None:
                path.insert(0, before)
            begun = next((n for n, place in enumerate(path) if nodes[place].get("sampled")), len(path))
            said = [nodes[place]["message"] for place in path]
            yield _row(
                "verifiers",
                {**row, **trace, "prompt": said[:begun], "completion": said[begun:], "step": work.get("step")},
                problem_id=task.get("key") or task.get("hash"),
                gold=task["data"].get("answer"),
                reward=sum(marks) if marks else None,
                method=" + ".join(rewards) or None,
                stop=trace.get("stop_condition"),
                fault="; ".join(errors) or None,
                response_tokens=sum(sum(nodes[place].get("mask") or ()) for place in path) or None,
            )


def _inspect(row: Fields) -> Iterator[Fields]:
    """The first scorer's mark is the reward; letters and words count as inspect_ai counts them."""
    row = _attached(row, row.pop("attachments", None) or {})
    said: list[Fields] = row.pop("messages") or []
    begun = next((n for n, one in enumerate(said) if one["role"] == "assistant"), len(said))
    scores: Mapping[str, Fields] = row.get("scores") or {}
    scorer = next(iter(scores), None)
    mark, answer = (scores[scorer].get(name) if scorer else None for name in ("value", "answer"))
    reward = MARKS.get(mark.lower()) if isinstance(mark, str) else mark
    tokens = [usage["output_tokens"] for usage in (row.get("model_usage") or {}).values()]
    yield _row(
        "inspect_ai",
        {**row, "prompt": said[:begun] or row["input"], "completion": said[begun:]},
        problem_id=_text(row["id"]),
        index=row["epoch"] - 1,
        gold=row["target"],
        reward=reward if isinstance(reward, int | float) else None,
        extracted=_text(answer) or None,
        method=scorer,
        stop=(row.get("limit") or {}).get("type"),
        fault=(row.get("error") or {}).get("message"),
        seconds=row.get("total_time"),
        response_tokens=sum(tokens) or None,
    )


def _attached(value: Any, kept: Mapping[str, str]) -> Any:
    """With the long texts that a log keeps apart."""
    if not kept:
        return value
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


def _row(form: str, fields: Fields, prompt: str = "prompt", said: str = "completion", **columns: Any) -> Fields:
    """prompt, said: the fields of what was asked and answered. The fields that are left are shown as they are."""
    plain = isinstance(fields[said], str)
    asked, answered = _messages(prompt, fields.pop(prompt), "user"), _messages(said, fields.pop(said), "assistant")
    for place, message in enumerate([*asked, *answered]):
        if left := {name: message[name] for name in message.keys() - KNOWN}:
            fields[f"message {place}"] = left
    for name in ("reward", "advantage", "seconds"):
        value = columns.get(name)
        if value is not None and not isinstance(value, int | float):
            named = columns["method"] if name == "reward" else name
            raise Unread(named, f"{_text(value)[:80]!r} is no number")
        if nan := value is not None and math.isnan(value):
            fields.setdefault(columns["method"] if name == "reward" else name, value)
        columns[name] = None if value is None or nan else float(value)
    step, reward = _whole("step", fields.pop("step", None)), columns["reward"]
    alone = len(asked) == 1 and asked[0]["role"] == "user"
    question = _utf8(_said(asked[0]) if alone else "\n\n".join(f"{one['role']}: {_said(one)}" for one in asked))
    turns, texts = _turns(answered)
    failed = sum(one["status"] != Status.OK for turn in turns for one in turn["results"] if one)
    verdict = None if reward is None else Verdict.RIGHT if reward > RIGHT_ABOVE else Verdict.WRONG
    odd = [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]
    fields |= {name: str(fields[name]) for name in odd}  # JSON has neither NaN nor infinity
    told = _json(fields)
    return {
        **columns,
        **{name: None if columns.get(name) is None else _text(columns[name]) for name in TEXTS},
        "index": _whole("epoch", columns.get("index")),
        "response_tokens": _whole("output_tokens", columns.get("response_tokens")),
        "step": step,
        "problem_id": _text(columns.get("problem_id")) or problem_id(question),
        "question": question,
        "gold": _text(columns.get("gold")),
        "source": form,
        "turns": _json(turns),
        "text": texts,
        "verdict": verdict and str(verdict),
        "calls": None if plain else sum(len(turn["calls"]) for turn in turns),
        "failed_calls": None if plain else failed,
        "fields": told if len(told) < LONGEST_FIELD else _json({key: _short(value) for key, value in fields.items()}),
    }


def _whole(field: str, value: Any) -> int | None:
    """A whole number, also as a float."""
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
    if not number or value != int(value):
        raise Unread(field, f"{str(value)[:80]} is no whole number from 0 to {LARGEST}")
    return int(value)


def _messages(field: str, value: Any, role: str) -> list[Fields]:
    """A text is one message of a role. Parquet gives each message the keys of all, empty where it has none."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(one, dict) and "role" in one for one in value):
        raise Unread(field, "it is neither a text nor a list of messages")
    return [{key: inner for key, inner in one.items() if inner is not None} for one in value]


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
    call = _parsed(call) if isinstance(call, str) else call
    inner = call["function"] if isinstance(call.get("function"), dict) else {"name": call.get("function"), **call}
    given = inner.get("arguments")
    try:
        arguments = _parsed(given) if isinstance(given, str) else given
    except ValueError:
        arguments = None
    told = {"id": call.get("id") or f"call_{place}", "tool": inner["name"], "parse_error": call.get("parse_error")}
    return {**told, "arguments": arguments if isinstance(arguments, dict) else {}, "raw": _text(given)}


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
    there = set[str]().union(*rows)
    values = {name: [row.get(name) for row in rows] for name in there}
    columns = [pyarrow.array(values.get(field.name, [None] * len(rows)), field.type) for field in schema]
    return pyarrow.Table.from_arrays(columns, schema=schema)


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
