"""A report as one HTML file that contains its data, its plots and the library that draws them."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from string import Template
from typing import Any

from smyrf.tools.analysis.tokens import TokenView
from smyrf.tools.compare.run import TUNED_DOCUMENTS, ModelRow, relative_time
from smyrf.tools.inspect.table import sentences
from smyrf.tools.report import charts
from smyrf.tools.report.charts import Chart
from smyrf.tools.report.findings import Findings, view_label
from smyrf.tools.tables import duration
from smyrf.tuning.search import LEAST


def build_page(findings: Findings) -> str:
    """The page as self-contained HTML."""
    from plotly.offline import get_plotlyjs

    sections, drawn = _sections(findings)
    data = {"charts": drawn, "views": [_view(view) for view in findings.views]}
    parts = {name: files("smyrf.tools.report").joinpath(name).read_text(encoding="utf-8") for name in _FILES}
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
        # A script must not contain the end tag of its element.
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        script=parts["page.js"],
    )


_FILES = ("page.html", "page.css", "page.js")
# Name of one input, by kind.
_UNITS = {"text": "document", "images": "image", "audio": "sound"}


def summary(findings: Findings) -> str:
    """The main result in two or three sentences."""
    tangent = [row for row in findings.rows[1:] if row.family == "Tangent"]
    n_layers = len({head.layer for head in findings.heads})
    n_heads = len(findings.heads)
    said = f"Inspected: {n_heads} head{'s' * (n_heads > 1)} of {n_layers} layer{'s' * (n_layers > 1)}. "
    if tangent:
        row = min(tangent, key=lambda one: abs(one.cost.share - 0.25))
        said += (
            f"With {row.label} a query makes {100 * row.cost.share:.3g}% of the key visits of dense attention, and the "
            f"relative error of the model's outputs is {row.drift.error:.2g} (mean cosine of tokens "
            f"{row.drift.token_cosine:.4f}). "
        )
    tuned, target = 100 * findings.rows[-1].cost.share, findings.max_error
    return f"{said}Tuned to an error of {target:g} in each layer, {tuned:.3g}% of the key visits are enough."


def _sections(findings: Findings) -> tuple[list[tuple[str, str, str]], list[Chart]]:
    """Name, title and HTML of each section, and their charts."""
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
        "Cost and quality",
        "The model with other attention against itself, without retraining: error of its last hidden states, "
        "‖output − dense‖ / ‖dense‖ over all tokens. Lower left is better.",
        charts.trade_off(findings),
        _comparison(findings.rows),
    )
    add(
        "layers",
        "Layers and heads",
        "Each head by itself: how its weights are spread, and the relative error of its output, over "
        f"{_inspected(findings)}.",
        [charts.by_layer(findings), *charts.heat_maps(findings)],
        _hard(findings),
    )
    add(
        "maps",
        "Inside the maps",
        _about_maps(findings),
        [charts.singular_values(findings), charts.captured_mass(findings)],
    )
    if findings.views:
        options = "".join(f"<option>{html.escape(view_label(view))}</option>" for view in findings.views)
        body = '<div class="view"><div class="tokens"></div><div class="answer" aria-live="polite"></div></div>'
        n_shown, n_tokens = len(findings.views[0].reaches), len(findings.views[0].tokens)
        some = f", its first {n_shown:,} of {n_tokens:,} tokens" if n_shown < n_tokens else ""
        note = f"The first document as a head sees it{some}. Tokens of one colour share a cluster."
        add(
            "tokens",
            "Tokens and clusters",
            note,
            [],
            f'<p><select aria-label="head and method">{options}</select></p>{body}',
        )
    n_tuned = min(TUNED_DOCUMENTS, findings.n_documents)
    note = (
        f"For each layer the smallest budget of Tangent, at least {LEAST} key visits, whose error stays below "
        f"{findings.max_error:g} on {_first(n_tuned, findings)}; two budgets where its heads differ, and dense "
        "attention where no budget saves enough (smyrf.tune, whether or not it is faster at this length)."
    )
    add("plan", "A tuned plan", note, [], _plan(findings))
    return sections, drawn


def _first(n: int, findings: Findings) -> str:
    """The first n inputs, in words."""
    unit, every = _UNITS[findings.kind], findings.n_documents
    if every == 1:
        return f"one {unit}"
    return f"{n} {unit}s" if n == every else f"the first {f'{n} ' * (n > 1)}of {every} {unit}s"


def _inspected(findings: Findings) -> str:
    """The queries and documents on which heads were inspected, in words."""
    least, most = (of(head.n_rows for head in findings.heads) for of in (min, max))
    rows = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{rows} {'query' if most == 1 else 'queries'} from {_first(findings.n_inspected, findings)}"


def _about_maps(findings: Findings) -> str:
    note = (
        "Captured mass is the share of the softmax on the keys that a query visits, over "
        f"{_inspected(findings)}. Tangent folds the other keys into far keys."
    )
    spectra = [head.spectrum for head in findings.heads if head.spectrum is not None]
    if not spectra:
        return note
    some = ", the largest ones of a long map" * any(len(one.values) < one.size for one in spectra)
    return (
        f"Singular values are those of whole maps, in {_first(1, findings)}{some}; if they decay fast, a map is close "
        f"to one of low rank. {note}"
    )


def _view(view: TokenView) -> dict[str, Any]:
    """The part of a view that the page's script needs."""
    reaches = [
        {
            "cluster": reach.cluster,
            "n_met": reach.n_met,
            "keys": reach.keys,
            "captured": reach.captured,
            "folded": reach.folded,
            "strongest": [{**asdict(one), "how": one.how, "text": view.tokens[one.key]} for one in reach.strongest],
        }
        for reach in view.reaches
    ]
    tokens = view.tokens[: len(reaches)]
    return {"tokens": tokens, "n_tokens": len(view.tokens), "n_clusters": view.n_clusters, "reaches": reaches}


