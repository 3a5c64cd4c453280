import errno
import importlib
import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from smyrf import Dense, Plan
from smyrf.__main__ import app
from smyrf.atomic_write import write_json

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--preset", "huge"], "--preset huge must be one of batch1, fixed-tokens, native, quick"),
        (["bench", "--preset", "batch1", "--length", "64"], "leave out --length"),
        (["bench", "--length", "0"], "--length 0 must be at least 1"),
        (["bench", "--length", "64", "--batch", "-1"], "--batch -1 must be at least 1"),
        (["bench", "--length", "64", "--n-hashes", "4"], "go in pairs"),
        (["bench", "--length", "64", "--n-hashes", "0", "--cluster-size", "4"], "--n-hashes 0 must be at least 1"),
        (["bench", "--length", "64", "--budget", "0"], "--budget 0 must be at least 1"),
        (["bench", "--levels", "2"], "--levels 2 is for Tangent"),
        (["bench", "--length", "64", "--budget", "9", "--levels", "32"], "levels=32 must be at most 31"),
        (["bench", "--length", "64", "--budget", str(10**19)], "must be below 2³¹"),
        (["bench", "--length", "64", "--n-hashes", "1", "--cluster-size", str(10**19)], "must be below 2³¹"),
        (["bench", "--dtype", "int8"], "--dtype int8 must be one of float32"),
        (["bench", "--backend", "cuda"], "--backend cuda must be one of reference, torch"),
        (["bench", "--backend", "torch", "--backend", "cuda"], "--backend cuda must be one of reference, torch"),
        (["bench", "--without", "smyrf"], "--without smyrf must be one of eager smyrf, sdpa, eager dense"),
        (["bench", "--threads", "0"], "--threads 0 must be at least 1"),
        (["tune", "minilm", "--max-error", "1.5"], "--max-error 1.5 must be between 0 and 1"),
        (["tune", "minilm", "--length", "0"], "--length 0 must be at least 1"),
        (["tune", "minilm", "--documents", "0"], "--documents 0 must be at least 1"),
        (["tune", "minilm", "--seed", str(2**62)], "must be less than 2**62"),
        (["tune", "minilm", "--length", "2"], "minilm: length=2 leaves no place for text"),
        (["tune", "/no/such/model"], "/no/such/model: cannot be loaded"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(refused, arguments, words):
    refused(arguments, words)


@pytest.mark.parametrize(
    ("command", "place", "words"),
    [
        ("demo --output", "file", "cannot be written"),
        ("demo --output", "file/below", "cannot be written"),
        ("bench --json", "", "is a folder, not a file"),
        ("bench --json", "file/out.json", "cannot be written"),
        ("bench --plot", "file/out", "cannot be written"),
        ("tune minilm --json", "file/out.json", "cannot be written"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_any_work(refused, tmp_path, command, place, words):
    (tmp_path / "file").write_text("")
    refused([*command.split(), str(tmp_path / place)], words)


def test_bench_writes_table_json_and_plots(tmp_path, monkeypatch):
    monkeypatch.setattr("smyrf.tools.bench.roofline.SIZES", (8, 16))
    monkeypatch.setattr("smyrf.tools.bench.run.TIMING_SECONDS", 0.02)
    out = tmp_path / "out.json"
    arguments = [
        "bench",
        "--length",
        "64",
        "--length",
        "128",
        "--n-hashes",
        "2",
        "--cluster-size",
        "16",
        "--heads",
        "2",
        "--budget",
        "24",
        "--levels",
        "1",
    ]
    arguments += ["--width", "8", "--threads", "1", "--no-memory", "--json", str(out), "--plot", str(tmp_path / "plot")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Smyrf 2×16" in result.output
    assert "Tangent 24, one level" in result.output
    data = json.loads(out.read_text())
    assert {row["length"] for row in data["results"]} == {64, 128}
    assert {row["backward"] for row in data["results"]} == {False, True}
    assert (tmp_path / "plot.png").exists()
    assert (tmp_path / "plot.svg").exists()


def test_bench_runs_backends_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr("smyrf.tools.bench.roofline.SIZES", (8, 16))
    monkeypatch.setattr("smyrf.tools.bench.run.TIMING_SECONDS", 0.02)
    out = tmp_path / "out.json"
    arguments = ["bench", "--length", "64", "--n-hashes", "2", "--cluster-size", "16", "--heads", "2", "--width", "8"]
    arguments += ["--backend", "torch,reference", "--without", "eager dense", "--without", "sdpa"]
    result = runner.invoke(app, [*arguments, "--threads", "1", "--no-memory", "--no-backward", "--json", str(out)])
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert data["config"] == {"backends": ["torch", "reference"], "without": ["eager dense", "sdpa"], "memory": False}
    found = [(row["contender"], row["backend"]) for row in data["results"]]
    assert found == [("smyrf", "torch"), ("smyrf", "reference"), ("eager smyrf", None)]
    assert all(row["gemm_gflops"] > 0 for row in data["results"])


def test_a_kernel_that_is_not_there_says_why(refused, monkeypatch):
    package = importlib.import_module("smyrf.backends.registry")
    monkeypatch.setattr(package, "BACKENDS", {"torch": package.BACKENDS["torch"]})
    monkeypatch.setattr(package, "_missing", {"native": "it was not built"})
    refused(["bench", "--backend", "native"], "--backend native is not available: it was not built")


def test_tune_prints_a_plan_and_writes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "plan.json"
    arguments = ["tune", "minilm", "--length", "128", "--documents", "1", "--threads", "1", "--json", str(out)]
    result = runner.invoke(app, [*arguments, "--max-error", "0.3", "--no-fallback"])
    assert result.exit_code == 0, result.output
    assert "Tangent" in result.output
    assert len(Plan.load(out).methods) == 6
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "dense is as fast at this length" in result.output
    assert Plan.load(out).methods == (Dense(),) * 6


def test_help_lists_the_commands():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "bench" in result.output
    assert "demo" in result.output
    assert "tune" in result.output


def test_an_output_that_is_a_link_is_checked_where_it_leads(tmp_path, refused):
    (tmp_path / "file").write_text("")
    (tmp_path / "blocked.json").symlink_to("file/a.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    refused(["bench", "--length", "64", "--json", str(tmp_path / "blocked.json")], "blocked.json cannot be written")
    refused(["bench", "--length", "64", "--json", str(tmp_path / "loop.json")], "loop.json is not a file")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS])
def test_a_file_that_cannot_be_written_is_named_in_one_sentence(number, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(number, os.strerror(number))

    commands = typer.Typer(cls=app.info.cls)
    commands.command("write")(lambda path: write_json(Path(path), {}))
    commands.command("other")(lambda: None)
    monkeypatch.setattr(Path, "write_bytes", full)
    path = tmp_path / "a.json"
    result = runner.invoke(commands, ["write", str(path)])
    assert result.exit_code == 2
    assert result.stderr == f"error: {path}: {os.strerror(number)}\n"
    assert not list(tmp_path.iterdir())
