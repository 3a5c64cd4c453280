"""Read a split of a task from a file: GLUE's TSV, JSON lines, CSV or Parquet."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smyrf.experiments.nlp.tasks import Task

# Text formats may be compressed with gzip.
SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".tsv.gz", ".csv.gz", ".jsonl.gz", ".json.gz")


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the line."""


def find_split(folder: Path, task: Task, split: str) -> Path | None:
    """Find the file of a split in a folder or in the task's subfolder; None if there is none.

    Raises:
        DataError: two files could be the split.

    Example:
        >>> import tempfile
        >>> from smyrf.experiments.nlp.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as name:
        ...     file = Path(name) / "glue" / "RTE" / "dev.tsv"
        ...     file.parent.mkdir(parents=True)
        ...     _ = file.write_text("")
        ...     find_split(Path(name), TASKS["rte"], "validation").relative_to(name).as_posix()
        'glue/RTE/dev.tsv'
    """
    for place in places(folder, task):
        names = [stem + suffix for stem in task.files[split] for suffix in SUFFIXES]
        found = [place / name for name in names if (place / name).is_file()]
        if len(found) > 1:
            raise DataError(f"{found[0]} and {found[1]} could both be the {split} split of {task.title}: keep one")
        if found:
            return found[0]
    return None


def places(folder: Path, task: Task) -> list[Path]:
    """Folders that may hold the files of a task; the task's own come first, or another task's files would match."""
    below = [folder / name for name in (task.title, task.name)]
    below += [folder / "glue" / name for name in (task.title, task.name)]
    return [*below, folder]


def read_split(path: Path, task: Task) -> dict[str, list[Any]]:
    """Read the texts and labels of a file as columns.

    Returns:
        the columns in `task.texts`, and ``label``: class indices or scores.

    Raises:
        DataError: the file is invalid; the message names the line or row.
    """
    rows = _ROWS[path.name.removesuffix(".gz").rsplit(".", 1)[-1]](path, task)
    wanted = (*task.texts, "label")
    found: dict[str, list[Any]] = {name: [] for name in wanted}
    try:
        for place, row in rows:
            row = _renamed(row, task, f"{path}: {place}")
            for name in wanted:
                if name not in row:
                    there = ", ".join(str(one) for one in row if one is not None)
                    raise DataError(
                        f"{path}: {place} has no column {name!r}; {task.title} needs it, the columns are: {there}"
                    )
            for name in task.texts:
                if not isinstance(row[name], str):
                    raise DataError(f"{path}: {place}: {name}={row[name]!r} must be text")
                if not row[name].isascii() and any("\ud800" <= letter <= "\udfff" for letter in row[name]):
                    raise DataError(f"{path}: {place}: {name} holds half of a surrogate pair, which is no character")
                found[name].append(row[name])
            found["label"].append(_label(row["label"], task, f"{path}: {place}"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: line {_undecodable(path)} is not UTF-8") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not found["label"]:
        raise DataError(f"{path} holds no rows")
    return found


def _renamed(row: dict[Any, Any], task: Task, place: str) -> dict[Any, Any]:
    """Rename the columns of a row to the task's names."""
    found: dict[Any, Any] = {}
    for name, value in row.items():
        own = task.columns.get(name, name) if name is not None else None
        if own in found:
            raise DataError(f"{place} has two columns that could be {own!r}, one of them {name!r}: keep one")
        found[own] = value
    return found


def _label(value: Any, task: Task, place: str) -> int | float:
    """A class index from an index or a name; for regression, a score."""
    if not task.labels:
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = float("nan")
        if isinstance(value, bool) or not score - score == 0:  # inf − inf and nan − nan are nan
            raise DataError(f"{place}: label={value!r} must be a score, a finite number")
        return score
    text = str(value).strip()
    numbers = {str(number): number for number in range(len(task.labels))}
    numbers |= {f"{number}.0": number for number in range(len(task.labels))}  # as floats are written
    if len(task.labels) == 2:
        numbers |= {"False": 0, "True": 1}
    if text in task.labels:
        return task.labels.index(text)
    if text not in numbers:
        raise DataError(
            f"{place}: label={value!r} must be one of {', '.join(task.labels)}, or a number from 0 to "
            f"{len(task.labels) - 1}"
        )
    return numbers[text]


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _undecodable(path: Path) -> int:
    """Number of the first line that is not UTF-8."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return number


def _separated(path: Path, task: Task) -> Iterator[tuple[str, dict[Any, Any]]]:
    tabs = ".tsv" in path.suffixes
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        # GLUE's files are not quoted: a quotation mark is text.
        reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(file)
        header: Sequence[str] | None = None
        n_broken = 0
        for fields in reader:
            if not any(fields):
                continue
            if header is None:
                if not tabs or not task.header or set(task.header) & set(fields):
                    header = fields
                    for name in header:
                        if header.count(name) > 1:
                            raise DataError(f"{path}: line {reader.line_num} has the column {name!r} twice")
                    continue
                header = task.header
            if tabs and task.has_broken_lines and len(fields) < len(header):
                n_broken += 1
                continue
            if len(fields) != len(header):
                what = f"{len(fields)} fields instead of {len(header)}"
                raise DataError(f"{path}: line {reader.line_num} has {what} ({', '.join(header)})")
            yield f"line {reader.line_num}", dict(zip(header, fields, strict=True))
        if n_broken:
            warnings.warn(f"{path}: {n_broken} lines with too few fields were left out", stacklevel=2)


def _json_lines(path: Path, task: Task) -> Iterator[tuple[str, dict[Any, Any]]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}: line {number} is not an object with columns")
            yield f"line {number}", row


def _parquet(path: Path, task: Task) -> Iterable[tuple[str, dict[Any, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}") from error


_ROWS = {"tsv": _separated, "csv": _separated, "jsonl": _json_lines, "json": _json_lines, "parquet": _parquet}