def _hard(findings: Findings) -> str:
    """Which heads are hard, and what they have in common."""
    if not findings.hard or len(findings.heads) == 1:  # a single head cannot be compared
        return ""
    lines = [line.strip() for one in findings.hard for line in sentences(one)]
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<details><summary>Which heads are hard, and why</summary><ul>{items}</ul></details>"


def _box(chart: Chart) -> str:
    select = ""
    if "choices" in chart:
        options = "".join(f"<option>{html.escape(one['label'])}</option>" for one in chart["choices"])
        select = f'<select data-chart="{chart["id"]}" aria-label="{html.escape(chart["title"])}">{options}</select>'
    title = f"<h3>{html.escape(chart['title'])}</h3>"
    return f'<div class="chart">{title}{select}<div class="plot" id="{chart["id"]}"></div></div>'


def _comparison(rows: Sequence[ModelRow]) -> str:
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
            layer.method.label,
            f"{layer.key_visits} of {layer.n_keys}",
            "–" if layer.error is None else f"{layer.error:.3f}",
        ]
        for number, layer in enumerate(findings.plan.layers)
    ]
    return _table(["layer", "name", "method", "key visits", "error"], lines)


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    # Columns of numbers are aligned right; the first row decides.
    kinds = [' class="number"' if _is_number(cell) else "" for cell in lines[0]]

    def row(cells: Sequence[str], kind: str) -> str:
        pairs = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{kind}{of}>{html.escape(cell)}</{kind}>' for of, cell in pairs)}</tr>"

    body = "".join(row(line, "td") for line in lines)
    return f'<div class="scroll"><table><thead>{row(names, "th")}</thead><tbody>{body}</tbody></table></div>'


def _is_number(cell: str) -> bool:
    return cell[:1].isdecimal() or cell == "–"


def _footer(findings: Findings) -> str:
    machine = {**findings.machine, "threads": findings.threads}
    about = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    return f"<p>Made by</p><pre>{html.escape(findings.command)}</pre><p>{html.escape(about)}</p>"
