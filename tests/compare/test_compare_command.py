"""`rllib-llm compare` on the shipped model: interrupted, resumed, reported and tracked."""

import os
import shlex
import signal
from types import SimpleNamespace

import pytest
import ray
from mlflow import MlflowClient
from ray.exceptions import RayTaskError

from precision_policies import load_policy
from rllib_llm.algorithm.monitor import PrecisionHalt
from rllib_llm.cli import main
from rllib_llm.cli.main import build_parser
from rllib_llm.cli.shell import command_line
from rllib_llm.compare import CurveWriter, experiment, read_curves
from rllib_llm.experiment.file import load_experiment
from rllib_llm.on_disk.directories import only_here

SMALL = [
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "evaluation.interval=null",
    "run.checkpoint_every=0",
    "run.resources.cpus_for_trainer=1",
]


@pytest.fixture(scope="module")
def resumed(ray_session, tmp_path_factory):
    """(directory, store, exit status at the interrupt, runs then, exit status after going on): two cells of three
    iterations, one at a time, with Ctrl-C in the first iteration of the first."""
    place = tmp_path_factory.mktemp("compare")
    store, directory = f"sqlite:///{place}/mlflow.db", place / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        original = experiment.CellCallback.on_trial_result

        def with_ctrl_c(self, *args, **kwargs):
            if not self._interrupt.requested:
                os.kill(os.getpid(), signal.SIGINT)
            original(self, *args, **kwargs)

        patch.setattr(experiment.CellCallback, "on_trial_result", with_ctrl_c)
        first = main(
            [
                *("compare", "quickstart", *SMALL, f"tracking.uri={store}", "tracking.experiment=compare"),
                *("--policies", "mixed-bf16-fp8,unified-fp8", "--seeds", "7,", "--iterations", "3"),
                *("--concurrent", "1", "--out", str(directory)),
            ]
        )
        patch.setattr(experiment.CellCallback, "on_trial_result", original)
        before = read_curves(directory).runs
        second = main(["compare", "--resume", str(directory), "--concurrent", "1"])
    return directory, store, first, before, second


def test_ctrl_c_keeps_what_was_done(resumed):
    """The first Ctrl-C ends with status 130 and leaves one running cell with its iterations."""
    _, _, first, before, _ = resumed
    assert first == 130
    assert [(run.arm, run.seed, run.status) for run in before] == [("mixed-bf16-fp8", 7, "running")]
    assert 1 <= before[0].last_iteration < 3


def test_resuming_goes_on_where_the_interrupt_was(resumed):
    """Status 0; every cell has every iteration, and what was trained before the interrupt was not trained again."""
    directory, _, _, before, second = resumed
    assert second == 0
    after = read_curves(directory).runs
    assert [(run.arm, run.status, list(run.rows)) for run in after] == [
        ("mixed-bf16-fp8", "finished", [1, 2, 3]),
        ("unified-fp8", "finished", [1, 2, 3]),
    ]
    for iteration, row in before[0].rows.items():
        assert after[0].rows[iteration] == row
    lines = (directory / "curves.jsonl").read_text().splitlines()
    assert len(lines) == 6


def test_cells_differ_in_policy_only(resumed):
    """Both arms saw the same problems; mixed has a mismatch, unified exactly none."""
    mixed, unified = read_curves(resumed[0]).runs
    prompts = "env_runners/prompt_length_mean"
    assert mixed.series(prompts) == unified.series(prompts)
    assert min(mixed.series("mismatch/max_abs").values()) > 0
    assert set(unified.series("mismatch/max_abs").values()) == {0.0}


def test_throughput_and_memory_are_in_the_curves(resumed):
    """Tokens per second of the phases are tokens over seconds, and both sides say how much memory they took."""
    [_, run] = read_curves(resumed[0]).runs
    row = run.rows[2]
    sampled, seconds = row["env_runners/num_tokens_sampled"], row["timers/sample"]
    assert row["throughput/sample_tokens_per_s"] == pytest.approx(sampled / seconds)
    trained, seconds = row["learners/default_policy/num_tokens"], row["timers/learn"]
    assert row["throughput/learn_tokens_per_s"] == pytest.approx(trained / seconds)
    assert row["throughput/iteration_tokens_per_s"] < row["throughput/sample_tokens_per_s"]
    assert 0.2 < row["memory/learner_rss_peak_gib"] < 8
    assert row["memory/engine_rss_peak_gib"] == pytest.approx(row["memory/learner_rss_peak_gib"], rel=0.1)
    assert not any("cuda" in name for name in row)  # no GPU, no measurement


