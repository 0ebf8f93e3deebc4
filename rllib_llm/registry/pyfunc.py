"""`mlflow.pyfunc.load_model("models:/NAME@ALIAS")`: text from a registered model, under its own policy.

MLflow calls `_load_pyfunc` by this module's name; no object of ours is pickled into the model.
"""

from __future__ import annotations

import difflib
import numbers
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precision_policies import PrecisionPolicy, load_policy
from precision_policies.hashing import differing
from rllib_llm.engines.base import RolloutEngine, SamplingParams
from rllib_llm.engines.factory import ENGINES, make_engine
from rllib_llm.envs.protocol import Prompt
from rllib_llm.models.checkpoint import eos_token_ids, load_config, load_tokenizer
from rllib_llm.on_disk.owner import owner_of, refuse_other_policy
from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.manifest import Manifest, probe_hash
from rllib_llm.registry.signature import OUTPUTS, PARAMETERS
from rllib_llm.rollout.prompting import PromptEncoder

__all__ = ["TextGenerator", "prompts_of"]

_CONFIG = ("policy", "allow_other_policy", "device", "engine_options")


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> TextGenerator:
    """Called by MLflow with the model's data folder, and what `load_model(..., model_config=...)` was given."""
    config = {key: value for key, value in (model_config or {}).items() if value is not None}
    if unknown := sorted(config.keys() - set(_CONFIG)):
        raise RegistryError(f"model_config has no key {', '.join(unknown)}; it takes {', '.join(_CONFIG)}")
    return TextGenerator(Path(path), **config)


class TextGenerator:
    """Generates text with the weights of a registered model.

    Args:
        root: directory of the registered model (`rllib_llm.registry.package`).
        policy: whatever `load_policy` takes; default: the model's own.
        allow_other_policy: compute under `policy` although the model was trained under another one.
        device: "cpu" or "cuda"; default: what this machine has.
        engine_options: passed to the engine's constructor.

    Raises:
        OtherPolicyError: another policy without the permission; with every difference.
    """

    def __init__(
        self,
        root: Path,
        policy: Any = None,
        allow_other_policy: bool = False,
        device: str | None = None,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        import torch

        self.manifest = Manifest.read(root)
        self.directory = root / self.manifest.masters
        owner = owner_of(self.directory)
        if owner is None or owner.policy.fingerprint != self.manifest.policy_fingerprint:
            raise RegistryError(f"{root}: its parts name different policies; see rllib-llm models verify")
        self.policy: PrecisionPolicy = owner.policy if policy is None else load_policy(policy)
        override = "load it with model_config={'allow_other_policy': True}"
        refuse_other_policy(self.directory, self.policy, allow_other_policy, override=override)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.engine_options = dict(engine_options or {})
        ends = eos_token_ids(load_config(self.directory), self.directory)
        self.encoder = PromptEncoder(load_tokenizer(self.directory), ends)
        self._engines: dict[str, RolloutEngine] = {}
        self._lock = (
            threading.Lock()
        )  # an engine serves one caller at a time, a scoring server has many threads

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """One answer per prompt.

        Args:
            model_input: see `prompts_of`.
            params: see `rllib_llm.registry.signature.PARAMETERS`. Without a seed every call draws a fresh one. Of what
                `mlflow.pyfunc` is given, MLflow drops unknown names with a warning and sends the rest here; called on
                `get_raw_model()`, an unknown name is an error.

        Returns:
            DataFrame with columns completion (text), finish_reason ("stop" or "length") and num_tokens, in the order of
            the prompts.
        """
        import pandas

        return pandas.DataFrame(self.answers(model_input, params), columns=list(OUTPUTS))

    def answers(
        self, model_input: Any, params: Mapping[str, Any] | None = None
    ) -> list[tuple[str, str, int]]:
        """The rows of `predict`."""
        chosen = _parameters(params or {})
        engine_name = str(chosen.pop("engine"))
        prompts = [self.encoder.encode(prompt) for prompt in prompts_of(model_input)]
        with self._lock:
            answers = self._engine(engine_name).generate(prompts, SamplingParams(**chosen))
        return [
            (self.encoder.decode(answer.token_ids), answer.finish_reason, len(answer.token_ids))
            for (answer,) in answers
        ]

    def get_raw_model(self) -> TextGenerator:
        """This object, without MLflow's schemas before it; MLflow's own models pass the call on to here."""
        return self

    def close(self) -> None:
        """Free the engines; the next `predict` makes new ones."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    def _engine(self, name: str) -> RolloutEngine:
        if name not in self._engines:
            options = {
                "device": self.device,
                "allow_other_policy": True,
                **self.engine_options,
            }  # decided in __init__
            engine = make_engine(name, str(self.directory), self.policy, **options)
            if self.policy.fingerprint == self.manifest.policy_fingerprint:
                self._compare_weights(engine)
            self._engines[name] = engine
        return self._engines[name]

    def _compare_weights(self, engine: RolloutEngine) -> None:
        """What the engine holds must be the bytes that were registered: the hashes of the training run's receipts."""
        held = engine.attest().weights
        if self.manifest.tensor_hash_probe != probe_hash():
            return  # hashes of another function say nothing; `models verify` compares bytes
        stated = differing(self.manifest.tensors, held).items()
        wrong = [name for name, (registered, _) in stated if registered is not None]
        if wrong:
            engine.close()
            raise RegistryError(
                f"{self.directory}: {len(wrong)} tensor(s) are not those registered ({', '.join(wrong[:5])}): "
                "see rllib-llm models verify"
            )


_TYPES = {"long": numbers.Integral, "double": numbers.Real, "string": str}  # MLflow's names of them


def _parameters(params: Mapping[str, Any]) -> dict[str, Any]:
    """Given and default parameters. Raises RegistryError for names that do not exist, values of another type, and an
    unknown engine: all of them."""
    problems = []
    for name, value in params.items():
        if name not in PARAMETERS:
            near = difflib.get_close_matches(str(name), PARAMETERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PARAMETERS)}"
            problems.append(f"unknown parameter {name} ({hint})")
        elif not _is_of_type(name, value):
            problems.append(f"{name} = {value!r} must be a {PARAMETERS[name][0]}")
    chosen = {name: default for name, (_, default) in PARAMETERS.items()} | dict(params)
    if isinstance(chosen["engine"], str) and chosen["engine"] not in ENGINES:
        problems.append(f"engine {chosen['engine']!r}: one of {', '.join(ENGINES)}")
    if problems:
        raise RegistryError("params refused: " + "; ".join(problems))
    return chosen


