"""The language model as an RLModule: what the Learner trains."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override

from precision_kernels import LowHalf, join_float32, split_float32
from precision_policies import load_policy
from rllib_llm.learner.iteration import Scores, TrainInput
from rllib_llm.learner.micro_batch import MicroBatch
from rllib_llm.learner.start import start_adapters
from rllib_llm.models.adapters import switched_off
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.checkpoint import load_pretrained, load_tokenizer
from rllib_llm.models.sampling_distribution import SamplingDistribution
from rllib_llm.on_disk.checkpoint import MODULE_FILE, WEIGHTS_FILE, opened
from rllib_llm.on_disk.state_file import StateFileError, read_tensor_file, write_tensor_file
from rllib_llm.settings.adapter import read_adapter

__all__ = ["CausalLMModule", "low_halves", "score"]


class CausalLMModule(TorchRLModule):
    """A `CausalLM` on the training side of a precision policy, with the frozen reference a KL term needs.

    model_config: {"model": ModelSettings as dict, "precision": ..., "needs_reference": bool}.
    Weights of the module never travel through RLlib's weight sync: `get_state(inference_only=True)` is
    empty, and env runners receive a `WeightUpdate` whose arrival is confirmed (algorithm/weight_sync.py).
    """

    framework = "torch"

    @override(RLModule)
    def setup(self) -> None:
        try:
            self._build()
        except AttributeError as error:
            # RLlib takes an AttributeError here for the deprecated RLModuleConfig constructor, tries that
            # one, and shows its error instead.
            raise RuntimeError(f"CausalLMModule.setup failed: {error}") from error

    def _build(self) -> None:
        model = self.model_config["model"]
        self.policy = load_policy(self.model_config["precision"]["policy"])
        adapter = read_adapter(model)
        self.lm: CausalLM = load_pretrained(
            model["path"],
            self.policy,
            side="train",
            gradient_checkpointing=model["gradient_checkpointing"],
            adapter=None if adapter is None else adapter.spec(),
        )
        if adapter is not None:
            start_adapters(self.lm, adapter)
        # In a list, so that torch registers no parameters: the reference is neither trained, nor saved,
        # nor exported; it is read from its directory again.
        self._reference: list[CausalLM] = []
        # Under adapters the reference is the same model with the adapters off, unless another one is named.
        self._is_own_reference = (
            self.model_config["needs_reference"]
            and adapter is not None
            and model["reference_path"] in (None, model["path"])
        )
        if self.model_config["needs_reference"] and not self._is_own_reference:
            path = model["reference_path"] or model["path"]
            reference = load_pretrained(path, self.policy, side="train")
            if path != model["path"]:
                _require_same_tokens(model["path"], path)
            self._reference.append(reference.requires_grad_(False).eval())

    @property
    def reference(self) -> CausalLM | None:
        """What a KL term compares with; None without such a term."""
        if self._is_own_reference:
            return self.lm
        return self._reference[0] if self._reference else None

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLMModule:
        for reference in self._reference:
            reference._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @override(TorchRLModule)
    def _forward_train(self, batch: TrainInput, **kwargs: Any) -> Scores:
        """Log-probabilities and entropies of the trained tokens of a micro-batch."""
        scores = score(self.lm, batch.micro_batch, batch.distribution)
        return scores if batch.entropy_with_grad else Scores(scores.logp, scores.entropy.detach())

    @torch.no_grad()
    def reference_logprobs(self, micro: MicroBatch, distribution: SamplingDistribution) -> torch.Tensor:
        """fp32 [N], log-probabilities of the micro-batch's tokens under the frozen reference."""
        if self._is_own_reference:
            with switched_off(self.lm):
                return score(self.lm, micro, distribution).logp
        [reference] = self._reference
        return score(reference, micro, distribution).logp

    # ---------------------------------------------------------------- state, bit by bit
    # RLlib's defaults go through numpy: bf16 raises, fp16 and fp64 silently become fp32.

    @override(TorchRLModule)
    def get_state(self, *args: Any, inference_only: bool = False, **kwargs: Any) -> dict[str, torch.Tensor]:
        if inference_only:
            return {}
        return {name: value.detach().cpu().clone() for name, value in self._trained_state().items()}

    def _trained_state(self) -> dict[str, torch.Tensor]:
        """What training changes: of a model with adapters only these, its base is where it was loaded from."""
        state = self.lm.state_dict()
        if self.lm.plan.adapter is None:
            return state
        kinds = {row.name: row.kind for row in self.lm.plan.modules}
        return {name: t for name, t in state.items() if kinds[name.rpartition(".")[0]] == "adapter"}

    @override(TorchRLModule)
    def set_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copies a full state in place. Raises RuntimeError for missing, unexpected or ill-shaped tensors, and
        ValueError for another dtype (copying would round), unless the config allows a precision change."""
        own = self._trained_state()
        if self.model_config["precision"]["allow_precision_change"]:
            state = _with_parts(state, own)
        wrong = [
            f"{k}: {state[k].dtype}, not {v.dtype}"
            for k, v in own.items()
            if k in state and state[k].dtype != v.dtype
        ]
        if wrong and not self.model_config["precision"]["allow_precision_change"]:
            raise ValueError(
                f"CausalLMModule.set_state would round {len(wrong)} tensors: {'; '.join(wrong[:5])}"
            )
        if state.keys() != own.keys():
            odd = sorted(state.keys() ^ own.keys())
            raise RuntimeError(
                f"CausalLMModule.set_state: {len(odd)} tensors are on one side only ({', '.join(odd[:5])}); is "
                "model.adapter that of the checkpoint?"
            )
        self.lm.load_state_dict(state, strict=self.lm.plan.adapter is None)

    @override(RLModule)
    def save_to_path(
        self, path: Any = None, *, state: Any = None, filesystem: Any = None, use_msgpack: bool = False
    ) -> str:
        """The weights as WEIGHTS_FILE, and what the module was built from as MODULE_FILE (JSON)."""
        fs, folder = opened(str(path), filesystem)
        fs.create_dir(folder.as_posix(), recursive=True)
        write_tensor_file(fs, folder / WEIGHTS_FILE, self.get_state() if state is None else state)
        with fs.open_output_stream((folder / MODULE_FILE).as_posix()) as file:
            file.write(json.dumps(dict(self.model_config), indent=1).encode())
        return folder.as_posix()

    @override(RLModule)
    def restore_from_path(
        self, path: Any, *, component: str | None = None, filesystem: Any = None, **kwargs: Any
    ) -> None:
        """Raises StateFileError for a file that is not readable, and what `set_state` does."""
        fs, folder = opened(str(path), filesystem)
        self.set_state(read_tensor_file(fs, folder / WEIGHTS_FILE))

    @classmethod
    @override(RLModule)
    def from_checkpoint(cls, path: Any, filesystem: Any = None, **kwargs: Any) -> CausalLMModule:
        """A module from the folder that `save_to_path` wrote. Executes nothing that lies there."""
        fs, folder = opened(str(path), filesystem)
        try:
            with fs.open_input_stream((folder / MODULE_FILE).as_posix()) as file:
                model_config = json.loads(file.read())
            module = cls(model_config=model_config, **kwargs)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateFileError(
                f"{folder / MODULE_FILE}: no module can be built from it ({error!r})"
            ) from error
        module.restore_from_path(folder.as_posix(), filesystem=fs)
        return module


def _with_parts(state: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state whose masters are whole where ``own``'s are split, or the other way round, in the parts of ``own``."""
    joined = dict(state)
    for name in [name for name in state if f"{name}_low" in state and f"{name}_low" not in own]:
        joined[name] = join_float32(
            state[name], LowHalf(joined.pop(f"{name}_low"), joined.pop(f"{name}_ties"))
        )
    for name in [
        name for name in own if f"{name}_low" in own and name in state and f"{name}_low" not in state
    ]:
        joined[name], low_half = split_float32(state[name].float())
        joined |= {f"{name}_{part}": tensor for part, tensor in low_half._asdict().items()}
    return joined


