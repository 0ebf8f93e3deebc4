"""The callback against real Tune experiments and a real sqlite store."""

import json
import os
import pickle
import signal
from pathlib import Path

import pytest
from mlflow import MlflowClient
from ray import tune
from ray.tune import CheckpointConfig, Trainable
from ray.tune.schedulers import PopulationBasedTraining

from rllib_llm.tracking import MLflowCallback
from rllib_llm.tracking.mlflow_callback import EXPERIMENT_RUN


class Learner(Trainable):
    """Reports what an Algorithm reports: a reward that is `lr * iteration`, NaN for what nobody logged, samples."""

    def setup(self, config):
        self.done = 0

    def reset_config(self, config):
        return True

    def step(self):
        self.done += 1
        if self.config.get("fail_at") == self.done:
            raise RuntimeError("the trial broke on purpose")
        return {
            "env_runners": {"episode_return_mean": self.config["lr"] * self.done, "unlogged": float("nan")},
            "learners": {"default_policy": {"grad[norm]%": 2.0}},
            "mismatch": {
                "k3": 10.0**-self.done,
                "max_abs": 0.0,
                "by_position": {"0-31": {"k3": 0.5, "num_tokens": 7}, "32-63": {"k3": 0.25, "num_tokens": 3}},
            },
            "perf": {"cpu_util_percent": 50.0},
            "samples": [{"prompt": "1+1=", "completion": "2", "reward": 1.0}],
        }

    def save_checkpoint(self, directory):
        Path(directory, "done.txt").write_text(str(self.done))

    def load_checkpoint(self, directory):
        self.done = self._iteration = int(
            Path(directory, "done.txt").read_text()
        )  # as RLlib's Algorithm does


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """One sqlite store for the module: creating its tables costs seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def run(callback, tmp_path, config, iterations=3, **options):
    return tune.run(
        Learner,
        name="exp",
        config=config,
        stop={"training_iteration": iterations},
        storage_path=str(tmp_path),
        callbacks=[callback],
        raise_on_failed_trial=False,
        verbose=0,
        **options,
    )


def history(client, run_id, key):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, key)]


@pytest.fixture(scope="module")
def grid(ray_session, uri, tmp_path_factory):
    """A finished grid search over two values of lr, tracked."""
    directory = tmp_path_factory.mktemp("grid")
    callback = MLflowCallback(
        uri, "grid", samples_every=2, experiment={"name": "g", "train": {"lr": 1e-4}}, tags={"team": "x"}
    )
    config = {
        "lr": tune.grid_search([1.0, 2.0]),
        "precision": {"policy": "unified-fp8"},
        "env": "copy",
        "env_config": {"task": "digits"},
        "note": "y" * 7000,
    }
    analysis = run(callback, directory, config)
    return callback, analysis, directory, MlflowClient(tracking_uri=uri)


def test_one_parent_and_a_nested_run_per_trial(grid):
    """The experiment is a parent run with its config; each trial is a finished run below it."""
    callback, analysis, directory, client = grid
    assert callback.report.complete
    assert not callback.problems
    parent = client.get_run(callback.run_ids[EXPERIMENT_RUN])
    assert parent.info.status == "FINISHED"
    assert parent.data.params == {"name": "g", "train.lr": "0.0001"}
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    assert {child.info.run_id for child in children} == {callback.run_ids["0"], callback.run_ids["1"]}
    for trial in analysis.trials:
        child = client.get_run(callback.run_id_of(trial.trial_id))
        assert child.info.status == "FINISHED"
        assert child.data.params["lr"] == str(trial.config["lr"])
        assert child.data.tags["team"] == "x"
    record = json.loads((directory / "exp" / "tracking.json").read_text())
    assert record["run_ids"] == callback.run_ids


def test_the_parent_has_the_best_trials_numbers(grid):
    """Reward, policy and count of trials stand in the parent's row of the list; trials are named by their search."""
    callback, analysis, _, client = grid
    parent = client.get_run(callback.run_ids[EXPERIMENT_RUN])
    assert parent.data.metrics["at_a_glance/reward"] == 6.0
    assert parent.data.metrics["counters/num_trials"] == 2
    assert parent.data.tags["policy.name"] == "unified-fp8"
    assert parent.data.tags["best.trial"] == "lr=2.0"
    for trial in analysis.trials:
        name = client.get_run(callback.run_id_of(trial.trial_id)).info.run_name
        assert name == f"lr={trial.config['lr']}"


