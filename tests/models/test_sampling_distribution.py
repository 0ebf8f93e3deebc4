import math

import pytest
import torch

from precision_kernels import log_softmax
from precision_kernels.reference import exp
from rllib_llm.engines.sampler import sample, sequence_uniforms
from rllib_llm.models import sampling_distribution
from rllib_llm.models.sampling_distribution import logprobs_of, support

VOCAB = 50
SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.3, 5, 1.0),
    (1.0, 0, 0.8),
    (0.5, 7, 0.6),
    (1.0, 1, 1.0),
    (1.0, VOCAB, 1.0),
]


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def all_logprobs(row: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """log-prob of every id that can be sampled from one row, -inf for the others; by the code under test."""
    scaled = sampling_distribution.truncated_logits(row[None], temperature, top_k, top_p)[0]
    possible = torch.nonzero(scaled > -torch.inf)[:, 0]
    logp, _ = logprobs_of(row.expand(len(possible), -1), possible, temperature, top_k, top_p)
    return torch.full((VOCAB,), -torch.inf).index_put((possible,), logp)


def by_definition(row: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The same in fp64, token by token, as the documentation says it."""
    p = torch.softmax(row.double() / temperature, 0)
    order = p.argsort(descending=True)
    kept = order[: top_k or VOCAB].tolist()
    if top_p < 1:
        mass, total, chosen = 0.0, sum(p[i].item() for i in kept), []
        for i in kept:
            if mass / total >= top_p:
                break
            chosen.append(i)
            mass += p[i].item()
        kept = chosen
    out = torch.zeros(VOCAB, dtype=torch.float64)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_logprobs_are_of_the_renormalised_distribution(temperature, top_k, top_p):
    """exp(log-prob) over all ids is the truncated, tempered, renormalised distribution, and sums to one."""
    for row in random_logits(8):
        ours = all_logprobs(row, temperature, top_k, top_p).double().exp()
        expected = by_definition(row, temperature, top_k, top_p)
        assert torch.equal(ours > 0, expected > 0)
        torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)
        assert abs(ours.sum().item() - 1) < 1e-5


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_entropy_and_gradient_are_those_of_the_same_distribution(temperature, top_k, top_p):
    """Entropy and d log p / d logits agree with fp64 autograd through a masked softmax."""
    logits = random_logits(6).requires_grad_()
    scaled = sampling_distribution.truncated_logits(logits.detach(), temperature, top_k, top_p)
    ids = scaled.argmax(-1)
    logp, entropy = logprobs_of(logits, ids, temperature, top_k, top_p)
    (logp.sum() + 0.3 * entropy.sum()).backward()
    wide = logits.detach().double().requires_grad_()
    masked = (wide / temperature).masked_fill(scaled == -torch.inf, -1e9)
    log_p = torch.log_softmax(masked, -1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    (log_p.gather(-1, ids[:, None]).sum() + 0.3 * expected_entropy.sum()).backward()
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), wide.grad, atol=1e-5, rtol=1e-4)


def test_ties_do_not_depend_on_the_order_of_the_vocabulary():
    """Ids whose logit equals the last kept one are kept, wherever they stand."""
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    assert support(row, 2, 1.0)[0].tolist() == [False, True, True, True, False, True]
    permutation = torch.tensor([5, 0, 3, 1, 4, 2])
    assert torch.equal(support(row[:, permutation], 2, 0.9), support(row, 2, 0.9)[:, permutation])


def test_top_p_compares_exact_sums():
    """A set whose probability is below top_p by 1e-10 is not enough, one above it is; fp32 cannot tell them."""
    [row] = random_logits(1)
    ordered = exp(log_softmax(row.sort(descending=True).values[None]))[0].tolist()
    for count in range(1, 20):
        mass = math.fsum(ordered[:count])
        assert support(row[None], 0, mass - 1e-10).sum() == count
        assert support(row[None], 0, mass + 1e-10).sum() == count + 1


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [300, 4096, 151_936])
def test_on_a_gpu_a_rows_support_does_not_depend_on_the_other_rows(vocab):
    """Rows alone, among few and among many have the same support, for many top_p."""
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(2)).cuda()
    for top_p in torch.linspace(0.05, 0.999, 40).tolist():
        together = support(logits, 0, top_p)
        many = support(logits.repeat(32, 1)[: (1 << 27) // vocab], 0, top_p)[:64]
        assert torch.equal(together, many)
        for rows in (1, 3):
            assert torch.equal(support(logits[:rows], 0, top_p), together[:rows])


def test_a_target_outside_the_own_support_keeps_a_finite_logprob():
    """A trainer whose numbers would have cut a sampled token still gives it a finite log-prob."""
    row = torch.tensor([[5.0, 4.0, 0.0]])
    logp, _ = logprobs_of(row, torch.tensor([2]), 1.0, 2, 1.0)
    expected = torch.log_softmax(row, -1)[0, 2]
    torch.testing.assert_close(logp[0], expected, atol=1e-6, rtol=1e-6)


def test_banned_ids_have_no_mass_in_banned_rows_only():
    """A banned id is never drawn and the others are renormalised; other rows keep their bits."""
    logits = random_logits(2).fill_diagonal_(50.0)
    rows = torch.tensor([True, False])
    uniforms = torch.tensor([0.5, 0.5], dtype=torch.float64)
    ids, logp = sample(logits, uniforms, 0.7, 0, 1.0, (0, 1), rows)
    assert ids[0] not in (0, 1)
    assert ids[1] == 1
    plain, _ = logprobs_of(logits[1:], ids[1:], 0.7)
    assert torch.equal(logp[1:], plain)
    expected = torch.log_softmax((logits[0] / 0.7).index_fill(0, torch.tensor([0, 1]), -torch.inf), -1)
    torch.testing.assert_close(logp[0], expected[ids[0]], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_a_row_does_not_depend_on_its_batch(temperature, top_k, top_p):
    """Ids, log-probs and entropies of a row have the same bits alone, in front, and at the end of a batch."""
    logits, uniforms = random_logits(37), torch.from_numpy(sequence_uniforms([1], 37))
    ids, logp = sample(logits, uniforms, temperature, top_k, top_p)
    _, entropy = logprobs_of(logits, ids, temperature, top_k, top_p)
    for i in (0, 1, 17, 36):
        one_id, one_logp = sample(logits[i : i + 1], uniforms[i : i + 1], temperature, top_k, top_p)
        _, one_entropy = logprobs_of(logits[i : i + 1], one_id, temperature, top_k, top_p)
        assert (one_id, one_logp, one_entropy) == (ids[i], logp[i], entropy[i])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_frequencies_follow_the_reported_probabilities(temperature, top_k, top_p):
    """Over 20 000 draws the frequencies fit exp(log-prob) by a chi-squared test at about five sigma."""
    row, count = random_logits(1, seed=4), 20_000
    uniforms = torch.from_numpy(sequence_uniforms([7, 1], count))
    ids, logp = sample(row.expand(count, -1), uniforms, temperature, top_k, top_p)
    expected = all_logprobs(row[0], temperature, top_k, top_p).double().exp() * count
    observed = torch.bincount(ids, minlength=VOCAB).double()
    assert torch.all(observed[expected == 0] == 0)
    large = expected >= 5
    statistic = ((observed - expected)[large] ** 2 / expected[large]).sum().item()
    freedom = max(1, int(large.sum()) - 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 10
    assert torch.equal(logp, all_logprobs(row[0], temperature, top_k, top_p)[ids])


def test_the_largest_uniform_never_draws_an_impossible_id():
    """u = 1 - 2^-53 and u = 0 give ids of positive probability even when the last and first ids have none."""
    logits = torch.full((2, VOCAB), -200.0)
    logits[:, 10:20] = 1.0
    uniforms = torch.tensor([1 - 2.0**-53, 0.0], dtype=torch.float64)
    ids, logp = sample(logits, uniforms, 1.0, 0, 1.0)
    assert ids.tolist() == [19, 10]
    assert torch.isfinite(logp).all()


def test_greedy_takes_the_lowest_of_equals_and_reports_temperature_one():
    """Temperature 0: argmax, ties to the lowest id; the log-prob is the untruncated one at temperature 1."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    ids, logp = sample(logits, torch.zeros(1, dtype=torch.float64), 0.0, 1, 0.1)
    assert ids.tolist() == [1]
    assert torch.equal(logp, logprobs_of(logits, ids)[0])


def test_streams_of_different_sequences_differ_and_repeat():
    """(seed, prompt, child) names a stream: equal names equal numbers, any other name other numbers, prefixes agree."""
    names = [(s, p, c) for s in (0, 1, 2**62) for p in (0, 1) for c in (0, 1)]
    draws = {name: tuple(sequence_uniforms(name, 8)) for name in names}
    assert len(set(draws.values())) == len(names)
    assert tuple(sequence_uniforms(names[3], 20)[:8]) == draws[names[3]]
