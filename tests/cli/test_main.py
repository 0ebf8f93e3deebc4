"""The console script: help everywhere, exit status 2 with words for bad input, and useful lists."""

import argparse
import json
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from ray import cloudpickle
from safetensors.torch import load_file, save_file

from rllib_llm.cli import main
from rllib_llm.cli.commands import _refuse_finished
from rllib_llm.cli.interrupt import Interrupt, RunStopper
from rllib_llm.cli.main import build_parser
from rllib_llm.cli.parsing import UsageError
from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.experiment.resume import new_directory
from rllib_llm.experiment.sections import Experiment, RunSettings
from rllib_llm.models.paths import resolve_model_path
from rllib_llm.on_disk.atomic import write_whole


def all_parsers(parser, path=()):
    """Every (command path, parser), the sub-commands' included."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from all_parsers(child, (*path, name))


def test_every_command_has_help(capsys):
    """`--help` works for every command and sub-command, and every one of its arguments is explained."""
    seen = []
    for path, parser in all_parsers(build_parser()):
        with pytest.raises(SystemExit) as stop:
            main([*path, "--help"])
        assert stop.value.code == 0
        assert "usage: rllib-llm" in capsys.readouterr().out
        unexplained = [a.dest for a in parser._actions if a.help is None and a.metavar != "key=value"]
        assert unexplained in ([], ["command"], ["action"], ["policy_command"]), (path, unexplained)
        seen.append(" ".join(path))
    assert {"train", "eval", "policy list", "config show", "envs list", "tracking send"} <= set(seen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "no-such-config"], "no such file"),
        (["train"], "train needs a config"),
        (["train", "quickstart", "train.lrr=1"], "closest: train.lr (a number"),
        (["train", "quickstart", "precision=unified-fp9"], "unified-fp8"),
        (["train", "quickstart", "rollout.temperature=0"], "must be > 0"),
        (["train", "quickstart", "env.config.task=no_such_task"], "no_such_task"),
        (["train", "quickstart", "model=/nowhere"], "/nowhere"),
        (["train", "--resume", "/nowhere"], "no experiment.yaml here or above"),
        (["train", "quickstart", "--resume", "/nowhere"], "drop quickstart"),
        (["eval", "/nowhere"], "no complete checkpoint"),
        (
            ["train", "quickstart", "run.directory=/proc/nowhere"],
            "run.directory = '/proc/nowhere': cannot make",
        ),
        (
            ["train", "quickstart", "tracking.uri=htp://host:5000"],
            "tracking.uri = 'htp://host:5000': MLflow cannot",
        ),
        (["config", "keys", "zzz"], "no key begins with 'zzz'"),
        (["tracking", "send", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["tracking", "send", "/"], "/ cannot be read"),
        (["tracking", "send", sys.executable], "cannot be read: 'utf-8'"),
        (["policy", "plan", "bf16", "--model", "nowhere"], "model='nowhere': no directory"),
        (["models", "list", "--tracking-uri", f"sqlite:///{sys.executable}"], "is not a sqlite database"),
        (["train", "quickstart", "tracking.uri=oracle://host/db"], "MLflow cannot use it"),
    ],
)
def test_bad_input_is_refused_in_words(arguments, words, capsys, tmp_path, monkeypatch):
    """Bad input ends with status 2, says what is wrong, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("rllib-llm: ")
    assert words in captured.err
    assert list(tmp_path.iterdir()) == []


def test_vllm_missing_is_bad_input(capsys, tmp_path, monkeypatch):
    """Where vLLM is not installed, asking for it is refused by name; nothing falls back to another engine."""
    pytest.importorskip("torch")
    import importlib.util

    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "rollout.engine=vllm"]) == 2
    assert "vllm" in capsys.readouterr().err.lower()


