"""`smyrf report`: its numbers, and one page that needs nothing from elsewhere, in a real browser."""

import html
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tiny
from smyrf import Dense, Smyrf, Tangent
from smyrf.analysis.balance import Balance
from smyrf.analysis.calls import Call
from smyrf.analysis.character import Character
from smyrf.analysis.hardness import hardness
from smyrf.analysis.inspection import HeadInspection, Outcome
from smyrf.analysis.spectrum import Spectrum
from smyrf.analysis.tokens import token_view
from smyrf.tuning.plan import LayerPlan, Plan

pytest.importorskip("transformers")
pytest.importorskip("plotly")

from smyrf.cli import app
from smyrf.compare.contenders import Tuned
from smyrf.compare.drift import Drift
from smyrf.compare.run import Cost, Row
from smyrf.report import charts
from smyrf.report.findings import Findings, write_data
from smyrf.report.page import build_page, summary

runner = CliRunner()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Where screenshots are kept, to be looked at.
PICTURES = Path(__file__).parents[1] / "build" / "screenshots"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of a small random model."""
    folder = tmp_path_factory.mktemp("report")
    # With weights as small as those of a new model attention is uniform, and every method is exact.
    wide = {"hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.5}
    model = tiny.save_encoder(folder / "<b>$title", n_layers=3, **wide)
    words = [" ".join(tiny.WORDS[(3 * i + j * j) % len(tiny.WORDS)] for j in range(90)) for i in range(4)]
    (folder / "texts.txt").write_text("\n".join(words))
    options = ["--text", str(folder / "texts.txt"), "--length", "64", "--documents", "3", "--rows", "32", "--no-memory"]
    options += ["--threads", "1", "--json", str(folder / "page.json"), "--output", str(folder / "page.html")]
    done = runner.invoke(app, ["report", model, *options])
    assert done.exit_code == 0, done.output
    assert "page.json" in done.output and "page.html" in done.output
    return folder / "page.html"


def data_of(page):
    return read(page.read_text(encoding="utf-8"))


def read(text):
    """The text of a page, and the data in it."""
    return text, json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def test_the_page_holds_everything_and_names_nothing_from_elsewhere(page):
    text, data = data_of(page)
    names = [chart["id"].removeprefix("chart-") for chart in data["charts"]]
    assert names == ["visits", "time", "layers", "maps", "errors", "singular", "mass"]
    assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="(?!data:)', text)
    assert "@import" not in text.split("</style>")[0] and "url(" not in text.split("</style>")[0]
    for title in ("Layers and heads", "Tokens and clusters", "A tuned plan", "Made by"):
        assert title in text
    heat = next(chart for chart in data["charts"] if chart["id"] == "chart-errors")
    assert [len(choice["data"][0]["z"]) for choice in heat["choices"]] == [3] * 5  # a row for each layer
    assert len(data["views"]) == 4 and len(data["views"][0]["reaches"]) == 64
    assert "<b>$title" not in text and "&lt;b&gt;$title" in text  # a model may be called anything
    assert "over 64 queries from the first 2 of 3 documents" in text


def test_the_result_file_holds_what_the_page_shows(page, tmp_path):
    text, data = data_of(page)
    file = json.loads(page.with_suffix(".json").read_text())
    assert {"command", "date", "threads", "machine"} <= file.keys()
    for name, value in {"kind": "text", "documents": 3, "inspected": 2, "rows": 32, "singular": 64}.items():
        assert file["config"][name] == value
    drawn = {chart["id"].removeprefix("chart-"): chart for chart in data["charts"]}
    tangent = [row for row in file["results"] if row["family"] == "Tangent"]
    (line,) = [trace for trace in drawn["visits"]["data"] if trace["name"] == "Tangent"]
    assert line["x"] == [100 * row["share"] for row in tangent]
    assert line["y"] == [row["error"] for row in tangent]
    heat = drawn["errors"]["choices"][4]["data"][0]
    assert [row[heat["x"][2]] for row in heat["z"]] == [
        head["outcomes"][4]["error"] for head in file["heads"] if head["head"] == 2
    ]
    assert len(drawn["singular"]["data"]) == len(file["heads"]) == 12
    assert all(html.escape(one["summary"]) in text for one in file["hardness"])
    (tmp_path / "plan.json").write_text(json.dumps(file["plan"]))
    assert len(Plan.load(tmp_path / "plan.json").layers) == 3
    for shown, view in zip(data["views"], file["views"], strict=True):
        assert shown["tokens"] == view["tokens"]
        for name in ("cluster", "n_met", "keys", "captured", "folded"):
            assert [one[name] for one in shown["reaches"]] == [one[name] for one in view["reaches"]]


# Numbers, from findings that are made by hand


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
        character=Character(0.1, 0.2, 0.3, 0.4, 0.5),
        spectrum=Spectrum(spectrum, 3, 17.0, 0.0, 257.0) if spectrum else None,
        outcomes=tuple(outcomes),
    )


def row_of(contender, share, error, seconds, extra_bytes):
    drift = Drift(error, 0.9876, 0.9123, 0.99, 0.98, None)
    return Row(contender, drift, Cost(100 * share, share, 1e6), seconds=seconds, extra_bytes=extra_bytes)


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
        "entropy, share of the largest there is": [pytest.approx([0.2, 0.21]), pytest.approx([0.4, 0.41])],
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
        "Looked at: 4 heads of 2 layers. With Tangent 25% a query spends 25% of the key visits of dense attention, and "
        "the outputs of the model move by 0.03 of their length (mean cosine of tokens 0.9876). Tuned to an error of "
        "0.1 in each layer, 37.5% of the key visits are enough."
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
    assert "from 32 key visits on, whose error stays below 0.1 on the first 4 of 5 documents" in text
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


def test_a_result_file_is_whole_or_not_there(findings, tmp_path):
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


# Other models and lengths


def test_a_model_of_images_has_a_report_without_tokens(saved, quick_comparison, visit, tmp_path):
    page = tmp_path / "page.html"
    options = ["--documents", "3", "--rows", "16", "--methods", "tangent:0.5,smyrf:1x16", "--no-memory"]
    done = runner.invoke(app, ["report", str(saved("vit")), *options, "--threads", "1", "--output", str(page)])
    assert done.exit_code == 0, done.output
    text, data = data_of(page)
    assert data["views"] == [] and 'id="tokens"' not in text
    assert "over 32 queries from the first 2 of 3 images" in text
    tab, found = visit(page)
    assert found["errors"] == []
    assert_drawn(tab, data)


def test_of_a_long_text_the_first_tokens_are_shown(quick_comparison, visit, tmp_path):
    model = tiny.save_encoder(tmp_path / "model", n_layers=1, max_position_embeddings=700, initializer_range=0.5)
    words = [" ".join(tiny.WORDS[(3 * i + j * j) % len(tiny.WORDS)] for j in range(700)) for i in range(2)]
    (tmp_path / "texts.txt").write_text("\n".join(words))
    options = ["--text", str(tmp_path / "texts.txt"), "--length", "600", "--documents", "2", "--rows", "16"]
    options += ["--methods", "tangent:0.25,smyrf:4x16", "--singular", "0", "--no-memory", "--threads", "1"]
    files = [tmp_path / "page.json", tmp_path / "page.html"]
    done = runner.invoke(app, ["report", model, *options, "--json", str(files[0]), "--output", str(files[1])])
    assert done.exit_code == 0, done.output
    text, data = data_of(files[1])
    assert "its first 512 of 600 tokens" in text and "over 32 queries from 2 documents" in text
    assert [chart["id"] for chart in data["charts"] if "singular" in chart["id"]] == []
    assert all(head["spectrum"] is None for head in json.loads(files[0].read_text())["heads"])
    view = data["views"][0]
    assert (view["n_tokens"], len(view["tokens"]), len(view["reaches"])) == (600, 512, 512)
    assert all(key < 512 for one in view["reaches"] for key in one["keys"])
    assert any(one["n_met"] > len(one["keys"]) for one in view["reaches"])
    tab, found = visit(files[1])
    tab.locator(".tokens span").nth(7).hover()
    assert f"meets {view['reaches'][7]['n_met']} of 600 keys" in tab.locator(".answer").inner_text()
    assert tab.locator(".tokens span.met").count() == len(view["reaches"][7]["keys"])
    assert found["errors"] == []
    assert_drawn(tab, data)


# In a browser


def assert_drawn(tab, data):
    """Each chart has all its lines, or its map."""
    for chart in data["charts"]:
        place = tab.locator(f"#{chart['id']}")
        if "choices" in chart:
            assert place.locator(".hm image").count() == 1, chart["id"]
        else:
            drawn = place.locator(".scatterlayer .trace").count()
            assert drawn == sum(bool(trace["x"]) for trace in chart["data"]) > 0, chart["id"]


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def visit(browser):
    """Opens a page; errors and requests are collected."""
    opened = []

    def visit(page, **options):
        context = browser.new_context(**options)
        opened.append(context)
        tab = context.new_page()
        found = {"errors": [], "requests": []}
        tab.on("console", lambda message: message.type == "error" and found["errors"].append(message.text))
        tab.on("pageerror", lambda error: found["errors"].append(str(error)))
        tab.on("request", lambda request: found["requests"].append(request.url))
        tab.goto(page.as_uri())
        tab.wait_for_function("document.documentElement.dataset.drawn !== undefined")
        return tab, found

    yield visit
    for context in opened:
        context.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wide", {"viewport": {"width": 1280, "height": 900}}),
        ("phone", {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}),
        ("dark", {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"}),
    ],
)
def test_in_a_browser_all_is_drawn_and_nothing_is_asked_for(visit, page, name, options):
    tab, found = visit(page, **options)
    assert found["errors"] == []
    assert [url for url in found["requests"] if url != page.as_uri() and not url.startswith("data:")] == []
    assert_drawn(tab, data_of(page)[1])
    # Nothing sticks out: a phone scrolls downwards alone. Its window would become as wide as what sticks out.
    assert tab.evaluate("document.documentElement.scrollWidth") <= options["viewport"]["width"]
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == (name == "dark")
    PICTURES.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=PICTURES / f"report-{name}.png", full_page=True)


def test_a_token_that_is_pointed_at_shows_its_keys(visit, page):
    tab, found = visit(page)
    _, data = data_of(page)
    view = data["views"][0]
    tab.locator(".tokens span").nth(5).hover()
    assert tab.locator(".tokens span.met").count() == len(view["reaches"][5]["keys"])
    assert tab.locator(".tokens span.asks").count() == 1
    answer = tab.locator(".answer").inner_text()
    assert f"meets {len(view['reaches'][5]['keys'])} of 64 keys" in answer
    words = [tab.locator(".answer td:last-child").nth(i).inner_text() for i in range(8)]
    assert words == [one["how"] for one in view["reaches"][5]["strongest"]]
    tab.mouse.move(0, 0)  # nobody is asked any more
    tab.locator("#tokens select").select_option(index=1)  # another method: other clusters
    assert tab.locator(".tokens.asked").count() == 0
    assert found["errors"] == []


def test_a_choice_draws_another_map(visit, page):
    tab, found = visit(page)
    shown = "document.getElementById('chart-errors').data[0].z[0][0]"
    before = tab.evaluate(shown)
    tab.locator('select[data-chart="chart-errors"]').select_option(index=3)
    tab.wait_for_function(f"{shown} !== {before}")
    assert found["errors"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["./nowhere"], "./nowhere: cannot be loaded: there is no such folder"),
        (["{m}", "--max-error", "2"], "--max-error 2.0 must be between 0 and 1"),
        (["{m}", "--rows", "0"], "--rows"),
        (["{m}", "--singular", "-1"], "--singular -1 must be at least 0"),
        (["{m}", "--methods", "x"], "'x' is not a method"),
        (["{m}", "--text", "no.txt"], "no.txt"),
        (["{m}", "--text", "a", "--images", "b"], "--text and --images must not be given together"),
        (["{m}", "--output", "/proc/a/page.html"], "--output"),
        (["{m}", "--json", "a.html", "--output", "./a.html"], "--json a.html is the page itself"),
        (["{m}", "--json", "/proc/a/page.json"], "--json"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(page, words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["report", *(word.replace("{m}", str(page.parent / "<b>$title")) for word in words)])
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr.replace("\n", " ") and "Traceback" not in done.output
    assert not list(tmp_path.iterdir())
