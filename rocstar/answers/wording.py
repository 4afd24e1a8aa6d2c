"""Rewrite answers so that two ways to write the same thing become the same text. Regular expressions over at most
`caps.MAX_CHARS` characters; nothing is evaluated, and what an answer *means* is decided in `prime.py`.

`clean` drops invisible characters and is safe before any parser. `math_style` and `loose_style` are the two
normalisations of the PRIME grader, ours after their description (release, prime_math): equal results mean equal
answers, unequal ones mean nothing. `plain_text` is the careful one that may decide alone.
"""

from __future__ import annotations

import re
import unicodedata

_FOLDED = {
    0x2212: "-", 0x2013: "-", 0x2014: "-", 0xD7: "\\times ", 0xB7: "\\cdot ", 0xF7: "/", 0x2044: "/",
    0xB0: "^{\\circ}", 0x221E: "\\infty ", 0x2264: "\\le ", 0x2265: "\\ge ", 0xB1: "\\pm ", 0x2213: "\\mp ",
    0x222A: "\\cup ", 0x2229: "\\cap ", 0x2205: "\\emptyset ", 0x2208: "\\in ", 0x221A: "\\sqrt ",
    0x2248: "\\approx ", 0x2260: "\\ne ", 0x2261: "\\equiv ", 0x3002: ".", 0x2018: "'", 0x2019: "'",
    0x20AC: "\\text{EUR}", 0xA3: "\\text{GBP}", 0xA5: "\\text{JPY}", 0x20B9: "\\text{INR}", 0xA2: "\\text{cents}",
    0x2030: "\\cdot 10^{-3}", 0x2126: "\\Omega ", 0x66B: ".", 0x66C: ",", 0x3001: ", ", 0x2216: "\\setminus ",
    0x2102: "\\mathbb{C}", 0x2115: "\\mathbb{N}", 0x211A: "\\mathbb{Q}", 0x211D: "\\mathbb{R}",
    0x2124: "\\mathbb{Z}", 0xFE0F: "", 0x2032: "'", 0x2033: "''", 0x22C5: "\\cdot ", 0x2219: "\\cdot ",
    0x2227: "\\land ", 0x2228: "\\lor ", 0x2A7D: "\\le ", 0x2A7E: "\\ge ", 0x27E8: "\\langle ", 0x27E9: "\\rangle ",
    0x2308: "\\lceil ", 0x2309: "\\rceil ", 0x230A: "\\lfloor ", 0x230B: "\\rfloor ",
}  # fmt: skip
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn"))  # control, format (right-to-left marks), surrogates, unassigned
_KEPT_CONTROLS = "\n\t\r\f"
_TAIL = re.compile(
    r"(?:\\[,;:! ]|\\(?:q?quad|enspace|(?:thin|med|thick)space|newline|hfill|checkmark|(?:black)?square)(?![A-Za-z])"
    r"|\\\\(?:\[\w+\])?|\\$|\\(?:[hv]space|[hv]?phantom|tag)\{[^{}]*\}|[~,;:\s])+$"
)
_FONT = re.compile(r"^\\(?:color\s*\{\w+\}|(?:large|Large|huge|bf|rm|it)(?![A-Za-z]))\s*")
_LOOKS = re.compile(
    r"(?:\\(?:textcolor\s*\{\w+\}|underline|uline|boldsymbol|bm|mathbf|textbf|mathit|textit|emph)\s*\{"
    r"|\{\s*\\(?:large|Large|huge|bf|rm|it|em|color\s*\{\w+\})(?![A-Za-z]))(?P<inner>.*)\}\.?"
    r"|\\(?:text|textnormal|textrm|mathrm|mathsf|mbox)\s*\{(?P<plain>[^{}A-Za-z\\]*\d[^{}A-Za-z\\]*)\}",
    re.DOTALL,
)
_NEARLY = re.compile(
    r"^\\(?:approx|sim|simeq|cong|thickapprox)(?![A-Za-z])\s*(?=[\d$\\.-])"
    r"|^(?:\\text\{\s*)?(?:about|around|exactly|approximately|approx\.?|roughly)\b\s*\}?\s*(?=[\d$\\.-])"
    r"|^\\text\{(?:about|around|exactly|approximately|approx\.?|roughly)\s+(?=[\d.-]+\}$)"
)
_NEARLY_IS = re.compile(r"^([A-Za-z]\s*)\\(?:approx|simeq)(?![A-Za-z])(?=\s*[\d$\\.-])")
SCALES = {
    "dozen": 12, "score": 20, "gross": 144, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6,
    "crore": 10**7, "billion": 10**9, "bn": 10**9, "trillion": 10**12, "quadrillion": 10**15,
}  # fmt: skip
HEDGE = (
    "not|more|less|fewer|most|least|than|ish|maybe|perhaps|possibly|or so|up to"
    "|wrong|false|invalid|incorrect|impossible|excluded|except|too|never|cannot"  # it is denied
    r"|alternatively|otherwise|else|vs|versus|instead|rather|if|unless"  # another one may stand for it
    r"|(?<![a-z] )(?:squared|cubed|factorial)|plus|minus|and a half|hal(?:f|ves)|thirds"  # another number
    r"|twice|doubled|tripled|inverse|reciprocal|times [b-z]\b|octal|hex(?:adecimal)?"
    r"|(?:and|or) (?:up|above|over|below|under|higher|greater|lower|counting)|(?:on|up)wards?"
    r"|thereabouts|(?:upper|lower) bound|likely|probably|my guess|isn't"
    r"|(?:four|fif|six|seven|eigh|nin|ten|twentie|hundred|thousand|million)ths?"
    r"|(?:negative|no|root|sqrt|logarithm|mega|kilo|et al)(?=\s*(?:\}|$))"
    r"|ago|below zero|BCE?|B\.C|base \d|(?:\w+-)?fold|bps|pp[mb]|per ?mille?|(?:basis|percentage) points?"
)
"""Words with which a number is no longer the answer."""
ABROAD = (
    r"\b(?i:oder|ou|nicht|mehr|weniger|höchstens|mindestens|más|menos|moins|pas|mi[lo]|mrd|mill[ei]|mila|promille"
    r"|(?:tausend|hundert|dutzend|halbe?|drittel|viertel)\w*|milli(?:on|ard)\w*|mili[oa]\w+|milh[aãoõ]\w+|mill[oó]n(?:es)?)\b"
    "|[万亿萬億百十兆打割多余만억백할或半不]|成(?![人员員年])|ダース|千(?![米克瓦卡焦帕])|천|[以未][上下内满満]|左右|超过|至[少多]|[大小]于|分之"
    "|이상|이하|미만|초과|triệu|tỷ|nghìn|ngàn|אלף|מיליון|พัน|ล้าน|тисяч|мільй|мільяр|тыс|миллион|миллиард|млн|млрд|или|не|более|менее"
    "|ألف|آلاف|مليون|ملايين|مليار|أو|हज़ार|हजार|लाख|करोड|अधिक|कम"
)
"""Words of other languages that make another number of it; not all there are."""
NO_UNIT = rf"(?:\b(?:{HEDGE}|or|and|at|to|(?:{'|'.join(SCALES)})s?)\b|{ABROAD})"
_LABEL = re.compile(rf"^\\text\{{(?![A-J]:|[^{{}}]*\b(?:{HEDGE})\b)[A-Za-z ]+(?:\bis|\bare|:|=)\s*\}}\s*")
_ORDINAL = re.compile(r"(?<=\d)\s*\^\s*\{?\s*(?:\\(?:text|mathrm|textrm)\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?")
_RATIO = re.compile(r"(?<=\d)\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*(?=\d)")
_INFINITY = re.compile(r"^([+-]?)\s*(?:\\text\{\s*)?infinity\s*\}?$", re.IGNORECASE)
_GREEK = re.compile(r"GREEK (SMALL|CAPITAL) (?:LETTER )?(?:FINAL )?(\w+)")
_ROOT = re.compile("\u221a\\s*(\\d+(?:[.]\\d+)?)")  # of the whole number; \\sqrt takes one digit
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207f\u00ba]+|[\u2080-\u208b]+")
_MICRO = re.compile("(\\d\\s*)\u00b5([A-Za-z]+)")
_CHOOSE = re.compile(r"\{([^{}\\]*)\\choose([^{}\\]*)\}")
_BOXED_SIGN = re.compile("\\\\text\\{([€£¥₹¢‰])\\}")
_MONEY = re.compile(r"\\pounds(?![A-Za-z])")
_E_POWER = re.compile(r"\^e(?![A-Za-z])")  # the grammar reads it in braces alone
_BAR = r"(?:\||\\[lr]?vert(?![A-Za-z]))\s*"
_ABSOLUTE = re.compile(  # not of z, which may be complex
    rf"^{_BAR}([A-Ya-y])\s*{_BAR}(<=?|\\(?:lt|leq?(?:slant)?)(?![A-Za-z]))\s*(?!0$)([^-+=<>|,;]+)$"
)
_CONGRUENT = re.compile(r"(\\equiv[^()]*\d)\s*\(\s*(\d+)\s*\)$")
_SMALL_O = re.compile(r"(?<=\d)\s*\^\s*(?:\{\s*[oO]\s*\}|[oO](?![A-Za-z]))")
_BRACES = re.compile(r"(?<!\\)[{}]")
MAX_LOOKS = 4
_SIZES = re.compile(r"\\(?:left|right)\s*\.(?!\d)|\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*")
_BLACKBOARD = re.compile(r"(\\math(?:bb|cal|frak))\s+([A-Za-z])(?![A-Za-z])")
_THIN = re.compile(r"\\[!,;:]|(?<!\\)\\ |\\(?:quad|qquad|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])")
_NO_GAP = re.compile(r"(?<=[\d,.}:])\s*\\!\s*(?=[\d:])")
_DIGITS = re.compile(r"(?<![\d.])\d{1,3}(?:\\[,;:]\s*\d{3})+(?!\d|\\[,;:]\s*\d)|\.\d+(?:\\[,;:]\s*\d+)+")
_PRODUCT = re.compile(r"(?<![\w^.])(\d+\)?)\s*(?=\(\s*(?:\d+(?:/\d+)?|\\frac\{\d+\}\{\d+\})\s*\))")  # no mixed number
_DIGIT = re.compile("[1-9]")
_STATEMENTS = re.compile(r"\([1-9]\)(?:\s*\([1-9]\))+")
_FRACTIONS = re.compile(r"\\[dtc](frac|binom)(?![A-Za-z])")
_DOTS = re.compile(r"\\[cd]?dots(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:mbox|textrm|textnormal)(?=\s*\{)")
_ONE_LETTER = re.compile(r"\\(?:mathrm|mathit|mathbf|mathsf|operatorname|rm|bf|it)\s*\{([A-Za-z])\}")
_BASIS = re.compile(
    r"\\(?:mathbf|hat|vec|boldsymbol|bm|bf)\s*(?:\{\s*(?:\\mathbf\s*\{?)?\s*\\?([ijk])(?:math)?\s*\}+|\\?([ijk])(?:math)?(?![A-Za-z]))"
)
_GLUED = re.compile(
    r"([A-Za-z]|[\d}](?=\\mathrm\{[dghms]\}))(\\(?:mathrm|mathit|mathbf|mathsf|operatorname|rm|bf|it)\s*\{[A-Za-z]\})"
)
_SUBSCRIPT = re.compile(r"((?<![A-Za-z\\])[A-Za-z]|\\[a-z]+)_(?:\{((?:[^{}]|\{[^{}]*\})*)\}|(\\[a-z]+))")
_OPERATORS = ("\\sum", "\\prod", "\\int", "\\lim", "\\log", "\\max", "\\min", "\\sup", "\\inf", "\\bigcup", "\\bigcap")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}\\]*)\}")
_SPELLED = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}|\*\*|`")  # a quick look before the four below
_EMPHASIS = re.compile(r"^(\*\*|`)(.*)\1\.?$", re.DOTALL)
_POWER = re.compile(r"(?<=[\w)}\]])\*\*(?=[\w({\\-])")
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_FUNCTION = re.compile(r"(?<![A-Za-z\\{])(sqrt|(?:arc)?(?:sin|cos|tan)|sec|csc|cot|log|ln|exp)(?=\s*[({\d\\^]|\s+\w\b)")
_OPERATOR = re.compile(
    r"\\(?:operatorname|mathrm)\s*\{\s*((?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|csc|log|ln|exp)\s*\}"
)
_TWICE = re.compile(r"(?<!\\)\\(?=\\(?:left|right|[dtc]?frac|sqrt|text)(?![A-Za-z]))")  # escaped once too often
_ROW_GAP = re.compile(r"(?<=\\\\)\[-?[\d.]+\s*(?:pt|mm|cm|em|ex|in)\]")
_NATURAL = re.compile(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})")
_ROOT_CALL = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_VARIANT = re.compile(r"\\var(?=(?:epsilon|theta|phi|rho|sigma|kappa)(?![A-Za-z]))")
_UNEQUAL = re.compile(r"\\not\s*=")
_LESS = re.compile(r"(\\mathbb\{[A-Z]\})\s*(?:-|\\backslash|\\smallsetminus)\s*(?=\\\{)")
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}")
_DELIMITERS = re.compile(r"\\?\$|\\[()\[\]]")
_PRIMED = re.compile(r"(?<![A-Za-z])([A-Za-z])('+)(?![A-Za-z])")
_TURN = r"\^\s*\{?\s*(?:T|\\(?:top|intercal)(?![A-Za-z])|\\(?:mathrm|mathsf|text)\s*\{?T\}?)\s*\}?"
_TRANSPOSED = re.compile(rf"((?:\\[A-Za-z]+|[A-Za-z])(?:_\w|_\{{\w+\}})?|\([A-Za-z+\- ]+\))\s*{_TURN}")
_TO_THE_T = re.compile(rf"(?<!matrix\}})(?<!array\}}){_TURN}")
_FIGURE = re.compile(r"\\([at])n?(?:gle|riangle)\s*(\{)?\s*([A-Z] ?[A-Z] ?[A-Z])(?![A-Za-z_'])(?(2)\s*\})")
_GAMMA = re.compile(r"\\gamma(?=\s*\()|\\Gamma(?![A-Za-z]|\s*[({_])")
_INNER = re.compile(r"(\()?\s*([A-Za-z])_\{turned\}\s*([A-Za-z])(?![A-Za-z^_])(?(1)\s*\))")
_INVERSE = re.compile(r"(?<![A-Za-z\\])([fghFG])\s*\^\s*\{?\s*-\s*1\s*\}?\s*(?=\()")
_CALL = re.compile(r"(?<![A-Za-z\\])([fFE](?:_\{\w+\})?)\s*\((?!\s*(?:[a-z]|\d+)\s*[,)])([^()]+)\)")
_CROSS = re.compile(r"\\vec\s*\{?\s*(\w)\s*\}?\s*\\times\s*\\vec\s*\{?\s*(\w)(?!\w)\s*\}?")
_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*((?:d|\\partial)\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?)\s*\}"
    r"\s*\{\s*((?:d|\\partial)\s*(?:[A-Za-z]|\\[a-z]+))\s*\}"
)
_LONE = re.compile(r"(\\[A-Za-z]+|[A-Za-z])(?:_\{?(\w+)\}?)?")
_LOOSE = re.compile(r"_([A-Za-z])(?![A-Za-z])")
_SPACES = re.compile(r"\s+")
_GAPS = re.compile(r"\s+(?!\d)|(?<!\d)\s+")  # `1 2` is not 12
_NOON = re.compile(r"(\d)\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)

_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|\\(?:text|mathrm)\{\s*degrees?\s*\}")
_NAME = r"(?:[A-Za-z]\w?|\\[A-Za-z]+)(?:_(?:\{[\w\\]+\}|\w))?(?:\s*\([A-Za-z, \\]{1,20}\))?"
_IS_NAME = re.compile(_NAME)
_NAMED = re.compile(rf"^\s*(?:{_NAME}\s*(?:=|\\approx)\s*)+(?=[^=])")
_TURNED = re.compile(rf"^(?!\s*{_NAME}\s*=)([^=<>,;]+?)\s*=\s*([A-Za-z](?:_\w)?)\s*$")
_LETTER = re.compile(r"^\s*([A-Za-z])(?:_\{?\w+\}?)?\s*(\([A-Za-z]\))?\s*(?:=|\\approx)\s*[^=]")
_POINT = re.compile(r"^[A-Z]'?\s*(?=\(.*,.*\)$)")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_RANGE = re.compile(
    r"\s*(?:,(?:\\[ ,;])*|\\text\{\s*(?:,\s*)?(?:for|where|with)\s*\}|\\quad|;|\()\s*[A-Za-z]\s*"
    r"\\in\s*\\(?:mathbb|mathbf|Bbb)\s*\{?[ZNQR]\}?\s*\)?$"
    r"|(?:\\text\{\s*,?\s*for (?:all|any|every)\s*\}|\\forall(?![A-Za-z]))\s*[A-Za-z]$"
)
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[A-Za-z](?![A-Za-z]))")
_BARE_FRACTION = re.compile(r"\\(frac|binom)\s*(?:\{([^{}]*)\}|([A-Za-z\d]|\\pi))\s*(?:\{([^{}]*)\}|([A-Za-z\d]|\\pi))")
_SLASH = re.compile(r"(?<![\w.}/])(-?\d+)\s*/\s*(\d+)(?![\w./])")
_TRAILING_TEXT = re.compile(
    r"(?<=[\d)}])\s*\\(?:text|mbox|textnormal|textrm|mathrm)"
    rf"\{{(?![^{{}}]*{NO_UNIT}|[^{{}}]*(?<![A-Za-z^-])\d)[^{{}}]*\}}(?:\^\{{?\d\}}?)?$"
)
_LETTERS = "\u00c0-\u218f\u2300-\u27bf\u2b00-\U0010ffff"  # of which some are pictures or marks; no arrows and operators
_WORDS_AFTER = re.compile(rf"(?<=[\d)}}%])\s*\\(?:text|mbox|textrm|mathrm)\{{([A-Za-z {_LETTERS}]+)\}}$")
# Letters of which one at least is not ASCII, behind a plain number: a unit of another language.
_BARE_UNIT = re.compile(rf"^([-+]?(?:\d[\d.,/ ]*)?\d)(\s*(?:[A-Za-z][A-Za-z ]*)?[{_LETTERS}][A-Za-z {_LETTERS}]*)\.?$")
_LINK = re.compile(r"\s*(?:,\s*)?\\?\b(?:and|or)\b\s*")
_UNIT_WORD = re.compile(
    r"(?<=[\d)}\s])(?:square |cubic |sq )?(?:degree|mm|cm|km|centimeter|millimeter|kilometer|meter|mile|second|minute|"
    r"hour|day|week|month|year|foot|feet|inch|yard|liter|litre|gram|kilogram|kg|cent|dollar|unit|point|percent)"
    r"(?:e?s)?\b\s*(?:\^\{?\d\}?)?\.?"
)
_WHOLE_FLOAT = re.compile(r"(?<![\w.])(\d+)\.0+(?![\d])")
_ARGUMENT = re.compile(r"(\\[A-Za-z]+)\s*\{([^{}]*)\}(?:\s*\{([^{}]*)\})?")
_EXPONENT = re.compile(r"([\^_])\s*\{(?!\s*-?\d+\s*\}|.\})([^{}]*)\}")  # more than what may stand there without braces
_THOUSANDS = re.compile(r"(?<![\d.,(\[])(?<!\\\{)\d{1,3}(?:(?:\{,\}|,(?:\\!)?)\d{3})+(?![\d,])")
_CASELESS = re.compile(
    r"(?<![A-Za-z\\])(?:[A-Z][a-z]{3,}|(?i:yes|no|true|false|odd|even|all|none|dne|and|or|ja|oui|non))(?![A-Za-z])"
)  # words outside of \text{}: NK is another product than nk
_MIXED = re.compile(r"(?<![\w.}^])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")


