"""Tables of inspected heads: their maps, errors and captured mass of methods, and cluster sizes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from smyrf.tools.analysis.hardness import Hardness
from smyrf.tools.analysis.inspection import HeadInspection
from smyrf.tools.inspect.layers import HeadSet
from smyrf.tools.tables import new_table, with_note


def map_table(rows: Sequence[HeadSet], every: HeadSet, title: str) -> Group:
    """Measures of the maps, one row per layer or head."""
    ranked = every.heads[0].spectrum is not None
    names = ["below 0.01", "below 1/M", "entropy", *(["eff. rank"] if ranked else [])]
    names += ["heaviest key", "alike", "query spread", "off mean"]
    found = new_table(title, ["layer", *names])
    for row in (*rows, every):
        cells = [f"{row.mean(lambda head: head.below_small):.1%}", f"{row.mean(lambda head: head.below_uniform):.1%}"]
        cells += [f"{row.mean(lambda head: head.entropy):.2f}"]
        cells += [f"{row.mean(lambda head: head.effective_rank):.1f}"] if ranked else []
        cells += [f"{row.mean(lambda head: head.profile.heaviest_key):.1%}"]
        cells += [f"{row.mean(lambda head: head.profile.alike):.2f}"]
        cells += [f"{row.mean(lambda head: head.profile.query_spread):.2f}"]
        cells += [f"{row.mean(lambda head: head.profile.off_mean):.2f}"]
        found.add_row(row.label, *cells, style="bold" if row is every else "")
    said = "below: share of the keys with a smaller weight; entropy: of a query's weights, in nats"
    if ranked:
        said += "; eff. rank: (Σσ²)² / Σσ⁴ of the map"
        if any(one.spectrum and len(one.spectrum.values) < one.spectrum.size for one in every.heads):
            said += ", an estimate"
    said += (
        "; heaviest key: its mean weight; alike: 1 if all queries attend to the same keys; query spread: of scores "
        "between queries; off mean: ‖output − mean of the values‖² / ‖output‖²"
    )
    return with_note(found, said)


def error_table(rows: Sequence[HeadSet], every: HeadSet, title: str) -> Group:
    """Relative output error of each method."""
    found = _by_method(every.heads[0], title)
    for row in (*rows, every):
        cells = [f"{row.error(i):.3f}" for i in range(len(every.heads[0].outcomes))]
        found.add_row(row.label, *cells, style="bold" if row is every else "")
    return with_note(found, "‖output − dense‖ / ‖dense‖")


def mass_table(rows: Sequence[HeadSet], every: HeadSet, title: str) -> Group:
    """Softmax mass that each method captures, and the most that this number of keys can hold."""
    found = _by_method(every.heads[0], title)
    for row in (*rows, every):
        cells = []
        for i in range(len(every.heads[0].outcomes)):
            captured, best = row.outcome(i, lambda one: one.captured), row.outcome(i, lambda one: one.best)
            cells.append(f"{captured:.0%} of {best:.0%}")
        found.add_row(row.label, *cells, style="bold" if row is every else "")
    note = "of the keys that a query visits, far keys excepted; of: the most that any keys of the same number hold"
    return with_note(found, note)


def balance_table(every: HeadSet, title: str) -> Group:
    """Clusters of each method, over all heads."""
    names = ["keys", "clusters", "queries each", "keys each", "distinct keys", "keys visited", "busiest key"]
    found = new_table(title, ["method", *names])
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
        "keys: key visits, as a share of dense; distinct keys: visited by a query; keys visited: by some query; "
        "busiest key: share of the queries that visit it"
    )
    return with_note(found, said)


def sentences(found: Hardness, n_heads: int = 3) -> list[str]:
    """What makes heads hard for a method, and its hardest heads."""
    return [f"{found.method.label}: {found.summary}", *(f"  {head}" for head in found.hard[:n_heads])]


def _by_method(head: HeadInspection, title: str) -> Table:
    return new_table(title, ["layer", *(one.method.label for one in head.outcomes)])


def _range(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,}–{most:,}"
