"""Rows of a file of problems, one after the other: JSONL, Parquet, Arrow, a directory that `datasets` saved.

Only one row (Parquet: one row group) is in memory at a time. What is wrong with a row is a `RowError`, never a
traceback of a parser.
"""

from __future__ import annotations

import bisect
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rllib_llm.envs.protocol import EnvConfigError
from rllib_llm.errors import RllibLLMError

Record = Mapping[str, Any]


class RowError(RllibLLMError, ValueError):
    """What is wrong with one row."""


class JsonNumber(str):
    """A number of a JSON file as it was written there: 0.00001 stays "0.00001"."""

    __slots__ = ()


class ProblemSource(ABC):
    """The rows of one file. `unit` is what its rows are called in messages."""

    unit = "row"

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, int, Record | RowError]]:
        """(number from 1, address, content) of every row in order; blank lines are left out."""

    @abstractmethod
    def read(self, address: int) -> Record:
        """The row at an address that `scan` gave."""


class JsonLines(ProblemSource):
    """A JSON object a line; an address is the byte where the line begins."""

    unit = "line"

    def __init__(self, path: Path):
        self.path = path

    def scan(self) -> Iterator[tuple[int, int, Record | RowError]]:
        address = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                    line, address = line[3:], 3
                if line.strip():
                    content: Record | RowError
                    try:
                        content = _json_object(line)
                    except RowError as error:
                        content = error
                    yield number, address, content
                address += len(line)

    def read(self, address: int) -> Record:
        with self.path.open("rb") as file:
            file.seek(address)
            return _json_object(file.readline())


def _json_object(line: bytes) -> Record:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start})") from None
    try:
        item = json.loads(
            text,
            parse_int=JsonNumber,
            parse_float=JsonNumber,
            parse_constant=JsonNumber,
            object_pairs_hook=_no_repeats,
        )
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise RowError("nested too deeply to be read") from None
    if not isinstance(item, dict):
        name = "number" if isinstance(item, JsonNumber) else type(item).__name__
        raise RowError(f"expected an object, got {name}")
    return item


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    item = dict(pairs)
    if len(item) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise RowError(f"the key {twice[0]!r} is there twice")
    return item


class Parquet(ProblemSource):
    """A Parquet file; an address is the row's number from 0."""

    def __init__(self, path: Path):
        self.path = path
        self._file = _opened(path, lambda: _arrow().parquet.ParquetFile(path))
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = array("Q", [sum(counts[:i]) for i in range(len(counts))])
        self._group = lru_cache(maxsize=4)(self._read_group)

    def _read_group(self, group: int) -> Any:
        return self._file.read_row_group(group)

    def scan(self) -> Iterator[tuple[int, int, Record | RowError]]:
        number = 0
        for batch in self._file.iter_batches(batch_size=1024):
            for row in _rows(batch):
                yield number + 1, number, row
                number += 1

    def read(self, address: int) -> Record:
        group = bisect.bisect_right(self._starts, address) - 1
        table = self._group(group)
        return _one(table.slice(address - self._starts[group], 1))


class Arrow(ProblemSource):
    """Arrow files of `datasets` (streams or files), mapped into memory; an address is the row's number from 0."""

    def __init__(self, paths: list[Path]):
        self._batches = [
            batch for path in paths for batch in _opened(path, lambda path=path: _record_batches(path))
        ]
        self._starts = array("Q")
        total = 0
        for batch in self._batches:
            self._starts.append(total)
            total += batch.num_rows

    def scan(self) -> Iterator[tuple[int, int, Record | RowError]]:
        number = 0
        for batch in self._batches:
            for start in range(0, batch.num_rows, 1024):
                for row in _rows(batch.slice(start, 1024)):
                    yield number + 1, number, row
                    number += 1

    def read(self, address: int) -> Record:
        position = bisect.bisect_right(self._starts, address) - 1
        batch = self._batches[position]
        return _one(batch.slice(address - self._starts[position], 1))


class Several(ProblemSource):
    """Files of one kind as one; rows are counted through."""

    def __init__(self, sources: list[ProblemSource]):
        self._sources, self.unit = sources, "row"
        self._bits = max(1, (len(sources) - 1).bit_length())

    def scan(self) -> Iterator[tuple[int, int, Record | RowError]]:
        number = 0
        for position, source in enumerate(self._sources):
            for _, address, content in source.scan():
                number += 1
                yield number, address << self._bits | position, content

    def read(self, address: int) -> Record:
        return self._sources[address & ((1 << self._bits) - 1)].read(address >> self._bits)


def open_source(path: Path) -> ProblemSource:
    """The source that `path` is.

    A file *.parquet, *.arrow, any other: JSONL. A directory that `Dataset.save_to_disk` wrote, or one of *.parquet,
    *.arrow or *.jsonl files. Raises `EnvConfigError`.
    """
    try:
        if not path.is_dir():
            return _file(path)
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if (p / "state.json").exists())
            raise EnvConfigError(
                f"env.config: {path} holds several splits ({', '.join(splits)}): name one of them, e.g. path = "
                f"{path / (splits[0] if splits else 'train')} and eval_path = another"
            )
        for ending in ("arrow", "parquet", "jsonl"):
            files = sorted(path.glob(f"*.{ending}"))
            if (state := path / "state.json").exists() and ending == "arrow":
                names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
                files = [path / os.path.basename(name) for name in names]
            if files and ending == "arrow":
                return Arrow(files)
            if files:
                sources = [_file(file) for file in files]
                return sources[0] if len(sources) == 1 else Several(sources)
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, EnvConfigError):
            raise
        raise EnvConfigError(f"env.config: cannot read {path.absolute()}: {error}") from error
    raise EnvConfigError(
        f"env.config: the directory {path.absolute()} holds no *.arrow, *.parquet or *.jsonl file"
    )


def _file(path: Path) -> ProblemSource:
    if path.suffix == ".parquet":
        return Parquet(path)
    if path.suffix == ".arrow":
        return Arrow([path])
    path.open("rb").close()
    return JsonLines(path)


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvConfigError(
            "Parquet and Arrow files need the package pyarrow: pip install 'rllib-llm[tasks]'"
        ) from error
    return pyarrow


def _opened(path: Path, call: Any) -> Any:
    arrow = _arrow()
    try:
        return call()
    except (arrow.ArrowException, OSError) as error:
        raise EnvConfigError(f"env.config: cannot read {path.absolute()}: {error}") from error


def _record_batches(path: Path) -> list[Any]:
    arrow = _arrow()
    mapped = arrow.memory_map(str(path))
    try:
        reader = arrow.ipc.open_stream(mapped)
        return list(reader)
    except arrow.ArrowInvalid:
        mapped.seek(0)
        file = arrow.ipc.open_file(mapped)
        return [file.get_batch(i) for i in range(file.num_record_batches)]


def _rows(batch: Any) -> Iterator[Record | RowError]:
    try:
        yield from batch.to_pylist()
    except (ValueError, UnicodeDecodeError):  # one value of the batch is not UTF-8: find it
        for position in range(batch.num_rows):
            try:
                yield batch.slice(position, 1).to_pylist()[0]
            except ValueError as error:
                yield RowError(f"cannot be read: {error}")


def _one(table: Any) -> Record:
    row: Record = table.to_pylist()[0]
    return row
