"""Opening a new sqlite store from several processes at once."""

import subprocess
import sys

_OPEN = "import sys; from rllib_llm.tracking.store import open_client; open_client(sys.argv[1]).search_experiments()"


def test_processes_that_open_a_new_store_together_all_get_it(tmp_path):
    """MLflow alone lets both make the tables: one fails, and the file is unusable afterwards."""
    command = [sys.executable, "-W", "ignore", "-c", _OPEN, f"sqlite:///{tmp_path}/new.db"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
