"""How the scorers of `rocstar eval` agree with published checkers and reference answers.

    python benchmarks/scorers.py --data-folder DATA --ifeval-checker FOLDER --bfcl-checker FOLDER

IFEval: verdicts on single instructions, strict and loose, beside those of the published checker
(github.com/josejg/instruction_following_eval, a package of Google's code) on answers that are made to follow the
instructions of real prompts, on such answers spoilt, and on answers of other prompts. The two instructions that count a
sign that is no letter are left out: the published checker draws a letter at random there.
BFCL: every reference answer must be right, and each spoilt one wrong; with --bfcl-checker (`bfcl_eval` of
github.com/ShishirPatil/gorilla) the verdicts on both are compared as well.

IFBench: verdicts of the package `ifbench`, as our scorer asks it, beside those that its repository publishes for one
model's answers (`data/sample_output.jsonl`, `eval/` of github.com/allenai/IFBench, --ifbench-checker).

What is absent is said and left out. Prints a table and, last, one JSON line."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ifeval_answers import Arguments, answers

from rocstar.evaluation.benchmark import find_benchmarks
from rocstar.evaluation.kinds import KINDS
from rocstar.evaluation.scorers.functions import complaint_of
from rocstar.evaluation.scorers.ifeval import published
from rocstar.evaluation.scorers.instructions import follows, variants
from rocstar.types import Problem, ToolCall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", type=Path, required=True)
    parser.add_argument("--ifeval-checker", type=Path)
    parser.add_argument("--bfcl-checker", type=Path)
    parser.add_argument("--ifbench-checker", type=Path)
    parser.add_argument("--model-answers", type=Path, help="JSONL with a model's answers as `response`: used as well.")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--perturbed", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    figures = {**ifeval(given), **bfcl(given), **ifbench(given)}
    print(json.dumps(figures))


def problems_of(name: str, folder: Path) -> list[Problem]:
    (benchmark,) = find_benchmarks(name)
    rows, _ = benchmark.read(folder)
    return KINDS[benchmark.file.kind].problems(benchmark.file, rows)


# IFEval


def ifeval(given: argparse.Namespace) -> dict[str, Any]:
    if given.ifeval_checker is None or not (given.data_folder / "ifeval").is_dir():
        print("IFEval: left out, it needs --ifeval-checker and the rows of ifeval/ in --data-folder")
        return {}
    sys.path.insert(0, str(given.ifeval_checker))
    import langdetect

    langdetect.DetectorFactory.seed = 0  # the published checker draws languages at random; one seed for both
    registry = importlib.import_module("instruction_following_eval.instructions_registry").INSTRUCTION_DICT
    agreed, differed, right = Counter(), Counter(), Counter()
    for problem, answer in itertools.islice(
        answers(problems_of("ifeval", given.data_folder), given.seed, written(given.model_answers)), given.answers
    ):
        for name, arguments in zip(problem.metadata["instructions"], problem.metadata["arguments"], strict=True):
            if not arguments.get("letter", "a").isalpha():
                continue
            theirs = [published_verdict(registry, name, arguments, one) for one in (answer, *variants(answer))]
            ours = [follows(name, arguments, one) for one in (answer, *variants(answer))]
            same = ours[0] == theirs[0] and any(ours) == any(theirs)
            (agreed if same else differed)[name] += 1
            right[name, ours[0]] += 1
            if not same:
                print(f"  differs: {name} {dict(arguments)} ours {ours} theirs {theirs}: {answer[:200]!r}")
    print(f"IFEval: {given.answers} answers, {sum(agreed.values())} verdicts agree, {sum(differed.values())} differ")
    for name in sorted(agreed + differed):
        print(f"  {name:45} agree {agreed[name]:4}  differ {differed[name]:3}  followed {right[name, True]:4}")
    return {
        "ifeval_answers": given.answers,
        "ifeval_verdicts": sum(agreed.values()) + sum(differed.values()),
        "ifeval_differ": sum(differed.values()),
        "ifeval_followed": sum(count for (_, followed), count in right.items() if followed),
        "ifeval_kinds": len(agreed + differed),
    }


def published_verdict(registry: Mapping[str, Any], name: str, arguments: Arguments, answer: str) -> bool:
    instruction = registry[name](name)
    instruction.build_description(**arguments)
    return bool(answer.strip()) and bool(instruction.check_following(answer))


def written(file: Path | None) -> list[str]:
    """What a real model wrote."""
    return [row["response"] for row in read(file)] if file else []


# BFCL


def bfcl(given: argparse.Namespace) -> dict[str, Any]:
    if not (given.data_folder / "bfcl").is_dir():
        print("BFCL: left out, there are no rows of bfcl/ in --data-folder")
        return {}
    problems = [p for p in problems_of("bfcl", given.data_folder) if p.metadata["possible"] is not None]
    checker = bfcl_checker(given.bfcl_checker)
    rng = random.Random(given.seed)
    wrong = [p for p in problems if complaint_of(p.metadata, references(p)) is not None]
    for problem in wrong:
        told = complaint_of(problem.metadata, references(problem))
        theirs = "not asked" if checker is None else "right" if checker(problem, references(problem)) else "wrong"
        print(
            f"  a reference is wrong ({told}; published checker: {theirs}): {str(problem.metadata['possible'])[:160]}"
        )
    passed, tried, differ = 0, 0, 0
    kinds: Counter[str] = Counter()
    while tried < given.perturbed:
        problem = rng.choice(problems)
        found = perturbed(problem, rng)
        if found is None:
            continue
        kind, calls = found
        tried += 1
        kinds[kind] += 1
        right = complaint_of(problem.metadata, calls) is None
        passed += right
        if right:
            said = [(call.tool, call.arguments) for call in calls]
            print(f"  a spoilt answer is right: {kind} {said} {problem.metadata['possible']}")
        if checker is not None:
            differ += checker(problem, calls) != right
    if checker is not None:
        differ += sum(checker(problem, references(problem)) is (problem in wrong) for problem in problems)
    print(f"BFCL: {len(problems)} reference answers, {len(wrong)} wrong")
    print(f"BFCL: {tried} spoilt answers, {passed} right {dict(kinds)}")
    told = "not compared" if checker is None else f"{differ} of {len(problems) + tried} verdicts differ"
    print(f"BFCL: beside the published checker: {told}")
    figures = {"bfcl_references": len(problems), "bfcl_references_wrong": len(wrong)}
    return {**figures, "bfcl_spoilt": tried, "bfcl_spoilt_right": passed, "bfcl_differ": differ if checker else None}


def references(problem: Problem) -> list[ToolCall]:
    """The calls that the possible answers describe: each parameter with its first value, left out where it may be and
    says nothing or is not described."""
    described = {function["name"]: function["parameters"] for function in problem.metadata["described"]}
    return [
        _call(
            name, {key: _first(values) for key, values in parameters.items() if _is_said(key, values, described[name])}
        )
        for possible in problem.metadata["possible"]
        for name, parameters in possible.items()
    ]


def _is_said(name: str, values: Sequence[Any], described: Mapping[str, Any]) -> bool:
    says_nothing = all(value == "" for value in values) and name not in described["required"]
    return not ("" in values and (says_nothing or name not in described["properties"]))


def _call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(id="call_0", tool=name, arguments=arguments, raw="")


def _first(values: Sequence[Any]) -> Any:
    """The first value that says something. A dict's keys hold lists of possible values again, but no deeper."""
    value = next((one for one in values if one != ""), "")
    if isinstance(value, dict):
        return _keys(value)
    return [_keys(one) if isinstance(one, dict) else one for one in value] if isinstance(value, list) else value


