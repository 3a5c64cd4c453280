"""A report as files: Markdown, JSON and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smyrf.atomic_write import write_json, write_text
from smyrf.experiments.nlp.report import Table
from smyrf.experiments.nlp.tables import markdown


def write_report(tables: Sequence[Table], folder: Path, *, plots: bool = True) -> list[Path]:
    """Writes ``report.md``, ``report.json`` and, for each table with more than one row, a plot; says what it wrote."""
    from smyrf.experiments.nlp.plots import can_plot, plot

    written: list[Path] = []
    text = []
    for number, table in enumerate(tables):
        text.append(markdown(table))
        if plots and can_plot(table):
            again = sum(other.name == table.name for other in tables[:number])  # of another model
            files = plot(table, folder / (table.name + (f"-{again + 1}" if again else "")))
            text.append(f"![{table.title}]({files[0].name})\n")
            written += files
    page, data = folder / "report.md", folder / "report.json"
    write_text(page, "\n".join(text))
    write_json(data, [to_dict(table) for table in tables])
    return [page, data, *written]


def to_dict(table: Table) -> dict[str, Any]:
    """A table as JSON can hold it."""
    rows = []
    for row in table.rows:
        cells = [
            {
                "task": column.task,
                "split": column.split,
                "by_seed": dict(cell.by_seed),
                "mean": cell.mean,
                "std": cell.std,
                "learning_rate": cell.rate,
                "paper": cell.paper,
                "paper_model": cell.paper_model or None,
            }
            for column, cell in row.cells.items()
        ]
        rows.append(
            {
                "label": row.label,
                "settings": dict(row.settings),
                "train_method": row.train_method.to_dict(),
                "eval_method": row.eval_method.to_dict(),
                "max_length": row.max_length,
                "memory": table.memory(row),
                "cells": cells,
            }
        )
    return {"name": table.name, "title": table.title, "model": table.model, "rows": rows}
