"""The dispatch: everything is bound by name on CPU, nothing falls back, and identities follow the source."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_kernels as pk
from precision_kernels import bindings, declaration, dispatch, reference, sources


@pytest.fixture
def fresh_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing bound, no library asked for, for one test."""
    monkeypatch.setattr(dispatch, "_bound", {})
    dispatch._load.cache_clear()
    yield
    dispatch._load.cache_clear()


@pytest.fixture
def definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test defines or implements is forgotten after it."""
    monkeypatch.setattr(declaration, "DEFINITIONS", dict(declaration.DEFINITIONS))
    monkeypatch.setattr(declaration, "IMPLEMENTATIONS", dict(declaration.IMPLEMENTATIONS))


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
    """No fallback: an operator on a device that no library serves names operator, device and remedy."""
    with pytest.raises(
        pk.UnboundOperatorError, match=r"on 'xpu' of rms_norm: no library.*bind_reference\('xpu'\)"
    ) as caught:
        dispatch.implementation("rms_norm", "xpu")
    (violation,) = caught.value.violations
    assert violation.value == ("rms_norm",)
    assert "'cuda'" in violation.remedy


@pytest.mark.parametrize("formats", [{"fp8", "bf16"}, {"bf16"}, {"fp16", "fp32"}])
def test_a_missing_library_is_named_before_a_run(
    fresh_tables: None, monkeypatch: pytest.MonkeyPatch, formats: set[str]
) -> None:
    """`require` names every operator that formats need and whose library is missing, once per cause, and pickles."""
    missing = {
        name: bindings.Library(f"precision_kernels.no_such_{name}", f"install {name}")
        for name in bindings.LIBRARIES
    }
    monkeypatch.setattr(dispatch, "LIBRARIES", missing)
    with pytest.raises(pk.UnboundOperatorError) as caught:
        pk.require("cuda", formats)
    named = [name for violation in caught.value.violations for name in violation.value]
    expected = {
        name for name in dispatch.OPERATORS if "fp8" in formats or name not in declaration.FP8_OPERATORS
    }
    assert sorted(named) == sorted(expected)
    assert len(caught.value.violations) == len({bindings.library_of(name, "cuda") for name in expected})
    for violation in caught.value.violations:
        assert "no_such_" in violation.problem
        assert violation.remedy.startswith("install ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_missing_library_leaves_the_others(
    fresh_tables: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators of other libraries are bound; those that are not bound are left out of the attestation, and logged."""
    libraries = {
        **bindings.LIBRARIES,
        "gone": bindings.Library("precision_kernels.no_such_library", "install it"),
    }
    monkeypatch.setattr(dispatch, "LIBRARIES", libraries)
    monkeypatch.setattr(dispatch, "library_of", lambda op, _: "gone" if op == "attention" else "reference")
    with caplog.at_level("WARNING", logger="precision_kernels.dispatch"):
        bound = pk.bound_implementations("cuda")
    assert set(bound) == {*dispatch.OPERATORS, "composition"} - {"attention"}
    assert caplog.text.count("no_such_library are not available") == 1
    assert dispatch.implementation("rms_norm", "cuda") is reference.rms_norm
    with pytest.raises(
        pk.UnboundOperatorError, match=r"attention: No module named .*no_such_library.* -> install it"
    ):
        dispatch.implementation("attention", "cuda")


def test_the_table_names_libraries_and_operators_that_exist() -> None:
    """A misspelt operator or library is an error of this test, not an operator that nobody binds."""
    assert set(bindings.CUDA) <= set(dispatch.OPERATORS)
    assert set(bindings.TRITON_GEMMS) <= set(dispatch.OPERATORS)
    assert set(dispatch.OPERATORS) >= declaration.FP8_OPERATORS
    for operator in dispatch.OPERATORS:
        assert bindings.library_of(operator, "cuda") in bindings.LIBRARIES
    pytest.importorskip("triton")
    importlib.import_module("precision_kernels.triton")
    for operator in dispatch.OPERATORS:
        if bindings.library_of(operator, "cuda") == "triton":
            assert ("triton", operator) in declaration.IMPLEMENTATIONS, operator