def _keys(value: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    told = {key: [one for one in inner if one != ""] for key, inner in value.items()}
    return {key: inner[0] for key, inner in told.items() if inner}


def perturbed(problem: Problem, rng: random.Random) -> tuple[str, list[ToolCall]] | None:
    """A reference answer with one thing wrong in it that cannot be right; None where this one does not apply."""
    calls = references(problem)
    place = rng.randrange(len(calls))
    call, (possible,) = calls[place], problem.metadata["possible"][place].values()
    kind = rng.choice(["name", "missing", "unexpected", "value", "type", "fewer", "more"])
    arguments = dict(call.arguments)
    if kind == "name":
        changed = [_call(call.tool + "_x", arguments)]
    elif kind == "unexpected":
        changed = [_call(call.tool, {**arguments, "no_such_parameter": 1})]
    elif kind == "fewer":
        changed = []
    elif kind == "more":
        changed = [call, call]
    else:
        names = [key for key in arguments if kind != "missing" or "" not in possible[key]]
        if not names:
            return None
        key = rng.choice(names)
        if kind == "missing":
            arguments.pop(key)
        else:
            arguments[key] = {"type": _retyped, "value": _other}[kind](arguments[key])
        changed = [_call(call.tool, arguments)]
    return kind, [*calls[:place], *changed, *calls[place + 1 :]]


def _other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return "zzqx"  # the other truth value is often right too
    if isinstance(value, int | float):
        return value + 987_654_321
    if isinstance(value, str):
        return f"{value} zzqx"
    return [*value, "zzqx"] if isinstance(value, list) else {**value, "zzqx": 1}


def _retyped(value: Any) -> Any:
    return {"zzqx": 1} if not isinstance(value, dict) else ["zzqx"]


def bfcl_checker(folder: Path | None) -> Callable[[Problem, Sequence[ToolCall]], bool] | None:
    """The published `ast_checker`, with a stand-in for its table of models, which says that names keep their dots."""
    if folder is None:
        return None
    sys.path.insert(0, str(folder))
    name = "bfcl_eval.constants.model_config"
    stand_in = types.ModuleType(name)
    vars(stand_in)["MODEL_CONFIG_MAPPING"] = {"m": types.SimpleNamespace(underscore_to_dot=False)}
    sys.modules[name] = stand_in
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    language = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON

    def check(problem: Problem, calls: Sequence[ToolCall]) -> bool:
        asked, said = problem.metadata, [{call.tool: dict(call.arguments)} for call in calls]
        return bool(
            checker.ast_checker(asked["described"], said, asked["possible"], language, asked["family"], "m")["valid"]
        )

    return check


# IFBench


def ifbench(given: argparse.Namespace) -> dict[str, Any]:
    if given.ifbench_checker is None:
        print("IFBench: left out, it needs --ifbench-checker")
        return {}
    sys.path.insert(0, str(given.ifbench_checker))
    said = {row["prompt"]: row["response"] for row in read(given.ifbench_checker / "data/sample_output.jsonl")}
    strict, loose = (read(given.ifbench_checker / f"eval/eval_results_{kind}.jsonl") for kind in ("strict", "loose"))
    asked = {row["prompt"]: row for row in read(given.ifbench_checker / "data/IFBench_test.jsonl")}
    counts: Counter[str] = Counter()
    for one, other in zip(strict, loose, strict=True):
        row, answer = asked.get(one["prompt"]), said[one["prompt"]]
        if row is None:
            counts["prompts that are gone"] += 1
            continue
        followed = zip(one["follow_instruction_list"], other["follow_instruction_list"], strict=True)
        for name, arguments, theirs in zip(row["instruction_id_list"], row["kwargs"], followed, strict=True):
            counts[ifbench_verdict(name, arguments, row["prompt"], answer, theirs)] += 1
    print(f"IFBench: {dict(counts)}")
    return {f"ifbench_{name.replace(' ', '_')}": count for name, count in counts.items()}


def ifbench_verdict(name: str, arguments: Arguments, prompt: str, answer: str, theirs: tuple[bool, bool]) -> str:
    try:
        ours = [published(name, arguments, prompt, one) for one in (answer, *variants(answer))]
    except LookupError:
        return "without data of nltk"
    if (ours[0], any(ours)) == theirs:
        return "agree"
    print(f"  differs: {name} {ours} theirs {theirs}")
    return "differ"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
