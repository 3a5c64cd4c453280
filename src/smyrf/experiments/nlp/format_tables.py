"""Format tables of presets and of results, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from smyrf.experiments.nlp.presets import MODEL_TITLES, Preset
from smyrf.experiments.nlp.recipe import short_name
from smyrf.experiments.nlp.result_tables import GLUE, Cell, Table
from smyrf.experiments.nlp.tasks import TASKS

NONE = "–"
PAPER = "  paper"


def preset_table(presets: Sequence[Preset]) -> RichTable:
    """Presets with their settings and the paper's result, averaged over tasks."""
    found = _empty("smyrf finetune --preset: the rows of the paper's tables")
    for name in ("preset", "model", "attention", "batch", "lr", "paper"):
        right = name in ("batch", "paper")
        found.add_column(name, justify="right" if right else "left", no_wrap=name != "attention")
    for preset, last in zip(presets, [*presets[1:], presets[0]], strict=True):
        recipe = preset.recipe
        attention = recipe.train_method.label
        if recipe.eval_methods[0] != recipe.train_method:
            attention += f" → {recipe.eval_methods[0].label}"
        rates = "/".join(f"{1e5 * rate:g}" for rate in preset.rates) + "e-5"
        figures = [one for figure in preset.paper.values() for one in figure]
        batch = f"{recipe.batch_size}×{recipe.max_length}"
        cells = (preset.name, MODEL_TITLES[recipe.model], attention, batch, rates)
        figure = f"{sum(figures) / len(figures):.4g}" if figures else NONE
        found.add_row(*cells, figure, style="" if figures else "bold", end_section=preset.table != last.table)
    epochs = {f"{preset.recipe.epochs:g}" for preset in presets}
    found.caption = (
        "batch: rows × tokens; paper: its result in percent, quoted, averaged over tasks; "
        f"{'/'.join(sorted(epochs))} epochs; the best of several learning rates is reported; a → b: trained with a, "
        "evaluated with b; bold: ours, not in the paper"
    )
    return found


def figure_table(presets: Sequence[Preset]) -> RichTable:
    """The paper's results of presets with several tasks, task by task."""
    wide = [preset for preset in presets if len(preset.paper) > 1]
    tasks = dict.fromkeys(task for preset in wide for task in preset.paper)
    found = _empty("the paper's results on GLUE, quoted")
    found.add_column("preset", no_wrap=True)
    for task in tasks:
        found.add_column(TASKS[task].title, justify="right", min_width=5)
    for preset in wide:
        figures = [preset.paper.get(task, ()) for task in tasks]
        found.add_row(preset.name, *("\n".join(f"{one:.2f}" for one in figure) or NONE for figure in figures))
    found.caption = "MNLI: matched, then mismatched; they count as two in an average"
    return found


def notes(presets: Sequence[Preset]) -> list[str]:
    """The notes of presets, one line each.

    Example:
        >>> from smyrf.experiments.nlp.presets import PRESETS
        >>> notes([PRESETS["imdb/tangent-25"], PRESETS["imdb/bert"]])
        ['imdb/tangent-25: our method: not in the paper']
    """
    return [f"{preset.name}: {preset.note}" for preset in presets if preset.note]


def headings(table: Table) -> list[str]:
    """Titles of the columns: one per task on GLUE; otherwise also the difference to dense attention."""
    if table.name.startswith(GLUE):
        average = ["avg."] if len(table.common_columns) > 1 else []
        return ["attention", "memory", *average, *(column.title for column in table.columns), "seeds"]
    return ["attention", "memory", "ours", "to dense", "seeds", "paper", "to dense"]


