"""Run `smyrf compare` on validated arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from smyrf.tools.compare.contenders import Contender, default_contenders, without_dense
from smyrf.tools.compare.load_model import Subject
from smyrf.tools.compare.memory import extra_bytes
from smyrf.tools.compare.plot import plot as write_plot
from smyrf.tools.compare.run import Comparison, ModelRow
from smyrf.tools.compare.table import cost_table, drift_table, remarks
from smyrf.tools.progress import track
from smyrf.tools.results import machine_line, write_results
from smyrf.tools.tables import duration, print_written


@dataclass(frozen=True)
class Prepared:
    """A model that has been loaded and run once, ready to be compared."""

    subject: Subject
    comparison: Comparison

    def config(self) -> dict[str, Any]:
        """Configuration for the result file."""
        subject = self.subject
        return {
            "model": subject.name,
            "class": type(subject.model).__name__,
            "kind": subject.kind,
            "inputs": None if subject.path is None else str(subject.path),
            "says": subject.inputs.says,
            "documents": subject.inputs.n_documents,
            "batch": len(next(iter(subject.inputs.batches[0].values()))),
            "n_keys": self.comparison.n_keys,
            "seed": self.comparison.seed,
            "dtype": "float32",
            "transformers": version("transformers"),
        }


def prepare(subject: Subject, *, threads: int, seed: int, console: Console) -> Prepared:
    """Run a model once.

    Raises:
        ValueError: says why it cannot be run, or that it has nothing to replace.
    """
    torch.set_num_threads(threads)
    with console.status(f"running {escape(subject.title)}"):
        comparison = Comparison(subject.model, subject.inputs.batches, seed, console)
    return Prepared(subject, comparison)


def compare(
    prepared: Prepared,
    contenders: Sequence[Contender],
    *,
    max_error: float,
    threads: int,
    memory: bool,
    json: Path | None,
    plot: Path | None,
    console: Console,
) -> list[ModelRow]:
    """Measure everything, print the tables, and write what was asked for.

    Args:
        contenders: empty for the default.
        max_error: of `Tuned` in the default contenders.
    """
    comparison, title, says = prepared.comparison, prepared.subject.title, prepared.subject.inputs.says
    chosen = without_dense(list(contenders) or default_contenders(comparison.n_keys, max_error))
    heading = f"{title}, {says}; {machine_line(threads)}"
    console.print(f"[bold]smyrf compare[/]: {escape(heading)}", highlight=False)
    rows = [comparison.dense()]

    def keep() -> None:
        if json is not None:
            found = [row.as_dict(rows[0]) for row in rows]
            write_results(json, found, threads=threads, config=prepared.config())

    for contender in chosen:
        rows.append(comparison.row(contender))
        keep()
    _time(comparison, rows, console)
    keep()
    if memory:
        for i, row in enumerate(track(rows.copy(), "peak memory", total=len(rows), console=console)):
            rows[i] = _with_memory(prepared.subject, row, rows[0], threads)
            keep()
    console.print(drift_table(rows, f"How far the outputs of {escape(title)} move, without retraining"))
    console.print(cost_table(rows, f"What {escape(title)} costs"))
    for line in remarks(rows):
        console.print(escape(line), highlight=False)
    print_written([json] if json is not None else [], console)
    if plot is not None:
        print_written(write_plot(rows, plot, f"{title}, {says}, no retraining"), console)
    return rows


def _with_memory(subject: Subject, row: ModelRow, dense: ModelRow, threads: int) -> ModelRow:
    if not row.methods and dense.extra_bytes is not None:  # the same model
        return replace(row, extra_bytes=dense.extra_bytes)
    first = subject.inputs.first(1)
    try:
        found = extra_bytes(subject.name, subject.kind, first, row.methods, threads, row.label)
    except RuntimeError as error:
        return replace(row, note=str(error))
    return replace(row, extra_bytes=found)


def _time(comparison: Comparison, rows: list[ModelRow], console: Console) -> None:
    with console.status("times") as status:
        if not console.is_terminal:
            console.print("times …")
        for i, row in comparison.times(rows.copy()):
            rows[i] = row
            if row.seconds is not None:
                status.update(f"times: {row.label} {duration(row.seconds)} per document")
