"""Rollouts that others wrote, converted to files of attempts for the page. None of their libraries is needed.

    TRL         completions/completions_00007.parquet (log_completions=True)
    verl        7.jsonl (trainer.rollout_data_dir, trainer.validation_data_dir)
    verifiers   traces.jsonl (its version 1, prime-rl)
    inspect_ai  logs: .eval, .json

Fields without a matching column are kept in `fields`, under their names. An unreadable row is skipped and reported with
its place and field. Source: what the libraries' writers write; the reading is ours."""

from __future__ import annotations

import json
import math
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import pyarrow
from pyarrow import parquet

from rocstar.errors import ConfigError, DataError
from rocstar.record.messages import as_text, mark_of, parsed, text_in, turns_of, written
from rocstar.record.rollouts import attempts_schema, parquet_file
from rocstar.types import RIGHT_ABOVE, Status, Verdict, problem_id, utf8
from rocstar.view.index import STRANGE
from rocstar.view.sources import Library, RunSource

OF_A_STEP = re.compile(r"(completions_)?\d+")  # files of one folder that are read as one
LONGEST_FIELD = 20_000  # characters; of a longer one the page tells its length
ROWS, GROUP_BYTES = 2_000, 1 << 22  # that are read for one attempt, at most
AT_ONCE = 64  # rows of a file of TRL: a short dictionary may stand for long texts
MOST_MESSAGES = 100_000  # of all branches of a trace, which share their beginnings
Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
NUMBERS: Mapping[str, Any] = {
    **{"reward": float, "advantage": float, "seconds": float},
    **{"step": Whole, "index": Whole, "response_tokens": Whole},
}
ZSTD = 93  # of a zip; Python reads it from 3.14 on
SHOWN = 5  # refusals that are shown
OF_ALL = ("header.json", "_journal/start.json", "log")  # where a file says what holds of all its rows
KNOWN = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "error"}
"""Of a message; what else one has is kept among the fields."""
UNREAD = (DataError, *STRANGE, RuntimeError, OSError, EOFError, zlib.error, zipfile.BadZipFile, pyarrow.ArrowException)
"""What reading a file of others ends in; RuntimeError where a zip is encrypted."""
Fields = dict[str, Any]
Made = Iterator[tuple[Fields, Fields]]
"""Attempts of a row: their fields, and columns that none of the fields is as it stands."""


def opened_others(place: Path, folder: Path, tell: Callable[[str], None]) -> Library | None:
    """The rollouts at a path, converted to files below `folder`; None for a folder without such rollouts, or with runs.
    tell: called with messages about skipped rows. Raises ConfigError for a file without rollouts, OSError."""
    if not place.is_file() and ((place / "run.json").exists() or not place.is_dir() or Library(base=place).sources()):
        return None
    base, sources = place if place.is_dir() else place.parent, list[RunSource]()
    dumps = defaultdict[Path, list[Path]](list)
    for file in sorted(filter(_may_be_read, [place] if place.is_file() else place.rglob("*"))):
        dumps[file.parent if OF_A_STEP.fullmatch(file.stem) else file].append(file)
    for number, (key, files) in enumerate(dumps.items()):
        plain = utf8(f"file:{':'.join(key.relative_to(base).parts) or place.resolve().name}")
        name = f"{plain} ({number})" if plain in {source.name for source in sources} else plain
        made = _Dump(folder / str(number)).read(files, name)
        sources += [made] if made.about["attempts"] else []
        for said in made.refused:
            tell(f"left out: {said}")
    shown = utf8(str(place))
    if place.is_file() and not sources:
        raise ConfigError(f"{shown} holds no rollouts of TRL, verl, verifiers or inspect_ai that can be read")
    only = f"/run/{quote(sources[0].name, safe='')}/attempts" if len(sources) == 1 else "/"
    return Library(base=Path(shown), first=only, opened=tuple(sources)) if sources else None


def _may_be_read(file: Path) -> bool:
    """Of JSON files only logs are."""
    try:
        if file.suffix not in WRITERS or not file.is_file():
            return False
        with file.open("rb") as opened:
            return file.suffix != ".json" or b'"eval"' in opened.read(2_000)
    except OSError:  # reported by `read`
        return True


