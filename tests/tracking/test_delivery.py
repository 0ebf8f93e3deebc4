"""Writes are delivered in order, survive a store that is away, and are never lost silently."""

import json
import threading

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, TEMPORARILY_UNAVAILABLE

from rllib_llm.tracking import send_spooled
from rllib_llm.tracking.delivery import Delivery
from rllib_llm.tracking.store import MLflowStore, Operation, artifact_root, resolve_uri


class FlakyStore(MLflowStore):
    """A real sqlite store behind a switch: while `away`, every write fails as a server that does not answer fails."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.away = threading.Event()
        self.writers = set()

    def apply(self, op):
        self.writers.add(threading.current_thread())
        if self.away.is_set():
            raise MlflowException("connection refused", error_code=TEMPORARILY_UNAVAILABLE)
        super().apply(op)


def metric(step, run="experiment"):
    return Operation(
        run, "metrics", {"step": step, "time_ms": 1_700_000_000_000 + step, "values": {"reward": step / 10}}
    )


def recorded(uri, run_id):
    return [(m.step, m.value) for m in MlflowClient(tracking_uri=uri).get_metric_history(run_id, "reward")]


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """One sqlite store for the module: creating its tables costs seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def test_a_store_that_goes_away_gets_everything_in_order_later(uri, tmp_path):
    """What is submitted while the store is away waits without blocking, and all of it arrives in order afterwards."""
    store = FlakyStore(uri, "away")
    delivery = Delivery(store, tmp_path / "unsent.jsonl")
    delivery.submit(Operation("experiment", "create", {"name": "r"}))
    delivery.submit(metric(0))
    assert delivery.flush(600)
    store.away.set()
    for step in range(1, 6):
        delivery.submit(metric(step))
    assert threading.current_thread() not in store.writers
    assert not delivery.flush(0.2)
    store.away.clear()
    report = delivery.close(600)
    assert report.complete
    assert report.spool is None
    assert recorded(uri, store.run_ids["experiment"]) == [(step, step / 10) for step in range(6)]


def test_what_is_never_delivered_is_spooled_and_can_be_sent_later(uri, tmp_path):
    """A store away until the end: the report says how many writes wait where, and sending that file delivers them."""
    store = FlakyStore(uri, "spooled")
    spool = tmp_path / "unsent.jsonl"
    delivery = Delivery(store, spool)
    delivery.submit(Operation("experiment", "create", {"name": "r"}))
    assert delivery.flush(600)
    store.away.set()
    for step in range(3):
        delivery.submit(metric(step))
    report = delivery.close(0.3)
    assert (report.undelivered, report.spool) == (3, spool)
    assert str(spool) in str(report)
    run_id = store.run_ids["experiment"]
    assert recorded(uri, run_id) == []
    again = send_spooled(spool)
    assert again.complete
    assert recorded(uri, run_id) == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert not spool.exists()
    assert spool.with_suffix(".sent").exists()


def test_a_refused_write_is_reported_and_does_not_hold_up_the_rest(uri, tmp_path):
    """A write that the store refuses for good is dropped with a line in the report; later ones arrive."""
    store = MLflowStore(uri, "refused")
    delivery = Delivery(store, tmp_path / "unsent.jsonl")
    delivery.submit(Operation("experiment", "create", {"name": "r"}))
    delivery.submit(Operation("experiment", "params", {"lr": "1"}))
    delivery.submit(Operation("experiment", "params", {"lr": "2"}))  # parameters are immutable
    delivery.submit(metric(7, run="no such run"))
    delivery.submit(metric(1))
    report = delivery.close(600)
    assert report.delivered == 3
    assert len(report.refused) == 2
    assert "params" in report.refused[0]
    assert recorded(uri, store.run_ids["experiment"]) == [(1, 0.1)]