def test_config_show_prints_what_loads_again(capsys, tmp_path):
    """The YAML that `config show` prints is a config with the same content."""
    assert main(["config", "show", "quickstart", "precision=bf16", "train.lr=2e-4"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "again.yaml"
    file.write_text(text)
    assert main(["config", "show", str(file)]) == 0
    assert capsys.readouterr().out == text
    assert "policy: bf16" in text
    assert "lr: 0.0002" in text


def test_policy_commands_take_a_config_by_name_and_a_config_json(capsys):
    """`policy check` knows shipped configs and their models; `--model` takes a config.json, as its help says."""
    assert main(["policy", "check", "quickstart"]) == 0
    assert "plan on tiny-chain" in capsys.readouterr().out
    config = str(resolve_model_path("tiny-chain") / "config.json")
    assert main(["policy", "plan", "unified-fp8", "--model", config]) == 0
    assert "plan hash" in capsys.readouterr().out
    assert main(["policy", "check", "quickstrt"]) == 2
    assert "'quickstrt': no such policy" in capsys.readouterr().err


def test_lists_name_what_there_is(capsys):
    """`config list`, `config keys` and `envs list` name the shipped configs, keys with types, and environments."""
    assert main(["config", "list"]) == 0
    assert main(["config", "keys", "train.lr"]) == 0
    assert main(["envs", "list"]) == 0
    output = capsys.readouterr().out
    for word in (
        "quickstart",
        "smollm2",
        "local_model",
        "train.lr_decay",
        "constant | linear | cosine",
        "jsonl_math",
        "reasoning_gym",
    ):
        assert word in output


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "holds no weights"),
        (lambda d: _cut(d / "model.safetensors"), "not a readable safetensors file"),
        (lambda d: _drop_tensor(d / "model.safetensors", "model.norm.weight"), "model.norm.weight: missing"),
        (lambda d: _raise_token_ids(d / "tokenizer.json"), "config.json says vocab_size = 128"),
    ],
)
def test_a_damaged_model_is_refused_before_anything_starts(damage, words, capsys, tmp_path, monkeypatch):
    """Weights that are missing, cut or of another shape, and a foreign tokenizer, end with status 2 and no trial."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model_path("tiny-chain"), model)
    damage(model)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", f"model={model}"]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model]


def test_trainings_of_one_second_get_directories_of_their_own(tmp_path, monkeypatch):
    """Names carry the time to a second; who comes second, even between look and make, takes the next number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _format: "20260101-120000")
    made = [new_directory(Experiment(name="e"), "bf16").name for _ in range(3)]
    assert made == [f"e-bf16-20260101-120000{end}" for end in ("", "-2", "-3")]


