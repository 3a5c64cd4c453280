"""Rows as tables for the terminal: what changes in the output, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from smyrf.tools.bench.table import duration
from smyrf.tools.compare.run import Row, relative_time


def drift_table(rows: Sequence[Row], title: str) -> Table:
    """Errors and cosines against dense attention, the first row."""
    names = ["attention", "keys", "error", "token cosine", "worst 1%", "pooled cosine", "worst"]
    agreement = rows[0].drift.agreement is not None
    found = _empty(title, [*names, *(["same nearest"] if agreement else [])])
    for row in rows[1:]:
        one = row.drift
        cells = [row.label, f"{row.cost.share:.1%}", f"{one.error:.3f}"]
        cells += [cosine(one.token_cosine), cosine(one.worst_token_cosine)]
        cells += [cosine(one.pooled_cosine), cosine(one.worst_pooled_cosine)]
        cells += [f"{one.agreement:.0%}"] if one.agreement is not None else []
        found.add_row(*cells, style=_style(row))
    found.caption = (
        "last hidden states against those with dense attention; keys: visited, as a share of dense; error: "
        "‖output − dense‖ / ‖dense‖; worst 1%: a hundredth of the tokens is below; pooled: mean of a document's tokens"
    )
    if agreement:
        found.caption += "; same nearest: documents whose nearest other one stays the same"
    return found


def cost_table(rows: Sequence[Row], title: str) -> Table:
    """Key visits, memory and time; dense attention first."""
    time = any(row.seconds is not None for row in rows)
    memory = any(row.extra_bytes is not None for row in rows)
    names = ["attention", "key visits", "keys", "scores"]
    names += ["peak memory"] if memory else []
    names += ["time", "× dense"] if time else []
    found = _empty(title, names)
    for row in rows:
        cells = [row.label, f"{row.cost.key_visits:,.0f}", f"{row.cost.share:.1%}", megabytes(row.cost.score_bytes)]
        if memory:
            cells.append("–" if row.extra_bytes is None else megabytes(row.extra_bytes))
        if time:
            ratio = relative_time(row, rows[0])
            cells += ["–" if row.seconds is None else duration(row.seconds), "–" if ratio is None else f"{ratio:.2f}"]
        found.add_row(*cells, style=_style(row))
    found.caption = "key visits: per query, mean over layers; scores: of a document in all heads of a layer"
    found.caption += "; peak memory: of a forward pass, beyond model and inputs" if memory else ""
    found.caption += "; time: of a forward pass per document" if time else ""
    return found


def remarks(rows: Sequence[Row]) -> list[str]:
    """Which layers have stayed dense, and why; what could not be measured. One line each, rows that agree together.

    Example:
        >>> from smyrf.tools.compare.contenders import Tuned
        >>> from smyrf.tools.compare.drift import Drift
        >>> from smyrf.tools.compare.run import Cost
        >>> same, cost = Drift(0, 1, 1, 1, 1, None), Cost(512, 1.0, 4e6)
        >>> remarks([Row(Tuned(0.1), same, cost, dense_layers={"dense is as fast at this length": 6})])
        ['tuned 0.1: 6 of 6 layers stay dense: dense is as fast at this length']
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        n_layers = len(row.methods) + sum(row.dense_layers.values())
        for reason, n_dense in row.dense_layers.items():
            found.setdefault(f"{n_dense} of {n_layers} layers stay dense: {reason}", []).append(row.label)
        if row.note:
            found.setdefault(row.note, []).append(row.label)
    n_rows = sum(row.label != "Dense" for row in rows)
    return [
        remark if len(labels) == n_rows > 1 else f"{', '.join(labels)}: {remark}" for remark, labels in found.items()
    ]


def cosine(value: float) -> str:
    """Four digits, which say 1 of nothing but rounding.

    Example:
        >>> cosine(0.99465), cosine(0.99998), cosine(0.9999999)
        ('0.9947', '0.9999', '1.0000')
    """
    return "1.0000" if value > 1.0 - 1e-6 else f"{min(value, 0.9999):.4f}"


def megabytes(n_bytes: float) -> str:
    """Megabytes, of a million bytes.

    Example:
        >>> megabytes(3_145_728), megabytes(123_456_789)
        ('3.1 MB', '123 MB')
    """
    return f"{n_bytes / 1e6:,.0f} MB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.1f} MB"


def _empty(title: str, names: Sequence[str]) -> Table:
    found = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        if name == "attention":  # the only column that may be cut
            found.add_column(name, no_wrap=True)
        else:
            found.add_column(name, justify="right", min_width=max(map(len, name.split())))
    return found


def _style(row: Row) -> str:
    return "bold" if row.family.startswith(("Tangent", "tuned")) else ""