def clean(text: str) -> str:
    """The text without invisible parts, and with signs of Unicode and Python as LaTeX: control and direction marks,
    sizes of brackets, spaces of LaTeX at its ends and thin ones inside, the font of one letter, the emphasis or
    underline of the whole, an equals sign before it. Safe before any parser: it changes no meaning."""
    if text.isascii() and text.isdigit():
        return text
    if not text.isascii() or not text.isprintable():
        text = _MICRO.sub(r"\1\\text{u\2}", _ROOT.sub(r"\\sqrt{\1}", unicodedata.normalize("NFC", text)))
        text = "".join(_visible(letter) for letter in _RAISED.sub(_level, _BOXED_SIGN.sub(r"\1", text)))
        text = _BARE_UNIT.sub(r"\1\\text{\2}", text.strip())
    text = _SMALL_O.sub(r"^{\\circ}", _unadorned(_TAIL.sub("", text.strip()))).replace(":=", "=")
    text = _LABEL.sub("", _RATIO.sub(":", _INFINITY.sub(r"\1\\infty", _ORDINAL.sub(r"\\text{th}", text))))
    text = _CONGRUENT.sub(r"\1\\pmod{\2}", _E_POWER.sub("^{e}", text))
    if _SPELLED.search(text):
        text = _POWER.sub("^", _EMPHASIS.sub(r"\2", text))
        text = _FUNCTION.sub(r"\\\1 ", _PI.sub(r"\\pi ", text))
    text = _clean_latex(_ROOT_CALL.sub(r"\\sqrt{\1}", text) if "sqrt" in text else text).strip()
    if _STATEMENTS.fullmatch(text) and (numbers := _DIGIT.findall(text)) == sorted(set(numbers)):
        return ",".join(f"({number})" for number in numbers)  # those that hold, not their product
    return _PRODUCT.sub(r"\1\\cdot ", _ABSOLUTE.sub(r"-\3 \2 \1 \2 \3", text))