def test_the_page_of_a_run_is_filled(grid):
    """Headlines are the first group; bins are one table; task, description and load are there."""
    callback, analysis, _, client = grid
    best = max(analysis.trials, key=lambda trial: trial.config["lr"])
    run = client.get_run(callback.run_id_of(best.trial_id))
    groups = {key.partition("/")[0] for key in run.data.metrics}
    assert min(groups) == "at_a_glance"
    assert {key for key in run.data.metrics if key.startswith("at_a_glance/")} == {
        f"at_a_glance/{name}" for name in ("reward", "mismatch_k3", "mismatch_max_abs")
    }
    assert run.data.metrics["system/cpu_utilization_percentage"] == 50.0
    assert not [key for key in run.data.metrics if "by_position" in key]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "bins.json")).read_text())
    assert table["columns"] == ["iteration", "by", "bin", "k3", "num_tokens"]
    assert [row[:4] for row in table["data"]] == [
        [step, "mismatch by position", name, k3]
        for step in (1, 2, 3)
        for name, k3 in (("0-31", 0.5), ("32-63", 0.25))
    ]
    [used] = run.inputs.dataset_inputs
    assert used.dataset.name == "copy digits"
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    note = run.data.tags["mlflow.note.content"]
    assert "on `copy digits` under precision policy `unified-fp8`." in note
    assert "Reward **2.000 → 6.000** (iteration 1 → 3)." in note


def test_bins_are_metrics_where_asked_for_and_one_trial_is_one_run(ray_session, uri, tmp_path):
    """With `one_run` there is no parent and the run has the experiment's name and keys; `detail` writes each bin."""
    callback = MLflowCallback(uri, "single", one_run=True, detail=True, experiment={"train": {"lr": 2.0}})
    run(callback, tmp_path, {"lr": 2.0})
    client = MlflowClient(tracking_uri=uri)
    [found] = client.search_runs([client.get_experiment_by_name("single").experiment_id])
    assert callback.report.complete
    assert not callback.problems
    assert callback.run_ids == {"0": found.info.run_id}
    assert (found.info.run_name, found.info.status) == ("exp", "FINISHED")
    assert found.data.params == {"train.lr": "2.0"}
    assert found.data.metrics["mismatch/by_position/0-31/k3"] == 0.5


def test_metrics_are_complete_and_hold_no_nan(grid):
    """Every finite number of every iteration is there under a valid name; the NaN made no row."""
    callback, analysis, _, client = grid
    for trial in analysis.trials:
        run_id, lr = callback.run_id_of(trial.trial_id), trial.config["lr"]
        assert history(client, run_id, "env_runners/episode_return_mean") == [
            (1, lr),
            (2, 2 * lr),
            (3, 3 * lr),
        ]
        names = set(client.get_run(run_id).data.metrics)
        assert "learners/default_policy/grad_norm__" in names
        assert not any("unlogged" in name or name.startswith("config") for name in names)


def test_artefacts_say_what_ran(grid):
    """Policy, whole config, samples table, plots and provenance lie in the trial's run."""
    callback, _, _, client = grid
    run_id = callback.run_ids["0"]
    files = {
        item.path
        for folder in ("", "config", "policy", "plots")
        for item in client.list_artifacts(run_id, folder)
    }
    assert {
        "samples.json",
        "config/trial.json",
        "policy/policy.yaml",
        "plots/reward.png",
        "plots/mismatch.png",
    } <= files
    data = client.get_run(run_id).data
    assert data.tags["policy.name"] == "unified-fp8"
    assert len(data.tags["policy.fingerprint"]) == 64
    assert data.tags["version.torch"]
    assert data.tags["mlflow.source.git.commit"]
    assert len(data.params["note"]) == 6000
    table = client.download_artifacts(run_id, "samples.json")
    samples = json.loads(Path(table).read_text())
    assert samples["columns"] == ["iteration", "prompt", "completion", "reward"]
    assert [row[0] for row in samples["data"]] == [1, 2]


def test_a_failed_trial_is_a_failed_run_with_its_error(ray_session, uri, tmp_path):
    """A trial that raises ends as FAILED with the error as an artefact; the other one is unharmed."""
    callback = MLflowCallback(uri, "failed")
    analysis = run(callback, tmp_path, {"lr": 1.0, "fail_at": tune.grid_search([2, None])})
    client = MlflowClient(tracking_uri=uri)
    by_config = {t.config["fail_at"]: client.get_run(callback.run_id_of(t.trial_id)) for t in analysis.trials}
    assert (by_config[2].info.status, by_config[None].info.status) == ("FAILED", "FINISHED")
    text = Path(client.download_artifacts(by_config[2].info.run_id, "error.txt")).read_text()
    assert "the trial broke on purpose" in text
    assert client.get_run(callback.run_ids[EXPERIMENT_RUN]).info.status == "FAILED"


def test_a_config_changed_by_pbt_is_a_curve_not_a_conflict(ray_session, uri, tmp_path):
    """PBT copies lr from the better trial: the parameter keeps its first value, the change is a metric and a tag."""
    callback = MLflowCallback(uri, "pbt")
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="env_runners/episode_return_mean",
        mode="max",
        perturbation_interval=2,
        hyperparam_mutations={"lr": [4.0]},
        quantile_fraction=0.5,
        resample_probability=1.0,
        synch=True,
    )
    analysis = run(
        callback,
        tmp_path,
        {"lr": tune.grid_search([1.0, 2.0])},
        iterations=6,
        scheduler=scheduler,
        checkpoint_config=CheckpointConfig(checkpoint_frequency=1),
    )
    assert callback.report.complete, callback.report
    client = MlflowClient(tracking_uri=uri)
    changed = [trial for trial in analysis.trials if trial.config["lr"] == 4.0]
    assert changed
    data = client.get_run(callback.run_id_of(changed[0].trial_id)).data
    assert data.params["lr"] in ("1.0", "2.0")
    assert data.tags["config.lr"] == "4.0"
    curve = history(client, callback.run_id_of(changed[0].trial_id), "config/lr")
    assert curve[0] == (0, float(data.params["lr"]))
    assert curve[-1][1] == 4.0


