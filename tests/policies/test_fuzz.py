"""Hostile and broken input: whatever stands in a file, a policy comes out or a PolicyError."""

from __future__ import annotations

import random
import string
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from precision_policies import (
    PolicyError,
    PrecisionOverrideWarning,
    PrecisionPolicy,
    available,
    from_yaml,
    load_policy,
)

pytestmark = pytest.mark.slow

CASES = 10_000
SEED = 20261129


def _words(text: str) -> list[str]:
    return text.split()


_VALUES = [
    "{a: b}",
    "a\\x00b",
    "!!python/object:os.system x",
    *_words(
        "fp8 bf16 fp16 fp32 float16 bfloat16 pad refuse exempt shared scheme ue8m0 none tis_token icepop guard"
    ),
    *_words(
        "halt warn correct true false yes off null ~ '' 0 -1 1 2.0 1e400 -0.0 .nan .inf 0x1F 1_000 12:30:45"
    ),
    *_words("2026-11-29 [] {} [[]] [1,2] ??? ${x} ${oc.env:HOME} &a *a |- > '%' @ ` ä 🦜 - : ? , ] }"),
]
_KEYS = _words(
    "schema_version name description extends operators operator_overrides compute_dtype gradient_dtype master_dtype "
    "optimizer_state_dtype loss_scaling quantisation linear lm_head embedding norm attention activation router "
    "kv_cache exempt ragged logprobs correction clip_calibration guard"
)
_INNER = _words(
    "train_forward rollout_forward dgrad wgrad saved scale_format scale_floor format modules first_layers kind lower "
    "upper veto when accept_uncorrected metric tolerance action patience enabled strength initial growth_interval"
)


def _line(rng: random.Random) -> str:
    key = rng.choice(_KEYS)
    if rng.random() < 0.5:
        return f"{key}: {rng.choice(_VALUES)}"
    inner = ", ".join(f"{rng.choice(_INNER)}: {rng.choice(_VALUES)}" for _ in range(rng.randint(0, 3)))
    return f"{key}: {{{inner}}}"


def _sensible(rng: random.Random) -> str:
    """A file that looks like a policy, with random keys and values."""
    base = rng.choice(["", "extends: bf16", "extends: unified-fp8", "extends: nothing", "extends: [bf16]"])
    version = rng.choice(
        ["schema_version: 1"] * 8 + ["schema_version: 0", "schema_version: 99", "schema_version: x", ""]
    )
    return "\n".join([version, base, *(_line(rng) for _ in range(rng.randint(0, 6)))])


def _damaged(rng: random.Random) -> str:
    """A short valid file with characters inserted, deleted, doubled or swapped."""
    text = list(
        "schema_version: 1\nextends: unified-fp8\nguard: {tolerance: 0.5, patience: 7}\nragged: exempt\n"
    )
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(text))
        action = rng.randrange(4)
        if action == 0:
            text.insert(at, rng.choice(string.printable))
        elif action == 1:
            del text[at]
        elif action == 2:
            text[at] = chr(rng.choice((0, 7, 9, 0x85, 0x2028, 0xFEFF, 0xD7FF, 0x1F99C)))
        else:
            text[at:at] = text[max(0, at - 9) : at]
    return "".join(text)


def _noise(rng: random.Random) -> str:
    return "".join(rng.choice("{}[]:-,&*!|>'\"%@`#?\n \tabc019.\x00é") for _ in range(rng.randint(0, 60)))


def _deep(rng: random.Random) -> str:
    depth = rng.randint(1, 60)
    return rng.choice(["[" * depth + "]" * depth, "{a: " * depth + "1" + "}" * depth, "- " * depth + "x"])


def _outcome(text: str) -> PrecisionPolicy | Exception:
    try:
        return from_yaml(text)
    except Exception as error:
        return error


def test_ten_thousand_broken_files_give_a_policy_or_a_named_error() -> None:
    """Of 10 000 seeded inputs none raises anything but PolicyError, and both outcomes occur often."""
    rng = random.Random(SEED)
    makers: list[Callable[[random.Random], str]] = [_sensible] * 5 + [_damaged] * 3 + [_noise, _deep]
    loaded = refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionOverrideWarning)
        for index in range(CASES):
            text = rng.choice(makers)(rng)
            outcome = _outcome(text)
            if isinstance(outcome, PrecisionPolicy):
                loaded += 1
                continue
            refused += 1
            assert isinstance(outcome, PolicyError), f"case {index}: {outcome!r} from {text!r}"
            assert outcome.violations, f"case {index}: an error without a violation: {text!r}"
            assert all(v.problem and v.remedy for v in outcome.violations), f"case {index}: {text!r}"
            assert len(str(outcome)) < 20_000, f"case {index}: flooded by its input"
    assert loaded + refused == CASES
    assert loaded > 200, f"only {loaded} inputs were policies: the generator no longer makes valid ones"
    assert refused > 5_000


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"a: \xc3\x28", b"", b"\x00", b"#" + b"x" * (300 * 1024), b"---\na: 1\n---\nb: 2\n"],
    ids=["utf16", "bad utf-8", "empty", "nul", "too large", "two documents"],
)
def test_files_that_are_not_policies_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    """Bytes that are no YAML text of one policy give a PolicyError that names the file."""
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=r"broken\.yaml"):
        load_policy(path)


def test_a_yaml_bomb_is_refused_before_it_unfolds() -> None:
    """Nested aliases that would unfold to 10^9 entries are refused by name, not expanded."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(PolicyError, match="alias"):
        from_yaml("\n".join(lines))


@pytest.mark.parametrize("source", [None, 3, 2.5, ["bf16"], b"bf16", object()])
def test_other_types_are_refused_by_name(source: object) -> None:
    """load_policy of something that cannot mean a policy raises PolicyError."""
    with pytest.raises(PolicyError, match="neither a name"):
        load_policy(source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "bf17", "BF16", "no/such/file", "a\x00b.yaml", "~nobody/x.yaml", " "]
)
def test_names_of_nothing_are_refused_with_what_there_is(name: str) -> None:
    """An unknown name or path lists the shipped names."""
    with pytest.raises(PolicyError) as caught:
        load_policy(name)
    assert all(shipped in str(caught.value) for shipped in available())