def _is_of_type(name: str, value: Any) -> bool:
    kind, default = PARAMETERS[name]
    if value is None:
        return default is None
    return isinstance(value, _TYPES[kind]) and not isinstance(value, bool)


# ---- input -----------------------------------------------------------------------------------------------------------


def prompts_of(model_input: Any) -> list[Prompt]:
    """Prompts of what MLflow hands over.

    Accepted: a text, a list of texts, a Series or one-column DataFrame of texts; chats as a DataFrame with a column
    ``messages`` whose cells are lists of ``{"role", "content"}``, or as ``{"messages": [...]}`` (one chat, or a list of
    them). A DataFrame with several columns must have one called ``prompt`` or ``messages``.

    Raises:
        RegistryError: lists every row that is none of these. A bare list of messages is one of them: MLflow turns it
            into a table and keeps its first column, so it must come as ``{"messages": [...]}``.
    """
    cells = _cells(model_input)
    if cells and all(_is_message(cell) for cell in cells):
        return [Prompt(messages=[dict(cell) for cell in cells])]
    prompts: list[Prompt] = []
    problems: list[str] = []
    for row, cell in enumerate(cells):
        items = _as_list(cell)
        if isinstance(cell, str) and cell:
            prompts.append(Prompt(text=cell))
        elif items and all(_is_message(item) for item in items):
            prompts.append(Prompt(messages=[dict(item) for item in items]))
        elif items and all(isinstance(item, str) and item for item in items):
            prompts += [Prompt(text=item) for item in items]  # {"prompt": [...]} arrives as one row
        else:
            problems.append(f"row {row}: {str(cell)[:60]!r} is neither a text nor a list of messages")
    if problems:
        raise RegistryError("input refused:\n" + "\n".join(f"  - {p}" for p in problems))
    return prompts


def _cells(model_input: Any) -> list[Any]:
    """One column of values."""
    if isinstance(model_input, str):
        return [model_input]
    if hasattr(model_input, "columns"):  # a DataFrame, recognised without importing pandas
        return _column(model_input)
    if isinstance(model_input, Mapping):
        for name in ("messages", "prompt"):
            if name in model_input:
                return _as_list(model_input[name]) or [model_input[name]]
        raise RegistryError(
            f"a mapping must have the key prompt or messages, not {', '.join(map(str, model_input))}"
        )
    return _as_list(model_input)


def _column(table: Any) -> list[Any]:
    for name in ("messages", "prompt"):
        if name in table.columns:
            return list(table[name])
    first = list(table[table.columns[0]]) if len(table.columns) == 1 else []
    chat = "role" in table.columns or any(_is_message(cell) for cell in first)
    if chat:
        raise RegistryError(
            'a chat must come as {"messages": [{"role": …, "content": …}, …]}, not as a bare list'
        )
    if len(table.columns) == 1:
        return first
    raise RegistryError(
        f"the table has columns {', '.join(map(str, table.columns))}: name the one with prompts prompt (or messages)"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _as_list(value: Any) -> list[Any]:
    """Lists, tuples and arrays as a list; [] for anything else."""
    if isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
        return []
    return list(value)
