"""Heads as tables for the terminal: their maps, what methods make of them, and how methods cluster."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from smyrf.tools.analysis.hardness import Hardness
from smyrf.tools.analysis.inspection import HeadInspection
from smyrf.tools.inspect.layers import Row


def map_table(rows: Sequence[Row], every: Row, title: str) -> Group:
    """What the maps are like, a row for each layer or head."""
    ranked = every.heads[0].spectrum is not None
    names = ["below 0.01", "below 1/M", "entropy", *(["eff. rank"] if ranked else [])]
    names += ["heaviest key", "alike", "query spread", "off mean"]
    found = _empty(title, names)
    for row in (*rows, every):
        cells = [f"{row.mean(lambda head: head.below_small):.1%}", f"{row.mean(lambda head: head.below_uniform):.1%}"]
        cells += [f"{row.mean(lambda head: head.entropy):.2f}"]
        cells += [f"{row.mean(lambda head: head.effective_rank):.1f}"] if ranked else []
        cells += [f"{row.mean(lambda head: head.character.heaviest_key):.1%}"]
        cells += [f"{row.mean(lambda head: head.character.alike):.2f}"]
        cells += [f"{row.mean(lambda head: head.character.query_spread):.2f}"]
        cells += [f"{row.mean(lambda head: head.character.off_mean):.2f}"]
        found.add_row(row.label, *cells, style="bold" if row is every else "")
    said = "below: share of the keys with less weight; entropy: of a query's weights, in nats"
    if ranked:
        said += "; eff. rank: (Σσ²)² / Σσ⁴ of the map"
        if any(one.spectrum and len(one.spectrum.values) < one.spectrum.size for one in every.heads):
            said += ", an estimate"
    said += (
        "; heaviest key: its mean weight; alike: 1 where all queries attend to the same keys; query spread: of scores "
        "between queries; off mean: how far the output is from the mean of the values"
    )
    return _with(found, said)


def error_table(rows: Sequence[Row], every: Row, title: str) -> Group:
    """Relative output error of each method."""
    found = _by_method(every.heads[0], title)
    for row in (*rows, every):
        cells = [f"{row.error(i):.3f}" for i in range(len(every.heads[0].outcomes))]
        found.add_row(row.label, *cells, style="bold" if row is every else "")
    said = "‖output − dense‖ / ‖dense‖"
    return _with(found, said)


def mass_table(rows: Sequence[Row], every: Row, title: str) -> Group:
    """Softmax mass that each method captures, beside the most that so many keys hold."""
    found = _by_method(every.heads[0], title)
    for row in (*rows, every):
        cells = []
        for i in range(len(every.heads[0].outcomes)):
            captured, best = row.outcome(i, lambda one: one.captured), row.outcome(i, lambda one: one.best)
            cells.append(f"{captured:.0%} of {best:.0%}")
        found.add_row(row.label, *cells, style="bold" if row is every else "")
    said = "of the keys that a query meets one by one; of: the most that so many keys hold (causal: as many as are met)"
    return _with(found, said)


def balance_table(every: Row, title: str) -> Group:
    """Clusters of each method, over all heads."""
    names = ["keys", "clusters", "queries each", "keys each", "distinct keys", "keys met", "busiest key"]
    found = _empty(title, names, first="method")
    for i, one in enumerate(every.heads[0].outcomes):
        its = [head.outcomes[i].balance for head in every.heads]
        queries = _range(min(b.fewest_queries for b in its), max(b.most_queries for b in its))
        keys = _range(min(b.fewest_keys for b in its), max(b.most_keys for b in its))
        found.add_row(
            one.method.label,
            f"{every.outcome(i, lambda one: one.share):.1%}",
            f"{max(b.n_clusters for b in its):,}",
            queries,
            keys,
            f"{every.outcome(i, lambda one: one.distinct_keys):,.0f}",
            f"{sum(b.reached_keys for b in its) / len(its):.1%}",
            f"{sum(b.busiest_key for b in its) / len(its):.1%}",
        )
    said = (
        "keys: visited, as a share of dense; distinct keys: that a query meets one by one; keys met: by some query; "
        "busiest key: queries that meet it"
    )
    return _with(found, said)


def sentences(found: Hardness, n_heads: int = 3) -> list[str]:
    """What makes heads hard for a method, and the hardest of them."""
    return [f"{found.method.label}: {found.summary}", *(f"  {head}" for head in found.hard[:n_heads])]


def _by_method(head: HeadInspection, title: str) -> Table:
    return _empty(title, [one.method.label for one in head.outcomes])


def _with(found: Table, said: str) -> Group:
    """A table and what is said of it: as its caption, words at the edge of a narrow terminal would be lost."""
    return Group(found, Text(said, style="table.caption"))


def _empty(title: str, names: Sequence[str], first: str = "layer") -> Table:
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column(first, no_wrap=True)
    for name in names:
        found.add_column(name, justify="right", min_width=max(map(len, name.split())))
    return found


def _range(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,}–{most:,}"
