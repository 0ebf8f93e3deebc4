"""Files of an experiment directory that something has damaged: named, or passed over, never a traceback."""

import json

import pytest

from rllib_llm.on_disk.checkpoint import (
    MANIFEST_FILE,
    METADATA_FILE,
    CheckpointError,
    read_metadata,
    verify_files,
)
from rllib_llm.on_disk.directories import earlier_run_ids, find_checkpoint, only_here
from rllib_llm.on_disk.errors import DirectoryError
from rllib_llm.tracking.history import HistoryCallback, read_history


@pytest.mark.parametrize("text", ["{", "[1]", '{"run_ids": 3}', '{"run_ids": {"0": null}}', "{}"])
def test_a_damaged_record_of_runs_is_named(tmp_path, text):
    """Going on with other MLflow runs than those that the user sees is for the user to decide."""
    (tmp_path / "tracking.json").write_text(text)
    with pytest.raises(DirectoryError, match=r"tracking\.json: .*Delete it to go on in new MLflow runs"):
        earlier_run_ids(tmp_path)


def test_lines_of_a_curve_that_are_no_rows_are_passed_over(tmp_path):
    """The rest of the curve is read and grows on, whatever stands between: its end is reached with training done."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"training_iteration": 1}\n\xff\xfe\n[1]\n{"a": 2}\n{"training_iteration": "x"}\n{"cut'
    )
    HistoryCallback(tmp_path).on_trial_result(2, [], None, {"training_iteration": 2})
    assert [row["training_iteration"] for row in read_history(tmp_path)] == [1, 2]


def test_a_directory_that_takes_no_lock_is_refused(tmp_path):
    """As a read-only one does, which root, who runs tests in containers, cannot have."""
    (tmp_path / ".lock").mkdir()
    with pytest.raises(DirectoryError, match="cannot be worked in"), only_here(tmp_path):
        pytest.fail("entered")


@pytest.mark.parametrize("metadata", ["{", "[]", '{"rllib_llm": 3}', '{"rllib_llm": {}}'])
def test_a_checkpoint_with_damaged_metadata_is_none(tmp_path, metadata):
    """Neither `--resume` nor `eval` takes it, and reading it says why."""
    checkpoint = tmp_path / "trial" / "checkpoint_000000"
    checkpoint.mkdir(parents=True)
    (checkpoint / METADATA_FILE).write_text(metadata)
    with pytest.raises(DirectoryError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)
    if "{}" not in metadata:
        with pytest.raises(CheckpointError, match=METADATA_FILE):
            read_metadata(str(checkpoint))
    (checkpoint / MANIFEST_FILE).write_text(json.dumps(["no", "files"]))
    with pytest.raises(CheckpointError, match=rf"{MANIFEST_FILE} cannot be read"):
        verify_files(str(checkpoint))
