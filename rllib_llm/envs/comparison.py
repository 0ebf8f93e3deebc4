"""Whether an answer is the right one. Gold is read first and decides how: as a number, as mathematics or as text.

number   one number, whatever its notation, with a unit: `1,500`, `1.5e3` and `\\frac{3000}{2}` are equal; `5 m` and
         `5 km` are not. Exact, but for a rounded decimal against a fraction: six decimals (below 0.1: six digits).
math     a formula, equation, set, tuple, interval, ratio or list of several: compared part by part, all of them; each
         part by math-verify, gold read as LaTeX.
text     words, dates, times, several quantities: the same words in the same order, case and punctuation aside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from rllib_llm.envs.answer_text import (
    CONNECTORS,
    FUNCTIONS,
    as_latex,
    boxes,
    date_of,
    is_text,
    split_top,
    statement,
    tokens_of,
    unwrapped,
    words_of,
)
from rllib_llm.envs.numerals import Numeral, find_numerals, in_ascii, parse_number
from rllib_llm.envs.units import PROSE_WORDS, is_known_unit, unit_of

Kind = Literal["number", "math", "text"]
COMPARE = ("auto", "math", "number", "text")
MAX_PARTS = 64
DECIMALS = 6

MathEqual = Callable[[str, str, bool], bool]
"""(gold, answer, answer is prose) -> equal: math-verify on one part; gold and a bare answer are LaTeX without $."""


@dataclass(frozen=True)
class Quantity:
    """A number with its unit."""

    number: Numeral
    unit: tuple[str, ...]


@lru_cache(maxsize=1024)
def quantity_of(text: str) -> Quantity | None:
    """The number and unit that the whole text is: "5 m", "$5", "28 percent", "15\\mbox{ cm}^2", "90^\\circ"."""
    text = re.sub(r"\$([^$]+)\$", r" \1 ", text).strip()
    plain = in_ascii(unwrapped(re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text)))
    plain = re.sub(r"\\(?:,|;|!|quad|qquad)(?=\s*[^\W\d])", " ", plain).strip()
    if plain.endswith("$") and not plain.startswith("$"):
        plain = "$" + plain[:-1]
    numeral = next(find_numerals(plain), None)
    if numeral is None or numeral.value is None or numeral.start != 0:
        return None
    rest = plain[numeral.end :]
    if re.match(r"\s*-\s*", rest):  # a 5-mile walk
        rest = re.sub(r"^\s*-\s*(?=[^\W\d_]{2})", " ", rest)
    if re.match(r"\s*[A-Za-z]", rest):
        first = re.match(r"\s*([A-Za-z]+)", rest)
        if first and len(first[1]) == 1 and not is_known_unit(first[1]):
            return None
        if first and rest[0].isalpha() and not is_known_unit(first[1]) and len(first[1]) < 3:
            return None  # 2xy
    unit = unit_of(rest)
    if unit is None or any(part.startswith("^") for part in unit[:1]):
        return None
    if numeral.currency:
        unit = (*(unit_of(numeral.currency) or ()), *unit)
    return Quantity(numeral, unit)


@lru_cache(maxsize=1024)
def kind_of(gold: str, compare: str = "auto") -> Kind:
    """How `gold` is compared: `compare` itself, or by what gold is ("auto")."""
    if compare in ("math", "number", "text"):
        return compare  # type: ignore[return-value]
    final = statement(gold)
    if quantity_of(final) is not None:
        return "number"
    if date_of(final) or re.fullmatch(
        r"\s*\d{1,2}\s?:\s?[0-5]\d(?:\s?:\s?[0-5]\d)?(?:\s*[apAP]\.?[mM]\.?)?\s*", in_ascii(final)
    ):
        return "text"
    if re.search(r"\d-\d+-\d|\d\.\d+\.\d", in_ascii(final)) or not re.search(r"\w", final):
        return "text"
    return "text" if is_text(final) else "math"


class Comparison:
    """`equal(gold, answer, compare)`; `math_equal` compares two formulas."""

    def __init__(self, math_equal: MathEqual):
        self._math_equal = math_equal

    def equal(self, gold: str, answer: str, compare: str = "auto") -> bool:
        """Whether `answer` is right. Never raises for what an answer holds, but for what `math_equal` raises."""
        kind = kind_of(gold, compare)
        if kind == "text":
            return text_equal(gold if compare == "text" else statement(gold), answer)
        final_gold, final = statement(gold), statement(answer)
        if not final or not final_gold:
            return False
        if kind == "number" and (wanted := quantity_of(final_gold)):
            verdict = self._number(wanted, final_gold, final, answer)
            if verdict is not None or compare == "number":
                return bool(verdict)
        elif kind == "number":
            return False
        final = re.sub(r"^(\d+(?:\.\d+)?)\s+to\s+(\d+(?:\.\d+)?)$", r"\1:\2", final)
        if is_prose(final) and not (compare == "math" and final.isalpha()):
            return self._prose(final_gold, final)
        return self._same(as_latex(final_gold), as_latex(final), compare == "math")

    def _number(self, gold: Quantity, gold_text: str, final: str, answer: str) -> bool | None:
        """The verdict for a gold number; None if the answer is a formula or prose."""
        found = quantity_of(final)
        if (
            found is None
            and gold.number.is_decimal
            and re.fullmatch(r"-?(?:\d{4,},\d+|\d{1,3},\d{1,2})", in_ascii(final))
        ):
            found = quantity_of(
                final.replace(",", ".")
            )  # a decimal comma, where gold says that it can be no list
        if found is None and (assigned := re.fullmatch(r"[a-zA-Z]\w?\s*=\s*(.+)", final, re.DOTALL)):
            found = quantity_of(assigned[1])
        if found is not None:
            return quantities_equal(gold, found)
        return None

    def _prose(self, gold: str, answer: str) -> bool:
        """A sentence: what math-verify takes from it, unless the sentence offers another number beside it."""
        wanted = quantity_of(gold)
        if wanted is not None and _contradicts(wanted, answer):
            return False
        return self._math_equal(as_latex(gold), answer, True)

    def _same(self, gold: str, answer: str, products: bool, depth: int = 0) -> bool:
        """Equality of two formulas, part by part. products: "ab" is a times b, not a word."""
        if _bare(gold) == _bare(answer):
            return True
        if depth > 4:
            return False
        golds, answers = parts_of(gold), parts_of(answer)
        if max(len(golds), len(answers)) > MAX_PARTS:
            return False
        if len(golds) > 1 or len(answers) > 1:
            if all(
                part.startswith("(") for part in golds + answers
            ):  # a solution given twice is one solution
                golds, answers = _distinct(golds), _distinct(answers)
            if len(golds) == len(answers):
                return self._match(golds, answers, products, depth)
            return _may_differ_in_form(golds, answers) and self._leaf(gold, answer, products)
        gold, answer = golds[0], answers[0]
        gold_tuple, answer_tuple = _tuple(gold), _tuple(answer)
        if gold_tuple and answer_tuple:
            return (
                (gold_tuple[0], gold_tuple[2]) == (answer_tuple[0], answer_tuple[2])
                and len(gold_tuple[1]) == len(answer_tuple[1])
                and all(
                    self._same(g, a, products, depth + 1)
                    for g, a in zip(gold_tuple[1], answer_tuple[1], strict=True)
                )
            )
        return self._leaf(gold, answer, products)

    def _match(self, golds: list[str], answers: list[str], products: bool, depth: int) -> bool:
        """Whether each gold part has an answer part of its own, in any order."""
        left = list(answers)
        for gold in golds:
            partner = next((answer for answer in left if self._same(gold, answer, products, depth + 1)), None)
            if partner is None:
                return False
            left.remove(partner)
        return True

    def _leaf(self, gold: str, answer: str, products: bool) -> bool:
        """Equality of two single formulas."""
        wanted, found = quantity_of(gold), quantity_of(answer)
        if wanted and found:
            return quantities_equal(wanted, found)
        if ratio := _ratio(gold):
            return ratio == _ratio(answer) or (
                found is not None and not found.unit and found.number.value == ratio
            )
        if _ratio(answer):
            return False
        if letter := _letter(gold):
            return letter == _letter(answer)
        if _BASE.search(gold) or _BASE.search(answer):  # 204_5: math-verify drops the base
            return _plain_base(gold) == _plain_base(answer)
        if re.search(r"\d\s+\d", answer) and not re.search(r"\d\s+\d", gold):  # math-verify reads 7 2 as 72
            return False
        gold_core, gold_unit = _without_unit(gold)
        core, unit = _without_unit(answer)
        if gold_unit and unit and gold_unit != unit:
            return False
        if not products and words_of(gold_core) + words_of(core) and not _names(gold_core, core):
            return tokens_of(gold_core) == tokens_of(core)
        if not _equations_compare(gold_core, core):
            return False
        return self._math_equal(gold_core, core, False)


def _letter(text: str) -> str | None:
    """The one letter that a formula is: a choice or a variable, "C", "(C)", "\\text{(C)}"."""
    match = re.fullmatch(r"\(?\s*([a-zA-Z])\s*\)?", unwrapped(text).strip())
    return match[1] if match else None


def text_equal(gold: str, answer: str) -> bool:
    """The same words in the same order; dates by their day. A box in the answer is the answer."""
    candidates = {answer, statement(answer)} if not boxes(answer) or boxes(gold) else {statement(answer)}
    wanted, day = tokens_of(gold), date_of(gold)
    for candidate in candidates:
        if wanted and tokens_of(candidate) == wanted:
            return True
        if day is not None and date_of(candidate) == day:
            return True
    return False


def quantities_equal(gold: Quantity, answer: Quantity) -> bool:
    """Equal numbers, and no other unit: an answer may leave gold's unit out, and may add one where gold has none."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    wanted, found = gold.number, answer.number
    if (wanted.percent and answer.unit) or (found.percent and gold.unit):
        return False
    assert wanted.value is not None
    assert found.value is not None
    if numbers_equal(wanted, found):
        return True
    if wanted.percent and not found.percent:  # "28%" asked for as a percentage
        return found.value == wanted.value * 100
    if found.percent and not wanted.percent and abs(wanted.value) >= 1:
        return found.value * 100 == wanted.value
    return False


