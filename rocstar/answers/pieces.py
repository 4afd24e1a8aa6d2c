"""Split an answer into parts: lists, tuples, intervals, sets, unions and matrices. Brackets only; the items stay text.

"(1, \\frac{1}{2})"      "(", ")", ["1", "\\frac{1}{2}"]     tuple or open interval: order counts
"\\{3, 1\\}" and "1, 3"   "{", "}" and "", ""               set and bare list: order does not count
"[0,1) \\cup (2,3]"      "u", "u", two intervals            union
"\\pm 3"                 "", "", ["3", "-3"]
"a = b = 0"             "", "", ["a = 0", "b = 0"], as "(a, b) = (0, 0)"
"2\\vec{i} - \\vec{j}"   "(", ")", ["2", "-1"]
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\cup(?![A-Za-z])|\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lbrace": "\\rbrace", "\\langle": "\\rangle"}
_CLOSING = frozenset(_OPENING.values())
_WORDS = r"\\(?:text|math|mbox|operatorname)[a-z]*\s*"
_LINKS = re.compile(
    rf"{_WORDS}\{{\s*(?:and|or|AND|OR)\s*\}}|\\(?:and|or|wedge|vee|land|lor)(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or|AND|OR)(?![A-Za-z])"
)
_MATRIX = re.compile(
    r"^\\begin\{(?P<bars>[vV]?)(?:[pbB]?matrix|smallmatrix|array)\*?\}(?:\{[lcr| ]*\})?(?P<cells>.*)"
    r"\\end\{[a-zBV]+\*?\}(?P<turned>\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?)?$",
    re.DOTALL,
)
_TURNED = re.compile(r"(?<=[)\]])\s*\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?$")
_SIGN = re.compile(r"\s*\\(pm|mp)(?![A-Za-z])\s*")
_NO_PLUS = re.compile(r"(?:^|(?<=[(\[{,;]))\s*\+")
# `]a,b[` is a common notation for an open interval.
_END = r"(?:[^\[\]();,]|\([^\[\]();,]*\))+"
_REVERSED = re.compile(
    r"(?:^|(?<=\\cup)|(?<=\\cap)|(?<=\\in)|(?<=[\s,;(={]))"
    rf"(?P<opening>[\[\](])(?P<ends>{_END}[;,]{_END})(?P<closing>[\[\])])(?=\s*(?:$|[,;)}}\\]))"
)
_AND = re.compile(rf"{_WORDS}\{{\s*and\s*\}}|\\(?:wedge|land)(?![A-Za-z])|(?<![A-Za-z\\])and(?![A-Za-z])")
_OR = re.compile(rf"{_WORDS}\{{\s*or\s*\}}|\\(?:vee|lor|cup)(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])")
_BUILDER = re.compile(r"^\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|:|\|)\s*(.*)\\\}$", re.DOTALL)
_LOGIC = re.compile(r"\\(?:vee|wedge|lor|land|equiv|ne)(?![A-Za-z])|[<>]|\\(?:leq?|geq?|lt|gt)(?:slant)?(?![A-Za-z])")
_STATED = re.compile(rf"=|\\(?:in|cup)(?![A-Za-z])|{_LOGIC.pattern}")
_RELATION = re.compile(r"(\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt)(?![A-Za-z])|[<>]=?)")
_BARS = re.compile(r"\||\\[lr]?vert(?![A-Za-z])")
_NAME = re.compile(r"((?<![A-Za-z\\])[A-Za-z]|\\(?:alpha|beta|theta|lambda|mu))(?:_\{?(\w+))?(?![A-Za-z])")
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:alpha|beta|theta|lambda|mu)|[A-Za-z]_\{?\w\}?|[fghyp]\([a-z]\)")
_LABELLED = re.compile(r"\s*([A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?\s*=\s*([^=]+)")
_CHAIN = re.compile(r"((?:[A-Za-z]\s*=\s*){2,})([^=<>,;]+)")
_TUPLES = re.compile(r"\(((?:(?:[A-Za-z]|\\[a-z]+(?![a-z]))\s*(?:,\s*)?){2,})\)\s*=\s*\(((?:[^()]|\([^()]*\))*)\)")
_BASIS = re.compile(r"((?<=[\w)}\]])\s*(?:\\cdot\s*)?)?\\vec\{([ijk])\}")
_LABEL = re.compile(r"^[A-Za-z]\w?(?:_\{?\w+\}?)?$")


@dataclass(frozen=True, slots=True)
class Pieces:
    opening: str
    """`(`, `[`, `{` (a set), `u` (a union), `m` (a matrix), or "" for a bare list."""
    closing: str
    """The bracket at the end, which need not match: `[0,1)`."""
    items: tuple[str, ...]
    """Texts between the separators; of a matrix its rows, joined by `&`."""

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the items counts."""
        return self.opening not in ("", "{", "u")

    @property
    def is_interval(self) -> bool:
        """Whether it may be an interval, or a union of such."""
        return self.opening == "u" or (self.opening in "([" and len(self.items) == 2 and self.opening != "")

    def named(self) -> dict[str, str]:
        """The values of a bare list by their letters, `x = 1, y = 2`; empty where one has none or two have the same."""
        found = [_LABELLED.fullmatch(item) for item in self.items] if self.opening == "" else []
        values = {match[1]: match[2] for match in found if match}
        return values if len(values) == len(self.items) > 1 else {}

    def as_vector(self, other: Pieces) -> Pieces:
        """A matrix of one row or column, or named values, as coordinates if the other has these; else unchanged."""
        cells = [cell.strip() for row in self.items for cell in split_top(row, ("&",))]
        is_vector = self.opening == "m" and len(cells) == max(len(self.items), len(cells) // len(self.items))
        if is_vector and other.opening in ("(", "["):
            return Pieces(other.opening, other.closing, tuple(cells))
        return Pieces("(", ")", tuple(self.named().values())) if other.opening == "(" and self.named() else self


def take_apart(text: str) -> Pieces | None:
    """The pieces of an answer that has several or is in brackets; None for a single value."""
    text = _LINKS.sub(",", _REVERSED.sub(_turned, text)).strip()
    in_brackets = text.startswith(("[\\begin", "(\\begin")) and text.endswith(("}]", "})"))
    if matrix := _MATRIX.match(text[1:-1].strip() if in_brackets else text):
        rows = [row for row in matrix["cells"].replace("\\cr", "\\\\").split("\\\\") if row.strip()]
        cells = [[cell.strip() for cell in row.split("&")] for row in rows]
        if matrix["turned"]:
            cells = [list(column) for column in zip(*cells, strict=False)]
        return Pieces(matrix["bars"] or "m", "m", tuple("&".join(row) for row in cells))
    if named := _named_values(text):
        return Pieces("", "", tuple(named))
    if coordinates := _coordinates(text):
        return Pieces("(", ")", coordinates)
    unions = [part for part in split_top(text, ("\\cup",)) if part]
    if len(unions) > 1:
        return Pieces("u", "u", tuple(unions))
    listed = _split_list(text)
    if len(listed) > 1:
        return Pieces("", "", tuple(item for part in listed for item in both_signs(part)))
    signed = both_signs(text)
    if len(signed) > 1 and (text.startswith("(") or not _bracketed(text)):
        return Pieces("", "", signed)
    return _bracketed(_TURNED.sub("", text))


def _named_values(text: str) -> list[str]:
    """`a = b = 0` and `(a, b) = (0, 0)` -> `a = 0`, `b = 0`; none for any other text."""
    if found := _CHAIN.fullmatch(text):
        return [f"{name} = {found[2]}" for name in re.findall(r"[A-Za-z]", found[1])]
    found = _TUPLES.fullmatch(text)
    names, values = (split_top(found[at], (",",)) for at in (1, 2)) if found else ([], [])
    return [f"{name} = {value}" for name, value in zip(names, values, strict=True)] if len(names) == len(values) else []


def _coordinates(text: str) -> tuple[str, ...]:
    """`2\\vec{i} - \\vec{k}` -> `2`, `0`, `-1`: a sum with one unit vector in each term; none for any other text."""
    terms = [term for term in split_top(text, ("+", "-")) if term]
    if "\\vec" not in text or any(len(_BASIS.findall(term)) != 1 for term in terms):
        return ()
    flat = _BASIS.sub(lambda found: "\\vec " + found[2] if found[1] is None else "\\cdot \\vec " + found[2], text)
    units = "ijk" if "{k}" in text else "ij"
    return tuple(re.sub(r"\\vec [ijk]", "0", flat.replace(f"\\vec {unit}", "1")) for unit in units)


def are_opposed(gold: str, predicted: str) -> bool:
    """Whether one has "and" where the other has "or" between statements, or only the prediction leaves open which of
    several values holds: `2 or 3` for `2, 3`. `x = 2 or x = 3` and `\\pm 2` are lists."""
    links = [(_AND.search(text) is None, _OR.search(text) is None) for text in (gold, predicted)]
    if all(map(_LOGIC.search, (gold, predicted))):
        return sorted(links) == [(False, True), (True, False)]
    return links[0][1] and not links[1][1] and not _SIGN.search(gold) and not _STATED.search(predicted)


def as_interval(text: str) -> str:
    r"""`x < 3` -> `(-\infty,3)`, `2 \le x < 5` and `x \ge 2 and x < 5` -> `[2,5)`, several with "or" as a union; any
    other text unchanged."""
    parts = [_both(_AND.split(part)) for part in _OR.split(_BUILDER.sub(r"\1", text.strip()))]
    if _RELATION.search(text):  # a point of the union
        points = map(_LABELLED.fullmatch, _OR.split(text))
        parts = [f"\\{{{point[2].strip()}\\}}" if point else part for part, point in zip(parts, points, strict=True)]
    return "\\cup ".join(part for part in parts if part) if all(parts) else text


def beside_bounds(text: str, other: str) -> str:
    """`1 < x < 3` -> `(1,3)` beside `|x - 2| < 1`, since math-verify solves that for an interval alone, and beside
    `3 > x > 1`; any other text unchanged. The letter z may be complex, where bars mean no interval."""
    names, others = (set(_NAME.findall(each)) for each in (text, other))
    solves = as_interval(other) != other or (_BARS.search(other) and _RELATION.search(other))
    is_real = names == others and "z" not in dict(names)
    return as_interval(text) if solves and is_real and not _BARS.search(text) else text


def _both(parts: list[str]) -> str | None:
    """One interval, or the intersection of an upper and a lower bound."""
    found = sorted((_interval(part) or "" for part in parts), key=lambda part: "-\\infty" in part)
    if len(found) == 2 and found[0].endswith("\\infty)") and found[1].startswith("(-\\infty"):
        return found[0].partition(",")[0] + "," + found[1].partition(",")[2]
    return found[0] if len(found) == 1 else None


def _interval(text: str) -> str | None:
    terms = _RELATION.split(text.strip())
    signs = ["<" + "=" * ("e" in sign or "=" in sign) for sign in terms[1::2]]
    if not signs or len({sign.startswith(("\\g", ">")) for sign in terms[1::2]}) > 1:
        return None
    values = [term.strip() for term in terms[::2]]
    if terms[1].startswith(("\\g", ">")):
        values, signs = values[::-1], signs[::-1]
    match len(values), [_VARIABLE.fullmatch(value) is not None for value in values]:
        case 3, [False, True, False]:
            low, high = values[0], values[2]
        case 2, [True, False]:
            low, high, signs = "-\\infty", values[1], ["<", *signs]
        case 2, [False, True]:
            low, high, signs = values[0], "\\infty", [*signs, "<"]
        case _:
            return None
    return f"{'[' if '=' in signs[0] else '('}{low},{high}{']' if '=' in signs[1] else ')'}"


def split_top(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split where a separator stands outside all brackets; items come stripped. Brackets need not be partners."""
    parts, start, depth = [], 0, 0
    for found in _TOKEN.finditer(text):
        token = found.group()
        if token in _OPENING or token.startswith("\\begin"):
            depth += 1
        elif token in _CLOSING or token.startswith("\\end"):
            depth = max(0, depth - 1)
        elif depth == 0 and token in separators:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [*parts, text[start:].strip()]


def both_signs(text: str) -> tuple[str, ...]:
    """`1 \\pm x` -> `1 + x`, `1 - x`; `(\\pm 1, \\mp 1)` -> `(1,-1)`, `(-1,1)`; several signs of one kind, which may
    mean four values, are left as they are."""
    kinds = _SIGN.findall(text)
    if not kinds or len(kinds) > len(set(kinds)):
        return (text,)
    label, equals, value = text.partition("=")
    value = value if equals and _LABEL.match(label.strip()) else text
    first = kinds[0]
    upper = _SIGN.sub(lambda found: "+" if found[1] == first else "-", value)
    lower = _SIGN.sub(lambda found: "-" if found[1] == first else "+", value)
    return _NO_PLUS.sub("", upper).strip(), _NO_PLUS.sub("", lower).strip()


def _turned(found: re.Match[str]) -> str:
    if found["opening"] != "]" and found["closing"] != "[":
        return found[0]
    opening, closing = found["opening"].replace("]", "("), found["closing"].replace("[", ")")
    return f"{opening}{found['ends']}{closing}"


def _split_list(text: str) -> list[str]:
    for separators in ((";",), (",",)):
        parts = split_top(text, separators)
        if len(parts) > 1:
            return [part for part in parts if part]
    return [text]


def _bracketed(text: str) -> Pieces | None:
    """`(a, b)`, `[a, b)`, `\\{a\\}`: the first bracket must stay open to the end."""
    tokens = [found for found in _TOKEN.finditer(text)]
    if len(tokens) < 2 or tokens[0].group() not in _OPENING or tokens[-1].group() not in _CLOSING:
        return None
    depth = 0
    for found in tokens[:-1]:
        depth += (found.group() in _OPENING) - (found.group() in _CLOSING)
        if depth == 0:
            return None
    items = _split_list(text[tokens[0].end() : tokens[-1].start()])
    rows = [row.items for item in items if (row := _bracketed(item)) and row.opening == "["]
    if tokens[0].group() == "[" and rows and len(rows) == len(items) and len(set(map(len, rows))) == 1:
        return Pieces("m", "m", tuple("&".join(row) for row in rows))  # [[1, 2], [3, 4]]
    opening, closing = (_PLAIN.get(found.group(), found.group()) for found in (tokens[0], tokens[-1]))
    if len(items) == 1 and opening in "([" and closing in ")]":
        return None  # brackets around a single value have no meaning
    return Pieces(opening, closing, tuple(item for part in items for item in both_signs(part)))


_PLAIN = {"\\{": "{", "\\lbrace": "{", "\\}": "}", "\\rbrace": "}", "\\langle": "(", "\\rangle": ")"}
