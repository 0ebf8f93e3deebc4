"""Config files: typed, overridable, and refused with every problem at once."""

import dataclasses

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rllib_llm.engines.factory import ENGINES
from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.experiment.file import experiment_from_dict, known_keys, load_experiment
from rllib_llm.experiment.sections import Experiment
from rllib_llm.losses import LOSSES
from rllib_llm.losses.advantages import ADVANTAGE_KINDS
from rllib_llm.settings.groups import SECTIONS
from rllib_llm.settings.names import all_keys


class AnyOptions:
    """An environment that takes every option; nothing is played."""

    def __init__(self, config, split, seed):
        pass

    def reset(self, index):
        raise NotImplementedError

    def step(self, completion):
        raise NotImplementedError


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "precision: unified-fp8\nmodel: tiny-chain\ntrain: {lr: 1e-4}\nrollout: {group_size: 4}\n"
    )
    return file


def test_file_and_overrides_become_a_typed_object(config_file):
    """File values, shorthands and dotlist overrides arrive with the types of the settings."""
    overrides = [
        "precision=mixed-bf16-fp8",
        "train.lr=2e-4",
        "train.betas=[0.8, 0.95]",
        "rollout.top_p=1",
        "run.seed=3",
    ]
    experiment = load_experiment(config_file, overrides)
    assert experiment.name == "mine"
    assert experiment.precision.policy == "mixed-bf16-fp8"
    assert experiment.model.path == "tiny-chain"
    assert experiment.train.lr == 2e-4
    assert experiment.train.betas == (0.8, 0.95)
    assert isinstance(experiment.rollout.top_p, float)
    assert experiment.rollout.group_size == 4
    assert experiment.run.seed == 3


def test_every_problem_is_listed_with_key_closest_key_and_type(config_file):
    """One error names all bad overrides, unknown keys (with closest key and its type) and ill-typed values."""
    bad = [
        "batchsize=1",
        "train.learning_rate=1",
        "rollout.groupsize=8",
        "rollout.group_size=eight",
        "train.kl_estimator=k9",
        "evaluation=3",
        "run.stop.x=abc",
        "nonsense",
    ]
    with pytest.raises(ExperimentError) as caught:
        load_experiment(config_file, bad)
    text = str(caught.value)
    assert len(caught.value.problems) == len(bad) + 1
    for expected in (
        "env: env.config.task or tasks must be given",  # of the file itself
        "batchsize = 1: no such setting -> closest: rollout.prompts_per_iteration (a whole number",
        "train.learning_rate = 1: no such setting -> closest: train.lr (a number",
        "rollout.groupsize = 8: no such setting -> closest: rollout.group_size (a whole number, >= 1)",
        "rollout.group_size = 'eight': is not a whole number",
        "train.kl_estimator = 'k9': not allowed -> use one of k1 | k2 | k3",
        "evaluation = 3: is no section -> give a section with interval",
        "run.stop = {'x': 'abc'}: is not a mapping from text to number",
        "'nonsense' is not an override",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "not valid YAML"),
        ("train:\n\tlr: 1", "not valid YAML"),
        ("train: {lr: 1}\ntrain: {lr: 2}", "duplicate key train"),
        (b"\xff\xfe", "cannot be read as UTF-8 text"),
        ("- 1\n- 2\n", "must hold a mapping"),
        ("train: {lr: '${nowhere}'}", "nowhere"),
    ],
)
def test_unreadable_files_are_refused_by_name(tmp_path, text, expected):
    """A file that is no YAML mapping, or refers to a key that is not there, is refused with the file's name."""
    file = tmp_path / "broken.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ExperimentError, match=r"broken\.yaml") as caught:
        load_experiment(file)
    assert expected in str(caught.value)


