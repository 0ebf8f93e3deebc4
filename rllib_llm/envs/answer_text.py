"""What a written answer consists of: its final statement without markup, its words, its dates, its parts."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from rllib_llm.envs.numerals import find_numerals, in_ascii
from rllib_llm.envs.units import canonical, is_known_unit

_LEAD_IN = re.compile(
    r"^\W*(?:(?:so|thus|hence|therefore|finally)\b[\s,:]*)?(?:the\s+|my\s+)?(?:correct\s+|final\s+)*"
    r"(?:(?:answer|result|solution)(?:\s+is|\s*[:=])+|(?:it|this|that)\s+(?:is|was|takes|equals)\b)\s*",
    re.IGNORECASE,
)
_FINAL = re.compile(r"final answer is:?\s*(\S.*?)\.?\s+I hope", re.IGNORECASE)
_BOX = re.compile(r"\\+(?:boxed|fbox)\s*\{")
_WRAPPED = re.compile(
    r"\\(?:text|mbox|textbf|textit|textnormal|textrm|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}"
)
_BETWEEN = re.compile(r"\\+(?:qquad|quad|text|mbox)|\\+[()\[\],;:! ]|[\s$.,;:&{}+*]")
_NAMED = re.compile(r"[a-zA-Z]\w?\s*=\s*$")
_SPACING = re.compile(
    r"\\(?:left|right|displaystyle|limits|bigl?|bigr?|Bigl?|Bigr?|biggl?|biggr?)(?![a-zA-Z])|\\!"
)
_GAPS = re.compile(r"\\(?:qquad|quad)|(?<!\\)\\[,;: ]|~")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_FROM_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SYMBOLS = {
    "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "∞": r"\infty ", "π": r"\pi ", "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
    "∓": r"\mp ", "θ": r"\theta ", "°": r"^\circ ",
}  # fmt: skip
_FUNCTIONS = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp max min gcd lcm mod det sqrt frac dfrac tfrac
cfrac pmod binom lim sum prod int floor ceil abs arg deg dim ker rank tr pi infty
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
CONNECTORS = frozenset(("and", "or", "und", "et"))
_MONTH_NAMES = "january february march april may june july august september october november december"
_MONTHS = tuple(_MONTH_NAMES.split())


def boxes(text: str) -> list[str]:
    """Contents of the last \\boxed{…} of the text, and of those before it with nothing but "," or "and" between."""
    found: list[tuple[int, int, str]] = []
    for match in _BOX.finditer(text):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                found.append((match.start(), position + 1, text[match.end() : position]))
                break
    if not found:
        return []
    last = [found[-1]]
    for box in reversed(found[:-1]):
        if box[1] > last[0][0] or not _connects(text[box[1] : last[0][0]]):
            break
        last.insert(0, box)
    return [content for _, _, content in last]


def _connects(between: str) -> bool:
    """Whether the text between two boxes makes them one answer: a comma, "and", "or" with few words, or no word."""
    words = _BETWEEN.sub(" ", _NAMED.sub(" ", between)).split()
    return len(words) <= 4 and (not words or any(word in CONNECTORS for word in words))


@lru_cache(maxsize=256)
def statement(text: str) -> str:
    """The answer itself: what is boxed, else the text without "The answer is", $…$, emphasis and a full stop."""
    text = text.strip()
    for _ in range(4):
        before = text
        text = text.rpartition("####")[2]  # GSM8K's final answer
        found = boxes(text)
        last = _FINAL.findall(text[text.rindex(found[-1]) :] if found else text)
        if last or found:
            text = re.sub(r"^\\?[\"']|\\?[\"']$", "", last[-1]) if last else ", ".join(found)
        text = _LEAD_IN.sub("", text, count=1) if len(text) < 2000 else text
        text = text.strip().removeprefix("=").rstrip(".").strip()
        for opening, closing in (
            ("$$", "$$"),
            ("$", "$"),
            (r"\(", r"\)"),
            (r"\[", r"\]"),
            ("**", "**"),
            ("`", "`"),
        ):
            inside = text[len(opening) : len(text) - len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inside
                and closing not in inside
            ):
                text = inside.strip()
        if text == before:
            break
    return text


def unwrapped(text: str) -> str:
    """`text` with the content of \\text{…} and its relatives in place of the command."""
    while (shorter := _WRAPPED.sub(r" \1 ", text)) != text:
        text = shorter
    return text


def as_latex(text: str) -> str:
    """A formula in LaTeX, whether it was written in LaTeX, Unicode or as in a programming language."""
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{match[0].translate(_FROM_SUPERSCRIPT)}}}", text)
    text = "".join(_SYMBOLS.get(character, character) for character in text)
    text = in_ascii(text)
    text = _GAPS.sub(" ", _SPACING.sub("", text)).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = re.sub(r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt ")
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    text = text.replace("**", "^").replace("<=", r"\leq ").replace(">=", r"\geq ").replace("!=", r"\neq ")
    text = re.sub(r"\\le(?![a-zA-Z])", r"\\leq", text)
    text = re.sub(r"\\ge(?![a-zA-Z])", r"\\geq", text)
    text = re.sub(r"(?<=[\w)}])\s*\*\s*(?=[\w({\\])", r"\\cdot ", text)
    text = re.sub(r"\^\((-?\w+(?:/\w+)?)\)", r"^{\1}", text)
    text = re.sub(r"\s+", " ", text.replace("$", "").strip())
    chain = re.fullmatch(r"([^<>=]+?)\s*(\\geq|>)\s*([^<>=]+?)\s*(\\geq|>)\s*([^<>=]+)", text)
    if chain and "\\leq" not in text:  # 7 >= x >= 2 is 2 <= x <= 7
        turned = {"\\geq": "\\leq ", ">": "<"}
        text = f"{chain[5]} {turned[chain[4]]} {chain[3]} {turned[chain[2]]} {chain[1]}"
    return text


def words_of(text: str) -> list[str]:
    """Words of two and more letters that are no commands, functions or connectors of a formula."""
    plain = re.sub(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", unwrapped(text))
    plain = re.sub(r"_\{[^{}]*\}|_\w", " ", plain)
    runs = re.findall(r"[^\W\d_⁰¹²³⁴⁵⁶⁷⁸⁹]{2,}", plain)
    return [run for run in runs if run not in FUNCTIONS and run.casefold() not in CONNECTORS]


_FORMULA = re.compile(r"(?:[A-Z][a-z]?(?:\d+|_\{?\d+\}?)?){2,}")  # H2O


def is_text(text: str) -> bool:
    """Whether an answer is words rather than mathematics: "no", "BCA", "Evelyn", "3 hours 20 minutes", "H2O"."""
    if _FORMULA.fullmatch(text) and not text.isalpha():
        return True
    words = words_of(text)
    if not words:
        return False
    symbols = re.sub(r"\\(?:text|mbox|mathrm|textbf)\b", "", text)
    if not re.search(r"[\d=<>+^*/\\|_]", symbols):
        return True
    for word in words:
        name = word.isupper() and len(word) <= 4  # a triangle, a segment
        if not name and (len(word) >= 3 or canonical(word) != word.casefold()):
            return True
    return bool(re.search(r"\d\s+[^\W\d_]{1,2}\s+\d", text))  # 5 ft 3 in


def tokens_of(text: str) -> tuple[str, ...]:
    """Words (case folded, one spelling per unit), numbers (by value) and signs of a text answer, in order.

    Letters that stand alone keep their case: they are names of variables, choices and units.
    """
    plain = unicodedata.normalize(
        "NFKC", _SUPERSCRIPTS.sub(lambda m: "^" + m[0].translate(_FROM_SUPERSCRIPT), unwrapped(text))
    )
    plain = in_ascii(_GAPS.sub(" ", _SPACING.sub("", plain)).replace("$", " "))
    plain = re.sub(r"_\{?(\w+)\}?", r"\1", plain)  # H_2O
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf").strip().strip("\"'`*_“”‘’").strip()
    tokens, position = [], 0
    for numeral in find_numerals(plain):
        if numeral.start < position:
            continue
        tokens += _words(plain[position : numeral.start])
        written = re.sub(r"\s", "", plain[numeral.start : numeral.end])
        tokens.append(written if numeral.value is None else str(numeral.value))
        if numeral.percent:
            tokens.append("%")
        if numeral.currency:
            tokens.append(numeral.currency)
        position = numeral.end
    tokens += _words(plain[position:])
    tokens = [token for token in tokens if token != ","]
    if all(token == "and" or not token[0].isalpha() or is_known_unit(token) for token in tokens):
        tokens = [token for token in tokens if token != "and"]  # 3 hours and 20 minutes
    if len(tokens) > 1 and tokens[0] in ("the", "a", "an"):
        tokens = tokens[1:]
    if len(tokens) == 3 and tokens[0] == "(" and tokens[2] == ")":
        tokens = tokens[1:2]
    while len(tokens) > 1 and tokens[-1] in (".", ";"):
        tokens.pop()
    return tuple(tokens)


_WORD_OR_SIGN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|[^\s\w]|\d")


def _words(text: str) -> list[str]:
    return [canonical(word) if word[0].isalpha() else word for word in _WORD_OR_SIGN.findall(text)]


def date_of(text: str) -> tuple[int, int, int | None] | None:
    """(month, day, year) of "July 4, 1776", "4th of July", "1776-07-04"; None for a text that is no date."""
    plain = in_ascii(unwrapped(text)).strip().strip(".").casefold()
    if iso := re.fullmatch(r"(\d{4})-(\d{1,2})-(\d{1,2})", plain):
        return int(iso[2]), int(iso[3]), int(iso[1])
    month = r"(?P<month>[a-z]{3,9})\.?"
    day, year = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?:\s*,?\s*(?P<year>\d{4}))?"
    for pattern in (rf"{month}\s+{day}{year}", rf"(?:the\s+)?{day}\s+(?:of\s+)?{month}{year}"):
        match = re.fullmatch(pattern, plain)
        if match and (number := _month(match["month"])):
            return number, int(match["day"]), int(match["year"]) if match["year"] else None
    return None


def _month(name: str) -> int | None:
    name = "sep" if name == "sept" else name
    return next((i for i, month in enumerate(_MONTHS, 1) if month.startswith(name)), None)


def split_top(text: str, separators: str) -> list[str]:
    """`text` cut where the regular expression `separators` matches outside of all brackets, parts stripped."""
    parts, depth, start, position = [], 0, 0, 0
    pattern = re.compile(separators)
    while position < len(text):
        if text.startswith(("\\{", "\\}"), position):
            depth += 1 if text[position + 1] == "{" else -1
            position += 2
            continue
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth -= 1
        elif depth == 0 and (match := pattern.match(text, position)) and match.end() > position:
            parts.append(text[start:position].strip())
            start = position = match.end()
            continue
        position += 1
    return [*parts, text[start:].strip()]
