"""Answers that are made to follow the instructions of IFEval's prompts, and such answers spoilt: what a scorer is tried
on (scorers.py)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rocstar.types import Problem

WORDS = re.findall(
    r"\w+",
    "the river runs under an old stone bridge while people walk home and talk about weather food music books trains "
    "gardens winter light and small towns near Lake Geneva where Dr Smith lives",
)
LANGUAGES = {
    "de": "Der Fluss fließt unter der alten Brücke, und die Leute gehen nach Hause.",
    "it": "Il fiume scorre sotto il vecchio ponte e la gente torna a casa la sera.",
    "ru": "Река течёт под старым мостом, и люди идут домой вечером.",
    "ko": "강은 오래된 다리 아래로 흐르고 사람들은 집으로 걸어갑니다.",
    "hi": "नदी पुराने पुल के नीचे बहती है और लोग शाम को घर जाते हैं।",
    "ar": "يجري النهر تحت الجسر القديم ويعود الناس إلى بيوتهم في المساء.",
    "vi": "Dòng sông chảy dưới cây cầu cũ và mọi người đi bộ về nhà vào buổi tối.",
    "fi": "Joki virtaa vanhan sillan alla ja ihmiset kävelevät illalla kotiin.",
    "th": "แม่น้ำไหลใต้สะพานเก่าและผู้คนเดินกลับบ้าน",
    "bn": "নদী পুরানো সেতুর নিচ দিয়ে বয়ে যায় এবং মানুষ বাড়ি ফেরে।",
}
ENGLISH = "The river runs under the old stone bridge and the people walk home in the evening."
Arguments = Mapping[str, Any]


def answers(problems: Sequence[Problem], seed: int, real: Sequence[str]) -> Iterator[tuple[Problem, str]]:
    """Endless (prompt, answer): made to follow, then spoilt, then taken from another prompt, then a real model's."""
    rng = random.Random(seed)
    last = ENGLISH
    while True:
        problem = rng.choice(problems)
        made = following(problem, rng)
        yield problem, made
        yield problem, spoilt(made, rng)
        yield problem, last
        if real:
            yield problem, rng.choice([rng.choice(real), following(problem, rng) + "\n\n" + rng.choice(real)])
        last = made


def following(problem: Problem, rng: random.Random) -> str:
    """An answer built to follow the instructions of a prompt, as far as they go together; near the thresholds."""
    text = prose(rng, rng.randint(20, 120))
    pairs = list(zip(problem.metadata["instructions"], problem.metadata["arguments"], strict=True))
    for name, arguments in sorted(pairs, key=lambda pair: LAST.get(pair[0], 0)):
        text = MAKE[name](text, arguments, rng)
    return text


def prose(rng: random.Random, words: int) -> str:
    parts, left = [], words
    while left > 0:
        size = min(left, rng.randint(3, 14))
        sentence = " ".join(rng.choices(WORDS, k=size)).capitalize()
        parts.append(sentence + rng.choice([".", ".", ".", "!", "?", "...", " e.g. this.", ", see www.site.com."]))
        left -= size
    return rng.choice([" ", "\n", "\n\n"]).join(parts)


def near(rng: random.Random, threshold: int, relation: str) -> int:
    """A count at, just above or just below a threshold."""
    wanted = threshold if relation == "at least" else threshold - 1
    return max(0, wanted + rng.choice([0, 0, 0, 1, -1]))