def test_values_out_of_range_are_listed_at_once_with_the_keys_of_the_file(config_file):
    """Every section's values are checked before anything starts, and named as the file names them."""
    bad = {
        "train.lr=-1": "train.lr = -1.0: out of range -> must be >= 0",
        "train.grad_clip=0": "train.grad_clip = 0.0: out of range -> must be > 0",
        "rollout.top_p=7": "rollout.top_p = 7.0: out of range -> must be > 0, <= 1",
        "rollout.temperature=.inf": "rollout.temperature = inf: is not finite",
        "rollout.push_timeout_s=0": "rollout.push_timeout_s = 0.0: out of range -> must be > 0",
        "rollout.max_prompt_tokens=0": "rollout.max_prompt_tokens = 0: out of range -> must be >= 1",
        "evaluation.interval=0": "evaluation.interval = 0: out of range -> must be >= 1",
        "run.iterations=0": "run.iterations = 0: out of range -> must be >= 1",
        "run.max_minutes=-1": "run.max_minutes = -1.0: out of range -> must be > 0",
        "run.keep_checkpoints=0": "run.keep_checkpoints = 0: out of range -> must be >= 1",
        "run.seed=-1": "run.seed = -1: out of range -> choose from 0 to 4294967295",
        "run.resources.num_learners=-2": "run.resources.num_learners = -2: out of range -> must be >= 0",
        "name=../elsewhere": "name = '../elsewhere': names a directory",
        "rollout.engine=vlm": "rollout.engine = 'vlm': no such engine (did you mean 'vllm'?) -> use one of torch, vllm",
        "env.name=resoning_gym": "did you mean 'reasoning_gym'?",
        "precision=nope": "precision.policy = 'nope': no such policy",
    }
    with pytest.raises(ExperimentError) as caught:
        load_experiment(config_file, list(bad)).to_grpo_config()
    text = str(caught.value)
    assert [said for said in bad.values() if said not in text] == []
    assert "rollout_config." not in text


def test_types_and_values_are_reported_in_one_round(config_file):
    """Ill-typed, unknown and out-of-range settings are one list; defaults that stand for bad values are not judged."""
    overrides = [
        "train.lr=fast",
        "train.num_epochs=0",
        "rollout.temprature=1",
        "rollout.top_p=7",
        "run.iterations=0",
    ]
    with pytest.raises(ExperimentError) as caught:
        load_experiment(config_file, [*overrides, "env.config=3", "evaluation=5"])
    keys = sorted(violation.key for violation in caught.value.violations)
    assert keys == [
        *("env.config", "evaluation", "rollout.temprature", "rollout.top_p"),
        *("run.iterations", "train.lr", "train.num_epochs"),
    ]


def test_a_value_that_is_no_yaml_is_one_problem_of_many(config_file):
    """What a shell makes of an unquoted `{a: 1}` is named with the override, beside everything else."""
    with pytest.raises(ExperimentError) as caught:
        load_experiment(config_file, ["run.stop={a:", "1}", "train.lr=fast", "env.config.task=x"])
    first, second, third, *_ = caught.value.problems
    assert first.startswith("'run.stop={a:': the value is not YAML")
    assert second.startswith("'1}' is not an override")
    assert third.startswith("train.lr = 'fast': is not a number or a list of lists of 2 numbers")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("####", "####"),
        ("#", "#"),
        ("a #b", "a #b"),
        ("Answer:", "Answer:"),
        ("Answer: ", "Answer: "),
        ("a: b", "a: b"),
        ("- x", "- x"),
        ("? x", "? x"),
        ("&x y", "&x y"),
        ("*x", "*x"),
        ("!x y", "!x y"),
        ("|", "|"),
        (">", ">"),
        ("---", "---"),
        ("...", "..."),
        ("%x", "%x"),
        ("# é 😀", "# é 😀"),
        ("a=b", "a=b"),
        ("a:b", "a:b"),
        ("a#b", "a#b"),
        ("'#'", "#"),
        ('"#: x"', "#: x"),
        ("null", None),
        ("", None),
        ("[1, '#']", [1, "#"]),
        ("{a: 1}", {"a": 1}),
        ("{a: '#'}", {"a": "#"}),
        ("2e-4", 2e-4),
        ("a: 1\nb: 2", {"a": 1, "b": 2}),
    ],
)
def test_an_override_that_yaml_would_read_in_part_is_text(tmp_path, value: str, read: object) -> None:
    """`#`, anchors, tags, `key: value`: no character of a one-line value is lost; the documented forms stay YAML."""
    env = "env.name=tests.cli.test_experiment:AnyOptions"
    found = load_experiment("quickstart", [env, f"env.config.answer_after={value}"])
    assert found.env.config == {"answer_after": read}
    (tmp_path / "again.yaml").write_text(found.to_yaml())
    assert load_experiment(tmp_path / "again.yaml") == found


