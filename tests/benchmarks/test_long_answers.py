"""The study of long answers (benchmarks/long_answers): its task, its decoder, and one iteration of its cells."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.long_answers import study, task
from benchmarks.long_answers.batch import Batch
from benchmarks.long_answers.cell import ARMS, Cell, Settings
from benchmarks.long_answers.pretrain import batch, steps_of_batch
from benchmarks.long_answers.sampler import Sample, generate
from rllib_llm.models import build_model, save_pretrained

CPU = torch.device("cpu")
SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip
SETTINGS = Settings(steps=3, prompts=2, group=4, lr=1e-3, warmup_steps=0, micro_batch_tokens=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with random weights."""
    lm = build_model(task.model_config(**SMALL), "bf16", "train")
    lm.initialise(3)
    return str(save_pretrained(lm, tmp_path_factory.mktemp("model")))


def sampled(cell: Cell, iteration: int = 0) -> tuple[task.Problems, Sample]:
    problems = task.draw(np.random.default_rng(iteration), cell.settings.prompts, cell.settings.steps)
    limit = cell.settings.limit
    [sample] = generate([cell.sampler], [problems.prompts()], cell.settings.group, limit, [[0, iteration]])
    return problems, sample


def spread(_: task.Problems, completions: list[np.ndarray]) -> np.ndarray:
    """Rewards that differ within every group, which a random model's do not."""
    return (np.arange(len(completions)) % 2).astype(np.float32)


def test_a_written_answer_is_right_and_a_slip_makes_it_wrong() -> None:
    """The checker accepts the true working, and no later step undoes a slip."""
    rng = np.random.default_rng(0)
    problems = task.draw(rng, 200, 30)
    truth = problems.values()
    assert task.rewards(problems, list(problems.answers(truth))).all()
    slipped = problems.values(slip=0.05, rng=rng)
    slips = (np.diff((slipped - truth) % 10, axis=1, prepend=0) != 0).sum(axis=1)
    rewards = task.rewards(problems, list(problems.answers(slipped)))
    assert rewards[slips == 0].all()
    assert not rewards[slips == 1].any()
    assert 0 < (slips == 1).sum() < 200
    assert not task.rewards(problems, [a[:-1] for a in problems.answers(truth)]).any(), (
        "an answer needs its end"
    )


def test_values_follow_the_operators() -> None:
    """(3 + 8) * 7 - 5 modulo 10, written out."""
    one = task.Problems(np.array([3]), np.array([[0, 2, 1]]), np.array([[8, 7, 5]]), np.array([[4, 5, 6]]))
    assert one.values().tolist() == [[1, 7, 2]]
    label, digit = task.LABELS, task.DIGITS
    assert one.prompts()[0].tolist() == [
        task.BOS, digit + 3, label + 4, 5, digit + 8, label + 5, 7, digit + 7, label + 6, 6, digit + 5, task.EQUALS
    ]  # fmt: skip
    assert one.answers(one.values())[0, -8:].tolist() == [
        label + 6, 6, digit + 5, task.EQUALS, digit + 2, task.HASH, digit + 2, task.EOS
    ]  # fmt: skip


def test_pretraining_batches_predict_the_answer_and_nothing_else() -> None:
    """Targets are the answers' tokens, each at the place before it."""
    packed, at, targets = batch(np.random.default_rng(0), 5, 120, 0.0, CPU)
    width = task.prompt_tokens(5) + task.answer_tokens(5)
    rows = packed.input_ids.view(-1, width)
    assert len(rows) == 120 // width
    assert torch.equal(targets.view(len(rows), -1), rows[:, task.prompt_tokens(5) :])
    assert torch.equal(packed.input_ids[at + 1], targets)
    lengths = [steps_of_batch(np.random.default_rng(i), i / 300, 64) for i in range(300)]
    assert min(lengths) >= 2
    assert max(lengths[:70]) <= 4
    assert 60 <= max(lengths) <= 64