def _require_same_tokens(path: str, reference_path: str) -> None:
    """A KL compares log-probs of token ids, so ids must mean the same text to both models (padding rows may differ)."""
    own, other = (load_tokenizer(p).get_vocab() for p in (path, reference_path))
    if own != other:
        example = next(
            token for token in sorted(own.keys() | other.keys()) if own.get(token) != other.get(token)
        )
        raise ValueError(
            f"model.reference_path = {reference_path!r} has another vocabulary than model.path = {path!r}: token "
            f"{example!r} is {other.get(example)} there and {own.get(example)} here, so a KL between the two has no "
            "meaning. Use a reference with the same tokenizer."
        )


def low_halves(lm: CausalLM) -> dict[torch.nn.Parameter, Callable[[], LowHalf | None]]:
    """Of each parameter, what gives the rest of its FP32 numbers where they are split."""
    return {
        getattr(module, suffix): functools.partial(module.low_half, suffix)
        for _, module, suffix in lm.masters()
        if module.low_half(suffix) is not None
    }


def score(lm: CausalLM, micro: MicroBatch, distribution: SamplingDistribution) -> Scores:
    """Log-probs and entropies of the trained tokens of `micro`, both differentiable."""
    hidden = lm(micro.packed)[micro.predict_at]
    logp, entropy = lm.token_logprobs(
        hidden,
        micro.targets,
        distribution.temperature,
        distribution.top_k,
        distribution.top_p,
        banned_ids=distribution.banned_ids,
        banned_rows=micro.starts_of_answers(distribution.min_tokens),
        return_entropy=True,
    )
    return Scores(logp, entropy)
