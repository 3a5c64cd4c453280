"""Tables of a comparison: how far outputs move, and what attention costs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from smyrf.tools.compare.run import ModelRow, relative_time
from smyrf.tools.tables import duration, megabytes, new_table


def drift_table(rows: Sequence[ModelRow], title: str) -> Table:
    """Errors and cosines against dense attention, the first row."""
    names = ["attention", "keys", "error", "token cosine", "worst 1%", "pooled cosine", "worst"]
    agreement = rows[0].drift.agreement is not None
    found = new_table(title, [*names, *(["same nearest"] if agreement else [])])
    for row in rows[1:]:
        one = row.drift
        cells = [row.label, f"{row.cost.share:.1%}", f"{one.error:.3f}"]
        cells += [cosine(one.token_cosine), cosine(one.worst_token_cosine)]
        cells += [cosine(one.pooled_cosine), cosine(one.worst_pooled_cosine)]
        cells += [f"{one.agreement:.0%}"] if one.agreement is not None else []
        found.add_row(*cells, style=_style(row))
    found.caption = (
        "last hidden states against those with dense attention; keys: visited, as a share of dense; error: "
        "‖output − dense‖ / ‖dense‖; worst 1%: first percentile over tokens; pooled: mean over a document's tokens"
    )
    if agreement:
        found.caption += "; same nearest: documents whose nearest neighbour stays the same"
    return found


def cost_table(rows: Sequence[ModelRow], title: str) -> Table:
    """Key visits, memory and time; dense attention first."""
    time = any(row.seconds is not None for row in rows)
    memory = any(row.extra_bytes is not None for row in rows)
    names = ["attention", "key visits", "keys", "scores"]
    names += ["peak memory"] if memory else []
    names += ["time", "× dense"] if time else []
    found = new_table(title, names)
    for row in rows:
        cells = [row.label, f"{row.cost.key_visits:,.0f}", f"{row.cost.share:.1%}", megabytes(row.cost.score_bytes)]
        if memory:
            cells.append("–" if row.extra_bytes is None else megabytes(row.extra_bytes))
        if time:
            ratio = relative_time(row, rows[0])
            cells += ["–" if row.seconds is None else duration(row.seconds), "–" if ratio is None else f"{ratio:.2f}"]
        found.add_row(*cells, style=_style(row))
    found.caption = "key visits: per query, averaged over layers; scores: size for one document in all heads of a layer"
    found.caption += "; peak memory: of a forward pass, beyond model and inputs" if memory else ""
    found.caption += "; time: of a forward pass per document" if time else ""
    return found


def remarks(rows: Sequence[ModelRow]) -> list[str]:
    """Which layers stayed dense and why, and what could not be measured: one line per remark, with its rows.

    Example:
        >>> from smyrf.tools.compare.contenders import Tuned
        >>> from smyrf.tools.compare.drift import Drift
        >>> from smyrf.tools.compare.run import Cost
        >>> same, cost = Drift(0, 1, 1, 1, 1, None), Cost(512, 1.0, 4e6)
        >>> remarks([ModelRow(Tuned(0.1), same, cost, dense_layers={"dense is as fast at this length": 6})])
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
    """Four digits; 1.0000 only if the difference from 1 is rounding.

    Example:
        >>> cosine(0.99465), cosine(0.99998), cosine(0.9999999)
        ('0.9947', '0.9999', '1.0000')
    """
    return "1.0000" if value > 1.0 - 1e-6 else f"{min(value, 0.9999):.4f}"


def _style(row: ModelRow) -> str:
    return "bold" if row.family.startswith(("Tangent", "tuned")) else ""
