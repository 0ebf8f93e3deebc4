"""Adding to the parent run of an experiment what is made after Tune has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rllib_llm.tracking import entries
from rllib_llm.tracking.delivery import Delivery, DeliveryReport, now_ms
from rllib_llm.tracking.mlflow_callback import EXPERIMENT_RUN, MLflowCallback
from rllib_llm.tracking.store import MLflowStore, Operation

__all__ = ["attach_report"]

_TIMEOUT_S = 30.0


def attach_report(
    callback: MLflowCallback,
    file: Path,
    final_rewards: Mapping[str, float],
    step: int,
    summary: Sequence[str],
) -> DeliveryReport:
    """The report as an artefact ``report/report.html``, mean final rewards as metrics, its summary as the description.

    What the store does not take is spooled beside the report, as the callback does.

    Args:
        final_rewards: arm -> mean over its seeds. step: the iteration that they are of.
        summary: sentences.
    """
    store = MLflowStore(callback.tracking_uri, callback.experiment_name, callback.run_ids)
    delivery = Delivery(store, file.with_name("tracking_unsent.jsonl"))
    values = entries.clean_keys({f"final_reward/{arm}": value for arm, value in final_rewards.items()})
    metrics = {"step": step, "time_ms": now_ms(), "values": values}
    note = entries.cut("\n".join(f"- {sentence}" for sentence in summary), entries.MAX_TAG_VALUE)
    for kind, payload in (
        ("file", {"path": str(file), "folder": "report"}),
        ("metrics", metrics),
        ("tags", {"mlflow.note.content": note}),
    ):
        delivery.submit(Operation(EXPERIMENT_RUN, kind, payload))
    return delivery.close(_TIMEOUT_S)