def spoilt(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    changes: list[Callable[[], str]] = [
        lambda: text.upper(),
        lambda: text.lower(),
        lambda: "\n".join(lines[1:]),
        lambda: "\n".join(lines[:-1]),
        lambda: "Sure, here it is:\n" + text,
        lambda: text + "\nI hope this helps, let me know!",
        lambda: text.replace("*", ""),
        lambda: text.replace("\n\n", "\n"),
        lambda: text.replace(".", "").replace("[", "("),
        lambda: text + "\n\n" + text,
        lambda: f'"{text}"',
        lambda: text[: len(text) // 2],
        lambda: "",
        lambda: "   \n ",
        lambda: "\n".join(rng.sample(lines, len(lines))),
        lambda: text.replace(" ", "  ").replace("***", "* * *"),
    ]
    return rng.choice(changes)()


def _number(arguments: Arguments, name: str, relation: str, rng: random.Random) -> int:
    return near(rng, arguments[name], arguments[relation])


def _words(text: str, arguments: Arguments, rng: random.Random) -> str:
    count = _number(arguments, "num_words", "relation", rng)
    return " ".join(rng.choices(WORDS, k=count)).capitalize() + "." if count else ""


def _sentences(text: str, arguments: Arguments, rng: random.Random) -> str:
    made = (prose(rng, rng.randint(2, 8)) for _ in range(_number(arguments, "num_sentences", "relation", rng)))
    return " ".join(one.split("\n")[0] for one in made)


def _frequency(text: str, arguments: Arguments, rng: random.Random) -> str:
    return text + f" {arguments['keyword']}" * _number(arguments, "frequency", "relation", rng)


def _letters(text: str, arguments: Arguments, rng: random.Random) -> str:
    bare = "".join(character for character in text if character.lower() != arguments["letter"].lower())
    return bare + arguments["letter"] * _number(arguments, "let_frequency", "let_relation", rng)


def _capitals(text: str, arguments: Arguments, rng: random.Random) -> str:
    count = _number(arguments, "capital_frequency", "capital_relation", rng)
    return text + "".join(
        rng.choice([" STOP", " A.B.C.", " NATO-led", " IT'S", " U.S. Go", " NOW."]) for _ in range(count)
    )


def _first_word(text: str, arguments: Arguments, rng: random.Random) -> str:
    count = max(1, arguments["num_paragraphs"] + rng.choice([0, 0, 0, 1, -1]))
    parts = [" ".join(rng.choices(WORDS, k=6)) for _ in range(count)]
    place = min(count, arguments["nth_paragraph"]) - 1
    opening = rng.choice(["", "'", '"', ""])
    parts[place] = f"{opening}{arguments['first_word'].title()}{rng.choice(['', ',', '!', ' and'])} {parts[place]}"
    return rng.choice(["\n\n", "\n\n", "\n\n\n\n"]).join(parts)


def _paragraphs(text: str, arguments: Arguments, rng: random.Random) -> str:
    count = max(1, arguments["num_paragraphs"] + rng.choice([0, 0, 0, 1, -1]))
    parts = [" ".join(rng.choices(WORDS, k=6)) for _ in range(count)]
    made = rng.choice(["\n***\n", "***", " *** ", "\n\n***\n\n"]).join(parts)
    return rng.choice([made, made, f"***\n{made}", f"{made}\n***", made + "\n******\n"])


def _bullets(text: str, arguments: Arguments, rng: random.Random) -> str:
    marks = ["* ", "- ", "  * ", "** ", "-", "*", "+ "]
    count = max(0, arguments["num_bullets"] + rng.choice([0, 0, 0, 1, -1]))
    return text.split("\n")[0] + "".join(
        f"\n{rng.choice(marks[:2] if rng.random() < 0.7 else marks)}point" for _ in range(count)
    )


def _highlights(text: str, arguments: Arguments, rng: random.Random) -> str:
    forms = ["*one*", "**two**", "* *", "***three***", "*four\nfive*", "****"]
    count = max(0, arguments["num_highlights"] + rng.choice([0, 0, 1, -1]))
    return text + "".join(f" {rng.choice(forms[:2] if rng.random() < 0.7 else forms)}" for _ in range(count))


def _marked_sections(text: str, arguments: Arguments, rng: random.Random) -> str:
    count = max(0, arguments["num_sections"] + rng.choice([0, 0, 1, -1]))
    gap = rng.choice([" ", " ", "", "-"])
    return "\n".join(f"{arguments['section_spliter']}{gap}{n + 1}\n{ENGLISH}" for n in range(count))


def _placeholders(text: str, arguments: Arguments, rng: random.Random) -> str:
    count = max(0, arguments["num_placeholders"] + rng.choice([0, 0, 1, -1]))
    return text + "".join(rng.choice([" [name]", " [a b]", " []", " [x\ny]"]) for _ in range(count))


def _postscript(text: str, arguments: Arguments, rng: random.Random) -> str:
    marker = rng.choice([arguments["postscript_marker"], "P.S.", "P. P. S", "PS:", "p.p.s."])
    return f"{text}\n{marker} one more thing"


def _language(text: str, arguments: Arguments, rng: random.Random) -> str:
    return rng.choice([LANGUAGES.get(arguments["language"], ENGLISH), rng.choice(list(LANGUAGES.values())), "12345"])


def _json(text: str, arguments: Arguments, rng: random.Random) -> str:
    body = json.dumps({"answer": text, "n": [1, 2]})
    return rng.choice(
        [body, f"```json\n{body}\n```", f"```\n{body}```", f"```JSON\n{body}\n```", f"Here: {body}", body[:-1]]
    )


def _title(text: str, arguments: Arguments, rng: random.Random) -> str:
    return rng.choice(["<<A title>>", "<<>>", "<< >>", "<<two\nlines>>", "<<<x>>>", "<one>"]) + "\n" + text


def _two(text: str, arguments: Arguments, rng: random.Random) -> str:
    other = rng.choice([ENGLISH, ENGLISH, text])
    return rng.choice(
        [f"{text}\n******\n{other}", f"{text}******{other}******", f"{text}\n*******\n{other}", f"******{text}"]
    )


def _ending(text: str, arguments: Arguments, rng: random.Random) -> str:
    return text + "\n" + rng.choice(["", '"']) + arguments["end_phrase"] + rng.choice(["", "", '"', " ", "."])


def _keywords(text: str, arguments: Arguments, rng: random.Random) -> str:
    words = list(arguments["keywords"])
    return text + " " + " ".join(words[: rng.choice([len(words), len(words), len(words) - 1])]).swapcase()


def _forbidden(text: str, arguments: Arguments, rng: random.Random) -> str:
    return text + rng.choice(
        ["", "", f" {rng.choice(arguments['forbidden_words'])}", f" un{arguments['forbidden_words'][0]}ly"]
    )


MAKE: dict[str, Callable[[str, Arguments, random.Random], str]] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text, arguments, rng: rng.choice(
        ["My answer is yes.", " My answer is maybe. ", "my answer is no.", "My answer is", f"{text} My answer is no."]
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _marked_sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two,
    "combination:repeat_prompt": lambda text, arguments, rng: (
        rng.choice(["", " ", "Sure. "]) + arguments["prompt_to_repeat"] + "\n" + text
    ),
    "startend:end_checker": _ending,
    "startend:quotation": lambda text, arguments, rng: rng.choice(
        [f'"{text}"', f' "{text}" \n', f'"{text}', '"', f"'{text}'"]
    ),
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda text, arguments, rng: rng.choice([text.upper(), ENGLISH.upper(), text]),
    "change_case:english_lowercase": lambda text, arguments, rng: rng.choice([text.lower(), ENGLISH.lower(), text]),
    "punctuation:no_comma": lambda text, arguments, rng: text.replace(",", rng.choice(["", "", ";", ","])),
}
LAST = {"change_case:english_capital": 1, "change_case:english_lowercase": 1, "punctuation:no_comma": 2,
        "detectable_format:json_format": 3, "combination:two_responses": 3, "combination:repeat_prompt": 4,
        "startend:end_checker": 5, "startend:quotation": 6}  # fmt: skip
"""Instructions that change the whole answer come after those that add to it."""
