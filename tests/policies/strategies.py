"""Hypothesis strategies: trees of well-formed values, of which those that can be a policy are kept."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, get_args, get_origin

from hypothesis import strategies as st

from precision_policies import PolicyError, PrecisionPolicy, load_policy
from precision_policies.coerce import hints, optional_part

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40).filter(lambda s: "${" not in s)


def value(hint: Any, metadata: Any) -> st.SearchStrategy[Any]:
    """Values that the type and range of a field allow."""
    inner = optional_part(hint)
    if inner is not None:
        return st.none() | value(inner, metadata)
    if dataclasses.is_dataclass(hint):
        return section(typing.cast(type, hint))
    if get_origin(hint) is typing.Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(TEXT, max_size=3)
    if get_origin(hint) is dict:
        return st.dictionaries(TEXT, TEXT.filter(str.strip), max_size=2)
    if hint is float:
        return st.floats(metadata["low"], metadata["high"])
    if hint is int:
        return st.integers(metadata["low"], metadata["high"])
    return st.booleans() if hint is bool else TEXT


def section(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    """Trees for a dataclass of the schema."""
    types = hints(cls)
    return st.fixed_dictionaries({f.name: value(types[f.name], f.metadata) for f in dataclasses.fields(cls)})


def _free_parts() -> st.SearchStrategy[dict[str, Any]]:
    """Changes that go with every dtype, so that enough trees are policies."""
    types = hints(PrecisionPolicy)
    meta = {f.name: f.metadata for f in dataclasses.fields(PrecisionPolicy)}
    free = (
        "description",
        "master_dtype",
        "optimizer_state_dtype",
        "exempt",
        "ragged",
        "logprobs",
        "clip_calibration",
    )
    more = ("guard", "correction", "loss_scaling")
    return st.fixed_dictionaries(
        {}, optional={name: value(types[name], meta[name]) for name in (*free, *more)}
    )


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """A complete tree: a shipped policy with some parts exchanged; may break a rule between parts."""
    base = draw(
        st.sampled_from(("bf16", "fp16", "mixed-bf16-fp8", "unified-fp8", "unified-fp8-fp16-backward"))
    )
    tree = load_policy(base).to_dict()
    tree.update(draw(_free_parts()))
    tree["name"] = draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True))
    tree["quantisation"]["scale_floor"] = draw(st.floats(2.0**-126, 1e-6))
    return tree


@st.composite
def policies(draw: st.DrawFn) -> PrecisionPolicy:
    """A policy; trees that break a rule are mended where the rule says how, else replaced by their base."""
    tree = draw(trees())
    try:
        return PrecisionPolicy.from_dict(tree)
    except PolicyError:
        base = load_policy("unified-fp8").to_dict()
        kept = (
            "name",
            "description",
            "exempt",
            "ragged",
            "logprobs",
            "clip_calibration",
            "quantisation",
            "master_dtype",
        )
        return PrecisionPolicy.from_dict({**base, **{key: tree[key] for key in kept}})
