"""Compiling ahead as `rllib-llm warm` and `train` do it, with processes that only pretend to compile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rllib_llm.cli import main
from rllib_llm.cli.warm import progress_text, warm_for_training
from rllib_llm.experiment.file import load_experiment
from rllib_llm.process.kernel_cache import compiled_kernels, kernel_cache
from rllib_llm.warming import ahead
from rllib_llm.warming.ahead import NoGpuError, Progress, compile_ahead, describe

GPU = "NVIDIA H200, 9.0"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A machine with a GPU and an empty cache; two shares of two kernels each. Tests may change the dict."""
    said: dict[str, Any] = {
        "gpu": GPU,
        "versions": {"torch": "2.11"},
        "shares": [{"kernel": "a"}, {"kernel": "b"}],
    }
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr(ahead, "gpu_of_this_machine", lambda: said["gpu"])
    monkeypatch.setattr(ahead, "versions", lambda: said["versions"])
    monkeypatch.setattr(ahead, "shares_of", lambda _: [share | {"rows": [1]} for share in said["shares"]])
    monkeypatch.setattr(ahead, "COMPILE_SHARE", "tests.warming.fakes:work")
    monkeypatch.setattr(ahead, "_LEARNER_PASS", "tests.warming.fakes:work")
    return said


def settings(*overrides: str) -> Any:
    """Of the quickstart."""
    return load_experiment("quickstart", overrides).to_grpo_config().settings()


def test_a_second_time_there_is_nothing_to_compile(pretend: dict[str, Any]) -> None:
    """The stamp stands for the list, the versions, the GPU and the kernels; each that changes compiles again."""
    heard: list[Progress] = []
    first = compile_ahead(settings(), heard.append, processes=2)
    assert (first.parts, first.kernels) == (("products", "learner"), 2)
    assert heard[0] == Progress("matrix products", 0, 2, 0)
    assert max(p.done for p in heard if p.what == "matrix products") == 2
    again = compile_ahead(settings())
    assert (again.parts, again.kernels) == ((), 0)
    assert describe(again).startswith("nothing to compile")
    pretend["shares"] = []
    for change in ({"versions": {"torch": "2.12"}}, {"gpu": "NVIDIA H100, 9.0"}):
        pretend.update(change)
        assert compile_ahead(settings()).parts == ("products", "learner")
    assert compile_ahead(settings("train.micro_batch_tokens=16384")).parts == ("products", "learner")
    assert compile_ahead(settings("train.entropy_coeff=0.1")).parts == ("learner",)
    (kernel_cache() / "cache" / "kernel.a").rmdir()
    assert compile_ahead(settings()).parts == ("products", "learner")


def test_a_damaged_stamp_is_none(pretend: dict[str, Any]) -> None:
    """A stamp that cannot be read, or says something else, only costs time."""
    compile_ahead(settings(), products_only=True)
    [stamp] = (kernel_cache() / "rllib_llm").glob("products-*.json")
    pretend["shares"] = []
    for text in ("", "[]", "{}", json.dumps({"identity": {}, "kernels": 0})):
        stamp.write_text(text)
        assert compile_ahead(settings(), products_only=True).parts == ("products",)


def test_the_command_says_what_failed(pretend: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`warm` ends with 0 and one line, or with 1 and each failure, and then leaves no stamp."""
    pretend["shares"] = [{"fails": "nvcc is broken"}, {"kernel": "c"}]
    assert main(["warm", "quickstart", "--processes", "1"]) == 1
    assert "1 of 2 shares of matrix products failed" in (err := capsys.readouterr().err)
    assert "ValueError: nvcc is broken" in err
    pretend["shares"] = []
    assert main(["warm", "quickstart"]) == 0
    assert "compiled 0 kernels" in capsys.readouterr().out
    assert main(["warm", "quickstart"]) == 0
    assert "nothing to compile" in capsys.readouterr().out
    pretend["gpu"] = None
    assert main(["warm", "quickstart"]) == 1
    assert "no NVIDIA GPU here" in capsys.readouterr().err


def test_training_goes_on_where_nothing_can_be_compiled_ahead(
    pretend: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said in one line; without a GPU in the config or in the machine nothing is done or said."""
    config = load_experiment("quickstart").to_grpo_config().learners(num_gpus_per_learner=1)
    pretend["shares"] = [{"dies": True}]
    warm_for_training(config)
    [line] = [text for text in capsys.readouterr().err.splitlines() if "not compiled ahead" in text]
    assert "ended by SIGKILL" in line
    pretend["shares"] = [{"kernel": "a"}]
    warm_for_training(config)
    assert "kernels   compiled 1 kernels" in capsys.readouterr().err
    warm_for_training(config)
    warm_for_training(load_experiment("quickstart").to_grpo_config())
    assert not capsys.readouterr().err
    assert compiled_kernels(kernel_cache()) == 1


def test_no_gpu_is_an_error_of_its_own(pretend: dict[str, Any]) -> None:
    """Nothing is compiled for a GPU that is not there."""
    pretend["gpu"] = None
    with pytest.raises(NoGpuError, match="no NVIDIA GPU"):
        compile_ahead(settings())


def test_progress_in_words() -> None:
    """What a log shows."""
    text = progress_text(Progress("matrix products", 812, 1040, 37))
    assert text == "compiling matrix products: 812 of 1040 sizes met, 37 new kernels"