@pytest.mark.parametrize("value", ["[1, 2", "{a: 1", "[1] # two", "{a: 1} x", "'a", "@x", "`x"])
def test_an_override_that_is_neither_text_nor_yaml_is_refused(config_file, value: str) -> None:
    """Unclosed brackets and quotes; a number with a note behind it is text, which no number setting takes."""
    with pytest.raises(ExperimentError, match=r"run\.iterations"):
        load_experiment(config_file, [f"run.iterations={value}"])
    with pytest.raises(ExperimentError, match=r"run\.iterations = '3 # three': is not a whole number"):
        load_experiment(config_file, ["run.iterations=3 # three"])


def test_a_part_of_a_list_cannot_be_overridden(tmp_path):
    """OmegaConf would raise a TypeError without a word of what to write instead."""
    file = tmp_path / "c.yaml"
    file.write_text("model: tiny-chain\ntrain: {betas: [0.9, 0.99]}\n")
    with pytest.raises(ExperimentError, match=r"give it whole: key='\[0\.9, 0\.99\]'"):
        load_experiment(file, ["train.betas[0]=1"])


def test_nan_is_no_value(config_file):
    """NaN passes every comparison that would refuse it, so it is refused as ill-typed."""
    with pytest.raises(ExperimentError, match=r"train\.lr = nan: is not finite"):
        load_experiment(config_file, ["train.lr=.nan"])


def test_a_missing_file_names_the_shipped_configs(tmp_path):
    """A path that does not exist is refused and the near shipped name is offered."""
    with pytest.raises(ExperimentError, match="Did you mean the shipped config 'quickstart'"):
        load_experiment(tmp_path / "quickstrt.yaml")


def test_what_a_file_leaves_open_must_be_given():
    """`???` in a config is asked for by its key, together with every other problem; given, it is gone."""
    with pytest.raises(ExperimentError) as caught:
        load_experiment("local_model", ["model=some-directory", "train.lr=fast"])
    assert caught.value.problems[0] == "env.config.path: must be given -> env.config.path=VALUE"
    assert caught.value.problems[1].startswith("train.lr = 'fast': is not a number")
    assert caught.value.problems[2].startswith("model.path = 'some-directory': ")
    assert len(caught.value.problems) == 3
    assert load_experiment("local_model", ["model=m", "env.config.path=p"]).env.config["path"] == "p"


def test_interpolation_is_resolved(tmp_path):
    """`${...}` refers to other keys of the config and is resolved before types are checked."""
    file = tmp_path / "c.yaml"
    file.write_text("run: {seed: 5, iterations: '${run.seed}'}\n")
    assert load_experiment(file, ["run.seed=7"]).run.iterations == 7


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "${oc.${run.directory}:SECRET}", "${oc.env:SECRET,x}"])
def test_environment_variables_need_the_leave_of_who_starts_the_run(tmp_path, monkeypatch, text):
    """A file reads no variable that the allow list of the process does not name, however it writes it."""
    file = tmp_path / "c.yaml"
    file.write_text(
        f"env: model:x\nmodel: tiny-chain\nrun: {{directory: env}}\ntracking: {{tags: {{a: '{text}'}}}}\n"
    )
    monkeypatch.setenv("SECRET", "hf_123")
    monkeypatch.setenv("RLLIB_LLM_CONFIG_ENV", "HOME,OTHER")
    with pytest.raises(ExperimentError) as refused:
        load_experiment(file)
    [problem] = refused.value.problems
    assert problem.startswith("tracking.tags.a = '${oc.env:SECRET}': reads an environment variable")
    assert problem.endswith("start with RLLIB_LLM_CONFIG_ENV=SECRET")
    assert "hf_123" not in str(refused.value)
    monkeypatch.setenv("RLLIB_LLM_CONFIG_ENV", "HOME, SECRET")
    assert load_experiment(file).tracking.tags == {"a": "hf_123"}
    assert OmegaConf.to_container(OmegaConf.create({"a": "${oc.env:SECRET}"}), resolve=True) == {
        "a": "hf_123"
    }


