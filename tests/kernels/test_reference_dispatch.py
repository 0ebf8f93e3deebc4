"""The dispatch: everything is bound by name on CPU, nothing falls back, and identities follow the source."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import precision_kernels as pk
from precision_kernels import dispatch, reference


@pytest.fixture
def fresh_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty binding tables for one test."""
    monkeypatch.setattr(dispatch, "_bound", {})
    monkeypatch.setattr(dispatch, "_failures", {})


def test_every_operator_is_bound_to_its_definition_on_cpu() -> None:
    """name@version#hash for each operator and for the code that composes them."""
    bound = pk.bound_implementations("cpu")
    assert set(bound) == {*dispatch.OPERATORS, "composition"}
    for operator, identity in bound.items():
        if operator != "composition":
            expected = rf"reference\.{operator}@torch-{re.escape(torch.__version__)}#[0-9a-f]{{16}}"
            assert re.fullmatch(expected, identity), identity
            assert dispatch.implementation(operator, "cpu") is getattr(reference, operator)


def test_an_unbound_device_raises_with_the_reason(fresh_tables: None) -> None:
    """No fallback: an operator on a device without provider names operator, device and remedy."""
    with pytest.raises(
        pk.UnboundOperatorError, match=r"'rms_norm' has no implementation on 'xpu'.*bind_reference\('xpu'\)"
    ):
        dispatch.implementation("rms_norm", "xpu")


def test_a_provider_that_cannot_load_is_named(fresh_tables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError of a provider is kept and shown when one of its operators is asked for; others stay
    bound.
    """
    monkeypatch.setattr(dispatch, "PROVIDERS", {"cpu": ("precision_kernels.no_such_provider",)})
    with pytest.raises(pk.UnboundOperatorError, match="no_such_provider"):
        dispatch.implementation("attention", "cpu")


def test_a_provider_that_another_one_replaces_is_a_warning(
    fresh_tables: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider that cannot load and whose operators a later one offers is named in the log, with the reason."""
    later = dispatch.PROVIDERS["cpu"]
    monkeypatch.setattr(dispatch, "PROVIDERS", {"cpu": ("precision_kernels.no_such_provider", *later)})
    with caplog.at_level("WARNING", logger="precision_kernels.dispatch"):
        assert dispatch.implementation("rms_norm", "cpu") is reference.rms_norm
    assert "on cpu" in caplog.text
    assert "No module named 'precision_kernels.no_such_provider'" in caplog.text


def test_a_provider_with_an_unknown_operator_is_refused(
    fresh_tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt operator name is an error, not an operator that nobody calls."""
    provider = sys.modules["precision_kernels.reference.provider"]
    offered = {"rms_nrom": pk.Implementation("x", "1", reference.rms_norm)}
    monkeypatch.setattr(provider, "implementations", lambda: offered)
    with pytest.raises(ValueError, match="rms_nrom"):
        dispatch.implementation("rms_norm", "cpu")


def test_binding_by_hand_is_reported(fresh_tables: None) -> None:
    """bind() changes what runs and what the attestation says; bind_reference does it for a whole device."""

    def doubled(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        y, rstd = reference.rms_norm(x, weight, eps)
        return y * 2, rstd

    x, weight = torch.ones(2, 4), torch.ones(4)
    before = pk.rms_norm(x, weight, 0.0)
    pk.bind("rms_norm", "cpu", pk.Implementation("tests.doubled", "1", doubled))
    assert torch.equal(pk.rms_norm(x, weight, 0.0), before * 2)
    assert pk.bound_implementations("cpu")["rms_norm"].startswith("tests.doubled@1#")
    pk.bind_reference("meta")
    assert pk.bound_implementations("meta")["attention"].startswith("reference.attention@")
    with pytest.raises(ValueError, match="unknown operator 'norm'"):
        pk.bind("norm", "cpu", pk.Implementation("tests.doubled", "1", doubled))


def test_observers_see_calls_and_change_nothing() -> None:
    """Operator, implementation, arguments and result of each dispatched call, in order; afterwards nobody listens."""
    x, weight = torch.randn(3, 4), torch.ones(4)
    before, attested = pk.rms_norm(x, weight, 0.5), pk.bound_implementations("cpu")
    seen: list[tuple[str, str, float, torch.Tensor]] = []

    def observer(operator: str, chosen: pk.Implementation, arguments: tuple, result: tuple) -> None:
        seen.append((operator, chosen.name, arguments[2], result[0]))

    with dispatch.observed(observer):
        during = pk.rms_norm(x, weight, 0.5)
        assert pk.bound_implementations("cpu") == attested
    assert [entry[:3] for entry in seen] == [("rms_norm", "reference.rms_norm", 0.5)]
    assert torch.equal(seen[0][3], during)
    assert torch.equal(before, during)
    assert torch.equal(pk.rms_norm(x, weight, 0.5), before)
    assert len(seen) == 1


def test_the_hash_covers_the_module_and_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editing exact.py changes the hash of the norm that uses it, not the hash of the formats it does not
    touch.
    """
    sources = dispatch._closure("precision_kernels.reference.norm")
    assert set(sources) == {f"precision_kernels.reference.{m}" for m in ("norm", "exact", "formats")}
    composition = dispatch._closure("precision_kernels.linear")
    assert "precision_kernels.linear" in composition
    read = Path.read_bytes

    def edited(self: Path) -> bytes:
        return read(self) + (b"\n# edited\n" if self.name == "exact.py" else b"")

    before = {f: dispatch.source_hash(f) for f in (reference.rms_norm, reference.quantise_weight)}
    assert before[reference.rms_norm] != before[reference.quantise_weight]
    dispatch._modules_hash.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", edited)
    assert dispatch.source_hash(reference.rms_norm) != before[reference.rms_norm]
    assert dispatch.source_hash(reference.quantise_weight) == before[reference.quantise_weight]
    dispatch._modules_hash.cache_clear()


def test_public_names_exist_and_are_documented() -> None:
    """Everything in __all__ of the package and of reference resolves; every function says what it takes."""
    for module in ("precision_kernels", "precision_kernels.reference"):
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            if callable(value) and not isinstance(value, torch.dtype):
                assert value.__doc__, f"{module}.{name}"
