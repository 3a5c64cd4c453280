"""What the page of `smyrf report` says and draws, from findings that are made by hand."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from report_page import read
from smyrf import Dense, Smyrf, Tangent
from smyrf.call import Call
from smyrf.models.plan import LayerPlan, Plan
from smyrf.tools.analysis.cluster_sizes import Balance
from smyrf.tools.analysis.hardness import hardness
from smyrf.tools.analysis.head_profile import HeadProfile
from smyrf.tools.analysis.inspection import HeadInspection, Outcome
from smyrf.tools.analysis.spectrum import Spectrum
from smyrf.tools.analysis.tokens import token_view

pytest.importorskip("transformers")
pytest.importorskip("plotly")

from smyrf.tools.compare.contenders import Tuned
from smyrf.tools.compare.drift import Drift
from smyrf.tools.compare.run import Cost, ModelRow
from smyrf.tools.report import charts
from smyrf.tools.report.findings import Findings, write_data
from smyrf.tools.report.page import build_page, summary

runner = CliRunner()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Where screenshots are kept, to be looked at.
PICTURES = Path(__file__).parents[2] / "build" / "screenshots"


def head_of(layer, head, errors, spectrum=(4.0, 1.0, 0.0)):
    outcomes = [
        Outcome(
            method=method,
            key_visits=round(100 * share),
            share=share,
            distinct_keys=7.0,
            captured=share + 0.01 * (layer + head),
            best=share + 0.1 + 0.01 * (layer + head),
            error=error,
            balance=Balance(2, 3, 5, 7, 11, 1.0, 0.5),
        )
        for method, share, error in zip(METHODS, SHARES, errors, strict=True)
    ]
    return HeadInspection(
        layer=layer,
        name=f"layer.{layer}",
        head=head,
        n_queries=100,
        n_keys=100,
        n_rows=34,
        below_small=0.5 + 0.1 * layer,
        below_uniform=0.6 + 0.1 * head,
        entropy=2.0,
        entropy_share=0.2 + 0.1 * layer + 0.01 * head,
        profile=HeadProfile(0.1, 0.2, 0.3, 0.4, 0.5),
        spectrum=Spectrum(spectrum, 3, 17.0, 0.0, 257.0) if spectrum else None,
        outcomes=tuple(outcomes),
    )


def row_of(contender, share, error, seconds, extra_bytes):
    drift = Drift(error, 0.9876, 0.9123, 0.99, 0.98, None)
    return ModelRow(contender, drift, Cost(100 * share, share, 1e6), seconds=seconds, extra_bytes=extra_bytes)


METHODS = (Tangent(0.5), Tangent(0.25), Smyrf(2, 16))
SHARES = (0.5, 0.25, 0.32)


@pytest.fixture
def findings():
    heads = (
        head_of(0, 0, (0.01, 0.02, 0.3)),
        head_of(0, 1, (0.03, 0.04, 0.5)),
        head_of(2, 0, (0.05, 0.06, 0.7), spectrum=(2.0, 1e-7, 0.0)),  # layer 1 cannot be approximated
        head_of(2, 1, (0.0, 0.0, 0.9)),
    )
    rows = (
        row_of(Dense(), 1.0, 0.0, 2.0, 8 << 20),
        row_of(Tangent(0.5), 0.5, 0.0, 1.5, 5 << 20),
        row_of(Tangent(0.25), 0.25, 0.03, 0.5, 2 << 20),
        row_of(Smyrf(2, 16), 0.32, 0.4, None, None),
        row_of(Smyrf(3, 16), 0.48, math.inf, 1.7, 3 << 20),
        row_of(Tuned(0.1, fallback=False), 0.375, 0.07, 1.1, 4 << 20),
    )
    layers = (
        LayerPlan(0, Tangent(0.25), 25, 100, 0.081, None, "cheapest that fits", "layer.0"),
        LayerPlan(1, Dense(), 100, 100, 0.0, None, "too short to save anything", "layer.1"),
    )
    x = torch.randn(1, 2, 100, 4)
    view = token_view([Call(x, x, x, 2.0)], [f" w{i}" for i in range(100)], Tangent(0.5), head=1, n_tokens=13)
    return Findings(
        title="a model",
        says="5 documents of 100 tokens",
        kind="text",
        n_documents=5,
        n_inspected=2,
        rows=rows,
        heads=heads,
        hard=(hardness(heads, 1), hardness(heads, 2)),
        plan=Plan(layers, 0.1, ""),
        max_error=0.1,
        views=(view,),
        config={"rows": 17},
        machine={"cpu": "some", "commit": None},
        threads=3,
        command="smyrf report a-model",
    )


def points(chart):
    return {trace["name"]: (trace["x"], trace["y"]) for trace in chart["data"]}


def test_trade_offs_are_those_of_the_rows(findings):
    visits, time, memory = charts.trade_off(findings)
    assert [chart["id"] for chart in (visits, time, memory)] == ["chart-visits", "chart-time", "chart-memory"]
    # From a small budget to a large one; rounding is drawn at the floor, and what is not finite nowhere.
    assert points(visits) == {
        "Tangent": ([25.0, 50.0], [0.03, charts.LEAST]),
        "Smyrf": ([32.0], [0.4]),
        "tuned": ([37.5], [0.07]),
    }
    assert visits["data"][0]["text"] == ["Tangent 25%", "Tangent 50%"]
    assert points(time) == {
        "Tangent": ([25.0, 75.0], [0.03, charts.LEAST]),
        "Smyrf": ([], []),
        "tuned": ([pytest.approx(55.0)], [0.07]),
    }
    assert points(memory) == {
        "Tangent": ([25.0, 62.5], [0.03, charts.LEAST]),
        "Smyrf": ([], []),
        "tuned": ([50.0], [0.07]),
    }


def test_what_was_not_measured_is_not_drawn(findings):
    unknown = tuple(replace(row, seconds=None, extra_bytes=None) for row in findings.rows)
    assert [chart["id"] for chart in charts.trade_off(replace(findings, rows=unknown))] == ["chart-visits"]


def test_heat_maps_have_a_row_for_each_layer_and_a_column_for_each_head(findings):
    maps, errors = charts.heat_maps(findings)
    for chart in (maps, errors):
        assert all(one["data"][0]["x"] == [0, 1] and one["data"][0]["y"] == [0, 2] for one in chart["choices"])
    z = {one["label"]: one["data"][0]["z"] for one in (*maps["choices"], *errors["choices"])}
    assert z == {
        "entropy, relative to its maximum": [pytest.approx([0.2, 0.21]), pytest.approx([0.4, 0.41])],
        "keys below a weight of 0.01, share": [[0.5, 0.5], [0.7, 0.7]],
        "keys below a weight of 1/M, share": [pytest.approx([0.6, 0.7]), pytest.approx([0.6, 0.7])],
        "effective rank": [pytest.approx([289 / 257] * 2)] * 2,
        "error of Tangent 50%": [[0.01, 0.03], [0.05, 0.0]],
        "error of Tangent 25%": [[0.02, 0.04], [0.06, 0.0]],
        "error of Smyrf 2×16": [[0.3, 0.5], [0.7, 0.9]],
    }
    _, gap = charts.heat_maps(replace(findings, heads=findings.heads[:3]))  # a layer may have fewer heads
    assert gap["choices"][0]["data"][0]["z"] == [[0.01, 0.03], [0.05, None]]


def test_singular_values_are_relative_to_the_largest(findings):
    chart = charts.singular_values(findings)
    assert [(trace["x"], trace["y"]) for trace in chart["data"]] == [
        ([1, 2, 3], [1.0, 0.25, None]),  # a logarithm has no place for zero
        ([1, 2, 3], [1.0, 0.25, None]),
        ([1, 2, 3], [1.0, None, None]),
        ([1, 2, 3], [1.0, 0.25, None]),
    ]
    assert ["layer 2, head 0" in trace["hovertemplate"] for trace in chart["data"]] == [False, False, True, False]


def test_captured_mass_stands_beside_the_most_there_is(findings):
    # In the mean over heads a hundredth more than the share.
    (tangent, smyrf, best) = charts.captured_mass(findings)["data"]
    assert [trace["name"] for trace in (tangent, smyrf, best)] == ["Tangent", "Smyrf", "heaviest keys"]
    assert (tangent["x"], tangent["y"]) == ([25.0, 50.0], pytest.approx([26.5, 51.5]))
    assert (smyrf["x"], smyrf["y"]) == ([32.0], pytest.approx([33.5]))
    assert (best["x"], best["y"]) == ([25.0, 32.0, 50.0], pytest.approx([36.5, 43.5, 61.5]))


def test_errors_by_layer_are_means_over_heads(findings):
    # Of each family the method in the middle.
    assert points(charts.by_layer(findings)) == {
        "Tangent 50%": ([0, 2], pytest.approx([0.02, 0.025])),
        "Smyrf 2×16": ([0, 2], pytest.approx([0.4, 0.8])),
    }
    assert charts.by_layer(replace(findings, heads=findings.heads[:2])) is None  # one layer is no line


def test_the_page_says_what_was_measured_and_where(findings):
    assert summary(findings) == (
        "Inspected: 4 heads of 2 layers. With Tangent 25% a query makes 25% of the key visits of dense attention, and "
        "the relative error of the model's outputs is 0.03 (mean cosine of tokens 0.9876). Tuned to an error of 0.1 in "
        "each layer, 37.5% of the key visits are enough."
    )
    text, data = read(build_page(findings))
    assert [chart["id"] for chart in data["charts"]][2] == "chart-memory"
    assert "Which heads are hard, and why" in text
    assert "Which heads are hard" not in build_page(replace(findings, heads=findings.heads[:1]))
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    assert ["Dense", "100%", "0", "0.9876", "0.9123", "2.00 s, 1.00×", "8.0 MiB"] in cells
    assert ["Tangent 25%", "25%", "0.03", "0.9876", "0.9123", "500 ms, 0.25×", "2.0 MiB"] in cells
    assert ["Smyrf 2×16", "32%", "0.4", "0.9876", "0.9123", "–", "–"] in cells
    assert ["0", "layer.0", "Tangent 25%", "25 of 100", "0.081"] in cells
    assert ["1", "layer.1", "Dense", "100 of 100", "0.000"] in cells
    assert text.count("over 34 queries from the first 2 of 5 documents") == 2
    assert "those of whole maps, in the first of 5 documents;" in text
    assert "The first document as a head sees it, its first 13 of 100 tokens." in text
    assert "at least 32 key visits, whose error stays below 0.1 on the first 4 of 5 documents" in text
    assert "<p>cpu some, threads 3</p>" in text and "<pre>smyrf report a-model</pre>" in text
    (shown,) = data["views"]
    assert (len(shown["tokens"]), len(shown["reaches"]), shown["n_tokens"]) == (13, 13, 100)
    one, whole = shown["reaches"][5], findings.views[0].reaches[5]
    assert (one["n_met"], one["keys"]) == (whole.n_met, list(whole.keys))
    assert [strong["text"] for strong in one["strongest"]] == [f" w{strong.key}" for strong in whole.strongest]
    assert [strong["how"] for strong in one["strongest"]] == [strong.how for strong in whole.strongest]


def test_a_page_without_singular_values_does_not_speak_of_them(findings):
    heads = tuple(replace(head, spectrum=None) for head in findings.heads)
    text, data = read(build_page(replace(findings, heads=heads, n_documents=1, n_inspected=1)))
    assert "chart-singular" not in [chart["id"] for chart in data["charts"]]
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert "ingular" not in own and "effective rank" not in own
    assert own.count("over 34 queries from one document") == 2


def test_a_result_file_is_whole_or_not_there(findings, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["smyrf", "report", "a-model"])
    write_data(findings, tmp_path / "new" / "a.json")
    data = json.loads((tmp_path / "new" / "a.json").read_text())
    assert (data["command"], data["threads"], data["config"]) == ("smyrf report a-model", 3, {"rows": 17})
    assert [row["extra_bytes"] for row in data["results"]] == [8 << 20, 5 << 20, 2 << 20, None, 3 << 20, 4 << 20]
    assert data["results"][4]["error"] is None  # JSON has no infinity
    assert data["plan"]["layers"][0]["method"]["budget"] == 0.25
    assert len(data["heads"]) == 4 and len(data["hardness"]) == 2 and len(data["views"][0]["reaches"]) == 13
    wrong = replace(findings, heads=(head_of(0, 0, (math.nan, 0.0, 0.0)),))
    with pytest.raises(ValueError, match="JSON"):
        write_data(wrong, tmp_path / "new" / "a.json")
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == data
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.json"]