@pytest.mark.parametrize(
    ("key", "digits"),
    [
        *((key, n) for key in ("run.iterations", "rollout.group_size") for n in (20, 400, 5000)),
        *((key, n) for key in ("train.lr", "run.max_minutes") for n in (400, 5000)),
    ],
)
def test_numbers_that_nothing_can_hold_are_one_short_sentence(tmp_path, key, digits):
    """A whole number beyond 64 bits and a number beyond float64 are refused by their key, in a file and as an override;
    more digits than Python reads are refused too."""
    section, name = key.split(".")
    file = tmp_path / "c.yaml"
    file.write_text(f"{section}: {{{name}: {'9' * digits}}}")
    for source, overrides in ((file, []), ("quickstart", [f"{key}={'9' * digits}"])):
        with pytest.raises(ExperimentError) as refused:
            load_experiment(source, overrides)
        [problem] = [p for p in refused.value.problems if "999" in p or "digits" in p]
        assert len(problem) < 400
        assert digits > 4300 or problem.startswith(f"{key} = ")


def test_yaml_round_trip():
    """The resolved YAML of an experiment loads to an equal experiment."""
    from omegaconf import OmegaConf

    experiment = Experiment(name="x", run=dataclasses.replace(Experiment().run, stop={"env_runners/x": 0.5}))
    assert experiment_from_dict(OmegaConf.to_container(OmegaConf.create(experiment.to_yaml()))) == experiment


def test_known_keys_cover_every_setting():
    """Every field of every settings class has a key, a type in words and a default."""
    keys = {key: (default, values, meaning) for key, default, values, meaning in known_keys()}
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            name = f"{section}.{field.name}"
            assert name == "run.resources" or all(part.strip() for part in keys[name]), name
    assert keys["rollout.top_p"][:2] == ("1.0", "a number, > 0, <= 1")
    assert keys["train.kl_estimator"][:2] == ("k3", "k1 | k2 | k3")


def test_choices_are_those_of_the_code():
    """What `config keys` says a loss, a kind of advantages and an engine may be is what the code knows."""
    known = all_keys()
    for name, choices in (
        ("train.loss", LOSSES),
        ("train.advantages", [*ADVANTAGE_KINDS, "null"]),
        ("rollout.engine", ENGINES),
    ):
        assert set(known[name].kind.split(" | ")) == set(choices)


OTHER_ENV = "tests.rllib.toy:CopyDigit"


@pytest.mark.parametrize(
    ("overrides", "config"),
    [
        (["env.config.a.x=5"], {"a": {"x": 5, "y": 2}, "b": 3}),
        (["env.config={a: {x: 5}}"], {"a": {"x": 5, "y": 2}, "b": 3}),
        (["env.config:={a: {x: 5}}"], {"a": {"x": 5}}),
        (["env.config.a:={x: 5}"], {"a": {"x": 5}, "b": 3}),
        (["env.config:={}"], {}),
        ([f"env={OTHER_ENV}"], {}),
        ([f"env.name={OTHER_ENV}"], {}),
        ([f"env.name={OTHER_ENV}", "env.config.hi=3"], {"hi": 3}),
        (["env.config.hi=3", f"env={OTHER_ENV}"], {"hi": 3}),
        (["env.name=reasoning_gym"], {"a": {"x": 1, "y": 2}, "b": 3}),
    ],
)
def test_overrides_merge_replace_and_change_the_environment(tmp_path, overrides, config):
    """`=` merges into the file's mapping, `:=` replaces it, and another environment drops the old one's config."""
    file = tmp_path / "c.yaml"
    file.write_text("model: tiny-chain\nenv: {name: reasoning_gym, config: {a: {x: 1, y: 2}, b: 3}}\n")
    assert load_experiment(file, overrides).env.config == config


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)
    )
)
def test_arbitrary_data_is_refused_in_words(data):
    """Whatever an unknown section holds, the outcome is an ExperimentError, never another exception."""
    assume(isinstance(data, dict) and not set(data) <= set(Experiment().to_dict()))
    with pytest.raises(ExperimentError):
        experiment_from_dict(data)