def test_a_full_queue_spools_the_newest(uri, tmp_path):
    """Beyond the limit of waiting operations, further ones go to the spool file first; sent, all arrive in order."""
    store = FlakyStore(uri, "full")
    store.away.set()
    delivery = Delivery(store, tmp_path / "unsent.jsonl", max_waiting=2)
    delivery.submit(Operation("experiment", "create", {"name": "r"}))
    for step in range(3):
        delivery.submit(metric(step))
    report = delivery.close(0.1)
    assert report.undelivered == 4
    kinds = [json.loads(line).get("kind") for line in (tmp_path / "unsent.jsonl").read_text().splitlines()]
    assert [kind for kind in kinds if kind] == ["metrics", "metrics", "create", "metrics"]
    sent = send_spooled(tmp_path / "unsent.jsonl")
    assert (sent.delivered, sent.refused) == (4, ())
    (run,) = MlflowClient(uri).search_runs([MlflowClient(uri).get_experiment_by_name("full").experiment_id])
    assert recorded(uri, run.info.run_id) == [(0, 0.0), (1, 0.1), (2, 0.2)]


def test_sending_that_is_interrupted_keeps_what_is_left(uri, tmp_path, monkeypatch):
    """Ctrl-C while the store does not answer: the file holds every write, and goes out at the next attempt."""
    store = FlakyStore(uri, "interrupted")
    store.away.set()
    spool = tmp_path / "unsent.jsonl"
    delivery = Delivery(store, spool)
    delivery.submit(Operation("experiment", "create", {"name": "r"}))
    delivery.submit(metric(0))
    delivery.close(0.1)
    flush = Delivery.flush

    def interrupted(self, timeout_s):
        if timeout_s:
            raise KeyboardInterrupt
        return flush(self, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "flush", interrupted)
        patch.setattr("rllib_llm.tracking.delivery.MLflowStore", lambda *_: store)
        assert send_spooled(spool).undelivered == 2
    assert not spool.with_suffix(".again").exists()
    assert send_spooled(spool).delivered == 2


def test_foreign_spool_file_is_refused(tmp_path):
    """A file that is not a spool is refused with file and line."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"tracking_uri": "sqlite:///x", "experiment": "e", "run_ids": {}}\n{"what": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        send_spooled(bad)


def test_permanent_errors_are_told_from_passing_ones():
    """HTTP 4xx is final, a busy or silent server is not, and a wrong operation is final."""
    permanent = MLflowStore.is_permanent
    assert permanent(MlflowException("no", error_code=INVALID_PARAMETER_VALUE))
    assert permanent(KeyError("run"))
    assert not permanent(MlflowException("busy", error_code=TEMPORARILY_UNAVAILABLE))
    assert not permanent(MlflowException("API request failed"))
    assert not permanent(ConnectionError("refused"))


def test_relative_sqlite_is_resolved_at_once(tmp_path, monkeypatch):
    """A relative sqlite file means the directory of the process that was told about it, with artefacts beside it."""
    monkeypatch.chdir(tmp_path)
    assert resolve_uri("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve_uri("http://host:5000") == "http://host:5000"
    assert artifact_root(f"sqlite:///{tmp_path}/mlflow.db") == f"{tmp_path}/mlartifacts"
    assert artifact_root("http://host:5000") is None


def test_a_refused_creation_spools_all_that_belongs_to_the_run(uri, tmp_path):
    """400 on "create run": it, its children and their writes wait in the file, and arrive when the cause is gone."""

    class Refusing(MLflowStore):
        def _create(self, op):
            if op.run == "experiment":
                raise MlflowException("tag too long", error_code=INVALID_PARAMETER_VALUE)
            super()._create(op)

    spool = tmp_path / "unsent.jsonl"
    delivery = Delivery(Refusing(uri, "refusing"), spool)
    delivery.submit(Operation("experiment", "create", {"name": "r"}))
    delivery.submit(Operation("0", "create", {"name": "t", "parent": "experiment"}))
    delivery.submit(metric(1, run="0"))
    delivery.submit(metric(2))
    report = delivery.close(600)
    assert (len(report.refused), report.undelivered) == (1, 4)
    sent = send_spooled(spool)
    assert (sent.delivered, sent.refused, sent.undelivered) == (4, (), 0)
