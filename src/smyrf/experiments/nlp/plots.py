"""Plot the metric against memory, or row by row: our results on the left, the paper's on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smyrf.experiments.nlp.recipe import short_name
from smyrf.experiments.nlp.result_tables import GLUE, Cell, Row, Table
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.tools.plotting import LOOKS, save_figure

_CUT = ", cut short"
_LOOKS: dict[str, dict[str, Any]] = {
    "Dense": {"color": "#1d4ed8", "marker": "D"},
    "Smyrf": {**LOOKS["Smyrf"], "marker": "o"},
    "Smyrf, E2LSH": {"color": "#9ca3af", "marker": "s", "linestyle": ":"},
    "Smyrf, cross-polytope": {"color": "#9ca3af", "marker": "^", "linestyle": ":"},
    "Tangent": {**LOOKS["Tangent"], "marker": "o"},
    "PerHead": {"color": "#7c3aed", "marker": "o"},
    "back and forth": {"color": "#059669", "marker": "P", "linestyle": "none"},
}


def can_plot(table: Table) -> bool:
    """Whether a table has more than one point to plot."""
    return sum(_cell(table, row).mean is not None for row in table.rows) > 1


def plot(table: Table, path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg: a point per row, with the standard deviation over seeds.

    Rows that differ in memory are plotted against it, others one below another.
    """
    from matplotlib.figure import Figure  # not pyplot, which would affect the plots of a notebook

    quoted = any(_cell(table, row).paper is not None for row in table.rows)
    by_memory = not table.name.endswith(("backandforth", "ablation"))
    size = (9.2 if quoted else 5.2, 3.9 if by_memory else 1.5 + 0.42 * len(table.rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, 1 + quoted, squeeze=False)
    metric = "mean of the metrics" if len(table.columns) > 1 else TASKS[table.columns[0].task].metric
    for number, one in enumerate(axes[0]):
        panel = _panel if by_memory else _list
        panel(one, table, paper=number == 1)
        models = {_cell(table, row).paper_model for row in table.rows} - {""}
        title = f"the paper's, {' and '.join(sorted(models))}" if number else f"ours, {short_name(table.model)}"
        one.set_title(title, fontsize=9, loc="left")
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
        if not by_memory:
            one.set_xlabel(f"{metric}, %")
    if by_memory:
        axes[0, 0].set_ylabel(f"{metric}, %")
    figure.suptitle(table.title, x=0.01, ha="left", fontsize=11, parse_math=False)
    return save_figure(figure, path)


def _list(axes: Any, table: Table, *, paper: bool) -> None:
    """Plot rows one below another, the first on top."""
    places = range(len(table.rows), 0, -1)
    for place, row in zip(places, table.rows, strict=True):
        cell = _cell(table, row)
        look = {"markersize": 7, **_look(_family(table, row)), "linestyle": "none"}
        if paper and cell.paper is not None:
            axes.plot([cell.paper], [place], markerfacecolor="white", **look)
        elif not paper and cell.mean is not None:
            axes.errorbar([cell.mean], [place], xerr=[cell.std or 0.0], capsize=2.5, elinewidth=1.4, **look)
    axes.set_yticks(list(places), ["" if paper else row.label for row in table.rows])
    axes.set_ylim(0.4, len(table.rows) + 0.6)


def _panel(axes: Any, table: Table, *, paper: bool) -> None:
    families: dict[str, list[tuple[float, Cell]]] = {}
    for row in table.rows:
        cell = _cell(table, row)
        if (cell.paper if paper else cell.mean) is not None:
            families.setdefault(_family(table, row), []).append((100 * table.memory(row), cell))
    for family, points in families.items():
        points.sort(key=lambda point: point[0])
        shares = [share for share, _ in points]
        look = {"markersize": 6, "linewidth": 1.4, **_look(family)}
        if paper:
            axes.plot(shares, [cell.paper for _, cell in points], label=family, markerfacecolor="white", **look)
        else:
            spread = [cell.std or 0.0 for _, cell in points] if any(cell.std for _, cell in points) else None
            axes.errorbar(shares, [cell.mean for _, cell in points], spread, label=family, capsize=2.5, **look)
    axes.set_xscale("log", base=2)
    ticks = sorted({round(100 * table.memory(row), 4) for row in table.rows})
    axes.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks])
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    axes.minorticks_off()
    axes.set_xlabel("key visits of a query in training, % of dense")
    axes.legend(fontsize=8, frameon=False, loc="best")


def _look(family: str) -> dict[str, Any]:
    if family.endswith(_CUT):
        return {**_LOOKS[family.removesuffix(_CUT)], "marker": "v", "linestyle": ":", "alpha": 0.6}
    return _LOOKS[family]


def _cell(table: Table, row: Row) -> Cell:
    """The cell of a row that is plotted: the average in a table with several columns."""
    if table.name.startswith(GLUE) and len(table.columns) > 1:
        return table.average(row) or Cell({})
    return row.cells.get(table.columns[0], Cell({}))


def _family(table: Table, row: Row) -> str:
    kind = type(row.train_method).__name__
    if row.train_method != row.eval_method:
        return "back and forth"
    if row.max_length < table.max_length:
        return f"{kind}{_CUT}"
    for variant in ("cross-polytope", "E2LSH"):
        if variant in row.train_method.family:
            return f"{kind}, {variant}"
    return kind
