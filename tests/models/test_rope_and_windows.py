"""Rope scalings and sliding windows: transformers' numbers, and one set of bits in learner and embedded engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from precision_kernels import AttentionLayout, attention
from precision_kernels.reference import attention as attend
from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.models import PackedBatch, build_model, save_pretrained
from rllib_llm.models.architecture import Architecture, ArchitectureError, refuse_windows
from tests.models.cases import fill, fp32_policy, random_sequences, transformers_twin

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-whole": {"rope_type": "linear", "factor": 3, "rope_theta": 500000},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic-odd": {"rope_type": "dynamic", "factor": 1.1},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-qwen": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6},
    "yarn-deepseek": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "beta_fast": 16,
                      "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn-attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
                       "attention_factor": 0.8, "truncate": False},
    "yarn-no-length": {"rope_type": "yarn", "factor": 2.0},
    "llama3-no-length": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 48, "intermediate_size": 80,
    "vocab_size": 130, "num_hidden_layers": 3, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "eos_token_id": 2,
}  # fmt: skip
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2-some": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3-all": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    "qwen3-types": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 2,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": {"model_type": "mistral", "sliding_window": 33},
    "mistral-none": {"model_type": "mistral", "sliding_window": None},
    "qwen2-off": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9},
}  # fmt: skip


def config_of(**values: Any) -> Any:
    values = SIZES | values
    return AutoConfig.for_model(values.pop("model_type"), **values)


def model_of(policy: Any, **values: Any) -> Any:
    return fill(build_model(config_of(**values), policy, "train"))


@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_have_the_bits_of_transformers(name: str) -> None:
    """Every rope scaling gives transformers' frequencies and attention factor, from the dict and from the config."""
    values = SIZES | {"model_type": "llama", "rope_scaling": dict(ROPES[name])}
    config = config_of(model_type="llama", rope_scaling=dict(ROPES[name]))
    expected, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    for arch in (Architecture.from_config(values), Architecture.from_config(config)):
        assert torch.equal(arch.rope.inverse_frequencies(arch.head_dim), expected)
        assert arch.rope.attention_factor == factor


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn-qwen", "yarn-attention"])
def test_logits_with_scaled_rope_are_those_of_transformers(kind: str, name: str) -> None:
    """In fp32, up to the last position of the context. Tolerance: other summation order, as without scaling."""
    model = model_of(fp32_policy(), model_type=kind, sliding_window=None, rope_scaling=dict(ROPES[name]))
    assert_equal_logits(model, (1, 40, 256))


@pytest.mark.parametrize("name", WINDOWS)
def test_windowed_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    """Sequences shorter than the window, as long, one longer, and much longer. Tolerance as without a window."""
    model = model_of(fp32_policy(), **WINDOWS[name])
    assert (model.architecture.window > 0) == (name not in ("mistral-none", "qwen2-off"))
    ours, theirs, twin = assert_equal_logits(model, (1, 8, 9, 10, 33, 34, 64, 65, 200))
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    expected = {n: p.grad for n, p in twin.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        wanted = expected[parameter_name]
        assert (parameter.grad - wanted).norm() < 1e-4 * wanted.norm() + 1e-6, parameter_name


def assert_equal_logits(model: Any, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    twin = transformers_twin(model, torch.float32)
    sequences = random_sequences(lengths, model.architecture.vocab)
    ours = model.logits(model(PackedBatch.from_sequences(sequences)))
    theirs = torch.cat([twin(torch.tensor([ids])).logits[0] for ids in sequences])
    torch.testing.assert_close(ours, theirs, atol=5e-5 * theirs.abs().max().item(), rtol=0)
    return ours, theirs, twin


@pytest.mark.parametrize("policy", ["bf16", "unified-fp8"])
@pytest.mark.parametrize(
    "values",
    [WINDOWS["qwen2-some"], WINDOWS["qwen3-types"], WINDOWS["mistral"],
     {"model_type": "llama", "rope_scaling": ROPES["yarn"]}, {"model_type": "qwen3", "rope_scaling": ROPES["dynamic"]}],
    ids=["qwen2-window", "qwen3-window", "mistral", "yarn", "dynamic"],
)  # fmt: skip
def test_engine_and_learner_have_one_set_of_bits(tmp_path: Any, policy: str, values: dict[str, Any]) -> None:
    """Prefill in chunks, a forked prompt and cached decode give the learner's packed log-probs, bit by bit."""
    model = model_of(policy, **values)
    directory = save_pretrained(model, tmp_path, dtype="float32")
    engine = make_engine("torch", directory, policy, max_prefill_tokens=16)
    prompts = random_sequences((3, 40, 70), model.architecture.vocab)
    answers = engine.generate(prompts, SamplingParams(n=2, max_tokens=30, seed=1))
    for prompt, row in zip(prompts, answers, strict=True):
        for answer in row:
            ids = [*prompt, *answer.token_ids.tolist()]
            hidden = model(PackedBatch.from_sequences([ids]))[len(prompt) - 1 : -1]
            scored = model.token_logprobs(hidden, torch.tensor(answer.token_ids))
            assert torch.equal(scored.detach(), torch.tensor(answer.logprobs))


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 300])
def test_attention_in_a_window_is_attention_to_those_keys_alone(window: int) -> None:
    """A query's row has the bits that it has when the keys before its window are not there at all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(290, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2))
    out, lse = attend(q, k, v, AttentionLayout(torch.tensor([0, 290])).within(window))
    dense = torch.einsum("thd,shd->hts", q.float(), k.float().repeat_interleave(2, 1)) * 16**-0.5
    places = torch.arange(290)
    seen = (places[None] <= places[:, None]) & (places[None] > places[:, None] - window)
    expected = dense.masked_fill(~seen, -torch.inf).softmax(-1) @ v.float().repeat_interleave(2, 1).transpose(
        0, 1
    )
    torch.testing.assert_close(out.float(), expected.transpose(0, 1), atol=2e-2, rtol=2e-2)
    changed_k, changed_v = k.clone(), v.clone()
    if window < 290:
        changed_k[: 290 - window], changed_v[: 290 - window] = 7.0, torch.nan
        again, again_lse = attend(
            q, changed_k, changed_v, AttentionLayout(torch.tensor([0, 290])).within(window)
        )
        assert torch.equal(again[-1], out[-1])
        assert torch.equal(again_lse[-1], lse[-1])


def test_a_negative_window_is_refused() -> None:
    """An attention layout names what does not fit."""
    with pytest.raises(ValueError, match="window"):
        AttentionLayout(torch.tensor([0, 3]), window=-1)
    assert callable(attention)


@pytest.mark.parametrize("longest", [None, 10, 256])
def test_engines_without_windows_refuse_longer_sequences_by_name(longest: int | None) -> None:
    """vLLM and CUDA take a model with windows while no sequence is longer than one."""
    arch = Architecture.from_config(config_of(**WINDOWS["qwen2-some"]))
    with pytest.raises(ArchitectureError, match="sliding_window=9"):
        refuse_windows(arch, longest)
    refuse_windows(arch, 9)
    refuse_windows(Architecture.from_config(config_of(**WINDOWS["qwen2-off"])), longest)
