from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_llm.envs import make_env
from rllib_llm.envs.extraction import AnswerExtractor
from rllib_llm.envs.numerals import find_numerals, parse_number

MINUS = "-−‐‑‒–—﹣－⁻"
SCRIPTS = [
    "0123456789",
    "٠١٢٣٤٥٦٧٨٩",
    "۰۱۲۳۴۵۶۷۸۹",
    "०१२३४५६७८९",
    "０１２３４５６７８９",
    "๐๑๒๓๔๕๖๗๘๙",
    "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗",
]
SENTENCES = [
    "{}",
    "The answer is {}",
    "So x = {}.",
    "**{}**",
    "It costs {}, I think",
    "= {}\n",
    "Antwort: {}",
    "答案是：{}",
    "({})",
]
last_number = AnswerExtractor("last_number")


def grouped(integer: int, separator: str) -> str:
    return f"{integer:,}".replace(",", separator)


@st.composite
def numbers(draw: st.DrawFn) -> tuple[str, Fraction]:
    """A random number in a random notation, and its value."""
    integer = draw(st.integers(0, 10**9))
    places = draw(st.integers(1, 6))
    digits = draw(st.integers(0, 10**places - 1))
    decimal = Fraction(integer) + Fraction(digits, 10**places)
    power = draw(st.integers(-20, 20))
    small, over = draw(st.integers(0, 9999)), draw(st.integers(1, 9999))
    tail = f"{digits:0{places}d}"
    exponent = str(power).replace("-", draw(st.sampled_from("-−–")))
    super_exponent = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = Fraction(small % 10) + Fraction(digits, 10**places)
    scientific = f"{small % 10}.{tail}"
    text, value = draw(
        st.sampled_from(
            [
                (str(integer), Fraction(integer)),
                (f"{integer}.{tail}", decimal),
                (f".{tail}", Fraction(digits, 10**places)),
                *[
                    (grouped(integer, s), Fraction(integer))
                    for s in (",", "'", "’", " ", "\u202f", "\u00a0", "_", "{,}", "\\,")
                ],
                (f"{grouped(integer, ',')}.{tail}", decimal),
                (f"{scientific}e{exponent}", mantissa * Fraction(10) ** power),
                (f"{scientific}E{power:+}", mantissa * Fraction(10) ** power),
                (f"{scientific}×10^{exponent}", mantissa * Fraction(10) ** power),
                (f"{scientific} \\times 10^{{{power}}}", mantissa * Fraction(10) ** power),
                (f"{scientific} · 10{super_exponent}", mantissa * Fraction(10) ** power),
                (f"10^{{{power}}}", Fraction(10) ** power),
                (f"{small}/{over}", Fraction(small, over)),
                (f"\\frac{{{small}}}{{{over}}}", Fraction(small, over)),
                (f"{integer}%", Fraction(integer, 100)),
                (f"{integer}.{tail} percent", decimal / 100),
                (f"{integer}\\%", Fraction(integer, 100)),
                (f"{small}½", small + Fraction(1, 2)),
                (f"{small} thousand", Fraction(small * 1000)),
            ]
        )
    )
    sign = draw(st.sampled_from(["", "+", *MINUS]))
    if "\\" not in text and "⁰" not in text and draw(st.booleans()):
        text = text.translate(str.maketrans("0123456789", draw(st.sampled_from(SCRIPTS))))
    return sign + text, -value if sign in MINUS and sign else value


def value_of(written: str) -> Fraction:
    over, slash, under = written.removesuffix("%").partition("/")
    value = Fraction(over) / Fraction(under) if slash else Fraction(over)
    return value / 100 if written.endswith("%") else value


@given(numbers(), st.sampled_from(SENTENCES))
def test_a_number_in_any_notation_is_read_whole(number, sentence):
    """The last number of a sentence has the value that was written, and so has what is extracted."""
    text, value = number
    written = last_number(sentence.replace("{}", text))
    assert written is not None
    assert value_of(written) == value
    again = parse_number(written)
    assert again is not None
    assert again.value == value


