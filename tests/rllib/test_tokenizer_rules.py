"""Disagreements between a model directory and its tokenizer are refused, or warned about once, before training."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllib_llm.algorithm import tokenizer_rules
from rllib_llm.algorithm.preflight import preflight_errors
from rllib_llm.algorithm.tokenizer_rules import TokenizerError, check_tokenizer
from rllib_llm.envs import Prompt
from rllib_llm.envs.extraction import AnswerExtractor
from rllib_llm.experiment.file import load_experiment
from rllib_llm.models.checkpoint import load_tokenizer
from rllib_llm.models.paths import ModelPathError, resolve_model_path
from rllib_llm.rollout.prompting import PromptEncoder
from rllib_llm.settings.groups import RolloutSettings

Edit = Callable[[dict[str, Any]], Any]
TEXT = Prompt(text="1a+2b-3=")
CHAT = Prompt(messages=[{"role": "user", "content": "1a+2="}])
CHATML = "{% for m in messages %}<im>{{ m['content'] }}<end>\n{% endfor %}{% if add_generation_prompt %}<im>{% endif %}"


@dataclasses.dataclass
class Factory:
    extract: AnswerExtractor


def model(tmp_path: Path, template: str | None = None, **edits: Edit) -> Path:
    """A copy of the shipped model with JSON files and chat template edited."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("tiny-chain"), folder)
    for name, edit in edits.items():
        file = folder / f"{name}.json"
        values = json.loads(file.read_text())
        edit(values)
        file.write_text(json.dumps(values))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def renamed(*names: str, special: bool = True) -> Edit:
    """Gives ids 100, 101, … of the vocabulary these texts, as added tokens."""

    def edit(t: dict[str, Any]) -> None:
        vocabulary = t["model"]["vocab"]
        for number, text in enumerate(names, 100):
            vocabulary.pop(next(k for k, v in vocabulary.items() if v == number))
            vocabulary[text] = number
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            t["added_tokens"].append({"id": number, "content": text, "special": special, **flags})

    return edit


def post_processor(*names: str) -> Edit:
    """Prompts become these tokens, in order; "A" is the text."""

    def edit(t: dict[str, Any]) -> None:
        special = {name: t["model"]["vocab"][name] for name in names if name != "A"}
        t["post_processor"]["single"] = [
            {"Sequence": {"id": "A", "type_id": 0}} if n == "A" else {"SpecialToken": {"id": n, "type_id": 0}}
            for n in names
        ]
        t["post_processor"]["special_tokens"] = {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in special.items()
        }

    return edit


def eos(value: Any) -> dict[str, Edit]:
    return {name: lambda c: c.update(eos_token_id=value) for name in ("config", "generation_config")}


def check(
    folder: Path, prompt: Prompt | None = TEXT, answer: dict[str, Any] | None = None, **rollout: Any
) -> None:
    extract = AnswerExtractor.from_config(answer or {"kind": "marker", "marker": "#"})
    check_tokenizer(folder, dataclasses.replace(RolloutSettings(), **rollout), prompt, Factory(extract))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Function giving what was warned about."""
    tokenizer_rules._warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if r.name == tokenizer_rules.__name__]


def test_the_shipped_model_has_none_of_them(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    """Text and chat prompts of the shipped model pass without a word."""
    check(model(tmp_path), TEXT)
    check(tmp_path / "model", CHAT)
    check(tmp_path / "model", None)
    assert warnings() == []


@pytest.mark.parametrize("value", [None, 127_000])
def test_no_known_end_is_refused(tmp_path: Path, value: Any) -> None:
    """No file names an end, or only one outside the vocabulary: refused with the tokenizer's own as the remedy."""
    folder = model(tmp_path, **eos(value))
    with pytest.raises(TokenizerError, match=r"no end of sequence is known.*<eos>"):
        check(folder)
    check(folder, stop_token_ids=(2,))
    check(folder, stop=("\n",))
    check(folder, engine_options={"eos_token_id": 2})
    with pytest.raises(TokenizerError, match="engine_options: eos_token_id=5000"):
        check(folder, engine_options={"eos_token_id": 5000})


