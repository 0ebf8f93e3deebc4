"""When can a trainer's and an engine's log-probability be compared at all? Named refusals for the cases where
not."""

from __future__ import annotations

from rllib_llm.mismatch.metrics import MismatchInputError


def require_comparable_sampling(
    *, temperature: float, top_p: float = 1.0, top_k: int = 0, truncation: str = "refuse"
) -> None:
    """Raises MismatchInputError, naming every offending key, unless both sides can state one distribution.

    temperature: > 0; greedy decoding (0) is a point mass and has no importance ratio. The trainer must divide
    its logits by the same temperature: with raw log-probs on one side the ratio is about 2 at T = 0.6
    (trl#4159). top_p, top_k: 1.0 and 0 (or -1) mean no truncation. truncation is
    `policy.logprobs.truncation`: "refuse", or "renormalise" when *both* sides renormalise over the kept
    tokens; renormalising one side only shifts every Delta by the log of the kept mass, so top_p = 0.9 gives
    rho of about 0.9 with identical weights (trl#6789).
    """
    wrong = []
    if not temperature > 0:
        wrong.append(
            f"rollout.temperature = {temperature}: greedy decoding has no sampling distribution to train on; "
            "use > 0 for training rollouts (evaluation may be greedy)"
        )
    if not 0 < top_p <= 1:
        wrong.append(f"rollout.top_p = {top_p}: must be in (0, 1]")
    if truncation not in ("refuse", "renormalise"):
        wrong.append(f"policy.logprobs.truncation = {truncation!r}: 'refuse' or 'renormalise'")
    if truncation == "refuse" and (top_p < 1 or top_k > 0):
        wrong.append(
            f"rollout.top_p = {top_p}, rollout.top_k = {top_k} truncate the distribution, but "
            "policy.logprobs.truncation = 'refuse'; set it to 'renormalise' (both sides then renormalise "
            "over the kept tokens) or sample with top_p = 1 and top_k = 0"
        )
    if wrong:
        raise MismatchInputError(
            "These rollouts cannot be compared with the trainer:\n  " + "\n  ".join(wrong)
        )
