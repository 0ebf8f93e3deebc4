import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from precision_kernels import quantise_activation, quantise_weight
from rllib_llm.models import PackedBatch
from tests.models.cases import (
    CONFIGS,
    fp32_policy,
    fp32_policy_with_fp8_linears,
    make_model,
    next_tokens,
    random_sequences,
    transformers_twin,
)

LENGTHS = (1, 7, 130)


def twin_logits(twin, sequences):
    return torch.cat([twin(torch.tensor([ids])).logits[0] for ids in sequences])


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameter_names_and_shapes_are_those_of_transformers(kind):
    """Every parameter carries its Hugging Face name and shape, and none is missing."""
    model = make_model(kind, "unified-fp8")
    theirs = {name: tuple(p.shape) for name, p in transformers_twin(model, torch.float32).named_parameters()}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == theirs


@pytest.mark.parametrize("kind", CONFIGS)
def test_fp32_logits_and_gradients_agree_with_transformers(kind):
    """With everything in fp32, packed logits and all gradients are transformers' up to fp32 summation order.

    Tolerance: sums of up to 576 products in another order, through two layers; measured below 1e-5 of the largest.
    """
    model = make_model(kind, fp32_policy())
    twin = transformers_twin(model, torch.float32)
    sequences = random_sequences(LENGTHS, model.architecture.vocab)
    batch = PackedBatch.from_sequences(sequences)
    ours = model.logits(model(batch))
    theirs = twin_logits(twin, sequences)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=5e-5 * theirs.abs().max().item(), rtol=0)

    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    theirs_by_name = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs_by_name[name].grad
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error < 1e-4, f"{name}: {error}"


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("backward", "bound"), [("fp32", 5e-5), ("fp8", 0.1)])
def test_fp8_gradients_follow_fp64_autograd_of_the_dequantised_model(kind, backward, bound):
    """FP8 linears give the logits and gradients of an fp64 transformers model whose weights and linear inputs are the
    dequantised codes (gradient passed straight through the quantiser).

    With fp32 activations both sides see the same codes, unless fp32 and fp64 fall on two sides of a rounding boundary:
    one such code among a million moves the logits by 1e-2; these tokens have none. An fp32 backward then agrees to fp32
    rounding (measured 6e-6); an fp8 backward adds the 3-bit mantissa of quantised gradients (measured 0.063-0.076).
    Bounds are on the relative error of every parameter's gradient.
    """
    model = make_model(kind, fp32_policy_with_fp8_linears(backward))
    twin = dequantised_twin(model)
    sequences = random_sequences((1, 4, 9), model.architecture.vocab, seed=5)
    batch = PackedBatch.from_sequences(sequences)
    ours, theirs = model.logits(model(batch)), twin_logits(twin, sequences)
    assert (ours - theirs).norm() / theirs.norm() < 5e-6
    targets = next_tokens(batch)
    torch.nn.functional.cross_entropy(ours, targets).backward()
    torch.nn.functional.cross_entropy(theirs, targets).backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    errors = {
        name: ((p.grad - expected[name]).norm() / expected[name].norm()).item()
        for name, p in model.named_parameters()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < bound, worst


def dequantised_twin(model):
    """transformers in fp64 with dequantised codes instead of weights and inputs of all linears but lm_head."""
    twin = transformers_twin(model, torch.float64)
    for name, module in twin.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes = quantise_weight(module.weight.detach().float(), "fp32", model.policy.scale_floor)
            module.weight.data = codes.dequantise(torch.float64)
            module.register_forward_pre_hook(lambda _m, args: (fake_quantised(args[0]),))
    return twin


def fake_quantised(x: torch.Tensor) -> torch.Tensor:
    """The dequantised 1x128 codes of x [1, T, K], with the gradient passed straight through."""
    codes = quantise_activation(x[0].detach().float()).dequantise(torch.float64)
    return x + (codes[None] - x).detach()


@pytest.mark.parametrize("kind", ["llama", "llama3-rope-biases"])
def test_inverse_frequencies_are_those_of_transformers(kind):
    """Default and llama3-scaled inverse frequencies have transformers' bits."""
    config = CONFIGS[kind]()
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[rope_type](config)
    arch = make_model(kind, "bf16").architecture
    assert torch.equal(arch.rope.inverse_frequencies(arch.head_dim), expected)
