"""IFEval: an answer is right if it follows every instruction of its prompt exactly (strict, prompt level). Further
figures: strict for single instructions, and loose for both, where the answer may also pass without its stars, its first
or its last line.

Each of its 25 kinds of instructions is a function (answer, its arguments) -> whether the answer follows it, written
anew after google-research's instruction_following_eval (Apache-2.0) and compared with it (docs/results.md). Its
counting rules are kept, oddities included: a keyword is a regular expression and may stand inside a longer word, a
bullet may begin with any number of dashes, a paragraph divider is `***`. One departure: if a row asks for a character
that is not a letter (`#`, `!`), the original counts a random letter, and this one counts the character. Sentences and
words with capitals are nltk's, languages langdetect's (extra `eval`).

IFBench has the same figures over 58 harder kinds of instructions. Its checks need taggers, syllable and emoji tables,
so the benchmark's own package `ifbench` of github.com/allenai/IFBench computes them.

Sources: Zhou et al. 2023, arXiv 2311.07911 (paper Table 5 quotes the strict prompt level); Pyatkin et al. 2025, arXiv
2507.02833."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.benchmark import BenchmarkFile, Rows, column, lines
from rocstar.evaluation.intervals import figure, mean_over_problems
from rocstar.evaluation.scoring import Scorer, judged, ratio
from rocstar.types import Group, Outcome, Problem, Trajectory, problem_id

Check = Callable[..., bool]

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
JSON_FENCES = ("```json", "```Json", "```JSON", "```")
FIRST_WORD_ENDS = re.compile(r"[.,?!'\"]")


def existence(answer: str, keywords: Sequence[str]) -> bool:
    return all(re.search(keyword, answer, re.IGNORECASE) for keyword in keywords)


def frequency(answer: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(len(re.findall(keyword.strip(), answer, re.IGNORECASE)), relation, frequency)


def forbidden_words(answer: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", answer, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(Counter(answer.lower())[letter.strip().lower()], let_relation, let_frequency)


def response_language(answer: str, language: str) -> bool:
    return _language(answer) in (language, None)


def number_sentences(answer: str, num_sentences: int, relation: str) -> bool:
    import nltk

    return _compared(len(nltk.sent_tokenize(answer)), relation, num_sentences)


def number_paragraphs(answer: str, num_paragraphs: int) -> bool:
    first, *inner = re.split(r"\s?\*\*\*\s?", answer)
    last = [inner.pop()] if inner else []
    if not all(part.strip() for part in inner):
        return False
    return len(inner) + sum(bool(part.strip()) for part in (first, *last)) == num_paragraphs


def number_words(answer: str, num_words: int, relation: str) -> bool:
    return _compared(len(re.findall(r"\w+", answer)), relation, num_words)


def nth_paragraph_first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """The place is counted among all parts between empty lines, the number only among those that are not blank."""
    parts = answer.split("\n\n")
    filled = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > filled or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return filled == num_paragraphs and FIRST_WORD_ENDS.split(word)[0].lower() == first_word.lower()


def number_placeholders(answer: str, num_placeholders: int) -> bool:
    closed = (line[: line.rfind("]") + 1] for line in answer.split("\n"))  # linear: each "[" in it finds its end
    return sum(len(re.findall(r"\[.*?\]", line)) for line in closed) >= num_placeholders


def postscript(answer: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, marker.lower()), answer.lower()) is not None


def number_bullet_lists(answer: str, num_bullets: int) -> bool:
    text = _without_long_gaps(answer)
    starred = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(starred) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def constrained_response(answer: str) -> bool:
    return any(option in answer for option in CONSTRAINED)


def number_highlighted_sections(answer: str, num_highlights: int) -> bool:
    """A section in two stars on each side counts once for each pattern that finds it."""
    single = [found.strip("*") for found in re.findall(r"\*[^\n\*]*\*", answer)]
    double = [found[2:-2] for found in re.findall(r"\*\*[^\n\*]*\*\*", answer)]
    return sum(bool(found.strip()) for found in (*single, *double)) >= num_highlights


def multiple_sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{section_spliter.strip()}\s?\d+\s?", answer)) >= num_sections


def json_format(answer: str) -> bool:
    bare = answer.strip()
    for fence in JSON_FENCES:
        bare = bare.removeprefix(fence)
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(answer: str) -> bool:
    """From the first `<<` to the last `>>` of a line, with something between that is neither blank nor a bracket."""
    spans = ((line, line.find("<<"), line.rfind(">>")) for line in answer.split("\n"))
    titles = (line[begin : end + 2] for line, begin, end in spans if 0 <= begin < end - 2)
    return any(found.lstrip("<").rstrip(">").strip() for found in titles)


def two_responses(answer: str) -> bool:
    parts = answer.split("******")
    filled = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(answer: str, prompt_to_repeat: str) -> bool:
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(answer: str, end_phrase: str) -> bool:
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    import nltk

    capitals = sum(word.isupper() for word in nltk.word_tokenize(answer))
    return _compared(capitals, capital_relation, capital_frequency)


def english_capital(answer: str) -> bool:
    return answer.isupper() and _language(answer) in ("en", None)


def english_lowercase(answer: str) -> bool:
    return answer.islower() and _language(answer) in ("en", None)


def no_comma(answer: str) -> bool:
    return "," not in answer


def quotation(answer: str) -> bool:
    bare = answer.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


CHECKS: Mapping[str, Check] = {
    f"{family}:{check.__name__}": check
    for family, checks in {
        "keywords": (existence, frequency, forbidden_words, letter_frequency),
        "language": (response_language,),
        "length_constraints": (number_sentences, number_paragraphs, number_words, nth_paragraph_first_word),
        "detectable_content": (number_placeholders, postscript),
        "detectable_format": (
            *(number_bullet_lists, constrained_response, number_highlighted_sections, multiple_sections),
            *(json_format, title),
        ),
        "combination": (two_responses, repeat_prompt),
        "startend": (end_checker, quotation),
        "change_case": (capital_word_frequency, english_capital, english_lowercase),
        "punctuation": (no_comma,),
    }.items()
    for check in checks
}
"""Name of an instruction -> its check, whose own name is the name's second part."""