@given(
    numbers(),
    st.sampled_from(["#", "A:", "=", ".", ",", "-", "$", "1", "/", "e"]),
    st.sampled_from(["", "\n", ".", ",", "/", "-", " "]),
)
def test_marker_and_until_do_not_cut_a_number(number, marker, until):
    """What follows a marker, up to `until`, holds the number whole or nothing of it."""
    text, value = number
    found = AnswerExtractor("marker", marker=marker, until=until)(f"{marker} {text}{until} and more")
    numerals = list(find_numerals(found or ""))
    assert all(n.value in (value, None) for n in numerals)


@pytest.mark.parametrize(
    "text",
    [
        "12:00",
        "2024-05-06",
        "1.2.3",
        "1,2",
        "(1,2,3)",
        "±3",
        "\\pm 3",
        "\\sqrt{2}",
        "2\\sqrt{3}",
        "2\\pi",
        "2π",
        "3x",
        "5²",
        "2^10",
        "2**10",
        "1/2/3",
        "1/0",
        "192.168.0.1",
        "1e999999",
        "3:4",
        "\\sqrt 7",
        "√7",
        "2\\frac{x}{3}7^2",
    ],
)
def test_what_is_no_number_or_a_part_is_not_read(text):
    """Dates, times, lists, powers and products: no number, rather than one of their digits."""
    assert last_number(f"The answer is {text}") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7-3", "3"),
        ("7 - 3", "3"),
        ("x = - 5", "-5"),
        ("Answer – 5", "5"),
        ("18 m^2", "18"),
        ("x2 is 4", "4"),
        ("5!", "5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("$1.5k", "1500"),
        ("5 million", "5000000"),
        ("3 dozen", "36"),
        ("1.234,56", "1234.56"),
        ("12,34,567", "1234567"),
        ("1 1/2", "3/2"),
        ("2\\frac{1}{2}", "5/2"),
        ("¾", "3/4"),
        ("90^\\circ", "90"),
        ("H2O", None),
        ("AZYUK2A", None),
        ("In 2020 100 people", "100"),
        ("3.14.", "3.14"),
        ("\\$5", "5"),
        ("5‰", "1/200"),
        ("0,5", None),
        ("a+1=3", "3"),
        ("1, 2, 3", "3"),
    ],
)
def test_readings_that_context_decides(text, expected):
    """Subtraction, dashes, currency, scales, mixed numbers, names with digits."""
    assert last_number(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "1" * 200_000,
        "1," * 50_000,
        "1 " * 50_000,
        "-" * 100_000,
        "1/" * 50_000,
        "$" * 100_000,
        "1.5e" * 20_000,
        "\\frac{" * 20_000,
    ],
)
def test_long_texts_are_read_in_one_pass(text):
    """Text that a model repeats without end costs no more than its length (the test's time limit catches a square)."""
    last_number(text)


@pytest.mark.parametrize("gold", [0.00001, 1e22, 1.5, -0.25, 10**30, "1/3", "12%"])
def test_a_number_of_a_file_can_be_earned(tmp_path, gold):
    """Through the user's interface: the row is read, and the number in another notation is paid."""
    rows = [{"question": "a?", "answer": gold}, {"question": "b?", "answer": 2}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "e.jsonl").write_text('{"question": "c?", "answer": 3}')
    factory = make_env("jsonl_math", {"path": str(path), "eval_path": str(tmp_path / "e.jsonl")})
    problem = next(p for p in map(factory.problem, range(2)) if p.question == "a?")
    value = parse_number(str(gold)).value
    for text in (str(gold), f"{value.numerator}/{value.denominator}"):
        assert problem.score(factory.extract(f"So it is {text}.")) == 1.0
    wrong = value * 2
    assert problem.score(factory.extract(f"So it is {wrong.numerator}/{wrong.denominator}.")) == 0.0
