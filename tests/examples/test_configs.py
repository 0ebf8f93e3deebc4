"""Shipped configs are complete, valid and explained."""

from pathlib import Path

import pytest
import yaml

from rllib_llm.experiment.file import load_experiment, shipped_experiments

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(shipped_experiments()))
def test_every_shipped_config_is_valid(name, tmp_path):
    """Each shipped config passes all checks once what it leaves open is given."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        "".join(f'{{"question": "What is {i} + {i}?", "answer": {2 * i}}}\n' for i in range(20))
    )
    given = ["model=tiny-chain"] if name != "quickstart" else []
    given += [f"env.config.path={problems}"] if name == "local_model" else []
    experiment = load_experiment(name, given)
    experiment.to_grpo_config()


@pytest.mark.parametrize("name", sorted(shipped_experiments()))
def test_every_shipped_config_begins_with_its_command(name):
    """Each config begins with a comment that shows how it is run."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    head = text[: text.index("\nprecision")]
    assert f"rllib-llm train {name}" in head


def test_quickstart_is_the_task_that_the_tiny_model_was_made_for():
    """The quickstart's environment is the one that lies beside the model it trains."""
    from rllib_llm.models.paths import resolve_model_path

    beside = yaml.safe_load(
        (resolve_model_path("tiny-chain") / "env_config.json").read_text(encoding="utf-8")
    )
    assert load_experiment("quickstart").env.config == beside
