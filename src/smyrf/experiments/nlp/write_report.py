"""Write a report: Markdown, JSON and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smyrf.atomic_write import write_json, write_text
from smyrf.experiments.nlp.format_tables import markdown
from smyrf.experiments.nlp.result_tables import Table


def write_report(tables: Sequence[Table], folder: Path, *, plots: bool = True) -> list[Path]:
    """Write ``report.md``, ``report.json`` and a plot per table with more than one row, and return the paths."""
    from smyrf.experiments.nlp.plots import can_plot, plot

    written: list[Path] = []
    text = []
    for number, table in enumerate(tables):
        text.append(markdown(table))
        if plots and can_plot(table):
            again = sum(other.name == table.name for other in tables[:number])  # tables of other models
            files = plot(table, folder / (table.name + (f"-{again + 1}" if again else "")))
            text.append(f"![{table.title}]({files[0].name})\n")
            written += files
    page, data = folder / "report.md", folder / "report.json"
    write_text(page, "\n".join(text))
    write_json(data, [table.to_dict() for table in tables])
    return [page, data, *written]