@pytest.mark.parametrize("arm", list(ARMS))
def test_an_iteration_measures_mismatch_and_learns(
    model: str, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On-policy arms have exactly equal log-probs; rewarded answers become likelier than the others, in every arm."""
    monkeypatch.setattr(task, "rewards", spread)
    cell = Cell(arm, 0, model, SETTINGS, CPU)
    problems, sample = sampled(cell)
    result = cell.learn(problems, sample)
    assert result["mismatch/num_tokens"] == sum(map(len, sample.completions)) > 8
    mixed = arm.startswith("mixed")
    assert (result["mismatch/max_abs"] > 0) is mixed
    assert (result["precision/correction_active"] == 1.0) is (arm == "mixed-bf16-fp8")
    assert result["learners/default_policy/grad_norm"] > 0
    assert cell.optimiser_steps == SETTINGS.minibatches
    again = cell.learn(problems, sample)  # the same answers, as the new weights see them
    assert again["mismatch/max_abs"] > 1e-3
    change = _mean_logp(cell, sample, 1) - _mean_logp(Cell(arm, 0, model, SETTINGS, CPU), sample, 1)
    other = _mean_logp(cell, sample, 0) - _mean_logp(Cell(arm, 0, model, SETTINGS, CPU), sample, 0)
    assert change > other + 1e-3


def _mean_logp(cell: Cell, sample: Sample, parity: int) -> float:
    flat = Batch(sample, CPU)
    return float(cell._logprobs(flat)[flat.sequence % 2 == parity].mean())


def test_a_cell_goes_on_from_its_state_as_if_it_had_not_stopped(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After save and restore the next iteration has the same bits; a state of other settings is refused."""
    monkeypatch.setattr(task, "rewards", spread)
    first = Cell("unified-fp8", 0, model, SETTINGS, CPU)
    first.learn(*sampled(first))
    first.save(tmp_path)
    second = Cell("unified-fp8", 0, model, SETTINGS, CPU)
    assert second.restore(tmp_path)
    assert second.iteration == 1
    a, b = sampled(first, 1), sampled(second, 1)
    assert all(np.array_equal(x, y) for x, y in zip(a[1].logprobs, b[1].logprobs, strict=True))
    assert (
        first.learn(*a)["learners/default_policy/policy_loss"]
        == (second.learn(*b)["learners/default_policy/policy_loss"])
    )
    for x, y in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match="another settings"):
        Cell("unified-fp8", 0, model, Settings(steps=4), CPU).restore(tmp_path)


def test_cells_decode_side_by_side_what_they_decode_alone(model: str) -> None:
    """Lockstep changes nothing: samples of a cell do not depend on the cells beside it."""
    cells = [Cell(arm, 0, model, SETTINGS, CPU) for arm in ("bf16", "unified-fp8")]
    problems = task.draw(np.random.default_rng(5), 2, 3)
    together = generate([c.sampler for c in cells], [problems.prompts()] * 2, 4, SETTINGS.limit, [[1, 2]] * 2)
    for cell, shared in zip(cells, together, strict=True):
        [alone] = generate([cell.sampler], [problems.prompts()], 4, SETTINGS.limit, [[1, 2]])
        assert all(np.array_equal(x, y) for x, y in zip(alone.logprobs, shared.logprobs, strict=True))
        assert len({tuple(c) for c in alone.completions}) == 8, "answers of a group are drawn independently"


def test_the_study_writes_curves_that_the_report_reads(model: str, tmp_path: Path) -> None:
    """Two arms, two iterations: a row for each, held-out rewards where they are due, and who ran with what."""
    arguments: dict[str, Any] = {
        "model": model, "out": str(tmp_path), "arms": ["bf16", "mixed-uncorrected"], "seeds": [4], "iterations": 2,
        "seconds": 60.0, "eval_every": 2, "eval_count": 8, "state": None, "lrs": [], "title": "t", "device": "cpu",
        "settings": json.dumps({"steps": 2, "prompts": 2, "group": 4}),
    }  # fmt: skip
    study.study(argparse.Namespace(**arguments))
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert [(r["arm"], r["seed"], r["iteration"]) for r in rows] == [
        ("bf16", "4", "1"), ("mixed-uncorrected", "4", "1"), ("bf16", "4", "2"), ("mixed-uncorrected", "4", "2")
    ]  # fmt: skip
    held_out = "evaluation/env_runners/episode_return_mean"
    assert [bool(r[held_out]) for r in rows] == [False, False, True, True]
    assert rows[0]["mismatch/max_abs"] == "0"
    assert float(rows[1]["mismatch/max_abs"]) > 0
    facts = json.loads((tmp_path / "compare.json").read_text())
    assert [r["status"] for r in facts["runs"]] == ["finished"] * 2
    assert facts["arms"]["bf16"]["fingerprint"] != facts["arms"]["mixed-uncorrected"]["fingerprint"]