def _unadorned(text: str) -> str:
    """Without a command that only underlines or emphasises the whole, and the equals sign of `= 12`."""
    for _ in range(MAX_LOOKS):
        text = _FONT.sub("", text)
        found = _LOOKS.fullmatch(text)
        if found is None or not _is_group(found["inner"] or ""):
            break
        text = _TAIL.sub("", (found["inner"] or found["plain"] or "").strip())
    text = text[1:].lstrip() if text.startswith("=") and not text.startswith("==") else text
    return _NEARLY_IS.sub(r"\1=", _NEARLY.sub("", text))


def _is_group(inner: str) -> bool:
    """Whether the first brace of a command is closed by the last: `\\textbf{a} and \\textbf{b}` is no single group."""
    depth = 0
    for brace in _BRACES.findall(inner):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _clean_latex(text: str) -> str:
    """The part of `clean` that touches commands of LaTeX only."""
    if "\\" not in text:
        return text
    text = _DOTS.sub(r"\\ldots", _TEXT.sub(r"\\text", text))
    text = _UNEQUAL.sub(r"\\ne ", _VARIANT.sub(r"\\", _NO_GAP.sub("", _TWICE.sub("", text))))
    text = _THIN.sub(" ", _DIGITS.sub(lambda found: _THIN.sub("", found[0]), text))
    text = _BARE_FRACTION.sub(_braced_fraction, _FRACTIONS.sub(r"\\\1", _SIZES.sub("", text)))
    text = _NATURAL.sub(r"\\ln ", _OPERATOR.sub(r"\\\1 ", _ROW_GAP.sub("", text)))
    text = _BLACKBOARD.sub(r"\1{\2}", _MONEY.sub(r"\\text{GBP}", _CHOOSE.sub(_binomial, text)))
    text = _LESS.sub(r"\1\\setminus ", text)
    if len(set(_BASIS.findall(text))) > 1:
        text = _BASIS.sub(r"\\vec{\1\2}", text)
    text = _EMPTY.sub(r"\\emptyset ", _BARE_ROOT.sub(r"\\sqrt{\1}", text))
    return _SUBSCRIPT.sub(_plain_subscript, _ONE_LETTER.sub(r"\1", _GLUED.sub(r"\1 \2", text)))


