"""The study of long answers (benchmarks/long_answers): its task, its decoder, and one iteration of its cells."""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.long_answers import merge, pretrain, study, task
from benchmarks.long_answers.batch import Batch
from benchmarks.long_answers.cell import ARMS, Cell, Settings
from benchmarks.long_answers.sampler import Sample, generate
from rllib_llm.models import build_model, save_pretrained

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SMALL = {"intermediate_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
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


def test_prompt_and_answer_written_out() -> None:
    """x = 3, then + 8, * 7, - 5, * 9 in turn for five steps, modulo 10."""
    one = task.Problems(np.array([3]), np.array([[0, 2, 1, 2]]), np.array([[8, 7, 5, 9]]), np.array([5]))
    assert one.values().tolist() == [[1, 7, 2, 8, 6]]
    label, digit, (a, b, c, d) = task.LABELS, task.DIGITS, (task.OPERATIONS + i for i in (8, 27, 15, 29))
    hidden = task.HIDDEN
    assert one.prompts()[0].tolist() == [
        task.BOS, label + 8, a, hidden, label + 7, b, hidden, label + 6, c, hidden, label + 5, d, digit + 3
    ]  # fmt: skip
    assert one.answers(one.values())[0].tolist() == [
        label + 4, a, digit + 1, label + 3, b, digit + 7, label + 2, c, digit + 2, label + 1, d, digit + 8,
        label, a, digit + 6, task.HASH, digit + 6, task.EOS,
    ]  # fmt: skip
    assert len(one.prompts()[0]) == task.prompt_tokens()
    assert len(one.answers(one.values())[0]) == task.answer_tokens(5)


def test_every_token_is_below_the_vocabulary_and_means_one_thing() -> None:
    """Values, operations, labels and signs do not overlap."""
    problems = task.draw(np.random.default_rng(0), 500, task.LONGEST)
    rows = np.concatenate([problems.prompts(), problems.answers(problems.values())], axis=1)
    kinds = [{task.PAD, task.BOS, task.EOS, task.HIDDEN, task.HASH}, set(range(task.DIGITS, task.DIGITS + 10)),
             set(range(task.OPERATIONS, task.OPERATIONS + 30)), set(range(task.LABELS, task.VOCAB))]  # fmt: skip
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert set(np.unique(rows)) <= set().union(*kinds)
    assert set(np.unique(rows)) >= kinds[3]
    with pytest.raises(ValueError, match=f"steps = {task.LONGEST + 1}: 1 to {task.LONGEST}"):
        task.draw(np.random.default_rng(0), 1, task.LONGEST + 1)


def _problems_of(ids: torch.Tensor) -> task.Problems:
    """Read prompts back."""
    prompts = ids[:, 1 : task.prompt_tokens()].reshape(len(ids), task.PERIOD, 3).numpy()
    operations = prompts[..., 1] - task.OPERATIONS
    return task.Problems(
        prompts[:, -1, 2] - task.DIGITS, operations // 10, operations % 10, prompts[:, -1, 0] - task.LABELS
    )


def test_pretraining_learns_and_leaves_a_model_that_the_study_loads(tmp_path: Path) -> None:
    """A few seconds teach the form of an answer; only tokens of answers are trained."""
    ids, last = pretrain.batch(np.random.default_rng(0), 5, 200, 0.0, CPU)
    width = task.prompt_tokens() + task.answer_tokens(5)
    assert ids.shape == (200 // width, width)
    assert ids[:, last + 1].ge(task.LABELS).all()
    assert ids[:, last].lt(task.OPERATIONS).all()
    assert ids[:, -1].eq(task.EOS).tolist() == [i % 3 == 0 for i in range(len(ids))]
    assert ids[0, -2] == ids[0, -4]
    assert task.rewards(_problems_of(ids[:1]), [ids[0, last + 1 :].numpy()]).all()
    made = pretrain.pretrain(argparse.Namespace(
        out=str(tmp_path), steps=90, seconds=100.0, lr=5e-3, slip=0.0, longest=4, batch_tokens=512,
        first=8, hold=0.7, start=None, config=json.dumps(SMALL), seed=0, measure=[2], log_every=5, device="cpu",
    ))  # fmt: skip
    history = json.loads((tmp_path / "pretraining.json").read_text())["history"]
    assert made["steps"] == 90
    assert made["loss"] < 0.8 * max(h["loss"] for h in history)
    assert 0.0 <= made["pass_at_1"]["2"] <= 1.0
    assert Cell("bf16", 0, str(tmp_path), SETTINGS, CPU).model.architecture.heads == 1


def test_the_curriculum_grows_only_on_what_is_learned() -> None:
    """Never beyond the longest chain, and not at all while the loss is high."""
    curriculum = pretrain.Curriculum(64, slip=0.0)
    for _ in range(100):
        curriculum.learned(2.0)
    assert max(curriculum.length(np.random.default_rng(i)) for i in range(50)) == 8
    for _ in range(300):
        curriculum.learned(0.01)
    lengths = [curriculum.length(np.random.default_rng(i)) for i in range(300)]
    assert max(lengths) == 64
    assert min(lengths) >= 2
    assert 100 < sum(length == 64 for length in lengths) < 200


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
        "seconds": 60.0, "until": math.inf, "eval_every": 2, "eval_count": 8, "state": None, "lrs": [],
        "title": "t", "device": "cpu", "settings": json.dumps({"steps": 2, "prompts": 2, "group": 4}),
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


def test_parts_of_a_study_are_joined_up_to_what_all_have(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds from two processes, one of them further: the common iterations, all runs; strangers are refused."""
    arguments: dict[str, Any] = {
        "model": model, "arms": ["bf16"], "seconds": 60.0, "until": math.inf, "eval_every": 0, "eval_count": 8,
        "state": None, "lrs": [], "title": "t", "device": "cpu",
    }  # fmt: skip
    monkeypatch.setenv("RLLIB_LLM_COMMIT", "c0ffee")  # the repository's may change meanwhile
    for seed, iterations, steps in ((1, 3, 2), (2, 1, 2), (3, 1, 3)):
        settings = json.dumps({"steps": steps, "prompts": 1, "group": 2})
        study.study(argparse.Namespace(
            **arguments, seeds=[seed], iterations=iterations, settings=settings, out=str(tmp_path / str(seed))
        ))  # fmt: skip
    with (tmp_path / "1" / "curves.csv").open("a") as file:
        file.write("bf16,1,4,0.5")  # killed while writing
    parts = [str(tmp_path / "1"), str(tmp_path / "2")]
    told: dict[str, Any] = {"title": None, "notes": ["One note."]}
    merge.merge(argparse.Namespace(parts=parts, out=str(tmp_path / "all"), **told))
    rows = list(csv.DictReader((tmp_path / "all" / "curves.csv").open()))
    assert [(r["seed"], r["iteration"]) for r in rows] == [("1", "1"), ("2", "1")]
    facts = json.loads((tmp_path / "all" / "compare.json").read_text())
    assert facts["planned"] == {"arms": ["bf16"], "seeds": [1, 2], "iterations": 1}
    assert facts["notes"][0] == "One note."
    assert "2 later rows" in facts["notes"][1]
    with pytest.raises(ValueError, match=r"3: other config than .*1; seeds appear twice"):
        merge.merge(
            argparse.Namespace(parts=[parts[0], str(tmp_path / "3"), parts[0]], out=str(tmp_path / "no"))
        )