def test_a_directory_behind_a_dangling_link_is_refused(tmp_path):
    """What cannot be made although its name is taken is an error, not another try."""
    (tmp_path / "results").symlink_to(tmp_path / "gone")
    with pytest.raises(ExperimentError, match=r"run\.directory = .*: cannot make"):
        new_directory(Experiment(run=RunSettings(directory=str(tmp_path / "results"))), "bf16")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    """A resumed run rewrites experiment.yaml; a disk that is full then must not cost the experiment."""
    file = tmp_path / "experiment.yaml"
    write_whole(file, "old")

    def full(path, text, **_):
        path.write_bytes(text[:2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "new text")
    assert file.read_text() == "old"


def test_a_stopper_is_pickled_without_the_handlers_it_replaced():
    """Tune pickles stoppers, and leaves a handler behind that cannot be pickled (an event's lock in its closure)."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        with Interrupt() as interrupt:
            interrupt.requested = True
            stopper = cloudpickle.loads(cloudpickle.dumps(RunStopper(5, {}, None, interrupt)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopper("trial", {"training_iteration": 1})
    assert stopper.reason == "interrupted"


def test_a_run_killed_in_its_last_iteration_can_be_resumed(tmp_path):
    """Whether a run is finished is what its checkpoint says; the curve may be ahead of it."""
    (tmp_path / "metrics.jsonl").write_text('{"training_iteration": 2}\n')
    checkpoint = tmp_path / "checkpoint_000000"
    checkpoint.mkdir()
    metadata = checkpoint / "rllib_checkpoint.json"
    metadata.write_text('{"rllib_llm": {"training_iteration": 1}}')
    _refuse_finished(tmp_path, checkpoint, 2)
    metadata.write_text('{"rllib_llm": {"training_iteration": 2}}')
    with pytest.raises(UsageError, match=r"run\.iterations=4"):
        _refuse_finished(tmp_path, checkpoint, 2)


def test_ctrl_c_while_ray_starts_leaves_nothing(capsys, tmp_path, monkeypatch):
    """An interrupt before there is anything to train in ends with status 130, no traceback and no directory."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rllib_llm.cli.launch.running_ray", interrupted)
    assert main(["train", "quickstart", "tracking.enabled=false"]) == 130
    assert capsys.readouterr().err.endswith("rllib-llm: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", [["train", "quickstart"], ["compare", "quickstart", "--policies", "bf16,fp16"]]
)
@pytest.mark.parametrize("wrong", [[], ["train.lr=-1"], ["train.lr=fast"]])
def test_what_is_not_there_is_listed_with_what_is_wrong(command, wrong, capsys, tmp_path, monkeypatch):
    """A tracking store and an engine that this machine lacks stand in one list, with values and types of settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else object())
    assert main([*command, *wrong, "tracking.uri=htp://host", "rollout.engine=vllm"]) == 2
    said = capsys.readouterr().err
    assert f": {2 + len(wrong)} problems\n" in said
    for words in (
        "the package vllm is not installed",
        "tracking.uri = 'htp://host'",
        *["train.lr"] * len(wrong),
    ):
        assert said.count(words) == 1


@pytest.mark.parametrize(
    "command", [["train", "quickstart"], ["compare", "quickstart", "--policies", "bf16"]]
)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.resources.ray_address=127.0.0.1:9", "'127.0.0.1:9': cannot be joined"),
        ("run.resources.ray_address=nonsense", "'nonsense': cannot be joined"),
        ("rollout.engine_options={device: cuda}", "asks Ray for no GPU and would see none"),
        ("tracking.uri=htp://host", "MLflow cannot use it"),
    ],
)
def test_what_ray_and_mlflow_refuse_leaves_nothing(command, override, words, capsys, tmp_path, monkeypatch):
    """A cluster that is not there, an engine without its GPU and a store of no kind end with status 2 and no files."""
    monkeypatch.chdir(tmp_path)
    # other tests may have started a Ray in this process, which would be taken, and must stay
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    assert main([*command, override]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _cut(file):
    file.write_bytes(file.read_bytes()[:-1000])


def _drop_tensor(file, name):
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def _raise_token_ids(file):
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"] = {
        token: i if token in special else i + 128 for token, i in vocabulary.items()
    }
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("cores", "needed", "declared"),
    [(2, 1, 2), (2, 2.5, 3), (2, 8, 8), (2, 8.5, 2), (2, 64, 2), (1, 2, 2), (1, 3.1, 4), (64, 64, 64)],
)
def test_a_local_ray_declares_a_few_cpus_per_core_at_most(monkeypatch, cores, needed, declared):
    """Processes that wait for one another may share a core; 64 on two cores are left to be refused."""
    from rllib_llm.cli.cluster import cpus_to_declare

    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert cpus_to_declare(needed) == declared


@pytest.mark.parametrize(
    ("model", "downloadable"),
    [("Qwen/Qwen3-0.6B", True), ("tiny-chian", False), ("./a/b", False), ("/a/b", False), ("a/b/c", False)],
)
def test_a_name_of_the_hub_says_how_to_download_it(capsys, model, downloadable):
    """Nothing contacts a hub, so a name that may be one's is answered with the command that fetches it."""
    assert main(["train", "quickstart", f"model={model}"]) == 2
    err = capsys.readouterr().err
    assert (f"hf download {model} --local-dir {model.rpartition('/')[2]}" in err) == downloadable
    assert "Model hubs are not contacted" in err
