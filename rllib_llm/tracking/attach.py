"""Adding to the parent run of an experiment what is made after Tune has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rllib_llm.tracking import entries
from rllib_llm.tracking.delivery import Delivery, DeliveryReport, now_ms
from rllib_llm.tracking.mlflow_callback import EXPERIMENT_RUN, MLflowCallback
from rllib_llm.tracking.store import MLflowStore, Operation

if TYPE_CHECKING:
    from rllib_llm.compare.report import Report

__all__ = ["attach_report"]

_TIMEOUT_S = 30.0


def attach_report(callback: MLflowCallback, file: Path, report: Report) -> DeliveryReport:
    """The report as an artefact ``report/report.html``, mean final rewards as metrics, its summary as the description.

    What the store does not take is spooled beside the report, as the callback does.
    """
    store = MLflowStore(callback.tracking_uri, callback.experiment_name, callback.run_ids)
    delivery = Delivery(store, file.with_name("tracking_unsent.jsonl"))
    means = {
        f"final_reward/{arm}": float(np.mean(list(values.values())))
        for arm, values in report.finals.values.items()
    }
    metrics = {"step": report.finals.horizon, "time_ms": now_ms(), "values": entries.clean_keys(means)}
    note = entries.cut("\n".join(f"- {sentence}" for sentence in report.summary), entries.MAX_TAG_VALUE)
    for kind, payload in (
        ("file", {"path": str(file), "folder": "report"}),
        ("metrics", metrics),
        ("tags", {"mlflow.note.content": note}),
    ):
        delivery.submit(Operation(EXPERIMENT_RUN, kind, payload))
    return delivery.close(_TIMEOUT_S)