@pytest.mark.parametrize("value", [3, [5], [5, 0]])
def test_the_tokenizers_end_is_among_the_ends(
    tmp_path: Path, value: Any, warnings: Callable[[], list[str]]
) -> None:
    """Else refused; where the user says what ends an answer, it is a warning, once."""
    folder = model(tmp_path, **eos(value))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: eos_token is '<eos>' \(id 2\)"):
        check(folder)
    check(folder, stop_token_ids=(2,))
    assert warnings() == []
    for _ in range(3):
        check(folder, stop_token_ids=(7,))
    assert len(warnings()) == 1
    assert "eos_token" in warnings()[0]


@pytest.mark.parametrize("special", [True, False])
def test_the_templates_closing_token_is_among_the_ends(
    tmp_path: Path, special: bool, warnings: Callable[[], list[str]]
) -> None:
    """For chat prompts else refused; a text prompt beside such a template is a warning, once."""
    folder = model(tmp_path, CHATML, tokenizer=renamed("<im>", "<end>", special=True))
    with pytest.raises(TokenizerError, match=r"closes an answer with '<end>' \(id 101\)"):
        check(folder, CHAT)
    check(folder, TEXT)
    check(folder, TEXT)
    assert len(warnings()) == 1
    assert "<end>" in warnings()[0]
    check(folder, CHAT, stop_token_ids=(101,))


@pytest.mark.parametrize(
    "names", [("<bos>", "A", "<eos>"), ("A", "<eos>"), ("A", "<pad>"), ("A", "<eos>", "<eos>")]
)
def test_a_tokenizer_that_appends_to_prompts_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The end of sequence, or any other token behind the text."""
    folder = model(tmp_path, tokenizer=post_processor(*names))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json appends '<(eos|pad)>'"):
        check(folder)


@pytest.mark.parametrize(
    ("prompt", "template", "match"),
    [
        (Prompt(text="1+2<eos>"), None, "first prompt ends with '<eos>'"),
        (
            CHAT,
            "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}",
            "first prompt ends with '<eos>'",
        ),
        (Prompt(text="<bos>1+2="), None, "'<bos>' .* twice"),
        (CHAT, "<bos>{{ bos_token }}{{ messages[0]['content'] }}", "'<bos>' .* twice"),
        (CHAT, "{{ nothing.at.all }}", "cannot be rendered"),
        (CHAT, "{% for m in %}", "cannot be rendered"),
        (CHAT, "{{ raise_exception('only tools') }}", "only tools"),
    ],
)
def test_prompts_that_are_over_or_begin_twice_are_refused(
    tmp_path: Path, prompt: Prompt, template: str | None, match: str
) -> None:
    """Whoever writes it: the task's text, the template, or a template that cannot be rendered at all."""
    with pytest.raises(TokenizerError, match=match):
        check(model(tmp_path, template), prompt)


def test_a_prompt_may_end_with_a_stop_id_that_is_text(tmp_path: Path) -> None:
    """A line break may end answers and stand before them; an end of sequence may not."""
    check(model(tmp_path), Prompt(text="1+2\n"), stop_token_ids=(4,))
    with pytest.raises(TokenizerError, match="ends with '<pad>'"):
        check(tmp_path / "model", Prompt(text="1+2<pad>"), stop_token_ids=(0,))


def test_a_post_processor_that_adds_two_beginnings_is_refused(tmp_path: Path) -> None:
    """A doubled beginning may come from one file alone."""
    with pytest.raises(TokenizerError, match="twice"):
        check(model(tmp_path, tokenizer=post_processor("<bos>", "<bos>", "A")))


@pytest.mark.parametrize(
    ("answer", "key"),
    [
        ({"kind": "tag", "tag": "réponse"}, "env.config.answer.tag"),
        ({"kind": "marker", "marker": "答"}, "env.config.answer.marker"),
        ({"kind": "marker", "marker": "<eos>"}, "env.config.answer.marker"),
    ],
)
def test_texts_of_the_reward_that_do_not_survive_are_refused(
    tmp_path: Path, answer: dict[str, Any], key: str
) -> None:
    """A tag or marker that the tokenizer cannot write, or that is a mark which no environment sees."""
    with pytest.raises(TokenizerError, match=key):
        check(model(tmp_path), answer=answer)


def test_a_normaliser_that_changes_a_tag_is_refused(tmp_path: Path) -> None:
    """Lower-casing tokenizers cannot write a tag with capitals; the same tag in lower case passes."""
    folder = model(tmp_path, tokenizer=lambda t: t.update(normalizer={"type": "Lowercase"}))
    with pytest.raises(TokenizerError, match="Answer"):
        check(folder, answer={"kind": "tag", "tag": "Answer"})
    check(folder, answer={"kind": "tag", "tag": "answer"})


