"""The same through an MLflow server, whose artefacts are not on this machine's file system."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from rllib_llm.cli.main import main
from rllib_llm.models import resolve_model_path
from rllib_llm.on_disk.owner import owner_of


@pytest.fixture
def server(tmp_path):
    """Address of a server of its own process; its files lie where the client does not look."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", "sqlite:///server.db"]
    command += [
        "--artifacts-destination",
        "./artefacts",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=60)
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.1)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(600)


def test_artefacts_are_downloaded_once_and_verified(server, trained, tmp_path, monkeypatch, capsys):
    """Register, verify and use as a model path: one copy in the cache, which keeps its policy."""
    cache = tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLIB_LLM_CACHE", str(cache))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////nowhere/mlflow.db")
    uri = ["--tracking-uri", server]
    assert main(["models", "register", str(trained.path), "--name", "adder", "--alias", "best", *uri]) == 0
    assert "MLflow run  not known" in capsys.readouterr().out
    assert main(["models", "verify", "adder@best", *uri]) == 0
    [copy] = (cache / "models").iterdir()
    written = copy.stat().st_mtime_ns
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    path = resolve_model_path("models:/adder@best")
    assert path == copy / "data" / "model" / "hf"
    assert copy.stat().st_mtime_ns == written
    assert owner_of(path).policy.name == "unified-fp8"
    assert os.environ["MLFLOW_TRACKING_URI"] == server
    assert not (tmp_path / "mlflow.db").exists()  # MLflow's default, in the current directory