class _Dump:
    """Files of attempts of one dump, one for each step."""

    def __init__(self, root: Path) -> None:
        self._root, self._rows, self._left_out = root, 0, 0
        self._about, self._refused = Fields(), list[str]()
        self._steps: dict[int, tuple[Path, Fields]] = {}

    def read(self, files: Sequence[Path], name: str) -> RunSource:
        """All that can be read, with its curves and what the page says of it."""
        (self._root / "rollouts").mkdir(parents=True)
        for file in files:
            try:
                self._write(file, self._attempts(file))
            except UNREAD as error:
                self._refuse(f"{file}: ", error)
        rows = [self._steps[step][1] for step in sorted(self._steps)]
        (self._root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        first = [f"{self._left_out} of {self._rows + self._left_out} rows; these first:"] if self._left_out else []
        written = ", ".join(dict.fromkeys(row["stage"] for row in rows))
        about = {"written by": written, "files": [utf8(str(file)) for file in files], "attempts": self._rows}
        return RunSource(name=name, root=self._root, about={**self._about, **about}, refused=(*first, *self._refused))

    def _refuse(self, place: str, error: Exception, rows: int = 1) -> None:
        said = str(error).partition("\n")[0][:300]
        if isinstance(error, KeyError):
            said = f"{error.args[0]}: it is missing"
        elif not isinstance(error, DataError):
            said = f"all: it cannot be read ({said})"
        self._left_out += rows
        self._refused += [utf8(place + said)] if len(self._refused) < SHOWN else []

    def _attempts(self, file: Path) -> list[Fields]:
        """Those of the rows that can be read."""
        found = list[Fields]()
        for place, read in _records(file):
            try:
                row = read()
                if not isinstance(row, dict):
                    raise DataError("all: it is no JSON object")
                if place in OF_ALL:
                    self._about |= row
                else:
                    found += _read(row, file.suffix)
            except UNREAD as error:
                self._refuse(f"{file}: {place}, ", error)
        return found

    def _write(self, file: Path, rows: Sequence[Fields]) -> None:
        """Siblings stand together, in the order in which their problem came, and are numbered from 0."""
        schema = attempts_schema().append(pyarrow.field("fields", pyarrow.string()))
        steps = defaultdict[int, dict[str, list[Fields]]](dict)
        for row in rows:
            steps[row["step"]].setdefault(row["problem_id"], []).append(row)
        for step, problems in steps.items():
            ordered = (sorted(siblings, key=lambda row: row["index"] or 0) for siblings in problems.values())
            found = [{**row, "index": number} for siblings in ordered for number, row in enumerate(siblings)]
            if step in self._steps:
                error = DataError(f"step: {step} was read from {self._steps[step][0]} already")
                self._refuse(f"{file}: ", error, len(found))
                continue
            table = pyarrow.Table.from_pylist(found, schema)
            together = max(1, min(ROWS, len(found) * GROUP_BYTES // table.nbytes))
            target = self._root / "rollouts" / f"step={step:06d}.parquet"
            parquet.write_table(table, target, compression="lz4", row_group_size=together)
            rewards = [row["reward"] for row in found if row["reward"] is not None]
            mean = {"reward/mean": fmean(rewards)} if rewards else {}
            self._steps[step] = file, {"step": step, "stage": found[0]["source"], **mean}
            self._rows += len(found)


def _records(file: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(place in the file, reads the row that is there, which may raise one of UNREAD); what places of OF_ALL hold is
    said of all rows. Raises one of UNREAD where the rest can't be read."""
    if file.suffix == ".parquet":
        with parquet_file(file) as opened:
            rows = (row for batch in opened.iter_batches(AT_ONCE) for row in batch.to_pylist())
            yield from ((f"row {number}", lambda row=row: row) for number, row in enumerate(rows))
    elif file.suffix == ".eval":
        with zipfile.ZipFile(file) as log:
            for info in log.infolist():
                if info.filename in OF_ALL or info.filename.startswith("samples/"):
                    yield info.filename, partial(_member, log, info)
    elif file.suffix == ".json":
        log = parsed(file.read_bytes())
        yield from ((f"sample {number}", lambda one=one: one) for number, one in enumerate(log.pop("samples")))
        yield "log", lambda: log
    else:
        with file.open("rb") as lines:
            yield from ((f"line {n}", partial(parsed, line)) for n, line in enumerate(lines, 1) if line.strip())


def _member(log: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if info.compress_type != ZSTD:
        return parsed(log.read(info))
    size, info.file_size, info.compress_type = info.file_size, info.compress_size, zipfile.ZIP_STORED
    del info.CRC  # that of what it holds, not of the packed bytes, which are read here
    return parsed(bytes(pyarrow.decompress(log.read(info), size, "zstd", asbytes=True)))


def _trl(row: Fields) -> Made:
    """TRL writes the rewards of its functions beside what they logged, and no sum: that of all floats is taken, without
    NaN, as TRL takes it."""
    columns = {"question": row.pop("prompt"), "text": row.pop("completion")}
    columns |= {name: row.pop(name) for name in ("step", "advantage")}
    rewards = {name: value for name, value in row.items() if isinstance(value, float) and not math.isnan(value)}
    yield row, {**columns, "reward": sum(rewards.values()) if rewards else None, "method": " + ".join(rewards)}


def _verl(row: Fields) -> Made:
    columns = {"question": row.pop("input"), "text": row.pop("output"), "gold": row.pop("gts", None)}
    yield row, {**columns, "step": row.pop("step"), "reward": row.pop("score"), "method": "score"}


def _traces(row: Fields) -> Made:
    """One attempt for each branch of a trace, from its root to a leaf."""
    work, traces = (row.get("run") or {}).get("work") or {}, row.pop("traces")
    if not traces:
        raise DataError("traces: there is no attempt in it")
    for trace in traces:
        nodes, task, rewards = trace["nodes"], trace["task"], trace.get("rewards") or {}
        marks = [one["score"] * one.get("weight", 1.0) for one in rewards.values() if one]
        columns = {
            "problem_id": task.get("key") or task.get("hash"),
            "gold": task["data"].get("answer"),
            "reward": sum(marks) if marks else None,
            "method": " + ".join(rewards),
            "fault": "; ".join(f"{one['type']}: {one['message']}" for one in trace.get("errors") or ()),
            "stop": trace.pop("stop_condition", None),
            "step": work.get("step"),
        }
        usages = {call.get("node"): call.get("usage") or {} for call in trace.get("calls") or ()}
        spent, depths = list[int](), list[int]()  # tokens of each node, and how many nodes lead to it
        for place, node in enumerate(nodes):
            if (before := node.get("parent")) is not None and not 0 <= before < place:
                raise DataError(f"nodes: the parent of node {place} is {before}")
            spent.append(sum(node.get("mask") or ()) or usages.get(place, {}).get("completion_tokens", 0))
            depths.append(1 + (depths[before] if before is not None else 0))
        leaves = sorted({*range(len(nodes))} - {node.get("parent") for node in nodes})
        if (together := sum(depths[leaf] for leaf in leaves)) > MOST_MESSAGES:
            raise DataError(f"nodes: its branches have {together} messages, and at most {MOST_MESSAGES} are read")
        shown = {name: _shown(value) for name, value in {**row, **trace}.items()}  # once for all branches
        for leaf in leaves or [None]:  # it broke at its start
            path, at = list[int](), leaf
            while at is not None:
                path.append(at)
                at = nodes[at].get("parent")
            path.reverse()
            begun = next((n for n, place in enumerate(path) if nodes[place].get("sampled")), len(path))
            said, tokens = [nodes[place]["message"] for place in path], sum(spent[place] for place in path)
            columns |= {"question": said[:begun], "text": said[begun:], "response_tokens": tokens or None}
            yield {**shown}, columns


def _sample(row: Fields) -> Made:
    """The first scorer's mark is the reward."""
    if kept := row.pop("attachments", None):  # long texts, which a log keeps apart
        link = re.compile(r'"attachment://(\w+)"')
        row = parsed(link.sub(lambda at: written(kept[at[1]]) if at[1] in kept else at[0], written(row)))
    said: list[Fields] = row.pop("messages") or []
    begun = next((n for n, one in enumerate(said) if one["role"] == "assistant"), len(said))
    scores: Mapping[str, Fields] = row.get("scores") or {}
    scorer, score = next(iter(scores.items()), (None, {}))
    usages = ((row.get(name) or {}).values() for name in ("model_usage", "role_usage"))  # of all models, of graders
    tokens, others = (sum(usage["output_tokens"] for usage in of) for of in usages)
    columns = {"question": said[:begun] or row["input"], "text": said[begun:], "extracted": score.get("answer")}
    columns |= {"reward": mark_of(score.get("value")), "method": scorer, "response_tokens": tokens - others or None}
    columns |= {"problem_id": row.pop("id"), "index": row.pop("epoch"), "gold": row.pop("target", None)}
    columns |= {"seconds": row.pop("total_time", None), "stop": (row.get("limit") or {}).get("type")}
    yield row, {**columns, "fault": (row.get("error") or {}).get("message")}


WRITERS: Mapping[str, tuple[str, Callable[[Fields], Made]]] = {
    ".parquet": ("TRL", _trl),
    ".jsonl": ("verl", _verl),
    ".eval": ("inspect_ai", _sample),
    ".json": ("inspect_ai", _sample),
}
"""Who writes files with an ending; rows of verifiers, which are JSONL too, have traces."""


def _read(row: Fields, ending: str) -> Iterator[Fields]:
    """The attempts of a row of a file with this ending."""
    writer, made = ("verifiers", _traces) if "traces" in row else WRITERS[ending]
    try:
        for fields, columns in made(row):
            yield _attempt(writer, fields, columns)
    except KeyError as missing:
        known = f"{writer} or verifiers" if ending == ".jsonl" else writer
        raise DataError(f"{missing.args[0]}: it is missing, and {ending} files are read as those of {known}") from None


def _attempt(writer: str, fields: Fields, columns: Fields) -> Fields:
    """A row of COLUMNS and `fields`, which are shown as they are. columns: values that are not in the messages."""
    asked, answered = _messages(columns, "question", "user"), _messages(columns, "text", "assistant")
    for place, message in enumerate([*asked, *answered]):
        more = {name: value for name, value in message.items() if name not in KNOWN and value is not None}
        fields |= {f"message {place}": more} if more else {}
    for name, kind in NUMBERS.items():
        given = columns.get(name)
        whole = int(given) if kind is Whole and isinstance(given, float) and given.is_integer() else given
        try:
            columns[name] = number = msgspec.convert(whole, kind | None)
        except msgspec.ValidationError as error:
            raise DataError(f"{name}: {error}, got {as_text(given)[:80]}") from None
        if number is not None and math.isnan(number):
            columns[name], fields[name] = None, number
    plain, reward = isinstance(columns["text"], str), columns["reward"]
    alone = len(asked) == 1 and asked[0]["role"] == "user"
    question = text_in(asked[0]) if alone else "\n\n".join(f"{one['role']}: {text_in(one)}" for one in asked)
    turns, texts = turns_of(answered)
    calls = sum([len(turn["calls"]) for turn in turns])
    failed = len([one for turn in turns for one in turn["results"] if one and one["status"] != Status.OK])
    return {
        **columns,
        **{name: as_text(columns.get(name)) or None for name in ("extracted", "stop", "fault")},
        "method": columns["method"] or None,
        "step": columns["step"] or 0,
        "problem_id": as_text(columns.get("problem_id")) or problem_id(question),
        "question": question,
        "gold": as_text(columns.get("gold")),
        "source": writer,
        "turns": written(turns),
        "text": texts,
        "verdict": None if reward is None else Verdict.RIGHT if reward > RIGHT_ABOVE else Verdict.WRONG,
        "calls": None if plain else calls,
        "failed_calls": None if plain else failed,
        "fields": written({name: _shown(value) for name, value in fields.items()}),
    }


def _messages(columns: Fields, column: str, role: str) -> list[Fields]:
    """A text is one message of a role; a rollout that broke has none."""
    value = columns[column]
    found = [{"role": role, "content": value}] if isinstance(value, str) else value or []
    if not isinstance(found, list) or [one for one in found if not isinstance(one, dict) or "role" not in one]:
        raise DataError(f"{column}: it is neither a text nor a list of messages")
    return found


def _shown(value: Any) -> Any:
    """JSON has neither NaN nor infinity, and a page no room for a field of any length."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    size = len(value if isinstance(value, str) else written(value))
    return value if size <= LONGEST_FIELD else f"{size} characters, which stay in the file"
