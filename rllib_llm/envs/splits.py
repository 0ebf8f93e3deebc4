"""Which split a problem belongs to is a property of its text, so train and eval can never share one.

Seeds alone do not do this: reasoning-gym's item i of seed s is item i-1 of seed s+1, and small tasks (products of
one-digit numbers) repeat within any seed. Here a keyed hash of the question decides, whatever generated it.
"""

from __future__ import annotations

import hashlib
import unicodedata
from random import Random

from rllib_llm.envs.protocol import Split


def normalise(text: str) -> str:
    """One form of all spellings of a text: NFKC, without invisible characters (category Cf), whitespace folded."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return " ".join(text.split())


def unit_hash(*parts: object) -> float:
    """Deterministic, platform-independent number in [0, 1) from the parts (53 bits of SHA-256)."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def split_of(question: str, split_seed: int, eval_fraction: float) -> Split:
    """ "eval" for a share of about `eval_fraction` of all questions, else "train"."""
    return "eval" if unit_hash("split", split_seed, normalise(question)) < eval_fraction else "train"


def rng_for(*parts: object) -> Random:
    """A generator of its own for each tuple of parts (seed, index, …)."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return Random(int.from_bytes(digest[:16], "big"))
