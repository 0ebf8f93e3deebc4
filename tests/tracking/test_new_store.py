"""Stores that do not exist yet: where they may be, and several processes that open one at once."""

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy

from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.mlflow_registry import Registry
from rllib_llm.tracking.store import TrackingUnavailableError, store_address

pytestmark = pytest.mark.slow

_OPEN = "import sys; from rllib_llm.tracking.store import open_client; open_client(sys.argv[1]).search_experiments()"


def test_processes_that_open_a_new_store_together_all_get_it(tmp_path):
    """MLflow alone lets both make the tables: one fails, and the file is unusable afterwards."""
    command = [sys.executable, "-W", "ignore", "-c", _OPEN, f"sqlite:///{tmp_path}/new.db"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [process.communicate(timeout=1200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors


def test_a_database_that_can_never_be_written_is_refused_at_the_start(tmp_path):
    """A file where a directory is needed, and a directory where a file is: no write of a long run would arrive."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for place in ("file/mlflow.db", "file/deep/mlflow.db", "directory"):
        with pytest.raises(TrackingUnavailableError, match="cannot be written"):
            store_address(f"sqlite:///{tmp_path}/{place}")
    for place in ("file", "new/mlflow.db", "directory/mlflow.db?timeout=3"):
        store_address(f"sqlite:///{tmp_path}/{place}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file"]


def test_what_is_no_database_is_refused_before_anything_is_written_to_it(tmp_path):
    """A text file, and a kind of database whose driver is not installed; an empty file becomes a database."""
    text = tmp_path / "notes.txt"
    text.write_text("do not lose me")
    with pytest.raises(TrackingUnavailableError, match=r"notes\.txt is not a sqlite database"):
        store_address(f"sqlite:///{text}")
    with pytest.raises(TrackingUnavailableError, match="MLflow cannot use it"):
        store_address("mssql+nosuchdriver://host/db")
    assert text.read_text() == "do not lose me"


def test_a_database_that_mlflow_cannot_open_is_an_error_of_the_registry(tmp_path):
    """Tables of another program's migrations: alembic's error is kept, its traceback is not shown."""
    import sqlite3

    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("create table alembic_version(version_num varchar)")
        database.execute("insert into alembic_version values ('another')")
    with pytest.raises(RegistryError, match=r"other\.db cannot be opened: CommandError: .*'another'"):
        Registry(f"sqlite:///{tmp_path}/other.db")


@pytest.mark.parametrize("name", ["run?seed=1", "a%41b", "100%", "what?"])
def test_a_directory_that_an_address_cannot_name_is_refused(tmp_path, monkeypatch, name):
    """A path with a character that URLs give a meaning would open another file: the error names path and character."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    for uri in (None, "sqlite:///mlflow.db", "sqlite:///sub/mlflow.db?timeout=10"):
        with pytest.raises(TrackingUnavailableError, match="cannot hold the character") as error:
            store_address(uri)
        assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["sp ace", "hash#1", "a&b", "a+b", "ünï", "semi;colon", "at@sign"])
def test_the_database_lies_in_the_directory_of_any_other_name(tmp_path, monkeypatch, name):
    """SQLAlchemy opens the very file that the path says, and a query of the user's own stays a query."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for uri in (None, "sqlite:///mlflow.db", "sqlite:///mlflow.db?timeout=10"):
        url = sqlalchemy.make_url(store_address(uri))
        assert Path(url.database) == folder / "mlflow.db"
        assert dict(url.query) == ({"timeout": "10"} if uri and "timeout" in uri else {})