def test_an_interrupted_experiment_is_killed_and_goes_on(ray_session, uri, tmp_path):
    """After Tune's interrupt the open runs are KILLED and tracking.json names them; resuming finishes the same runs."""
    callback = MLflowCallback(uri, "interrupted")
    original = callback.on_checkpoint

    def interrupt(**info):
        original(**info)
        os.kill(os.getpid(), signal.SIGUSR1)  # what Tune takes for Ctrl-C wherever it handles SIGINT or not

    callback.on_checkpoint = interrupt
    options = {"checkpoint_config": CheckpointConfig(checkpoint_frequency=1), "max_concurrent_trials": 1}
    run(callback, tmp_path, {"lr": tune.grid_search([1.0, 2.0])}, **options)
    client = MlflowClient(tracking_uri=uri)
    assert set(callback.run_ids) == {EXPERIMENT_RUN, "0"}
    assert {client.get_run(run_id).info.status for run_id in callback.run_ids.values()} == {"KILLED"}
    assert json.loads((tmp_path / "exp" / "tracking.json").read_text())["run_ids"] == callback.run_ids
    again = MLflowCallback(uri, "interrupted")
    run(again, tmp_path, {"lr": tune.grid_search([1.0, 2.0])}, resume=True, **options)
    assert callback.run_ids.items() <= again.run_ids.items()
    runs = client.search_runs([client.get_experiment_by_name("interrupted").experiment_id])
    assert len(runs) == 3
    assert {found.info.status for found in runs} == {"FINISHED"}
    for position in ("0", "1"):
        curve = history(client, again.run_ids[position], "env_runners/episode_return_mean")
        assert sorted({step for step, _ in curve}) == [1, 2, 3]
    assert json.loads((tmp_path / "exp" / "tracking.json").read_text())["run_ids"] == again.run_ids


def test_a_write_of_the_run_ids_that_fails_leaves_the_old_ones(uri, tmp_path, monkeypatch):
    """tracking.json is replaced in one step: a full disk costs a note, not the ids that a resumed run goes on with."""
    callback = MLflowCallback(uri, "full", run_ids={"experiment": "abc"})
    callback._directory = tmp_path
    callback._save_run_ids()
    callback._earlier_ids["0"] = "def"

    def full(path, text, **_):
        path.write_bytes(text[:2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        callback._save_run_ids()
    assert json.loads((tmp_path / "tracking.json").read_text())["run_ids"] == {"experiment": "abc"}


def test_resuming_goes_on_in_the_same_runs(ray_session, uri, tmp_path):
    """With the run ids of an earlier process, no new run is made and the curve of the old one grows."""
    first = MLflowCallback(uri, "resumed")
    run(first, tmp_path, {"lr": 1.0}, checkpoint_config=CheckpointConfig(checkpoint_at_end=True))
    checkpoint = next(tmp_path.rglob("checkpoint_*"))
    record = json.loads((tmp_path / "exp" / "tracking.json").read_text())
    second = MLflowCallback(uri, "resumed", run_ids=record["run_ids"])
    run(second, tmp_path, {"lr": 1.0}, iterations=5, restore=str(checkpoint))
    assert second.run_ids == first.run_ids
    client = MlflowClient(tracking_uri=uri)
    steps = [step for step, _ in history(client, first.run_ids["0"], "env_runners/episode_return_mean")]
    assert steps == [1, 2, 3, 4, 5]
    experiment = client.get_experiment_by_name("resumed")
    assert len(client.search_runs([experiment.experiment_id])) == 2


def test_hooks_never_raise(uri, tmp_path):
    """Nonsense from Tune is noted, not raised: training must not end because of tracking."""
    callback = MLflowCallback(uri, "noted")
    callback.on_trial_start(iteration=1, trials=[], trial=object())
    callback.on_trial_result(iteration=1, trials=[], trial=None, result={})
    callback.on_experiment_end(trials=[])
    assert len(callback.problems) == 2
    assert callback.problems[0].startswith("on_trial_start")


def test_the_callback_can_be_pickled(uri):
    """Tune pickles callbacks with the experiment; the copy keeps the address and the run ids."""
    callback = MLflowCallback(uri, "pickled", run_ids={"experiment": "abc"})
    copy = pickle.loads(pickle.dumps(callback))
    assert (copy.tracking_uri, copy.run_ids) == (uri, {"experiment": "abc"})
