"""Reads rollouts saved by TRL's GRPOTrainer or verl as groups, and compares what is learnt from them here with the
trainer's log.

    TRL   OUTPUT_DIR/completions/completions_00007.parquet (log_completions=True), texts and advantages; log_history of
          a trainer_state.json, loss, gradient norm and lengths
    verl  ROLLOUT_DATA_DIR/7.jsonl (trainer.rollout_data_dir), texts without special tokens and scores; its metrics, as
          its file logger or its console wrote them, loss, gradient norm and lengths

Both write text, not token ids. The model's own tokenizer and chat template turn it into tokens; the logged lengths show
which rows had no end token, and whether token counts match those sampled, else the dump is refused. Neither records
which tokens a tool wrote, so transcripts with tools are refused, nor the engine's log-probabilities, so settings that
need them are refused too. Source: ours."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rocstar.config.recipe import changed
from rocstar.config.sections import LearningSection, Recipe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.templates import template_named
from rocstar.dialogue.tokenizer_files import read_model_files
from rocstar.errors import ConfigError, DataError
from rocstar.learning.advantages import advantage_of, rows_of
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.models import load_model
from rocstar.learning.policy import Policy
from rocstar.learning.step import learn_rows
from rocstar.record.folder import read_json
from rocstar.record.journal import read_journal
from rocstar.record.rollouts import read_table
from rocstar.run.report import mean_of_updates
from rocstar.run.tried import Tried
from rocstar.types import (
    RIGHT_ABOVE,
    Choice,
    Completion,
    Finish,
    FormatFacts,
    Group,
    Outcome,
    Penalty,
    Problem,
    Reason,
    Resampled,
    Stop,
    Trajectory,
    Turn,
    Verdict,
    problem_id,
)

DEFAULTS = {"TRL": LearningSection(clip_high=0.2, dual_clip=0.0), "verl": LearningSection(clip_high=0.2)}
"""The trainer's own defaults, for settings that are not given."""
TAKEN = ("learning.", "rollout.temperature=", "model.dtype=", "model.device=")
UNTOLD = ("learning.importance_", "learning.attempt_ratio_", "learning.off_policy_kl")
"""Settings that need the engine's log-probabilities."""
COMPUTED = ("learning.advantage", "learning.normalize_by_std")
"""Settings of advantages, which TRL's dump already holds."""
is_close = partial(math.isclose, rel_tol=1e-6, abs_tol=1e-6)
"""Whether a figure equals the trainer's, computed in fp32: within 1e-6 of the larger one, or 1e-6 if that is below
1."""
KL_OF_TRL = "with use_bias_correction_kl, its default, TRL's KL term has the same loss and another gradient than here"
SYSTEM, USER = "rocstarsystem", "rocstaruser"  # stand for texts in a rendered conversation
TRL_LENGTHS = tuple(f"completions/{name}" for name in ("mean_length", "max_length", "min_length", "clipped_ratio"))
LENGTHS = tuple(f"_length/{name}" for name in ("mean", "max", "min", "clip_ratio"))
ON_CONSOLE = re.compile(r"([\w/]+):(?:np\.\w+\()?(-?\d+(?:\.\d*)?(?:e[-+]?\d+)?)(?![\w.])")
LARGEST = 1e300  # of numbers that are accepted
FIGURES = ("loss", "grad_norm")
"""Figures compared with the log; the norm is that before clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A step's rollouts as another trainer saved them."""

    trainer: str
    """TRL or verl."""
    step: int
    """The trainer's count, from 1."""
    groups: Sequence[Group]
    advantages: Sequence[float] | None
    """Advantages of the groups' attempts in order, if the dump has them."""
    logged: Mapping[str, float]
    """Those of FIGURES that the log has."""
    notes: Sequence[str]
    """Assumptions about facts that the dump does not record."""


def read_dump(place: Path, model: Path, *, step: int | None = None, log: Path | None = None) -> Dump:
    """place: the file, or its folder; step: which one, of a folder. model: the one that wrote the step. log:
    trainer_state.json of TRL, by default those beside the dump, or verl's metrics. Raises ConfigError, DataError,
    OSError."""
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {model} is no model folder: it has no config.json; give a Hugging Face folder")
    file = _file(place, step)
    reader = _Reader(file, model, log)
    dump = reader.trl() if file.suffix == ".parquet" else reader.verl()
    state = model / "trainer_state.json"
    if state.exists() and (made := read_json(state).get("global_step")) != dump.step - 1:
        raise ConfigError(
            f"{model} is the checkpoint of step {made}, and the rollouts of {file.name} were written with that of step "
            f"{dump.step - 1}; give it with --model"
        )
    return dump


