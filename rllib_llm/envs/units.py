"""Spellings of one unit: "m", "metre" and "meters" are one, "m" and "km" are two. Nothing is converted."""

from __future__ import annotations

import re

_SPELLINGS = """
m meter meters metre metres
km kilometer kilometers kilometre kilometres
cm centimeter centimeters centimetre centimetres
mm millimeter millimeters millimetre millimetres
in inch inches
ft foot feet
yd yard yards
mi mile miles
g gram grams gramme grammes
kg kilogram kilograms
mg milligram milligrams
lb lbs pound pounds
oz ounce ounces
t ton tons tonne tonnes
l L liter liters litre litres
ml mL milliliter milliliters millilitre millilitres
s sec secs second seconds
ms millisecond milliseconds
min mins minute minutes
h hr hrs hour hours
d day days
wk week weeks
mo month months
yr yrs year years
N newton newtons
J joule joules
kJ kilojoule kilojoules
W watt watts
kW kilowatt kilowatts
MW megawatt megawatts
V volt volts
A amp amps ampere amperes
Hz hertz
kHz kilohertz
MHz megahertz
Pa pascal pascals
kPa kilopascal kilopascals
K kelvin kelvins
mol mole moles
mph
kmh km/h kph
sq square
cu cubic
deg degree degrees °
rad radian radians
$ dollar dollars usd USD
€ euro euros eur EUR
£ gbp GBP
¥ yen jpy JPY
₹ rupee rupees inr INR
¢ cent cents
"""
_CANONICAL = {
    spelling: line.split()[0] for line in _SPELLINGS.strip().splitlines() for spelling in line.split()
}
_PROSE = """
an and are as at be but by can cannot could else except for from has have if is it its maybe minus more most no nor not
of on or over perhaps plus possibly so than that the then there these they this to was were will with without wrong yes
"""
# Words that are no units: with one of them the text says something about the number.
_NO_UNITS = frozenset(_PROSE.split())
PROSE_WORDS = _NO_UNITS - {"and", "or", "per"}
_WORD = re.compile(r"[^\W\d_]+|[$€£¥₹¢°]|/|\^\{?-?\d+\}?|\bper\b")


def canonical(word: str) -> str:
    """One spelling of a unit's word; other words in lower case without a plural's s; a letter as it is."""
    if word in _CANONICAL:
        return _CANONICAL[word]
    if len(word) == 1:
        return word
    lower = word.casefold()
    if lower in _CANONICAL:
        return _CANONICAL[lower]
    return lower[:-1] if len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss") else lower


def unit_of(text: str) -> tuple[str, ...] | None:
    """The unit that the whole text is, as canonical parts; () for an empty text, None for a text that is no unit."""
    text = text.strip().strip(".").strip().replace("²", "^2").replace("³", "^3")
    words = _WORD.findall(text)
    if _WORD.sub("", text).strip(" ·*-⋅") or len(words) > 8:
        return None
    letters = [word for word in words if word[0].isalpha()]
    if len(letters) > 4 or any(word.casefold() in _NO_UNITS for word in letters):
        return None
    if any(word[0].isupper() and not is_known_unit(word) for word in letters):  # a name: 10 Downing Street
        return None
    parts: list[str] = []
    for word in words:
        part = "/" if word == "per" else canonical(word)
        exponent = re.sub(r"[\^{}]", "", word)
        parts.append(f"^{exponent}" if exponent.lstrip("-").isdigit() else part)
    if len(parts) > 1 and parts[0] in ("sq", "cu"):  # "square metres" is m^2
        parts = [parts[1], "^2" if parts[0] == "sq" else "^3", *parts[2:]]
    return ("km", "/", "h") if parts == ["kmh"] else tuple(parts)


def is_known_unit(word: str) -> bool:
    """Whether a word is a spelling of one of the units listed here."""
    return word in _CANONICAL or (len(word) > 2 and word.casefold() in _CANONICAL)