def follows(instruction: str, arguments: Mapping[str, Any], prompt: str, answer: str) -> bool:
    """Raises DataError for an instruction that is none of CHECKS, TypeError for arguments that it does not take."""
    if instruction not in CHECKS:
        raise DataError(f"{instruction!r} is no instruction of IFEval; the rows are of another benchmark.")
    given = {name: value for name, value in arguments.items() if value is not None}
    return bool(answer.strip()) and CHECKS[instruction](answer, **given)


def variants(answer: str) -> tuple[str, ...]:
    """The variants of which one must follow for a loose verdict: without stars, first line or last line."""
    lines = answer.split("\n")
    cut = (answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])))
    return (*cut, *(part.replace("*", "") for part in cut))


def _without_long_gaps(text: str) -> str:
    """At most two blank lines in a row: thousands of them would make the patterns above quadratic, and change no
    count."""
    blank = [not line.strip() for line in text.split("\n")]
    pairs = enumerate(text.split("\n"))
    return "\n".join(line for place, line in pairs if place < 2 or not all(blank[place - 2 : place + 1]))


def _compared(count: int, relation: str, threshold: int) -> bool:
    """Raises ValueError for another relation."""
    if relation not in ("less than", "at least"):
        raise ValueError(f"the relation {relation!r} is neither 'less than' nor 'at least'")
    return count < threshold if relation == "less than" else count >= threshold


