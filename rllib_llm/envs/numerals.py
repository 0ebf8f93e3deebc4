"""Numbers as people and models write them: found whole in a text, or not at all.

A number has one value whatever its notation: 1500, 1,500, 1 500, 1_500, 1.5e3, 1.5×10³, 1.5 \\times 10^{3}, 3000/2,
\\frac{3000}{2}, 150000%, 1.5 thousand, ١٥٠٠. Digits, signs and separators of every script are read. What looks like a
number and is none or only a part of one (12:00, 2024-05-06, 1.2.3, 1,2, 2^10, 2\\pi, \\sqrt{2}, ±3) has no value.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = (
    1000  # of one part of a number, and the largest power of ten: bounds the work of exact arithmetic
)

_SAME = {
    **dict.fromkeys("−‐‑‒–—―﹣－⁻₋➖", "-"),
    **dict.fromkeys("＋﹢➕", "+"),
    **dict.fromkeys("⁄∕／", "/"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
    **dict.fromkeys("’＇", "'"),
    **dict.fromkeys("％٪﹪", "%"),
    **dict.fromkeys("，٬﹐", ","),
    **dict.fromkeys("．٫﹒", "."),
    "：": ":",
}


class _Ascii(dict[int, str]):
    """A table for str.translate, filled as characters are met: one character for one, so positions stay."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if code >= 128:
            digit = unicodedata.decimal(character, None)
            character = _SAME.get(character, character) if digit is None else str(digit)
        self[code] = character
        return character


_ASCII = _Ascii()


def in_ascii(text: str) -> str:
    """`text` with the digits, signs, separators and spaces of other scripts in ASCII, of the same length."""
    return text.translate(_ASCII)


