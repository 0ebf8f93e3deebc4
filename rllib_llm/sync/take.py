"""One function for all engines: by whatever transport an update came, verify it, apply it, say what is held."""

from __future__ import annotations

from collections.abc import Callable

from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.sync.base import expected_specs
from rllib_llm.sync.packed import WeightSyncError, WeightUpdate
from rllib_llm.sync.receiver import Incoming, receive
from rllib_llm.sync.stream import Groups, StreamIncoming, StreamOffer
from rllib_llm.sync.topology import WeightTransportError
from rllib_llm.sync.verify import ScaleRange, WeightReceipt, verify_update


def take_update(
    update: WeightUpdate | Incoming | StreamOffer,
    model: CausalLM,
    groups: Groups,
    begin: Callable[[], None],
    finish: Callable[[int], None],
) -> WeightReceipt:
    """Have `model` (side "rollout") hold an update; arguments and errors as of `rllib_llm.sync.receiver.receive`.

    Args:
        groups: the process's group for broadcasts.
    """
    device = next(model.buffers()).device
    if isinstance(update, StreamOffer):
        try:
            update = StreamIncoming(update, device, groups)
        except WeightTransportError as error:
            raise WeightSyncError([str(error)], update.manifest.version) from error
    if isinstance(update, Incoming):
        return receive(update, model, begin, finish)
    scales = ScaleRange.of(model.policy)
    expected = expected_specs(model, update.base, update.version)
    verify_update(update, expected, model.policy.fingerprint, model.plan.hash, device, scales)
    begin()
    tensors = ((name, tensor.view()) for name, tensor in update.tensors.items())
    model.load_rollout_tensors(tensors, adapters_only=update.base is not None)
    finish(update.version)
    return WeightReceipt(update.version, model.policy.fingerprint, model.plan.hash, model.weight_hashes())