def numbers_equal(first: Numeral, second: Numeral) -> bool:
    """Equal values; a decimal equals a fraction with no finite decimal that rounds to it (six decimals or digits)."""
    a, b = first.value, second.value
    assert a is not None
    assert b is not None
    if a == b:
        return True
    if first.is_decimal == second.is_decimal or (a < 0) != (b < 0):
        return False
    exact = b if first.is_decimal else a
    if _is_finite_decimal(exact):
        return False
    return abs(a - b) <= _tolerance(exact)


def _is_finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _tolerance(exact: Fraction) -> Fraction:
    magnitude = abs(exact)
    digits = DECIMALS
    if magnitude < Fraction(1, 10):
        digits = (
            DECIMALS - 1 - math.floor(math.log10(magnitude.numerator) - math.log10(magnitude.denominator))
        )
    return Fraction(1, 2) / 10**digits


def is_prose(text: str) -> bool:
    """Whether an answer is a sentence rather than an answer: words that are neither unit, name nor connector."""
    if re.search(r"\\begin\s*\{(?:[pbvV]?matrix|array|cases)", text) and "$" not in text:
        return False
    if "$" in text.strip("$") or re.search(r"\\\[|\\\(", text):
        return True
    bare = _without_unit(as_latex(text))[0]
    plain = re.sub(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+|_\{[^{}]*\}", " ", unwrapped(bare))
    words = re.findall(r"(?<![\w^])[^\W\d_]{2,}(?![\w(^])", plain)
    return any(
        word.casefold() in PROSE_WORDS
        or (
            len(word) >= 3
            and word not in FUNCTIONS
            and word.casefold() not in CONNECTORS
            and not is_known_unit(word)
            and not (word.isupper() and len(word) <= 4)
        )
        for word in words
    )


_HEDGE = re.compile(
    r"[\s$*.\\()]*(?:,|;|/|\||&|or|and|maybe|perhaps|possibly|either|but|if not|else|[\s,;])+[\s$*\\()]*",
    re.I,
)


def _contradicts(gold: Quantity, answer: str) -> bool:
    """Whether a sentence puts another number, or another unit, beside gold's."""
    plain = in_ascii(unwrapped(answer))
    numerals = [n for n in find_numerals(plain) if n.value is not None]
    for before, after in pairwise(numerals):
        between = plain[before.end : after.start]
        values = {before.value, after.value}
        offered = gold.number.value in values and len(values) == 2 and after is numerals[-1]
        if offered and between.strip() and len(between) < 40 and _HEDGE.fullmatch(between):
            return True
    if numerals and re.search(
        r"(?:\b(?:not|than|never)|n't|≠|\\neq?)\s*$", plain[: numerals[-1].start], re.I
    ):
        return True
    if gold.unit and numerals and numerals[-1].value == gold.number.value:
        rest = re.match(r"\s*([^\W\d_]+(?:\s*/\s*[^\W\d_]+)?)", plain[numerals[-1].end :])
        unit = unit_of(rest[1]) if rest and is_known_unit(rest[1].split("/")[0].strip()) else ()
        return bool(unit) and unit != gold.unit
    return False


_SEPARATOR = "|".join(
    (
        r"\s*,\s*(?:\\text\s*\{\s*)?(?:and|or)\b\s*\}?\s*",
        r"\s*,(?!\d{3}(?!\d))\s*",  # not the comma of 1,234
        r"\s*,(?=\d{3}\s*,\s)\s*",
        r"\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}\s*",
        r"\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])\s*",
    )
)


def parts_of(text: str) -> list[str]:
    """Parts of a list ("1, 2", "x=1 or x=2", "\\{1, 2\\}", "1 \\pm 2"), or the text alone."""
    text = _unbraced(text.strip())
    groups = [part for part in split_top(text, r";") if part]
    if len(groups) > 1:
        return groups
    if text.count("\\begin") or parse_number(text) is not None:
        return [text]
    parts = [part for part in split_top(text, _SEPARATOR) if part]
    if len(parts) > 1:
        return [piece for part in parts for piece in _signs(part)]
    return _signs(_unbraced(parts[0])) if parts else [text]


def _unbraced(text: str) -> str:
    """The content of one pair of braces around the whole: a set."""
    for opening, closing in ((r"\{", r"\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            inside = text[len(opening) : len(text) - len(closing)]
            depth = 0
            for character in inside:
                depth += {"{": 1, "}": -1}.get(character, 0)
                if depth < 0:
                    return text
            return inside.strip()
    return text


def _signs(part: str) -> list[str]:
    if r"\pm" not in part and r"\mp" not in part:
        return [part]
    upper = part.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = part.replace(r"\pm", "-").replace(r"\mp", "+")
    return [re.sub(r"(^|[=(,])\s*\+", r"\1", upper), lower]


def _tuple(text: str) -> tuple[str, list[str], str] | None:
    """(opening bracket, parts, closing bracket) of "(1, 2)" or "[0, 1)"; None for anything else."""
    text = re.sub(r"^\(?\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\)?\s*=\s*(?=\()", "", text)
    text = re.sub(r"^[a-zA-Z]\s*(?:=|\\in)\s*(?=[(\[])", "", text)
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth == 0 and position < len(text) - 1:
            return None
    parts = split_top(text[1:-1], r"\s*[,;]\s*")
    return (text[0], parts, text[-1]) if len(parts) > 1 and all(parts) else None


def _may_differ_in_form(golds: list[str], answers: list[str]) -> bool:
    """Whether lists of different lengths can be equal: where one is a tuple, an interval or a relation."""
    single = golds if len(golds) == 1 else answers if len(answers) == 1 else None
    if single is None:
        return False
    text, others = single[0], answers if single is golds else golds
    inside = _tuple(text)
    if inside:
        return len(inside[1]) == len(others)
    return (
        bool(re.search(r"\\cup|\\cap|\\in(?![a-zA-Z])|[<>]|\\[lg]eq?(?![a-zA-Z])|\\setminus|\|", text))
        and len(others) < 4
    )


def _ratio(text: str) -> Fraction | None:
    match = re.fullmatch(r"(?:[^=]*=)?\s*(\d+(?:\.\d+)?)\s*(?::|\\colon|to)\s*(\d+(?:\.\d+)?)", text)
    if match is None or not float(match[2]):
        return None
    return Fraction(match[1]) / Fraction(match[2])


_UNIT_AT_END = re.compile(
    r"(?:\s*\\(?:text|mbox|mathrm|textbf|textnormal|textrm|rm)\s*\{(?P<wrapped>[^{}]*)\}"
    r"|(?<=[\d})])\s+(?P<plain>[^\W\d_][\w ./^]*))"
    r"(?P<power>\s*\^\s*\{?\s*\d\s*\}?)?$|\^\s*\{?\s*\\circ\s*\}?$"
)


def _without_unit(text: str) -> tuple[str, tuple[str, ...]]:
    """(formula, unit at its end): "\\frac{1}{3} \\text{meters}" -> ("\\frac{1}{3}", ("m",))."""
    match = _UNIT_AT_END.search(text)
    if match is None or match.start() == 0:
        return text, ()
    written = match["wrapped"] or match["plain"]
    if written is None:
        return text[: match.start()].strip(), ("deg",)
    if match["plain"] and not is_known_unit(written.split()[0].split("/")[0]) and len(written.split()[0]) < 3:
        return text, ()
    unit = unit_of(written + (match["power"] or "").replace(" ", ""))
    return (text, ()) if not unit else (text[: match.start()].strip(), unit)


def _names(gold: str, answer: str) -> bool:
    """Whether the words of two formulas are names of points (AB, NO) or products of single letters of both."""
    golds, answers = words_of(gold), words_of(answer)
    if not all(len(word) <= 4 for word in golds + answers):
        return False
    if not re.search(r"[\d=<>+^*/\\|(]", gold):
        return False
    return not golds or not answers or all(word.isupper() or len(word) == 2 for word in golds + answers)


_RELATION = re.compile(r"(?<![<>!\\])=|\\(?:leq|geq|neq|approx|equiv|lt|gt)(?![a-zA-Z])|[<>]")


def _equations_compare(gold: str, answer: str) -> bool:
    """Whether an equation is compared with an equation, or with the value of one that only names it ("x = 5")."""
    if _RELATION.search(gold) or not _RELATION.search(answer):
        return True
    if not re.search(r"=|\\approx", answer) or re.search(r"[<>]|\\[lgn]eq?(?![a-zA-Z])", answer):
        return "(" in gold or "[" in gold  # an interval against an inequality
    left = re.split(r"=|\\approx", answer, maxsplit=1)[0].strip()
    if not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", left)):
        return True
    return (
        re.fullmatch(
            r"\|?[a-zA-Z\\]+(?:_\{?\w+\}?)?\|?(?:\([\w, ]*\))?(?::\w+)?|\([\w, ]+\)|\\frac\{\w+\}\{\w+\}",
            left,
        )
        is not None
    )


_BASE = re.compile(r"\d\s*_\s*\{?\s*\d")


def _plain_base(text: str) -> str:
    return re.sub(r"[\s{}()]", "", text)


def _distinct(parts: list[str]) -> list[str]:
    return list({re.sub(r"\s", "", part): part for part in parts}.values())


_NOISE = re.compile(r"(?<![\w,.])\s+|\s+(?!\w)")  # not the space of "100, 000" and "7 2"


def _bare(text: str) -> str:
    return _NOISE.sub("", text)