_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺", "0123456789+")
_VULGAR = "".join(
    chr(code)
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F), 0x2189)
    if unicodedata.numeric(chr(code), None)
)
# Digits with the separators that stand between them: "1,234.5" "1{,}234" "1\,234" "1'234" "1_234" ".5".
_DIGITS = r"(?:\d|(?<![\w.])\.(?=\d))(?:\d|(?:[.,'_]|\{,\}|,?\\[,!]\s?)(?=\d))*"
_SPACED = r"\d{1,3}(?:[ ]\d{3})+(?:[.,]\d+)?(?!\d)"
_PLAIN = rf"(?:(?<![\d.,]){_SPACED}|{_DIGITS})"
_EXPONENT = r"\{?\s*[-+]?\s*\d+\s*\}?"
_POWER = (
    rf"[eE][-+]?\d+(?![\d.]\d)"
    rf"|\s*(?:[×✕xX*·⋅∙]|\\times|\\cdot)\s*10\s*(?:(?:\^|\*\*)\s*{_EXPONENT}|-?[⁰¹²³⁴⁵⁶⁷⁸⁹⁺]+)"
)
_NUMERAL = re.compile(
    rf"""
    (?P<sign>[-+][ ]*)?
    (?P<currency>\\?[$€£¥₹₩₽]\s*(?P<inner>[-+])?)?
    (?:
        (?P<date>\d+-\d+-\d+(?!\d)|\d+(?:\.\d+)*(?:\s?:\s?\d+(?:\.\d+)?)+)      # dates, times, ratios: no numbers
      | (?:(?P<whole>\d+)\s*)?\\[dtc]?frac\s*
        (?:\{{\s*(?P<over>[-+]?\s*{_PLAIN})\s*\}}\s*\{{\s*(?P<under>{_PLAIN})\s*\}}|(?P<overdigit>\d)(?P<underdigit>\d))
      | (?P<mixed>\d+)[ ]+(?P<part>\d+)\s?/\s?(?P<of>\d+)(?![\d/.])
      | (?:(?P<units>\d+)\s?)?(?P<vulgar>[{_VULGAR}])
      | 10\s*(?:(?:\^|\*\*)\s*(?P<ten>{_EXPONENT})|(?P<tensuper>-?[⁰¹²³⁴⁵⁶⁷⁸⁹⁺]+))
      | (?P<plain>{_PLAIN})(?P<power>{_POWER})?(?P<slashes>(?:\s?/\s?{_PLAIN})*)
    )
    (?P<percent>\s*(?:\\?%|‰|per[ ]?cent(?:age)?\b|pct\b))?
    (?P<scale>\s*(?:{"|".join(_SCALES)})s?\b)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
# A factor directly behind a number makes it a part of an expression.
_FACTOR = re.compile(
    r"\s*(?:\\(?:pi|sqrt|[dtc]?frac|sin|cos|tan|log|ln|exp|infty|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega)\b"
    r"|[π√∞]|\^(?!\s*\{?\s*\\circ)|\*\*[\d({])|[⁰¹²³⁴⁵⁶⁷⁸⁹]"
)
_VARIABLE = re.compile(r"[a-zA-Zα-ωΑ-Ω]+")
_UNIT_LETTERS = frozenset("mgslLAVWKCFJNhdkMtBbcTHz")
_INSIDE = re.compile(r"(?:(?<=[\d)])\*\*\s*[-(]?|[\^_]\s*\{?\s*|√\s*\(?|\\sqrt\s*(?:\[[^\]]*\])?\s*\{?\s*)$")
_LETTER_BEFORE = re.compile(r"(\\)?([A-Za-zα-ωΑ-Ω]+)$")


@dataclass(frozen=True)
class Numeral:
    """A number at text[start:end]. value: exact, None if it is none or a part of something larger.

    written: the value in one notation that Python's Fraction reads ("-3", "1234.50", "3/4", "1.5e3"), with "%" kept.
    is_decimal: written with a decimal point or exponent, so possibly rounded. currency: the sign before it, or "".
    """

    start: int
    end: int
    value: Fraction | None
    written: str
    percent: bool = False
    is_decimal: bool = False
    currency: str = ""


def find_numerals(text: str) -> Iterator[Numeral]:
    """All numbers of the text in order, the valueless ones too; digits of names and exponents (H2O, x^2) are none."""
    plain, position = in_ascii(text), 0
    while match := _NUMERAL.search(plain, position):
        position = max(match.end(), position + 1)
        numeral = _numeral(plain, match)
        if numeral is not None:
            yield numeral


def parse_number(text: str) -> Numeral | None:
    """The number that the whole text is (whitespace, $…$ and a full stop aside), or None."""
    stripped = in_ascii(text).strip()
    match = _NUMERAL.match(stripped)
    if match is None or match.end() != len(stripped):
        return None
    numeral = _numeral(stripped, match)
    return numeral if numeral is not None and numeral.value is not None and numeral.start == 0 else None


def _numeral(text: str, match: re.Match[str]) -> Numeral | None:
    sign, start = _sign(text, match)
    body = match.start() + len(match["sign"] or "")
    before = text[max(0, start - 24) : start]
    if _INSIDE.search(before):
        return None if re.search(r"[\^_]\s*\{?\s*$", before) else Numeral(start, match.end(), None, "")
    letters = _LETTER_BEFORE.search(before) if start == body and not match["currency"] else None
    if letters and not letters[1]:
        return None
    written, end = _written(match), match.end()
    if written is None or re.search(r"(?:±|\\pm|\\mp|∓)\s*$", before) or _continues(text, end):
        return Numeral(start, end, None, "")
    glued = _VARIABLE.match(text, end)
    if (glued and match["currency"] and glued[0] in ("k", "K")) or (glued and glued[0] == "k"):
        written, end = _times(written, 1000), end + 1
    elif glued and match["currency"] and glued[0] in ("m", "M", "mn", "b", "B", "bn"):
        written, end = _times(written, 10**6 if glued[0][0] in "mM" else 10**9), glued.end()
    elif glued and len(glued[0]) == 1 and glued[0] not in _UNIT_LETTERS:
        return Numeral(start, end, None, "")
    if match["scale"]:
        written = _times(written, _SCALES[match["scale"].strip().lower().rstrip("s")])
    value = _value(written)
    if value is None:
        return Numeral(start, end, None, "")
    if sign:
        value, written = -value, written.removeprefix("-") if written.startswith("-") else "-" + written
    percent = bool(match["percent"])
    if percent:
        value /= 1000 if "‰" in match["percent"] else 100
        written = f"{value.numerator}/{value.denominator}" if "‰" in match["percent"] else written + "%"
    currency = (match["currency"] or "").strip("\\ -+")
    return Numeral(start, end, value, written, percent, "." in written or "e" in written, currency)


def _sign(text: str, match: re.Match[str]) -> tuple[bool, int]:
    """Whether a minus belongs to the number, and where the number starts with its sign.

    A sign belongs to it unless something is subtracted ("7-3", "7 - 3") or a dash separates ("Answer - 3").
    """
    inner = (match["inner"] or "") == "-"
    sign = match["sign"]
    if not sign:
        return inner, match.start()
    before, body = text[: match.start()], match.start() + len(sign)
    if len(sign) == 1:
        belongs = not before or not (before[-1].isalnum() or before[-1] in "_.)]}%'\"|")
    else:
        belongs = not before.strip() or before.rstrip()[-1] in "=(:,[{<>≈"
    if not belongs:
        return inner, body
    return (sign[0] == "-") != inner, match.start()


def _written(match: re.Match[str]) -> str | None:
    """The number in Python's notation, without sign, percent and scale; None if it is none."""
    if match["date"]:
        return None
    if match["over"] or match["overdigit"]:
        over = match["over"] or match["overdigit"]
        minus = "-" if over.startswith("-") else ""
        parts = (_digits(over.lstrip("-+ ")), _digits(match["under"] or match["underdigit"]))
        if None in parts:
            return None
        if match["whole"]:
            return None if minus else _mixed(match["whole"], *(part or "" for part in parts))
        return f"{minus}{parts[0]}/{parts[1]}"
    if match["mixed"]:
        return _mixed(match["mixed"], match["part"], match["of"])
    if match["vulgar"]:
        part = Fraction(unicodedata.numeric(match["vulgar"])).limit_denominator(100)
        value = int(match["units"] or 0) + part if len(match["units"] or "") <= MAX_DIGITS else None
        return None if value is None else f"{value.numerator}/{value.denominator}"
    if match["ten"] or match["tensuper"]:
        return "1e" + _exponent(match["ten"] or match["tensuper"])
    digits = _digits(match["plain"])
    if digits is None:
        return None
    if match["power"]:
        power = match["power"]
        digits += "e" + _exponent(
            re.split(r"[eE]|\^|\*\*|10(?=-?[⁰¹²³⁴⁵⁶⁷⁸⁹⁺])", power, maxsplit=1)[1]
            if "\\times" not in power
            else re.split(r"\^|\*\*|10(?=-?[⁰¹²³⁴⁵⁶⁷⁸⁹⁺])", power, maxsplit=1)[1]
        )
    slashes = [part.strip() for part in match["slashes"].split("/")[1:]]
    if len(slashes) > 1:
        return None
    if slashes:
        under = _digits(slashes[0])
        return None if under is None or "e" in digits else f"{digits}/{under}"
    return digits


def _exponent(text: str) -> str:
    return re.sub(r"[\s{}+]", "", text.translate(_SUPERSCRIPT))


def _mixed(whole: str, part: str, of: str) -> str | None:
    if not all(text.isdigit() and len(text) <= MAX_DIGITS for text in (whole, part, of)):
        return None
    if not int(part) < int(of):
        return None
    return f"{int(whole) * int(of) + int(part)}/{int(of)}"


_GROUPED = [
    re.compile(r"(?!0)\d{1,3}(?:,\d{3})+(?:\.\d+)?"),  # 1,234,567.8
    re.compile(r"\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?"),  # 12,34,567.8 (Indian)
    re.compile(r"\d{1,3}(?:['_ ]\d{3})+(?:\.\d+)?"),  # 1'234'567.8
]
_CONTINENTAL = re.compile(
    r"0,\d{3,}|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?: \d{3})+,\d{1,2}"
)


def _digits(text: str) -> str | None:
    """Digits with separators as Python writes them, or None: "1,234.5" -> "1234.5", "1,2" -> None."""
    text = re.sub(r"\{,\}|,?\\[,!]\s?", ",", text.strip())
    if len(text) > 2 * MAX_DIGITS:
        return None
    if re.fullmatch(r"\d*\.?\d+", text):
        return text if text[0] != "." else "0" + text
    if any(pattern.fullmatch(text) for pattern in _GROUPED):
        return re.sub(r"[,'_ ]", "", text)
    if _CONTINENTAL.fullmatch(text):
        return re.sub(r"[. ]", "", text).replace(",", ".")
    return None


def _continues(text: str, end: int) -> bool:
    """Whether what follows makes the number a part of an expression or of a longer token."""
    return bool(_FACTOR.match(text, end)) or bool(
        re.match(r"[.,:/'_-]?\d", text[end : end + 2]) and text[end] != "-"
    )


def _times(written: str, factor: int) -> str:
    value = _value(written)
    return written if value is None else str(value * factor)


def _value(written: str) -> Fraction | None:
    exponent = written.partition("e")[2]
    if exponent and not (len(exponent) <= 5 and abs(int(exponent)) <= MAX_DIGITS):
        return None
    if len(written) > 2 * MAX_DIGITS:
        return None
    try:
        over, slash, under = written.partition("/")
        return Fraction(over) / Fraction(under) if slash else Fraction(over)
    except (ValueError, ZeroDivisionError):
        return None