def learnt(dump: Dump, model: Path, variants: Sequence[Sequence[str]], reference: Path | None) -> dict[str, Any]:
    """The results of the step under each set of settings, as in `rocstar replay --json`, and the first one's loss and
    gradient norm beside the logged ones; `differs` names those that are not `is_close`. Raises ConfigError."""
    made = _tried(dump, model, variants, reference)
    own = next(made)
    again = {name: own.metrics[f"learn/{name}"] for name in FIGURES}
    return {
        "trainer": dump.trainer,
        "step": dump.step,
        "logged": dump.logged,
        "again": again,
        "difference": {name: again[name] - value for name, value in dump.logged.items()},
        "differs": [name for name, value in dump.logged.items() if not is_close(again[name], value)],
        "notes": [one for one in dump.notes if reference or one != KL_OF_TRL],
        "tried": [
            {**one.summary(own.gradient), "gradient_norm": one.metrics["learn/grad_norm"]}
            for one in itertools.chain([own], made)
        ],
        "tokens": own.heaviest(Codec.load(model).decode),
    }


def _tried(dump: Dump, model: Path, variants: Sequence[Sequence[str]], reference: Path | None) -> Iterator[Tried]:
    """reference: what learning.kl_coefficient keeps the policy near."""
    recipes = [_recipe(dump.trainer, settings) for settings in variants]
    pulled = {bool(recipe.learning.kl_coefficient) for recipe in recipes}
    if pulled != {reference is not None}:
        raise ConfigError("learning.kl_coefficient and --reference FOLDER, the model of the KL term, go together")
    kept = partial(Choice, kept=True, reason=Reason.KEPT_ALL, penalty=Penalty(errors=0.0, format=0.0))
    choices = [tuple(kept(index=one.index) for one in group.trajectories) for group in dump.groups]
    pairs = zip(dump.groups, choices, strict=True)  # those with equal rewards too: both trainers count their tokens
    everything = [Resampled(group=group, choices=chosen) for group, chosen in pairs]
    for settings, recipe in zip(variants, recipes, strict=True):
        learning = recipe.learning
        initial_model = load_model(reference or model)
        known = initial_model.get_output_embeddings().weight.shape[0]  # both trainers take the softmax over all rows
        policy = Policy(initial_model, Codec.load(model), template_named("paper"), recipe.model, known=known)
        learner = GrpoLearner(policy, learning, temperature=recipe.rollout.temperature)
        if reference:
            policy.model.load_state_dict(load_model(model).state_dict())
        rows = rows_of(everything, advantage_of(learning), over_batch=learning.over_batch)
        if dump.advantages is not None:
            rows = tuple(replace(row, advantage=own) for row, own in zip(rows, dump.advantages, strict=True))
        result = Tried(settings=", ".join(settings) or f"{dump.trainer}'s defaults", groups=dump.groups)
        updates, _ = learn_rows(learning, learner, rows, dump.step, partial(result.add, learner))
        result.metrics = mean_of_updates(updates)
        yield result


def _recipe(trainer: str, settings: Sequence[str]) -> Recipe:
    for setting in settings:
        if not setting.startswith(TAKEN):
            raise ConfigError(
                f"a dump of {trainer} takes no {setting!r}; give learning.KEY=VALUE, or a value of "
                "rollout.temperature, model.dtype or model.device"
            )
        if setting.startswith(UNTOLD):
            raise ConfigError(
                f"{setting!r} asks for the engine's log-probabilities, which {trainer} writes nowhere; leave it out"
            )
        if trainer == "TRL" and setting.startswith(COMPUTED):
            raise ConfigError(f"{setting!r} makes advantages, and a dump of TRL has its own; leave it out")
    return changed(Recipe(learning=DEFAULTS[trainer]), settings, {})


def _file(place: Path, step: int | None) -> Path:
    if place.is_file() and place.suffix in (".parquet", ".jsonl") and step is None:
        return place
    names = [] if step is None else [f"completions/completions_{step:05d}.parquet", f"{step}.jsonl"]
    found = next((place / name for name in names if (place / name).is_file()), None)
    if found is None:
        raise ConfigError(
            f"{place} has no {' or '.join(names) or 'step'} in it; give the file that TRL or verl wrote, or TRL's "
            "output_dir or verl's rollout_data_dir and --step N"
        )
    return found


