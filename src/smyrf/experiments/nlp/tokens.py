"""Tokenise texts, with a cache on disk: a second run of the same task does not tokenise again."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smyrf.experiments.nlp.tasks import Task
from smyrf.tools.error_text import first_line
from smyrf.tuning.machine import cache_folder


def tokens_folder() -> Path:
    """Folder of cached token ids."""
    return cache_folder() / "tokens"


def tokenise(rows: Any, tokenizer: Any, task: Task, max_length: int, folder: Path | None = None) -> Any:
    """Convert texts to token ids, truncated to `max_length` but not padded, and add ``labels``.

    Args:
        rows: a `datasets.Dataset` with the text columns of `task` and ``label``.
        folder: cache folder; `tokens_folder()` by default. Files are named by a hash of texts, labels, tokenizer and
            length.

    Returns:
        a memory-mapped `datasets.Dataset`.
    """
    import pyarrow

    folder = tokens_folder() if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}, the cache of token ids, cannot be created: {error}; set SMYRF_CACHE") from error
    file = folder / f"{task.name}-{max_length}-{_key(rows, tokenizer, task, max_length)}.arrow"

    def encode(some: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(*(some[name] for name in task.texts), truncation=True, max_length=max_length, verbose=False)
        return {**encoded, "labels": some["label"]}

    def mapped() -> Any:
        return rows.map(
            encode,
            batched=True,
            remove_columns=rows.column_names,
            cache_file_name=str(file),
            new_fingerprint=file.stem.rsplit("-", 1)[-1],
            desc=f"tokenise {task.title}",
        )

    with _bar_on_terminals():
        try:
            found = mapped()
            if len(found) == len(rows):
                return found
        except (pyarrow.ArrowException, OSError, ValueError):
            pass
        file.unlink(missing_ok=True)  # damaged, for example by a full disk
        try:
            return mapped()
        except Exception as error:
            if (cause := _os_error(error)) is None:
                raise
            reason = cause.strerror or first_line(cause)
            raise ValueError(
                f"{folder}, the cache of token ids, cannot be written: {reason}; set SMYRF_CACHE"
            ) from error


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer as it was loaded, without the truncation and padding of its last call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(folder)


def _os_error(error: BaseException | None) -> OSError | None:
    """The system's error behind another: on a full disk datasets fails again, when it closes the file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def largest_token(rows: Any) -> int:
    """Largest token id in all rows."""
    import pyarrow.compute

    return pyarrow.compute.max(rows.data["input_ids"].combine_chunks().flatten()).as_py()


@contextmanager
def _bar_on_terminals() -> Iterator[None]:
    import datasets

    before = datasets.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if before:
            datasets.enable_progress_bars()


def _key(rows: Any, tokenizer: Any, task: Task, max_length: int) -> str:
    found = hashlib.sha256()
    settings: list[Any] = [type(tokenizer).__name__, tokenizer.model_input_names, tokenizer.truncation_side]
    settings += [task.texts, max_length]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in pure Python, which cannot be serialised
        settings += [sorted(tokenizer.get_vocab().items()), repr(tokenizer)]
    else:
        description = json.loads(backend.to_str())
        # Truncation and padding change with every call.
        settings.append({name: part for name, part in description.items() if name not in ("truncation", "padding")})
    found.update(json.dumps(settings).encode())
    found.update(hash_rows(rows, task).encode())
    return found.hexdigest()[:32]


def hash_rows(rows: Any, task: Task) -> str:
    """Hash of all texts and labels, in order."""
    found = hashlib.sha256()
    for name in (*task.texts, "label"):
        for value in rows[name]:
            found.update(repr(value).encode("utf-8", "surrogatepass"))
            found.update(b"\0")
    return found.hexdigest()