@pytest.mark.parametrize("count", [1, 20])
def test_ids_beyond_the_tokenizer_are_announced_once(
    tmp_path: Path, warnings: Callable[[], list[str]], count: int
) -> None:
    """Rows of the embedding that no token of the tokenizer has, at its end or in between."""

    def drop(t: dict[str, Any]) -> None:
        for token in sorted(t["model"]["vocab"], key=t["model"]["vocab"].__getitem__)[120 - count : 120]:
            del t["model"]["vocab"][token]

    folder = model(tmp_path, tokenizer=drop)
    check(folder)
    check(folder)
    assert len(warnings()) == 1
    assert f"no text for {count} of" in warnings()[0]


def test_stop_strings_that_do_not_survive_are_a_warning(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """They may stand beside others that do."""
    check(model(tmp_path), stop=("停", "\n"))
    assert len(warnings()) == 1
    assert "rollout.stop[0]" in warnings()[0]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("names", [("<answer>", "</answer>"), ("<think>", "</think>")])
def test_tags_that_are_special_tokens_reach_the_reward(
    tmp_path: Path, names: tuple[str, str], special: bool
) -> None:
    """Special or not, a tag is text; the end, the padding and ids without text are not."""
    folder = model(tmp_path, tokenizer=renamed(*names, special=special))
    encoder = PromptEncoder(load_tokenizer(folder), (2,))
    written = f"{names[0]}5{names[1]}"
    assert encoder.read_back(written) == written
    ids = encoder.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert encoder.decode([1, *ids, 2, 0, 5000]) == written
    assert encoder.unknown([1, *ids, 2, 0, 5000, 127]) == 1 + (
        127 not in encoder.tokenizer.get_vocab().values()
    )
    check(folder, answer={"kind": "tag", "tag": names[0].strip("<>")})


def test_a_closing_token_is_not_shown_to_the_environment(tmp_path: Path) -> None:
    """An end that only generation_config.json names is stripped, where it is a special token."""
    folder = model(tmp_path, CHATML, tokenizer=renamed("<im>", "<end>"))
    ids = [21, 101]
    assert PromptEncoder(load_tokenizer(folder), (101,)).decode(ids) == "0"
    assert PromptEncoder(load_tokenizer(folder), (21,)).decode(ids) == "0<end>"


DAMAGE: dict[str, bytes] = {
    "cut off": b'{"model_type": "qwen3", "vocab', "empty": b"", "a list": b"[1, 2]", "a number": b"3",
    "not UTF-8": b'{"a": "\xff\xfe"}', "deep": b'{"a":' + b"[" * 100_000, "null": b"null",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
)
def test_damaged_files_are_named_before_anything_starts(tmp_path: Path, name: str, damage: str) -> None:
    """Every JSON file of a model directory, however it is damaged, is an error that names it."""
    folder = model(tmp_path)
    (folder / name).write_bytes(DAMAGE[damage])
    with pytest.raises(ModelPathError, match=name):
        check(folder)


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], {"a": 2}])
def test_an_end_that_is_no_id_is_refused(tmp_path: Path, value: Any) -> None:
    """generation_config.json may name an id or a list of ids."""
    folder = model(tmp_path, generation_config=lambda c: c.update(eos_token_id=value))
    with pytest.raises(ModelPathError, match=r"generation_config\.json: eos_token_id"):
        check(folder)


def test_a_tokenizer_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    """Valid JSON without a model in it, and a directory without any tokenizer."""
    folder = model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelPathError, match=r"tokenizer\.json"):
        check(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelPathError, match=r"no tokenizer\.json"):
        check(folder)


def test_preflight_lists_tokenizer_and_weights_together(tmp_path: Path) -> None:
    """What is wrong with the tokenizer is said beside what is wrong with the weights."""
    folder = model(tmp_path, **eos(None))
    (folder / "model.safetensors").write_bytes(b"half")
    found = preflight_errors(load_experiment("quickstart", [f"model={folder}"]).to_grpo_config())
    assert ["not a readable safetensors" in str(found[0]), "no end of sequence" in str(found[1])] == [
        True,
        True,
    ]
