"""The language model as an RLModule: what the Learner trains."""

from __future__ import annotations

import pathlib
from typing import Any

import pyarrow.fs
import safetensors.torch
import torch
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override

from precision_policies import load_policy
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.checkpoint import load_pretrained, load_tokenizer

__all__ = ["CausalLMModule"]

WEIGHTS_FILE = "model.safetensors"


class CausalLMModule(TorchRLModule):
    """A `CausalLM` on the training side of a precision policy, with the frozen reference a KL term needs.

    model_config: {"llm": ModelSettings as dict, "precision_config": ..., "needs_reference": bool}.
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
        llm = self.model_config["llm"]
        self.policy = load_policy(self.model_config["precision_config"]["policy"])
        self.lm: CausalLM = load_pretrained(
            llm["path"], self.policy, side="train", gradient_checkpointing=llm["gradient_checkpointing"]
        )
        # In a list, so that torch registers no parameters: the reference is neither trained, nor saved,
        # nor exported; it is read from its directory again.
        self._reference: list[CausalLM] = []
        if self.model_config["needs_reference"]:
            path = llm["reference_path"] or llm["path"]
            reference = load_pretrained(path, self.policy, side="train")
            if path != llm["path"]:
                _require_same_tokens(llm["path"], path)
            self._reference.append(reference.requires_grad_(False).eval())

    @property
    def reference(self) -> CausalLM | None:
        return self._reference[0] if self._reference else None

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLMModule:
        for reference in self._reference:
            reference._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        """Log-probabilities of the tokens of a `MicroBatch`.

        batch: {"micro_batch": MicroBatch, "law": keyword arguments of `CausalLM.token_logprobs` (temperature,
        top_k, top_p), "entropy_with_grad": bool}. Returns {"logp": fp32 [N], "entropy": fp32 [N]}.
        """
        micro = batch["micro_batch"]
        hidden = self.lm(micro.packed)[micro.predict_at]
        return score(self.lm, hidden, micro.targets, batch["law"], batch["entropy_with_grad"])

    @torch.no_grad()
    def reference_logprobs(self, micro: Any, law: dict[str, Any]) -> torch.Tensor:
        """fp32 [N], log-probabilities of the micro-batch's tokens under the frozen reference."""
        [reference] = self._reference
        hidden = reference(micro.packed)[micro.predict_at]
        logp = reference.token_logprobs(hidden, micro.targets, **law)
        assert isinstance(logp, torch.Tensor), "without return_entropy there is one result"
        return logp

    # ---------------------------------------------------------------- state, bit by bit
    # RLlib's defaults go through numpy: bf16 raises, fp16 and fp64 silently become fp32.

    @override(TorchRLModule)
    def get_state(self, *args: Any, inference_only: bool = False, **kwargs: Any) -> dict[str, torch.Tensor]:
        if inference_only:
            return {}
        return {name: value.detach().cpu().clone() for name, value in self.lm.state_dict().items()}

    @override(TorchRLModule)
    def set_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copies a full state in place. Raises RuntimeError for missing, unexpected or ill-shaped tensors, and
        ValueError for another dtype (copying would round), unless the config allows a precision change."""
        own = self.lm.state_dict()
        wrong = [
            f"{k}: {state[k].dtype}, not {v.dtype}"
            for k, v in own.items()
            if k in state and state[k].dtype != v.dtype
        ]
        if wrong and not self.model_config["precision_config"]["allow_precision_change"]:
            raise ValueError(
                f"CausalLMModule.set_state would round {len(wrong)} tensors: {'; '.join(wrong[:5])}"
            )
        self.lm.load_state_dict(state, strict=True)

    @override(RLModule)
    def save_to_path(
        self,
        path: Any = None,
        *,
        state: dict | None = None,
        filesystem: Any = None,
        use_msgpack: bool = False,
    ) -> str:
        """RLlib's files, with the weights in safetensors instead of a pickle."""
        state = self.get_state() if state is None else state
        out = super().save_to_path(
            path, state={"weights": WEIGHTS_FILE}, filesystem=filesystem, use_msgpack=use_msgpack
        )
        filesystem = filesystem or pyarrow.fs.LocalFileSystem()
        with filesystem.open_output_stream((pathlib.Path(out) / WEIGHTS_FILE).as_posix()) as file:
            file.write(safetensors.torch.save({k: v.contiguous() for k, v in state.items()}))
        return out

    @override(RLModule)
    def restore_from_path(
        self, path: Any, *, component: str | None = None, filesystem: Any = None, **kwargs: Any
    ) -> None:
        if filesystem is None:
            filesystem, path = pyarrow.fs.FileSystem.from_uri(str(path))
        with filesystem.open_input_stream((pathlib.Path(path) / WEIGHTS_FILE).as_posix()) as file:
            self.set_state(safetensors.torch.load(file.read()))


def _require_same_tokens(path: str, reference_path: str) -> None:
    """A KL compares log-probs of token ids, so ids must mean the same text to both models (padding rows may differ)."""
    own, other = (load_tokenizer(p).get_vocab() for p in (path, reference_path))
    if own != other:
        example = next(
            token for token in sorted(own.keys() | other.keys()) if own.get(token) != other.get(token)
        )
        raise ValueError(
            f"llm.reference_path = {reference_path!r} has another vocabulary than llm.path = {path!r}: token "
            f"{example!r} is {other.get(example)} there and {own.get(example)} here, so a KL between the two has no "
            "meaning. Use a reference with the same tokenizer."
        )


def score(
    lm: CausalLM, hidden: torch.Tensor, targets: torch.Tensor, law: dict[str, Any], entropy_with_grad: bool
) -> dict[str, torch.Tensor]:
    """{"logp", "entropy"} of targets [N] given hidden states [N, H]; entropy carries gradient only on request."""
    logp, entropy = lm.token_logprobs(hidden, targets, return_entropy=True, **law)
    return {"logp": logp, "entropy": entropy if entropy_with_grad else entropy.detach()}
