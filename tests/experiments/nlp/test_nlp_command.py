"""`smyrf finetune` as it is typed."""

import json

import pytest
from typer.testing import CliRunner

import tiny

pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from smyrf.__main__ import app
from smyrf.experiments.nlp.presets import PRESETS

runner = CliRunner()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and the files of two tasks."""
    folder = tmp_path_factory.mktemp("place")
    tiny.save_encoder(folder / "model")
    for name in ("rte", "imdb"):
        tiny.write_task(folder / "data", name)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def finetune(place, output, *words):
    common = ["--model", str(place / "model"), "--data", str(place / "data"), "--output", str(output)]
    return runner.invoke(app, ["finetune", *words, *common])


def test_a_task_several_seeds_and_a_report(place, tmp_path):
    words = ["rte", "--seed", "0", "--seed", "1", "--max-steps", "1", "--lr", "1e-3", "--no-keep-model"]
    words += [
        "--train-method",
        "smyrf:2x4",
        "--eval-method",
        "dense",
        "--eval-method",
        "smyrf:2x4",
        "--max-length",
        "16",
    ]
    done = finetune(place, tmp_path, *words)
    assert done.exit_code == 0, done.output
    assert "2 of 2: RTE, Smyrf 2×4, 16 tokens, learning rate 0.001, seed 1: 1 steps on 32 rows" in done.output
    assert " ± " in done.output and "Smyrf 2×4 → Dense" in done.output
    files = sorted(tmp_path.glob("*.run.json"))
    assert len(files) == 2
    data = json.loads(files[0].read_text())
    assert data["recipe"]["max_length"] == 16 and len(data["evaluations"]) == 2
    again = finetune(place, tmp_path, *words)
    assert again.output.count("finished before") == 2
    report = runner.invoke(app, ["finetune", "report", str(tmp_path)])
    assert report.exit_code == 0, report.output
    assert (tmp_path / "report.md").exists() and (tmp_path / "glue-backandforth.png").exists()


def test_a_preset_with_its_task_and_with_options(place, tmp_path):
    words = ["imdb", "--preset", "backandforth/bert", "--max-steps", "1", "--train-rows", "8", "--eval-rows", "8"]
    done = finetune(place, tmp_path, *words, "--threads", "1", "--json", str(tmp_path / "tables.json"))
    assert done.exit_code == 0, done.output
    assert [table["name"] for table in json.loads((tmp_path / "tables.json").read_text())] == ["imdb", "backandforth"]
    assert "Smyrf 8×32 → Dense" in done.output and "93.54 BERT" in done.output
    (file,) = tmp_path.glob("*.run.json")
    data = json.loads(file.read_text())
    assert data["preset"] == "backandforth/bert" and data["recipe"]["max_length"] == 512
    assert len(list(tmp_path.glob("*/model/model.safetensors"))) == 1


def test_the_list_shows_every_preset(tmp_path):
    done = runner.invoke(app, ["finetune", "--list", "--json", str(tmp_path / "presets.json")])
    assert done.exit_code == 0
    presets = json.loads((tmp_path / "presets.json").read_text())
    assert [one["name"] for one in presets] == list(PRESETS) and presets[0]["paper"]["mnli"] == [84.43, 84.68]
    assert "our method: not in the paper" in done.output
    assert all(name in done.output for name in PRESETS)
    assert "97.2" in done.output and "68.59" in done.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "TASK or --preset is missing"),
        (["boolq"], "task='boolq' must be one of cola"),
        (["rte", "--preset", "glue"], "--preset 'glue' must be one of glue/bert-128"),
        (["imdb", "--preset", "glue/bert-128"], "--preset glue/bert-128 has no task 'imdb'; it has cola"),
        (["rte", "--train-method", "smyrf"], "--train-method 'smyrf' is not a method"),
        (["rte", "--eval-method", "tangent:2.0"], "--eval-method 'tangent:2.0' is not a method"),
        (["rte", "--batch", "0"], "--batch 0 must be at least 1"),
        (["rte", "--epochs", "1e308"], "--epochs 1e+308 must be positive, and at most 1e+06"),
        (["rte", "--lr", "0"], "--lr 0.0 must be positive"),
        (["rte", "--pad", "right"], "--pad 'right' must be one of"),
        (["rte", "--seed", "-1"], "--seed -1 must be"),
        (["rte", "--threads", "0"], "--threads 0 must be at least 1"),
        (["rte", "--max-length", "1000"], "--max-length 1000 is more than the 512 positions"),
        (["rte", "--train-rows", "1000"], "--train-rows 1000 is more than the 32 rows"),
        (["cola"], "has no train split of CoLA"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(place, tmp_path, words, sentence):
    done = finetune(place, tmp_path / "runs", *words)
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.output
    assert not list(tmp_path.rglob("*.run.json"))


def test_folders_that_do_not_fit_are_refused(place, tmp_path):
    (tmp_path / "file").write_text("")
    done = finetune(place, tmp_path / "file", "rte")
    assert done.exit_code == 2 and "cannot be written" in done.stderr.replace("\n", " ")
    for folder, words in ((tmp_path, "holds no results"), (tmp_path / "no", "is not a folder")):
        done = runner.invoke(app, ["finetune", "report", str(folder)])
        assert done.exit_code == 2 and words in done.stderr.replace("\n", " ")


def test_a_missing_column_is_said_before_the_model_is_trained(place, tmp_path):
    tiny.write_task(tmp_path / "data", "mrpc")
    (tmp_path / "data" / "MRPC" / "dev.tsv").write_text("Quality\t#1 String\n1\ta\n")
    words = ["mrpc", "--model", str(place / "model"), "--data", str(tmp_path / "data"), "--output", str(tmp_path / "o")]
    done = runner.invoke(app, ["finetune", *words])
    assert done.exit_code == 2
    assert "dev.tsv: line 2 has no column 'sentence2'" in done.stderr.replace("\n", "")
