"""`mlflow.pyfunc.load_model` on a registered model."""

from __future__ import annotations

import json

import mlflow
import pandas
import pytest

from rllib_llm.engines import make_engine
from rllib_llm.engines.base import SamplingParams
from rllib_llm.models import load_tokenizer
from rllib_llm.on_disk.owner import OtherPolicyError
from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.pyfunc import TextGenerator, prompts_of

PROMPTS = ["1a+4b-0c+7=", "2a+2="]
GREEDY = {"temperature": 0.0, "max_tokens": 24}
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.fixture(scope="module")
def model(store):
    earlier = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store.uri)
    yield mlflow.pyfunc.load_model("models:/adder@best")
    mlflow.set_tracking_uri(earlier)


def test_it_generates_what_the_embedded_engine_generates(model, store):
    """Greedy answers are those of the engine on the registered masters, for lists, tables and single texts."""
    folder = str(store.root() / "hf")
    tokenizer = load_tokenizer(folder)
    with make_engine("torch", folder, "unified-fp8") as engine:
        ids = [tokenizer(p)["input_ids"] for p in PROMPTS]
        answers = engine.generate(ids, SamplingParams(temperature=0, max_tokens=24))
    expected = [tokenizer.decode(a.token_ids.tolist(), skip_special_tokens=True) for (a,) in answers]
    found = model.predict(PROMPTS, params=GREEDY)
    assert list(found["completion"]) == expected
    assert list(found["num_tokens"]) == [len(a.token_ids) for (a,) in answers]
    assert set(found["finish_reason"]) <= {"stop", "length"}
    for same in (pandas.DataFrame({"prompt": PROMPTS}), pandas.Series(PROMPTS), {"prompt": PROMPTS}):
        assert list(model.predict(same, params=GREEDY)["completion"]) == expected
    assert list(model.predict(PROMPTS[1], params=GREEDY)["completion"]) == expected[1:]


def test_parameters_reach_the_sampler(model):
    """A seed repeats an answer, max_tokens bounds it, another engine or a wrong value is refused."""
    first, again = (model.predict(PROMPTS, params={"seed": 5, "max_tokens": 12}) for _ in range(2))
    assert first.equals(again)
    assert max(first["num_tokens"]) <= 12
    others = [
        model.predict(PROMPTS, params={"seed": s, "max_tokens": 12})["completion"] for s in range(6, 10)
    ]
    assert any(not first["completion"].equals(other) for other in others)
    with pytest.raises(RegistryError, match="engine 'tensorrt': one of torch, vllm"):
        model.predict(PROMPTS, params={"engine": "tensorrt"})
    with pytest.raises(ValueError, match="top_p=2"):
        model.predict(PROMPTS, params={"top_p": 2.0})


def test_a_misspelt_parameter_is_refused_by_the_model_itself(model, monkeypatch):
    """MLflow drops it with a warning before the model is asked, as docs/registry.md says; `get_raw_model` does not."""
    said = []
    monkeypatch.setattr("mlflow.models.utils._logger.warning", lambda text, *_: said.append(text))
    short = {"max_tokens": 2, "temprature": 0.0}
    assert len(model.predict(PROMPTS, params=short)) == 2
    assert "temprature" in said[0]
    with pytest.raises(RegistryError) as error:
        model.get_raw_model().predict(PROMPTS, params={**short, "top_k": "many", "seed": True})
    for words in ("temprature (did you mean temperature?)", "top_k = 'many' must be a long", "seed = True"):
        assert words in str(error.value)


def test_chats_keep_all_their_messages(model):
    """Messages come as a mapping or a column. A bare list, of which MLflow drops all but a column, is refused."""
    assert prompts_of({"messages": CHAT})[0].messages == CHAT
    assert [p.messages for p in prompts_of({"messages": [CHAT, CHAT[1:]]})] == [CHAT, CHAT[1:]]
    table = pandas.DataFrame({"messages": [CHAT, CHAT]})
    assert len(model.predict(table, params={"max_tokens": 2})) == 2
    assert len(model.predict({"messages": CHAT}, params={"max_tokens": 2})) == 1
    for bare in (CHAT, [CHAT]):
        with pytest.raises(RegistryError, match="a chat must come as"):
            model.predict(bare)


def test_rows_that_are_no_prompts_are_listed():
    """Every bad row is named; nothing is generated for the others."""
    with pytest.raises(RegistryError, match=r"row 1: ''.*\n.*row 2: '7'"):
        prompts_of(["fine", "", 7])
    with pytest.raises(RegistryError, match="columns a, b"):
        prompts_of(pandas.DataFrame({"a": ["x"], "b": ["y"]}))


def test_the_input_example_is_what_a_server_takes(model, store):
    """The stored payload names texts and parameters of the signature, and is answered within its own bound."""
    payload = json.loads((store.root().parents[1] / "serving_input_example.json").read_text())
    assert payload == {"inputs": ["1+2="], "params": {"max_tokens": 32, "temperature": 0.0}}
    [row] = model.predict(payload["inputs"], params=payload["params"]).to_dict("records")
    assert 0 < row["num_tokens"] <= 32


def test_another_policy_is_refused_with_the_diff_unless_allowed(model):
    """Given through `model_config`, the only way that MLflow offers."""
    with pytest.raises(OtherPolicyError, match=r"model_config={'allow_other_policy': True}") as error:
        mlflow.pyfunc.load_model("models:/adder@best", model_config={"policy": "bf16"})
    assert "linear.rollout_forward" in str(error.value)
    allowed = {"policy": "bf16", "allow_other_policy": True}
    other = mlflow.pyfunc.load_model("models:/adder@best", model_config=allowed)
    assert len(other.predict(PROMPTS, params=GREEDY)) == 2


def test_weights_that_were_changed_are_not_served(copy):
    """What the engine holds is compared with the registered hashes before the first answer."""
    from tests.registry.test_verify import flip

    flip(copy / "hf" / "model.safetensors", "model.norm.weight")
    with pytest.raises(RegistryError, match=r"1 tensor\(s\) are not those registered \(model.norm.weight\)"):
        TextGenerator(copy).predict(PROMPTS)