def test_what_is_bound_is_decided_by_the_device(fresh_tables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """New FP8 weight gradients are cuBLASLt's where it scales blocks, DeepGEMM's elsewhere; nothing else depends on
    the machine.
    """
    chosen = {}
    for there in (False, True):
        monkeypatch.setattr(bindings, "cublaslt_scales_blocks", lambda there=there: there)
        chosen[there] = {name: bindings.library_of(name, "cuda") for name in dispatch.OPERATORS}
    assert chosen[True].pop("wgrad_fp8_matmul") == "cublaslt"
    assert chosen[False].pop("wgrad_fp8_matmul") == "deepgemm"
    assert chosen[True] == chosen[False]


def test_an_implementation_has_the_parameters_of_its_definition(definitions: None) -> None:
    """Other names, other defaults, an unknown operator or a second offer are refused where they are written."""

    @declaration.define
    def doubled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    def implementing(function: Callable[..., Any], name: str = "doubled") -> None:
        function.__name__ = name
        declaration.implements("elsewhere", "1")(function)

    with pytest.raises(TypeError, match=r"'factor'.* 3\.0\)\], its definition .*doubled takes .* 2\.0\)"):
        implementing(lambda x, factor=3.0: x)
    with pytest.raises(TypeError, match="its definition"):
        implementing(lambda x: x)
    with pytest.raises(TypeError, match="its definition"):
        implementing(lambda x, scale=2.0: x)
    with pytest.raises(ValueError, match="no operator 'trebled'"):
        implementing(lambda x: x, "trebled")
    implementing(lambda x, factor=2.0: x + x)
    with pytest.raises(ValueError, match="'elsewhere' offers operator 'doubled' already"):
        implementing(lambda x, factor=2.0: x + x)
    with pytest.raises(ValueError, match=r"'doubled' is defined in .* already"):
        declaration.define(doubled)
    assert declaration.IMPLEMENTATIONS["elsewhere", "doubled"].identity.startswith("elsewhere.doubled@1#")


def test_a_library_is_bound_on_request(fresh_tables: None) -> None:
    """`bind_library` binds what it is asked for, and names what a library does not offer or is not called."""
    pk.bind_library("reference", "meta", ["rms_norm"])
    assert dispatch.implementation("rms_norm", "meta") is reference.rms_norm
    with pytest.raises(pk.UnboundOperatorError):
        dispatch.implementation("rotary", "meta")
    with pytest.raises(ValueError, match=r"'reference' does not offer \['rms_nrom'\]"):
        pk.bind_library("reference", "meta", ["rms_nrom"])
    with pytest.raises(ValueError, match="unknown library 'refrence'"):
        pk.bind_library("refrence", "meta")


def test_a_definition_names_its_operator(fresh_tables: None) -> None:
    """An operator may be asked for by its definition, whose signature a type checker then sees."""
    assert dispatch.implementation(reference.rms_norm, "cpu") is reference.rms_norm
    with pytest.raises(ValueError, match="no operator 'lane_sum'"):
        dispatch.implementation(reference.lane_sum, "cpu")


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
    found = sources.closure("precision_kernels.reference.norm")
    assert set(found) == {f"precision_kernels.reference.{m}" for m in ("norm", "exact", "formats")}
    composition = sources.closure("precision_kernels.autograd.linear")
    assert "precision_kernels.autograd.linear" in composition
    read = Path.read_bytes

    def edited(self: Path) -> bytes:
        return read(self) + (b"\n# edited\n" if self.name == "exact.py" else b"")

    before = {f: sources.source_hash(f) for f in (reference.rms_norm, reference.quantise_weight)}
    assert before[reference.rms_norm] != before[reference.quantise_weight]
    sources.modules_hash.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", edited)
    assert sources.source_hash(reference.rms_norm) != before[reference.rms_norm]
    assert sources.source_hash(reference.quantise_weight) == before[reference.quantise_weight]
    sources.modules_hash.cache_clear()


def test_public_names_exist_and_are_documented() -> None:
    """What the package exports and what reference defines resolves; every function says what it takes."""
    for module in ("precision_kernels", "precision_kernels.reference"):
        package = importlib.import_module(module)
        for name in getattr(package, "__all__", [n for n in vars(package) if not n.startswith("_")]):
            value = getattr(package, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                assert value.__doc__, f"{module}.{name}"
