"""A report as one HTML file: data, plots and the library that draws them are all in it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from string import Template
from typing import Any

from smyrf.analysis.tokens import TokenView
from smyrf.bench.table import duration
from smyrf.compare.run import Row, relative_time
from smyrf.methods import method_label
from smyrf.report import charts
from smyrf.report.charts import Chart
from smyrf.report.findings import Findings, view_label


def build_page(findings: Findings) -> str:
    """The page.

    Returns:
        HTML that needs nothing from elsewhere.
    """
    from plotly.offline import get_plotlyjs

    sections, drawn = _sections(findings)
    data = {"charts": drawn, "views": [_view(view) for view in findings.views]}
    parts = {name: files("smyrf.report").joinpath(name).read_text(encoding="utf-8") for name in _FILES}
    return Template(parts["page.html"]).substitute(
        title=html.escape(f"Attention of {findings.title}"),
        says=html.escape(findings.says),
        summary=html.escape(summary(findings)),
        links="".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, _ in sections),
        sections="".join(
            f'<section id="{name}"><h2>{html.escape(title)}</h2>{body}</section>' for name, title, body in sections
        ),
        footer=_footer(findings),
        css=parts["page.css"],
        # The end of an element may stand in no script, wherever it comes from.
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        script=parts["page.js"],
    )


_FILES = ("page.html", "page.css", "page.js")
# Tokens of a text that are shown.
MAX_TOKENS = 512


def summary(findings: Findings) -> str:
    """The most important thing, in a sentence or two."""
    tangent = [row for row in findings.rows[1:] if row.family == "Tangent"]
    n_layers = len({head.layer for head in findings.heads})
    n_heads = len(findings.heads)
    said = f"Looked at: {n_heads} head{'s' * (n_heads > 1)} of {n_layers} layer{'s' * (n_layers > 1)}. "
    if tangent:
        row = min(tangent, key=lambda one: abs(one.cost.share - 0.25))
        said += (
            f"With {row.label} a query meets {100 * row.cost.share:.3g}% of the keys, and the outputs of the model "
            f"move by {row.drift.error:.2g} of their length (mean cosine of tokens {row.drift.token_cosine:.4f}). "
        )
    return said + f"Tuned to an error of {findings.max_error:g} in each layer, {_plan_share(findings):.3g}% are enough."


def _plan_share(findings: Findings) -> float:
    tuned = findings.rows[-1]
    return 100 * tuned.cost.share


def _sections(findings: Findings) -> tuple[list[tuple[str, str, str]], list[Chart]]:
    """Name, title and HTML of each section, and the charts in them."""
    drawn: list[Chart] = []
    sections = []

    def add(name: str, title: str, note: str, some: Sequence[Chart | None], more: str = "") -> None:
        shown = [chart for chart in some if chart is not None]
        drawn.extend(shown)
        if shown or more:
            boxes = "".join(map(_box, shown))
            grid = f'<div class="charts">{boxes}</div>' if shown else ""
            sections.append((name, title, f'<p class="note">{html.escape(note)}</p>{grid}{more}'))

    add(
        "trade-off",
        "What it costs, and what it gives",
        "The model with other attention against itself, without retraining: error of its last hidden states, "
        "‖output − dense‖ / ‖dense‖ over all tokens. Lower left is better.",
        charts.trade_off(findings),
        _comparison(findings.rows),
    )
    add(
        "layers",
        "Layers and heads",
        "Each head on its own: how its weights are spread, and the relative error of its output.",
        [charts.by_layer(findings), *charts.heat_maps(findings)],
        _hard(findings),
    )
    add(
        "maps",
        "Inside the maps",
        "Singular values that fall fast say that a map is close to one of low rank; mass that is met says how much of "
        "the softmax the keys hold that a query is compared with. What Tangent does not meet it keeps in far keys.",
        [charts.singular_values(findings), charts.captured_mass(findings)],
    )
    if findings.views:
        options = "".join(f"<option>{html.escape(view_label(view))}</option>" for view in findings.views)
        body = '<div class="view"><div class="tokens"></div><div class="answer" aria-live="polite"></div></div>'
        note = "A text as a head sees it. Tokens of one colour ask together."
        add(
            "tokens",
            "Tokens and clusters",
            note,
            [],
            f'<p><select aria-label="head and method">{options}</select></p>{body}',
        )
    note = (
        f"The cheapest method of each layer whose error stays below {findings.max_error:g} on a few documents "
        "(smyrf.tune, whether or not it is faster at this length)."
    )
    add("plan", "A tuned plan", note, [], _plan(findings))
    return sections, drawn


def _view(view: TokenView) -> dict[str, Any]:
    """What the script shows of a text: its first tokens, so that the page of a long one can be opened."""
    reaches = [
        {
            "cluster": reach.cluster,
            "n_met": len(reach.keys),
            "keys": [key for key in reach.keys if key < MAX_TOKENS],
            "captured": reach.captured,
            "folded": reach.folded,
            "strongest": [{**asdict(one), "text": view.tokens[one.key]} for one in reach.strongest],
        }
        for reach in view.reaches[:MAX_TOKENS]
    ]
    tokens = view.tokens[:MAX_TOKENS]
    return {"tokens": tokens, "n_tokens": len(view.tokens), "n_clusters": view.n_clusters, "reaches": reaches}


def _hard(findings: Findings) -> str:
    """Which heads are hard, and what they have in common, for those who want to know."""
    if not findings.hard:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in findings.hard)
    return f"<details><summary>Which heads are hard, and why</summary><ul>{items}</ul></details>"


def _box(chart: Chart) -> str:
    select = ""
    if "choices" in chart:
        options = "".join(f"<option>{html.escape(one['label'])}</option>" for one in chart["choices"])
        select = f'<select data-chart="{chart["id"]}" aria-label="{html.escape(chart["title"])}">{options}</select>'
    title = f"<h3>{html.escape(chart['title'])}</h3>"
    return f'<div class="chart">{title}{select}<div class="plot" id="{chart["id"]}"></div></div>'


def _comparison(rows: Sequence[Row]) -> str:
    names = ["attention", "key visits", "error", "cosine of tokens", "worst 1%", "time", "memory"]
    lines = []
    for row in rows:
        time, extra = relative_time(row, rows[0]), row.extra_bytes
        lines.append(
            [
                row.label,
                f"{100 * row.cost.share:.3g}%",
                f"{row.drift.error:.2g}",
                f"{row.drift.token_cosine:.4f}",
                f"{row.drift.worst_token_cosine:.4f}",
                "–" if row.seconds is None or time is None else f"{duration(row.seconds)}, {time:.2f}×",
                "–" if extra is None else f"{extra / 2**20:.1f} MiB",
            ]
        )
    return _table(names, lines)


def _plan(findings: Findings) -> str:
    lines = [
        [
            str(number),
            layer.name,
            method_label(layer.method),
            f"{layer.key_visits} of {layer.n_keys}",
            "–" if layer.error is None else f"{layer.error:.3f}",
        ]
        for number, layer in enumerate(findings.plan.layers)
    ]
    return _table(["layer", "name", "method", "key visits", "error"], lines)


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    # A column whose first cell is a number has numbers, and its title stands above them.
    kinds = [' class="number"' if _is_number(cell) else "" for cell in lines[0]]

    def row(cells: Sequence[str], kind: str) -> str:
        pairs = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{kind}{of}>{html.escape(cell)}</{kind}>' for of, cell in pairs)}</tr>"

    body = "".join(row(line, "td") for line in lines)
    return f'<div class="scroll"><table><thead>{row(names, "th")}</thead><tbody>{body}</tbody></table></div>'


def _is_number(cell: str) -> bool:
    return cell[:1].isdecimal() or cell == "–"


def _footer(findings: Findings) -> str:
    machine: dict[str, Any] = findings.machine
    about = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    return f"<p>Made by</p><pre>{html.escape(findings.command)}</pre><p>{html.escape(about)}</p>"