def test_the_report_is_an_artefact_of_the_parent_run(resumed):
    """One parent with the report and final rewards, one nested run per cell, all finished, none doubled by resuming."""
    directory, store, *_ = resumed
    client = MlflowClient(tracking_uri=store)
    runs = client.search_runs([client.get_experiment_by_name("compare").experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["mixed-bf16-fp8_seed7", "out", "unified-fp8_seed7"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    [parent] = [run for run in runs if run.info.run_name == "out"]
    assert {run.data.tags.get("mlflow.parentRunId") for run in runs if run is not parent} == {
        parent.info.run_id
    }
    [artefact] = client.list_artifacts(parent.info.run_id, "report")
    assert artefact.file_size == (directory / "report.html").stat().st_size
    assert {"final_reward/mixed-bf16-fp8", "final_reward/unified-fp8"} <= set(parent.data.metrics)
    assert parent.data.tags["mlflow.note.content"].startswith("- Too few seeds to rank 2 arms")


def test_a_finished_comparison_may_be_resumed(resumed, capsys):
    """There is nothing left to do, and that is no error."""
    directory = resumed[0]
    assert main(["compare", "--resume", str(directory)]) == 0
    assert "2 of 2 cells finished" in capsys.readouterr().out
    assert len((directory / "curves.jsonl").read_text().splitlines()) == 6


def as_ray_raises(error: Exception) -> Exception:
    """What `ray.get` raises for an error of a remote method."""
    return RayTaskError("train", "traceback", error).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "text", "status", "reason"),
    [
        (ValueError("no"), "Traceback:\n  File x\nValueError: no\n", "failed", "ValueError: no"),
        (PrecisionHalt("stopped"), "x.Halt: stopped\n  hint: one\n", "halted", "x.Halt: stopped"),
        (ValueError("PrecisionHalt"), "ValueError: PrecisionHalt\n", "failed", "ValueError: PrecisionHalt"),
        (None, "x.PrecisionHalt: of another program\n", "failed", "x.PrecisionHalt: of another program"),
        (None, "", "failed", "no error text"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_cell_that_an_error_ends_is_failed_or_halted(tmp_path, error, text, status, reason, wrapped):
    """The error's own line is the reason; the guard's halt is told from other errors by its class, not by its words."""
    (tmp_path / "error.txt").write_text(text)
    if error is not None:
        error = as_ray_raises(error) if wrapped else error
        (tmp_path / "error.pkl").write_bytes(ray.cloudpickle.dumps(error))
    config = {"precision": {"policy": "bf16"}, "seed": 3}
    trial = SimpleNamespace(
        config=config,
        error_file=str(tmp_path / "error.txt"),
        pickled_error_file=str(tmp_path / "error.pkl"),
        path=str(tmp_path / "cell"),
    )
    plan = experiment.ComparisonPlan(load_experiment("quickstart"), (load_policy("bf16"),), (3,), 5)
    writer = CurveWriter(tmp_path)
    callback = experiment.CellCallback(plan, writer, SimpleNamespace(requested=False))
    callback.on_trial_start(1, [trial], trial)
    assert writer.states == {("bf16", 3): ("running", "")}
    cell = load_experiment(tmp_path / "cell" / "experiment.yaml")
    assert (cell.run.seed, cell.run.iterations) == (3, 5)
    assert load_policy(cell.precision.policy).fingerprint == load_policy("bf16").fingerprint
    callback.on_trial_error(1, [trial], trial)
    assert writer.states == {("bf16", 3): (status, reason)}


def test_results_without_a_plan_are_no_comparison_to_go_on_with(tmp_path, capsys):
    """A compare.json of another program describes results; what to train it does not say."""
    (tmp_path / "experiment.yaml").write_text("model: tiny-chain\n")
    (tmp_path / "compare.json").write_text('{"planned": {"arms": ["a"]}, "arms": {"a": {"policy": "bf16"}}}')
    assert main(["compare", "--resume", str(tmp_path)]) == 2
    assert "does not hold the plan of a comparison (KeyError: 'definition')" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["{", "9" * 5000, "[" * 100_000, '{"planned": {"arms": [], "seeds": [], "iterations": "x"}, "arms": {}}'],
)
def test_a_plan_that_cannot_be_read_is_refused_in_words(tmp_path, capsys, content):
    """Damage ends with one sentence and status 2, whatever Python raises for it."""
    (tmp_path / "experiment.yaml").write_text("model: tiny-chain\n")
    (tmp_path / "compare.json").write_text(content)
    assert main(["compare", "--resume", str(tmp_path)]) == 2
    assert "does not hold the plan of a comparison" in capsys.readouterr().err


def test_a_comparison_under_way_is_not_resumed_beside_itself(resumed, capsys):
    """Two processes in one directory would mix their curves; the second is refused and changes nothing."""
    directory = resumed[0]
    before = (directory / "curves.jsonl").read_bytes()
    with only_here(directory):
        assert main(["compare", "--resume", str(directory)]) == 2
    assert "another process is at work here" in capsys.readouterr().err
    assert (directory / "curves.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quickstart"], "compare needs a config and policies"),
        (["quickstart", "--policies", "bf16,bf16"], "policies = ['bf16']: more than once"),
        (["quickstart", "--policies", "bf17"], "bf17"),
        (["quickstart", "--policies", "bf16", "--seeds", "many"], "--seeds many"),
        (["quickstart", "--policies", "bf17,bf16,fp61"], "fp61"),
        (["quickstart", "--policies", ","], "policies: none given"),
        (["quickstart", "--policies", "bf16", "--seeds", " "], "at least 1"),
        (["quickstart", "--policies", "bf16", "--seeds=0,-1"], "none below 0"),
        (["quickstart", "--policies", "bf16", "--margin", "7", "--target", "nan"], "2 problems"),
        (["quickstart", "--policies", "bf16", "--seeds", "0"], "--seeds 0: at least 1"),
        (["quickstart", "--policies", "bf16", "--seeds", "99999999999"], "at most 1000, or a list"),
        (["quickstart", "--policies", "bf16", "--seeds", "0,4294967296"], "or above 2**32 - 1"),
        (["quickstart", "--policies", "bf16", "--seeds", "3,3"], "none twice"),
        (["quickstart", "--policies", "bf16", "--baseline", "fp16"], "--baseline fp16"),
        (["quickstart", "--policies", "bf16", "train.lr=-1", "rollout.top_p=0"], "2 problems"),
        (["quickstart", "--policies", "bf16", "--out", "full"], "--out full is not empty"),
        (["quickstart", "--policies", "bf16", "--resume", "."], "--resume takes config"),
        (["--resume", "full"], "no experiment.yaml and no compare.json"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, text, tmp_path, monkeypatch, capsys):
    """Status 2 and a reason, before Ray starts and before a directory is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["compare", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_report_of_a_directory_without_results_is_refused(tmp_path, capsys):
    """`rllib-llm report` says what it looked for."""
    assert main(["report", str(tmp_path)]) == 2
    assert "no curves*.jsonl or curves*.csv here" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_commands_to_paste_survive_spaces():
    """What is printed for the user to run is what a shell reads back."""
    assert shlex.split(command_line("rllib-llm", "compare", "--resume", "my results/a'b")) == [
        "rllib-llm", "compare", "--resume", "my results/a'b",
    ]  # fmt: skip


def test_overrides_may_stand_after_options():
    """argparse alone would refuse `--seeds 2 train.lr=2e-4`; words that are no overrides still are errors."""
    from rllib_llm.cli.main import _parsed

    parsed = _parsed(
        build_parser(), ["compare", "quickstart", "a.b=1", "--policies", "bf16", "train.lr=2e-4"]
    )
    assert parsed.overrides == ["a.b=1", "train.lr=2e-4"]
    with pytest.raises(SystemExit):
        _parsed(build_parser(), ["compare", "quickstart", "--policies", "bf16", "stray"])
    with pytest.raises(SystemExit):
        _parsed(build_parser(), ["eval", "somewhere", "--prompts", "3", "a=b"])
