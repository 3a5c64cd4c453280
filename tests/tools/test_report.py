"""`smyrf report`: its numbers, and one page that needs nothing from elsewhere, in a real browser."""

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from report_page import read
from smyrf.models.plan import Plan

pytest.importorskip("transformers")
pytest.importorskip("plotly")

from smyrf.__main__ import app

runner = CliRunner()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Where screenshots are kept, to be looked at.
PICTURES = Path(__file__).parents[2] / "build" / "screenshots"


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smyrf.tools.compare.run.TIMING_SECONDS", 0.01)
        done = runner.invoke(app, ["report", model, *options])
    assert done.exit_code == 0, done.output
    assert "page.json" in done.output and "page.html" in done.output
    return folder / "page.html"


def data_of(page):
    return read(page.read_text(encoding="utf-8"))


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
    assert f"visits {view['reaches'][7]['n_met']} of 600 keys" in tab.locator(".answer").inner_text()
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
    assert f"visits {len(view['reaches'][5]['keys'])} of 64 keys" in answer
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
def test_bad_input_gives_one_sentence_and_exit_code_2(refused, page, words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(["report", *(word.replace("{m}", str(page.parent / "<b>$title")) for word in words)], sentence)
    assert not list(tmp_path.iterdir())
