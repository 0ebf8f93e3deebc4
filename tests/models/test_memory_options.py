import pytest
import torch

from precision_kernels.dispatch import observed
from rllib_llm.engines.factory import make_engine
from rllib_llm.learner.weights import WeightSource
from rllib_llm.models import PackedBatch, causal_lm
from tests.models.cases import make_model, next_tokens, random_sequences


def loss_and_gradients(model, batch, **sampling):
    logp, entropy = model.token_logprobs(model(batch), next_tokens(batch), return_entropy=True, **sampling)
    model.zero_grad()
    (logp.sum() + 0.1 * entropy.sum()).backward()
    return logp.detach(), entropy.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
def test_gradient_checkpointing_changes_no_bit(policy):
    """With recomputed layers, log-probs and every gradient have the bits that they have without."""
    plain, lean = (make_model("qwen3", policy, gradient_checkpointing=flag) for flag in (False, True))
    batch = PackedBatch.from_sequences(random_sequences((5, 40), 128))
    logp, _, grads = loss_and_gradients(plain, batch)
    lean_logp, _, lean_grads = loss_and_gradients(lean, batch)
    assert torch.equal(logp, lean_logp)
    assert all(torch.equal(grads[name], lean_grads[name]) for name in grads)


def test_gradient_checkpointing_keeps_fewer_tensors():
    """Checkpointing saves the layers' inputs only: far fewer bytes are held between forward and backward."""
    held = {}
    for flag in (False, True):
        model = make_model("qwen3", "bf16", gradient_checkpointing=flag)
        batch = PackedBatch.from_sequences(random_sequences((300,), 128))
        total = [0]

        def pack(tensor, total=total):
            total[0] += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(batch)
        held[flag] = total[0]
    assert held[True] < held[False] / 3


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}], ids=["plain", "truncated"]
)
def test_chunked_logits_change_no_logprob(sampling, monkeypatch):
    """Log-probs and entropies taken in chunks of a few rows have the same bits; gradients differ by fp32 order only."""
    model = make_model("llama", "bf16")
    batch = PackedBatch.from_sequences(random_sequences((20, 31), 130))
    logp, entropy, grads = loss_and_gradients(model, batch, **sampling)
    monkeypatch.setattr(causal_lm, "LOGITS_CHUNK_ELEMENTS", 130 * 7)
    logp_chunked, entropy_chunked, grads_chunked = loss_and_gradients(model, batch, **sampling)
    assert torch.equal(logp, logp_chunked)
    assert torch.equal(entropy, entropy_chunked)
    for name, grad in grads.items():
        assert (grads_chunked[name] - grad).norm() <= 2e-2 * grad.norm(), name


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"]
)
def test_operands_follow_every_optimiser(options):
    """The forward after a step uses the new weights, also with the fused AdamW, which raises no version counter."""
    model = make_model("qwen3", "unified-fp8")
    batch = PackedBatch.from_sequences([[5, 6, 7]])
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    before = model(batch)
    before.float().square().sum().backward()
    optimiser.step()
    stepped = model(batch).detach()
    assert not torch.equal(stepped, before.detach())
    fresh = make_model("qwen3", "unified-fp8")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(batch).detach(), stepped)


def test_operands_follow_other_changes():
    """load_state_dict, also with assign=True, and in-place edits change the forward at once; edits through `.data`
    need `forget_operands`."""
    model = make_model("qwen3", "unified-fp8")
    batch = PackedBatch.from_sequences([[5, 6, 7]])
    first = model(batch).detach()
    other = make_model("qwen3", "unified-fp8", seed=5)
    second = other(batch).detach()
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(batch).detach(), second)
    model.load_state_dict(make_model("qwen3", "unified-fp8").state_dict(), assign=True)
    assert torch.equal(model(batch).detach(), first)
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    with torch.no_grad():
        weight.mul_(-1.0)
    third = model(batch).detach()
    assert not torch.equal(third, first)
    weight.data.mul_(-1.0)
    assert torch.equal(model(batch).detach(), third)
    model.forget_operands()
    assert torch.equal(model(batch).detach(), first)


@pytest.fixture
def quantised_rows():
    """Numbers of rows of the weights that are quantised."""
    rows = []

    def observer(operator, _, arguments, __):
        if operator == "quantise_weight":
            rows.append(arguments[0].shape[0])

    with observed(observer):
        yield rows


def test_weights_are_quantised_once_per_step(quantised_rows):
    """Ten forwards and backwards of one optimiser step quantise every weight once, and the export uses these codes."""
    model = make_model("qwen3", "unified-fp8")
    rows = quantised_rows
    batch = PackedBatch.from_sequences([[5, 6, 7]])
    for _ in range(10):
        model(batch).float().sum().backward()
    assert sum(rows) == sum(row.shape[0] for row in model.plan.modules if row.train_forward == "fp8") > 0
    # k and v have 64 rows, so q, k, v are apart; gate and up are one.
    assert len(rows) == 6 * model.architecture.layers
    exported = dict(model.rollout_tensors())
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert (
        exported["model.layers.0.mlp.up_proj.weight"].data_ptr()
        == layer.prepared().quantised.codes.data_ptr()
    )


def test_a_push_reads_the_weights_three_times_and_quantises_them_once(quantised_rows):
    """Manifest, verification and copy of a learner's push quantise each fp8 weight once in all."""
    model = make_model("qwen3", "unified-fp8")
    engine = make_engine("torch", model.config, "unified-fp8")

    source = WeightSource(model, model.policy, torch.device("cpu"))
    receipt = engine.update_weights(source.in_process_update(source.manifest(3)))
    assert dict(receipt.hashes) == engine.model.weight_hashes()
    assert sum(quantised_rows) == sum(r.shape[0] for r in model.plan.modules if r.train_forward == "fp8") > 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)  # not seen by autograd's counter
    after = engine.update_weights(source.in_process_update(source.manifest(4)))
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    assert after.hashes[name] != receipt.hashes[name]


def test_norms_are_rounded_once_per_change():
    """The weight in the compute dtype is made once and follows changes; one that was made in inference mode, which
    autograd cannot save, is not used in training."""
    model = make_model("qwen3", "unified-fp8")
    norm = model.get_submodule("model.layers.0.self_attn.q_norm")
    with torch.inference_mode():
        norm._rounded()
    batch = PackedBatch.from_sequences([[5, 6, 7]])
    model(batch).float().sum().backward()
    first = norm._rounded()
    assert norm._rounded() is first
    with torch.no_grad():
        norm.weight.mul_(1.5)
    assert torch.equal(norm._rounded(), norm.weight.to(torch.bfloat16))
    norm.weight.data.mul_(2.0)
    model.forget_operands()
    assert torch.equal(norm._rounded(), norm.weight.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_training_after_a_forward_in_inference_mode(kind):
    """Nothing that a forward keeps for the next one is of that mode, which autograd refuses: the gradients are those
    of a model that was not asked before."""
    batch = PackedBatch.from_sequences([[5, 6, 7], [8]])
    asked, fresh = (make_model(kind, "unified-fp8") for _ in range(2))
    with torch.inference_mode():
        asked.token_logprobs(asked(batch), next_tokens(batch))
    grads, expected = (loss_and_gradients(model, batch)[2] for model in (asked, fresh))
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
