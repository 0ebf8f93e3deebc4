"""Which bounds each kind of importance correction needs, may have, or has none of: for policies and for settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from .errors import Violation


class Correction(Protocol):
    """Kind and bounds of a correction, as `schema.Correction` and others have them."""

    @property
    def kind(self) -> str: ...
    @property
    def lower(self) -> float | None: ...
    @property
    def upper(self) -> float | None: ...


Need = Literal["needs", "may", "no"]


class Bounds(NamedTuple):
    """Whether a kind needs a bound of the ratio on that side, may have one, or has none."""

    lower: Need
    upper: Need


BOUNDS: dict[str, Bounds] = {
    "none": Bounds("no", "no"),
    "tis_token": Bounds("no", "needs"),
    "tis_sequence": Bounds("no", "needs"),
    "icepop": Bounds("needs", "needs"),
    "mis_token": Bounds("may", "needs"),
    "mis_sequence": Bounds("may", "needs"),
    "geometric_mask": Bounds("needs", "needs"),
    "product_mask": Bounds("needs", "needs"),
}
_EXAMPLES = {"lower": "0.5", "upper": "2.0"}


def bound_violations(correction: Correction, prefix: str = "correction") -> Iterator[Violation]:
    """Bounds that the kind lacks or has none of, and a lower one that is not below the upper."""
    for name, need in BOUNDS[correction.kind]._asdict().items():
        key, value = f"{prefix}.{name}", getattr(correction, name)
        if need == "needs" and value is None:
            problem, remedy = f"kind {correction.kind} needs this bound", f"give it, e.g. {_EXAMPLES[name]}"
            yield Violation(key, None, problem, remedy)
        if need == "no" and value is not None:
            yield Violation(key, value, f"kind {correction.kind} has no such bound", "set it to null")
    lower, upper = correction.lower, correction.upper
    if lower is not None and upper is not None and not lower < upper:
        yield Violation(f"{prefix}.lower", lower, f"is not below upper {upper}", "lower it, or raise upper")