class _Reader:
    """Of one file."""

    def __init__(self, file: Path, model: Path, log: Path | None) -> None:
        from transformers import AutoTokenizer

        self._file, self._log = file, log
        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{model} has no chat template, by which the prompts were written; give one that has")
        self._ends = tuple(dict.fromkeys((self._tokenizer.eos_token_id, *read_model_files(model).eos_ids)))

    # -- TRL -----------------------------------------------------------------------------------------------------------

    def trl(self) -> Dump:
        try:
            rows = read_table(self._file).to_pylist()
        except ValueError as error:  # pyarrow's are
            raise DataError(f"{self._file} cannot be read as parquet: {error}") from error
        step = self._one_step(rows)
        entry, before = self._trl_log(step)
        lengths = self._figures(entry, TRL_LENGTHS)
        tokens = self._figures(entry, ["num_tokens"])["num_tokens"] - before
        prompts, completions = (self._column(rows, name, str, list) for name in ("prompt", "completion"))
        prompt_ids = [self._trl_prompt(row, prompt) for row, prompt in enumerate(prompts)]
        has_ids = "completion_ids" in rows[0]
        texts = [self._trl_text(row, one, has_ids) for row, one in enumerate(completions)]
        ids = self._logged_ids(rows) if has_ids else self._tokens("completion", texts, lengths)
        cut = [one[-1] not in (*self._ends, self._tokenizer.pad_token_id) for one in ids]
        self._compare("completion", [*_lengths(ids), fmean(cut)], lengths)
        self._compare("prompt", [sum(map(len, (*prompt_ids, *ids)))], {"num_tokens of the step": tokens})
        members = self._members([json.dumps(prompt) for prompt in prompts])
        groups = [_group(some, prompts, prompt_ids, ids, cut) for some in members]
        column, logged = self._column(rows, "advantage", float), self._logged(entry)
        advantages = [column[row] for some in members for row in some]
        notes = (*([] if has_ids else self._notes()), KL_OF_TRL)
        return Dump(trainer="TRL", step=step, groups=groups, advantages=advantages, logged=logged, notes=notes)

    def _trl_log(self, step: int) -> tuple[Mapping[str, Any], float]:
        """The step's row of log_history, and the count of tokens before it."""
        home = self._file.parent.parent
        history: dict[int, Mapping[str, Any]] = {}
        beside = [*home.glob("checkpoint-*/trainer_state.json"), *home.glob("trainer_state.json")]
        for place in [self._log] if self._log else beside:
            rows = read_json(place).get("log_history")
            logged = [_given(one) for one in rows] if isinstance(rows, list) else []
            history |= {one["step"]: one for one in logged if "step" in one and one.keys() & {"loss", "num_tokens"}}
        if step not in history or (step > 1 and step - 1 not in history):
            raise DataError(
                f"no trainer_state.json in {home} has steps {max(1, step - 1)} and {step} one by one; train with "
                "logging_steps=1, and give the file with --log where it is elsewhere"
            )
        if any("num_tokens" not in history.get(near, history[step]) for near in range(step - 1, step + 2)):
            raise DataError(
                f"{self._file}: several steps, {step} among them, learnt from these rollouts; only those of one step "
                "are replayed (num_iterations=1, steps_per_generation=gradient_accumulation_steps)"
            )
        return history[step], self._figures(history[step - 1], ["num_tokens"])["num_tokens"] if step > 1 else 0

    def _trl_prompt(self, row: int, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(text=prompt)["input_ids"])
        messages = [_given(one) for one in prompt]
        if not messages or not all(map(_is_plain, messages)):
            raise self._refused(row, "prompt", "its messages are not roles with a text, and nothing else is read")
        try:
            return self._rendered(messages)
        except DataError as error:
            raise self._refused(row, "prompt", str(error)) from error

    def _trl_text(self, row: int, completion: Any, has_ids: bool) -> str:
        if isinstance(completion, str):
            return completion
        if len(completion) != 1:
            raise self._refused(row, "completion", "no field tells which tokens of its several messages a tool wrote")
        message = _given(completion[0])
        if not has_ids and not _is_plain(message):
            raise self._refused(row, "completion", f"TRL has parsed it into {', '.join(message)}; log completion_ids")
        return str(message.get("content"))

    # -- verl ----------------------------------------------------------------------------------------------------------

    def verl(self) -> Dump:
        lines = _text(self._file).removesuffix("\n").split("\n")
        rows = [self._json(row, line) for row, line in enumerate(lines)]
        step = self._one_step(rows)
        step_log = self._verl_log(step)
        if (turns := step_log.get("num_turns/max")) != 2:
            only = "only 2, a question and an answer, is read, since no field tells which tokens a tool wrote"
            there = "missing" if turns is None else turns
            raise DataError(f"{self._log}: num_turns/max of step {step} is {there}; {only}")
        inputs, outputs = (self._column(rows, name, str) for name in ("input", "output"))
        known = {text: self._verl_prompt(inputs.index(text), text) for text in dict.fromkeys(inputs)}
        prompt_ids = [known[text] for text in inputs]
        self._compare("input", _lengths(prompt_ids), self._figures(step_log, [f"prompt{one}" for one in LENGTHS[:3]]))
        lengths = self._figures(step_log, [f"response{name}" for name in LENGTHS])
        ids = self._tokens("output", outputs, lengths)
        mean, most, least = _lengths(ids)
        at_limit = fmean(len(one) == most for one in ids) if lengths["response_length/clip_ratio"] else 0.0
        self._compare("output", [mean, most, least, at_limit], lengths)
        scores = self._column(rows, "score", float, int)
        self._compare("score", [fmean(scores)], self._figures(step_log, ["critic/rewards/mean"]))
        cut = [one[-1] not in self._ends for one in ids]
        uids = [str(row.get("uid", "")) for row in rows]
        members = self._members([f"{uid} {text}" for uid, text in zip(uids, inputs, strict=True)])
        groups, notes = [_group(some, inputs, prompt_ids, ids, cut, scores) for some in members], self._notes()
        logged = self._logged(step_log, "actor/")
        return Dump(trainer="verl", step=step, groups=groups, advantages=None, logged=logged, notes=notes)

    def _json(self, row: int, line: str) -> Mapping[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._refused(row, "all", "it is no JSON object; was the file cut?")
        return found

    def _verl_log(self, step: int) -> Mapping[str, Any]:
        if self._log is None:
            raise ConfigError(
                f"only verl's metrics show which rows of {self._file} had an end token; give with --log what its "
                "file logger (trainer.logger) or its console wrote"
            )
        text = _text(self._log)
        if text.startswith("{"):
            found = [row["data"] for row in read_journal(self._log, {"step": int, "data": dict}) if row["step"] == step]
        else:
            lines = [line for line in text.splitlines() if f"step:{step} - " in line]
            found = [{name: float(value) for name, value in ON_CONSOLE.findall(line)} for line in lines]
        if found:
            return dict(found[-1])
        raise DataError(f"{self._log} has no step {step}; give the metrics of the run that wrote {self._file}")

    def _verl_prompt(self, row: int, text: str) -> list[int]:
        """Tokens of the only conversation, of a user or of system and user, with this text without special tokens."""
        found = set()
        for messages in ({"user": USER}, {"system": SYSTEM, "user": USER}):
            try:
                shown = re.escape(self._read(self._rendered(_messages(messages))))
            except DataError:  # a template may not support a system message
                continue
            for some in ("(.*)", "(.*?)"):
                parts = re.fullmatch(shown.replace(SYSTEM, some).replace(USER, some), text, re.DOTALL)
                ids = self._rendered(_messages(dict(zip(messages, parts.groups(), strict=True)))) if parts else []
                found |= {tuple(ids)} if self._read(ids) == text else set()
        if len(found) != 1:
            raise self._refused(row, "input", f"{len(found)} conversations of the model's chat template read so, not 1")
        return list(found.pop())

    # -- both ----------------------------------------------------------------------------------------------------------

    def _column(self, rows: Sequence[Mapping[str, Any]], name: str, *kinds: type) -> list[Any]:
        for row, values in enumerate(rows):
            value = values.get(name)
            if not isinstance(value, kinds) or not _is_sound(value):
                raise self._refused(row, name, f"{value!r} is not what the trainer writes there")
        return [values[name] for values in rows]

    def _one_step(self, rows: Sequence[Mapping[str, Any]]) -> int:
        steps = sorted(set(self._column(rows, "step", int)))
        if len(steps) != 1:
            raise DataError(f"{self._file}: its rows are of the steps {steps}; give a file with the rows of one")
        return int(steps[0])

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Raises DataError."""
        try:
            shown = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise their own types
            raise DataError(f"the model's chat template refuses it ({error})") from error
        return list(shown["input_ids"])

    def _read(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _logged_ids(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        ids = self._column(rows, "completion_ids", list)
        for row, one in enumerate(ids):
            if not one or not all(isinstance(token, int) and 0 <= token < len(self._tokenizer) for token in one):
                raise self._refused(row, "completion_ids", "it is no list of the model's token ids")
        return ids

    def _tokens(self, field: str, texts: Sequence[str], lengths: Mapping[str, float]) -> list[list[int]]:
        """Each with the end token, except those that fill the limit without it. lengths: mean, most, least, and share
        of rows at the limit."""
        _, most, _, share = lengths.values()
        rows = []
        for row, text in enumerate(texts):
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            if self._read(ids) != text or len(ids) > most:
                drawn = f"those drawn, of which no row has more than {most:g}"
                raise self._refused(row, field, f"its text becomes {len(ids)} tokens, which are not {drawn}")
            rows.append(ids if share and len(ids) == most else [*ids, self._ends[0]])
            if not rows[-1]:
                raise self._refused(row, field, "it has no token")
        return rows

    def _figures(self, logged: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
        for name in names:
            if not isinstance(logged.get(name), float | int) or not _is_sound(logged[name]):
                raise DataError(f"{self._log or self._file.parent.parent}: {name} of the step is {logged.get(name)!r}")
        return {name: float(logged[name]) for name in names}

    def _logged(self, step_log: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
        there = {f"{prefix}{name}": name for name in FIGURES if f"{prefix}{name}" in step_log}
        return {there[name]: value for name, value in self._figures(step_log, list(there)).items()}

    def _compare(self, field: str, found: Sequence[float], logged: Mapping[str, float]) -> None:
        for own, (name, value) in zip(found, logged.items(), strict=True):
            if not is_close(own, value):
                raise DataError(
                    f"{self._file}: {field}: {name} is {own:.10g} as the rows are read with this model's tokenizer and "
                    f"template, and the trainer logged {value}: rows are missing, or these are not the tokens it had"
                )

    def _members(self, names: Sequence[str]) -> list[list[int]]:
        """Rows of each group. names: a value that siblings share."""
        members: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            members.setdefault(name, []).append(row)
        sizes = sorted({len(some) for some in members.values()})
        if len(sizes) != 1 or sizes == [1]:
            raise DataError(f"{self._file}: its prompts have {sizes} rows; groups are of one size above 1, by prompt")
        return list(members.values())

    def _notes(self) -> tuple[str, ...]:
        ends = [self._tokenizer.decode([one]) for one in self._ends]
        taken = f"no field tells which of the end tokens {', '.join(ends)} a row had; {ends[0]} is taken for all"
        return (taken,) if len(ends) > 1 else ()

    def _refused(self, row: int, field: str, why: str) -> DataError:
        return DataError(f"{self._file}: row {row}, {field}: {why}")


def _group(
    rows: Sequence[int],
    prompts: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    ids: Sequence[Sequence[int]],
    cut: Sequence[bool],
    scores: Sequence[float] | None = None,
) -> Group:
    question = prompts[rows[0]] if isinstance(prompts[rows[0]], str) else json.dumps(prompts[rows[0]])
    problem = Problem(id=problem_id(question), question=question, answer="")
    attempts = []
    for index, row in enumerate(rows):
        unknown = (math.nan,) * len(ids[row])  # not recorded
        finish, end = (Finish.LENGTH, Stop.MAX_TOKENS) if cut[row] else (Finish.STOP, Stop.ANSWERED)
        turn = Turn(completion=Completion(token_ids=tuple(ids[row]), logprobs=unknown, finish=finish))
        prompt, outcome = tuple(prompt_ids[row]), None if scores is None else _outcome(scores[row])
        made = Trajectory(problem_id=problem.id, index=index, prompt_ids=prompt, turns=(turn,), stop=end)
        attempts.append(replace(made, outcome=outcome))
    return Group(problem=problem, trajectories=tuple(attempts))


def _outcome(score: float) -> Outcome:
    verdict = Verdict.RIGHT if score > RIGHT_ABOVE else Verdict.WRONG
    return Outcome(verdict=verdict, reward=float(score), extracted=None, method="verl", format_facts=FormatFacts())


def _lengths(ids: Sequence[Sequence[int]]) -> list[float]:
    lengths = [len(one) for one in ids]
    return [fmean(lengths), max(lengths), min(lengths)]


def _given(message: Any) -> dict[str, Any]:
    """Without the null keys that parquet adds from other rows' messages."""
    return {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no UTF-8: {error}") from error


def _is_sound(value: Any) -> bool:
    """Whether a number is finite and not too large, and text can be encoded."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
    return not isinstance(value, bool) and (not isinstance(value, float | int) or abs(value) < LARGEST)


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _messages(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in texts.items()]
