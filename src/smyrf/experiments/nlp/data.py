"""Load the splits of a task from a folder or from the Hugging Face hub, whole or as a sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smyrf.experiments.nlp.files import SUFFIXES, DataError, find_split, places, read_split
from smyrf.experiments.nlp.tasks import Task
from smyrf.tools.error_text import first_line

# Fraction of the training split that is held out if there is no evaluation split, and the seed that selects rows: runs
# with different seeds see the same rows.
HELD_OUT, ROWS_SEED = 0.2, 0


def load_splits(
    task: Task, folder: Path | None, *, n_train: int | None = None, n_eval: int | None = None
) -> dict[str, Any]:
    """Load the training and evaluation splits as `datasets.Dataset` with the text columns of `task` and ``label``.

    Args:
        folder: holds the task's files, or a folder per task; None for the hub.
        n_train, n_eval: sample sizes, the same rows for every seed; None for all rows.

    Raises:
        DataError: a split is missing or invalid.
    """
    from datasets import Dataset

    columns = _from_hub(task) if folder is None else _from_folder(task, folder)
    found = {split: Dataset.from_dict(some) for split, some in columns.items()}
    (*_, last) = task.splits
    if last not in found:
        if len(found["train"]) < 5:
            where = task.hub.name if folder is None else folder
            raise DataError(f"{where}: {len(found['train'])} rows are too few to hold some out for evaluation")
        parts = found["train"].train_test_split(HELD_OUT, seed=ROWS_SEED)
        found["train"], found[last] = parts["train"], parts["test"]
    return {
        split: _sample(some, n_train if split == "train" else n_eval, "n_train" if split == "train" else "n_eval")
        for split, some in found.items()
    }


def _sample(rows: Any, size: int | None, name: str) -> Any:
    if size is None or size == len(rows):
        return rows
    if size > len(rows):
        raise DataError(f"{name}={size} is more than the {len(rows)} rows available")
    return rows.shuffle(seed=ROWS_SEED).select(range(size))


def _from_folder(task: Task, folder: Path) -> dict[str, dict[str, list[Any]]]:
    if not folder.is_dir():
        raise DataError(f"data={str(folder)!r} is not a folder")
    files = {split: find_split(folder, task, split) for split in ("train", *task.splits)}
    for split, file in files.items():
        if file is None and (split == "train" or not task.holds_out):
            names = " or ".join(f"{stem}.*" for stem in task.files[split])
            where = ", ".join(str(place) for place in places(folder, task) if place.is_dir())
            raise DataError(
                f"{folder} has no {split} split of {task.title}: {names}, with one of {', '.join(SUFFIXES[:5])}, was "
                f"looked for in {where}"
            )
    there = [file for file in files.values() if file is not None]
    for file in there:
        if file.parent != there[0].parent:
            raise DataError(f"{there[0]} and {file} are splits of {task.title} in different folders: keep them in one")
    return {split: read_split(file, task) for split, file in files.items() if file is not None}


def _from_hub(task: Task) -> dict[str, dict[str, list[Any]]]:
    import datasets

    name, configuration, folder, revision = task.hub
    try:
        loaded: Mapping[str, Any] = datasets.load_dataset(name, configuration, data_dir=folder, revision=revision)
    except Exception as error:  # the network, the hub and the cache raise many kinds
        what = f"{task.title} cannot be loaded from the hub ({name}): {first_line(error)}"
        raise DataError(f"{what}; a folder with its files can be given instead") from error
    found = {}
    for split in ("train", *task.splits):
        if split not in loaded:
            if split == "train" or not task.holds_out:
                raise DataError(f"{name} on the hub has no split {split!r}")
            continue
        rows = loaded[split]
        renamed = {task.columns.get(column, column): column for column in rows.column_names}
        for column in (*task.texts, "label"):
            if column not in renamed:
                raise DataError(f"{name} on the hub has no column {column!r} in its split {split!r}")
        found[split] = {column: list(rows[renamed[column]]) for column in (*task.texts, "label")}
        found[split]["label"] = [label if label is None else _number(label) for label in found[split]["label"]]
        if any(label is None or (task.labels and label < 0) for label in found[split]["label"]):
            raise DataError(f"the split {split!r} of {name} on the hub has rows without a label")
    return found


def _number(label: Any) -> int | float:
    return int(label) if isinstance(label, bool) else label