def lines(table: Table) -> list[list[str]]:
    """The rows as text; on GLUE the paper's results have their own row below ours."""
    found = []
    for row in table.rows:
        memory = f"{100 * table.memory(row):.4g}%"
        label = row.label + (f", {row.max_length} tokens" if row.max_length < table.max_length else "")
        n_seeds = {len(cell.by_seed) for cell in row.cells.values() if cell.by_seed}
        seeds = "–".join(str(one) for one in sorted({min(n_seeds), max(n_seeds)})) if n_seeds else "0"
        if table.name.startswith(GLUE):
            cells = [row.cells.get(column) for column in table.columns]
            shown = [table.average(row), *cells] if len(table.common_columns) > 1 else cells
            found.append([label, memory, *map(ours, shown), seeds])
            if any(cell is not None and cell.paper is not None for cell in cells):
                found.append([PAPER, "", *map(paper, shown), ""])
        else:
            column = table.columns[0]
            gap = table.gap(row, column)
            cell = row.cells.get(column)
            figure = paper(cell) + (f" {cell.paper_model}" if cell is not None and cell.paper is not None else "")
            found.append([label, memory, ours(cell), ours(gap, True), seeds, figure, paper(gap, True)])
    return found


def ours(cell: Cell | None, signed: bool = False) -> str:
    """Mean ± standard deviation of our runs in percent.

    Example:
        >>> ours(Cell({0: 90.0, 1: 92.0, 2: 94.0})), ours(Cell({0: 91.25})), ours(None)
        ('92.0 ± 2.0', '91.2', '–')
    """
    if cell is None or cell.mean is None:
        return NONE
    spread = "" if cell.std is None else f" ± {cell.std:.1f}"
    return f"{_number(cell.mean, 1, signed)}{spread}"


def paper(cell: Cell | None, signed: bool = False) -> str:
    """The paper's result in percent."""
    return NONE if cell is None or cell.paper is None else _number(cell.paper, 2, signed)


def rich_table(table: Table) -> RichTable:
    """Format a table for the terminal."""
    found = _empty(escape(f"{table.title}, {short_name(table.model)}"))
    wide = table.name.startswith(GLUE)
    for name in headings(table):
        is_label = name == "attention"
        # Cells may wrap before the deviation in a wide table, labels in a narrow one.
        found.add_column(name, justify="left" if is_label else "right", no_wrap=is_label == wide, min_width=5)
    for cells in lines(table):
        cells = [cell.replace("± ", "±") if wide else cell for cell in cells]
        style = "dim" if cells[0] == PAPER else "bold" if cells[0].startswith("Tangent") else ""
        found.add_row(*cells, style=style)
    found.caption = caption(table)
    return found


def markdown(table: Table) -> str:
    """Format a table as Markdown."""
    names = headings(table)
    text = [f"### {table.title}, {short_name(table.model)}", "", f"| {' | '.join(names)} |"]
    text.append("|" + "|".join("---" if name == "attention" else "---:" for name in names) + "|")
    for cells in lines(table):
        quoted = cells[0] == PAPER
        text.append(
            "| " + " | ".join(f"*{cell.strip()}*" if quoted and cell.strip() else cell for cell in cells) + " |"
        )
    return "\n".join([*text, "", f"{caption(table)[:1].upper()}{caption(table)[1:]}.", ""])


def caption(table: Table) -> str:
    """Explanation of the columns."""
    metrics = dict.fromkeys(f"{column.title} {TASKS[column.task].metric}" for column in table.columns)
    said = f"percent ({', '.join(metrics)}), mean ± standard deviation over seeds; memory: key visits per query in "
    said += f"training, relative to dense attention at {table.max_length} tokens"
    if table.is_grouped:
        said += "; batches of similar lengths, which are shorter: Tangent's budget is a share of that length"
    if not table.name.startswith(GLUE):
        said += "; to dense: difference to dense attention in points, seed by seed"
    if table.name.startswith(GLUE) and 1 < len(table.common_columns) < len(table.columns):
        said += "; avg.: over the tasks that all rows have"
    if any(cell.n_rates > 1 for row in table.rows for cell in row.cells.values()):
        said += "; the best of several learning rates on this split, as in the paper"
    models = {cell.paper_model for row in table.rows for cell in row.cells.values() if cell.paper is not None}
    if models:
        said += f"; paper: quoted, {' and '.join(sorted(models))} trained on all of the data"
        said += ", its averages over the tasks shown here" if table.name.startswith(GLUE) else ""
    return said


def _number(value: float, digits: int, signed: bool) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") if signed else f"{value:.{digits}f}"


def _empty(title: str) -> RichTable:
    return RichTable(
        title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