def plain_text(text: str) -> str:
    """An answer without the LaTeX that changes only its looks: delimiters, wrappers of words, repeated spaces."""
    text = _WRAPPER.sub(r"\1", _inside(text.strip()).strip("$")).replace("\\ ", " ").replace("~", " ")
    text = _SPACES.sub(" ", _NOON.sub(lambda found: f"{found[1]} {found[2].lower()}m", text))
    return text.strip().removesuffix(".").strip()


def math_style(text: str) -> str:
    """First normalisation: delimiters, degrees, dollars, percent, trailing units and spaces go; fractions and
    roots get their braces; a leading point gets its zero."""
    text = _TRAILING_TEXT.sub("", bare(text))
    text = _DEGREES.sub("", text).replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = _WRAPPER.sub(r"\1", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", _BARE_FRACTION.sub(_braced_fraction, text))
    text = _SLASH.sub(_slash_fraction, text)
    text = re.sub(r"(?<![\d])\.(?=\d)", "0.", text)
    return _GAPS.sub("", text)


def loose_style(text: str) -> str:
    """Second normalisation: words unwrapped, "and" and "or" as commas, units and thousands commas dropped, mixed
    numbers as sums, fractions with a slash, words in lower case."""
    text = _WRAPPER.sub(lambda found: f" {found[1].lower() if len(found[1]) > 1 else found[1]} ", bare(text))
    text = _DEGREES.sub("", text).replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = _LINK.sub(",", _UNIT_WORD.sub("", text))
    text = _THOUSANDS.sub(_ungrouped, _WHOLE_FLOAT.sub(r"\1", text))
    text = _MIXED.sub(_mixed_sum, _BARE_FRACTION.sub(_braced_fraction, text))
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", text)
    text = re.sub(r"(?<![\w)])\((\w|\d+)\)(?![\w(])", r"\1", re.sub(r"\\[()\[\]]", "", text))
    text = _ARGUMENT.sub(lambda found: f"{found[1]}({found[2]})({found[3] or ''})", _EXPONENT.sub(r"\1(\2)", text))
    text = text.replace("\\pi", "pi").replace("{", "").replace("}", "").rstrip(". ")
    return _GAPS.sub("", _CASELESS.sub(lambda word: word[0].lower(), text))


def without_range(gold: str, predicted: str) -> tuple[str, str]:
    """`n = 2k, k \\in \\mathbb{Z}` -> `n = 2k` where the other side does not say over what its letters run."""
    ranges = [_RANGE.search(text) for text in (gold, predicted)]
    if (ranges[0] is None) == (ranges[1] is None):
        return gold, predicted
    return _RANGE.sub("", gold), _RANGE.sub("", predicted)


def without_thousands(text: str) -> str:
    """`1,024` -> `1024`, where the whole is one number."""
    return _ungrouped(found) if (found := _THOUSANDS.fullmatch(text)) else text


def words_after(text: str) -> str:
    """The words in \\text{} behind a value: `increase` of `20\\%\\text{ increase}`."""
    found = _WORDS_AFTER.search(text)
    return found[1] if found else ""


def without_foreign_words(gold: str, predicted: str) -> tuple[str, str]:
    """`2,5\\text{ Äpfel}` -> `2,5` where the other side has the same words behind its value, or none."""
    words = words_after(gold), words_after(predicted)
    if all(words) and words[0] != words[1]:
        return gold, predicted
    tail = _WORDS_AFTER if all(words) else _TRAILING_TEXT
    return tail.sub("", gold) if words[0] else gold, tail.sub("", predicted) if words[1] else predicted


def bare(text: str) -> str:
    """Without math delimiters around it, a full stop after it, and `x \\in` before it."""
    return _MEMBER.sub("", _inside(text.strip()).rstrip(".").strip())


def _inside(text: str) -> str:
    """Without the marks of a formula around the whole."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner and opening not in inner:
            return inner.strip()
    return text


def undelimited(text: str) -> str:
    """Without any marks of formulas, dollars included, and the full stop after them: `$1$ and $2$.` -> `1 and 2`."""
    return _DELIMITERS.sub(" ", text).strip().removesuffix(".").strip()


def named_primes(text: str) -> str:
    """`f'` -> `f_{prime}`, `A^T` -> `A_{turned}`: parsers drop these signs, and S/S' becomes 1. `C_d x` -> `C_{d}x`,
    no differential; `\\frac{dV}{dr}` -> `D_{dVdr}`, which would be 0; `3\\frac12x` -> `(3+1/2)x`, no product, and names
    for others: `\\angle ABC`, `f(-x)`, `\\vec a \\times \\vec b`, and `\\Gamma`, which would be `\\gamma`."""
    text = _MIXED.sub(lambda found: _mixed_sum(found) if int(found[2]) < int(found[3]) else found[0], text)
    text = _DERIVATIVE.sub(lambda found: f"D_{{{re.sub('[^A-Za-z0-9]', '', found[1] + found[2])}}}", text)
    text = _LOOSE.sub(r"_{\1}", text)
    text = _TRANSPOSED.sub(lambda found: _LONE.sub(r"\1_{\2turned}", found[1]), text)
    text = _PRIMED.sub(lambda found: f"{found[1]}_{{{'prime' * len(found[2])}}}", _TO_THE_T.sub("^{T_{o}}", text))
    text = _INNER.sub(r" S_{\2turned\3} ", text)  # matrices and vectors do not commute
    text = _FIGURE.sub(lambda found: _symbol(found[1], min(found[3], found[3][::-1])), text)
    text = _CROSS.sub(r"X_{\1times\2}", _GAMMA.sub(lambda found: _symbol(found[0]), text))
    text = _INVERSE.sub(r"\1_{inverse}", text)
    return _CALL.sub(lambda found: _symbol(found[1], *(f"{ord(sign):x}x" for sign in "".join(found[2].split()))), text)


def _symbol(*parts: str) -> str:
    """A letter with a name that only equal parts have."""
    return f"S_{{{re.sub('[^A-Za-z0-9]', '', ''.join(parts))}}}"


def is_name(text: str) -> bool:
    """`x`, `a_3`, `f(x)`, and letters that may be numbers elsewhere: i, e."""
    return _IS_NAME.fullmatch(text.strip()) is not None


def without_point(gold: str, predicted: str) -> str:
    """`P(2,5)` -> `(2,5)` where the reference is a point, too."""
    return _POINT.sub("", predicted) if gold.startswith("(") else predicted


def without_names(gold: str, predicted: str) -> tuple[str, str]:
    """`x = 5` and `5 = x` -> `5`, `f(x) = 5` -> `5`; an equation of more than a name and a value stays, so do both of
    `x = 5` and `y = 5`, which differ, and the names of a list, `x = 3, y = 4`."""
    gold, predicted = _TURNED.sub(r"\2 = \1", gold), _TURNED.sub(r"\2 = \1", predicted)
    ours, others = (_LETTER.match(text) for text in (gold, predicted))
    if ours and others and bool(ours[2]) == bool(others[2]) and ours.groups() != others.groups():
        return gold, predicted
    return _without_name(gold, predicted), _without_name(predicted, gold)


def _without_name(text: str, other: str) -> str:
    first, last = text.find("="), text.rfind("=")
    several = first < last and (_SEPARATOR.search(text, first, last) or "=" in other)  # a = b = 0, a = 0, b = 0
    return text if several else _NAMED.sub("", text)


def _visible(letter: str) -> str:
    is_styled = unicodedata.decomposition(letter).startswith(("<wide>", "<font>", "<fraction>", "<compat>"))
    if is_styled and ord(letter) not in _FOLDED:
        letter = unicodedata.normalize("NFKC", letter)
    if len(letter) > 1:
        top, _, bottom = letter.partition("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}" if bottom else "".join(map(_visible, letter))
    if ord(letter) in _FOLDED:
        return _FOLDED[ord(letter)]
    if letter in _KEPT_CONTROLS:
        return letter
    if found := _GREEK.fullmatch(unicodedata.name(letter, "").replace("LAMDA", "LAMBDA")):
        return f"\\{found[2].lower() if found[1] == 'SMALL' else found[2].capitalize()} "
    kind = unicodedata.category(letter)
    if kind in _INVISIBLE:
        return ""
    if kind == "Nd":
        return str(unicodedata.decimal(letter))
    return " " if kind[0] == "Z" else letter


def _level(found: re.Match[str]) -> str:
    """Digits and signs that Unicode raises or lowers: `10⁻⁵` -> `10^{-5}`."""
    plain = unicodedata.normalize("NFKC", found[0]).replace("\u2212", "-")
    return f"{'^' if '<super>' in unicodedata.decomposition(found[0][0]) else '_'}{{{plain}}}"


def _plain_subscript(found: re.Match[str]) -> str:
    r"""`k_{\mathrm{B}}` -> `k_{B}`: a subscript of a letter is a name, its commands are letters of that name."""
    base, braced, command = found.groups()
    if base in _OPERATORS or "\\" not in found[0][len(base) :]:
        return found[0]
    name = re.sub(r"\\(?:mathrm|mathit|text|rm)\b|[^A-Za-z0-9]", "", braced if braced is not None else command)
    return f"{base}_{{{name}}}" if name else base


def _binomial(found: re.Match[str]) -> str:
    return rf"\binom{{{found[1].strip()}}}{{{found[2].strip()}}}"


def _braced_fraction(found: re.Match[str]) -> str:
    name, top, one, bottom, other = found.groups()
    return rf"\{name}{{{one if top is None else top}}}{{{other if bottom is None else bottom}}}"


def _mixed_sum(found: re.Match[str]) -> str:
    """In brackets where anything but a separator stands beside it: `-1\\frac12` is not -1 + 1/2."""
    total = f"{found[1]}+{found[2]}/{found[3]}"
    before, after = found.string[: found.start()].strip()[-1:], found.string[found.end() :].strip()[:1]
    return total if before in ",;([=" and after in ",;)]=" else f"({total})"


def _ungrouped(found: re.Match[str]) -> str:
    return re.sub(r"\D", "", found[0])


def _slash_fraction(found: re.Match[str]) -> str:
    sign = "-" if found[1].startswith("-") else ""
    return rf"{sign}\frac{{{found[1].removeprefix('-')}}}{{{found[2]}}}"
