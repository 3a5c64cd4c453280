"""`smyrf report`: one page that needs nothing from elsewhere, in a real browser."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny

pytest.importorskip("transformers")
pytest.importorskip("plotly")

from smyrf.cli import app

runner = CliRunner()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Where screenshots are kept, to be looked at.
PICTURES = Path(__file__).parents[1] / "build" / "screenshots"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of a small random model."""
    folder = tmp_path_factory.mktemp("report")
    model = tiny.save_encoder(folder / "<b>$title", n_layers=3, hidden_size=32, num_attention_heads=4)
    words = [" ".join(tiny.WORDS[(3 * i + j * j) % len(tiny.WORDS)] for j in range(90)) for i in range(4)]
    (folder / "texts.txt").write_text("\n".join(words))
    options = ["--text", str(folder / "texts.txt"), "--length", "64", "--documents", "3", "--rows", "32", "--no-memory"]
    done = runner.invoke(app, ["report", model, *options, "--threads", "1", "--output", str(folder / "page.html")])
    assert done.exit_code == 0, done.output
    return folder / "page.html"


def data_of(page):
    text = page.read_text(encoding="utf-8")
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
    assert [len(choice["data"][0]["z"]) for choice in heat["choices"]] == [3] * 6  # a row for each layer
    assert len(data["views"]) == 4 and len(data["views"][0]["reaches"]) == 64
    assert "<b>$title" not in text and "&lt;b&gt;$title" in text  # a model may be called anything


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
def visit(browser, page):
    """Opens the page; errors and requests are collected."""
    opened = []

    def visit(**options):
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
    tab, found = visit(**options)
    assert found["errors"] == []
    assert [url for url in found["requests"] if url != page.as_uri() and not url.startswith("data:")] == []
    assert tab.locator(".plot .main-svg").count() >= 7
    assert all(tab.locator(f"#chart-{one} .trace").count() for one in ("visits", "layers", "singular", "mass"))
    # Nothing sticks out: a phone scrolls downwards alone.
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == (name == "dark")
    PICTURES.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=PICTURES / f"report-{name}.png", full_page=True)


def test_a_token_that_is_pointed_at_shows_its_keys(visit):
    tab, found = visit()
    _, data = data_of(Path(tab.url.removeprefix("file://")))
    view = data["views"][0]
    tab.locator(".tokens span").nth(5).hover()
    assert tab.locator(".tokens span.met").count() == len(view["reaches"][5]["keys"])
    assert tab.locator(".tokens span.asks").count() == 1
    answer = tab.locator(".answer").inner_text()
    assert f"meets {len(view['reaches'][5]['keys'])} of 64 keys" in answer
    assert tab.locator(".answer tr").count() == len(view["reaches"][5]["strongest"])
    tab.mouse.move(0, 0)  # nobody is asked any more
    tab.locator("#tokens select").select_option(index=1)  # another method: other clusters
    assert tab.locator(".tokens.asked").count() == 0
    assert found["errors"] == []


def test_a_choice_draws_another_map(visit):
    tab, found = visit()
    shown = "document.getElementById('chart-errors').data[0].z[0][0]"
    before = tab.evaluate(shown)
    tab.locator('select[data-chart="chart-errors"]').select_option(index=3)
    tab.wait_for_function(f"{shown} !== {before}")
    assert found["errors"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere"),
        (["{m}", "--max-error", "2"], "--max-error 2.0 must be between 0 and 1"),
        (["{m}", "--rows", "0"], "--rows"),
        (["{m}", "--methods", "x"], "'x' is not a method"),
        (["{m}", "--text", "no.txt"], "no.txt"),
        (["{m}", "--text", "a", "--images", "b"], "--text and --images must not be given together"),
        (["{m}", "--output", "/proc/a/page.html"], "--output"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(page, words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["report", *(word.replace("{m}", str(page.parent / "<b>$title")) for word in words)])
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr.replace("\n", " ") and "Traceback" not in done.output
    assert not list(tmp_path.iterdir())