def _language(text: str) -> str | None:
    """Two letters, such as `en`; None if no language is detected: then any passes."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # it is randomised, and an answer must always get the same verdict
    try:
        found: str = detect(text)
    except LangDetectException:
        return None
    return found


Follows = Callable[[str, Mapping[str, Any], str, str], bool]
"""(instruction, its arguments, prompt, answer) -> whether the answer follows it."""
IFBENCH_HINT = "pip install git+https://github.com/allenai/IFBench"


def columns(file: BenchmarkFile) -> list[str]:
    return [file.question, "instruction_id_list", "kwargs"]


def problems(file: BenchmarkFile, rows: Rows) -> list[Problem]:
    """Raises DataError."""
    found = []
    for part, where, row in lines(rows, file.files):
        question = str(column(row, file.question, where))
        names, arguments = column(row, "instruction_id_list", where), column(row, "kwargs", where)
        if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
            raise DataError(f"{where}: instruction_id_list and kwargs are not two lists of one length.")
        metadata = {"instructions": names, "arguments": arguments}
        found.append(Problem(id=problem_id(question), question=question, answer="", source=part, metadata=metadata))
    return found


def check() -> None:
    """Raises ModuleNotFoundError without the libraries, ConfigError without the data that nltk downloads apart."""
    download = f"{sys.executable} -m nltk.downloader punkt_tab"
    for name in ("nltk", "langdetect"):
        if find_spec(name) is None:
            error = ModuleNotFoundError(f"No module named {name!r}", name=name)
            error.add_note(download)
            raise error
    try:
        import nltk

        nltk.word_tokenize("One. Two.")
    except LookupError:
        raise ConfigError(
            f"IFEval counts sentences with nltk's punkt_tab, which is not there; get it with: {download}"
        ) from None


def check_ifbench() -> None:
    """Raises ConfigError if its package is not installed."""
    if find_spec("ifbench") is None:
        raise ConfigError(f"IFBench is scored by its own package, which is not installed; {IFBENCH_HINT}")


def published(instruction: str, arguments: Mapping[str, Any], prompt: str, answer: str) -> bool:
    """The verdict of IFBench's package. Raises KeyError for an unknown instruction."""
    from ifbench import instructions_registry

    one = instructions_registry.INSTRUCTION_DICT[instruction](instruction)
    one.build_description(**{name: value for name, value in arguments.items() if value is not None})
    if "prompt" in (one.get_instruction_args() or {}):
        one.build_description(prompt=prompt)
    return bool(answer.strip()) and bool(one.check_following(answer))


@dataclass(frozen=True, kw_only=True)
class IfevalScorer(Scorer):
    """`method` of an outcome spells the verdicts on single instructions: S strict, l only loose, . neither."""

    decide: Follows = follows
    """Judges one instruction; `follows` knows those of IFEval."""

    def figures(self, groups: Sequence[Group]) -> dict[str, Any]:
        judged = [[a.outcome for a in group.trajectories if a.outcome] for group in groups]
        signs = [[outcome.method.partition(" ")[2] for outcome in outcomes] for outcomes in judged]
        loose = [[("." not in one) for one in group] for group in signs if group]
        return {
            "prompt_strict": figure(mean_over_problems([fmean(map(_strict, g)) for g in signs if g])),
            "prompt_loose": figure(mean_over_problems([sum(group) / len(group) for group in loose])),
            "instruction_strict": figure(ratio([("".join(g).count("S"), len("".join(g))) for g in signs])),
            "instruction_loose": figure(ratio([(len(t) - t.count("."), len(t)) for t in map("".join, signs)])),
        }

    def outcome(self, problem: Problem, attempt: Trajectory) -> Outcome:
        """Raises DataError for an instruction of no known kind."""
        text = self.final_text(attempt)
        pairs = zip(problem.metadata["instructions"], problem.metadata["arguments"], strict=True)
        signs = "".join(self._sign(name, arguments, problem.question, text) for name, arguments in pairs)
        return judged(_strict(signs), method=f"instructions {signs}", extracted=None, text=text)

    def _sign(self, name: str, arguments: Mapping[str, Any], prompt: str, text: str) -> str:
        if self.decide(name, arguments, prompt, text):
            return "S"
        return "l" if any(self.decide(name, arguments, prompt, one) for one in variants(text)) else "."


def _strict(signs: str) -> bool:
    return set(signs) <= {"S"}
