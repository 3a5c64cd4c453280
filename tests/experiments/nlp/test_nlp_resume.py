"""Runs that are interrupted, and runs of several processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

psutil = pytest.importorskip("psutil")
pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import smyrf  # noqa: E402
from smyrf import Smyrf  # noqa: E402
from smyrf.experiments.nlp.checkpoints import last_checkpoint, remove_all, remove_half_written  # noqa: E402
from smyrf.experiments.nlp.recipe import Recipe  # noqa: E402
from smyrf.experiments.nlp.train import finetune, prepare  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


def test_what_a_kill_left_of_a_finished_run_is_removed(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=1)
    first = finetune(recipe, tmp_path, data, keep_model=False)
    left = tmp_path / recipe.name(first.inputs) / "checkpoint-1"
    left.mkdir(parents=True)
    assert finetune(recipe, tmp_path, data) == first and not left.parent.exists()


def test_an_interrupted_evaluation_does_not_cost_the_training(models, data, tmp_path, monkeypatch):
    recipe = Recipe(task="rte", model=models["bert"], train_method=Smyrf(2, 4), max_length=16, epochs=6)
    whole = finetune(recipe, tmp_path / "whole", data)

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "predict", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finetune(recipe, tmp_path / "cut", data)
    steps = []
    training_step = transformers.Trainer.training_step

    def count(*arguments, **options):
        steps.append(1)
        return training_step(*arguments, **options)

    monkeypatch.setattr(transformers.Trainer, "training_step", count)
    again = finetune(recipe, tmp_path / "cut", data)
    assert not steps and again.losses == whole.losses
    assert [one.metrics for one in again.evaluations] == [one.metrics for one in whole.evaluations]


def test_a_run_of_several_processes_does_not_go_on_in_one(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=2)
    checkpoint = tmp_path / prepare(recipe, data).name / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    for mark in ("whole-0-of-2", "whole-1-of-2"):
        (checkpoint / mark).touch()
    with pytest.raises(ValueError, match="was begun with 2 processes and cannot go on with 1"):
        finetune(recipe, tmp_path, data)


def test_a_damaged_checkpoint_is_named(models, data, tmp_path, monkeypatch):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, epochs=8.0, batch_size=8)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.Trainer, "predict", stop)
    with pytest.raises(KeyboardInterrupt):
        finetune(recipe, tmp_path, data)
    monkeypatch.undo()
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))
    last = last_checkpoint(tmp_path / prepare(recipe, data).name)
    (last / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=rf"{last.name} cannot be read: .*; remove it"):
        finetune(recipe, tmp_path, data)


def test_half_written_checkpoints_are_not_resumed(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step, marks in ((2, ["whole-0-of-1"]), (4, ["whole-0-of-2"]), (6, [])):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for mark in marks:
            (tmp_path / f"checkpoint-{step}" / mark).touch()
    (tmp_path / "checkpoint-old").mkdir()
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    remove_half_written(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-old"]
    remove_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-old"]


def _command(models, data, output, *more, kind="bert"):
    words = ["finetune", "rte", "--model", models[kind], "--data", str(data), "--output", str(output)]
    words += ["--max-length", "16", "--lr", "1e-3", "--batch", "8", "--threads", "1", *more]
    return words


def _environment():
    source = str(Path(smyrf.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _only_result(folder):
    (file,) = folder.glob("*.run.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(("pad", "n_processes"), [("max_length", 1), ("grouped", 1), ("grouped", 2)])
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been_killed(models, data, tmp_path, pad, n_processes):
    command = [sys.executable, "-m", "smyrf"]
    if n_processes > 1:
        several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes)]
        command = [sys.executable, "-m", *several, "-m", "smyrf"]
    # 150 steps, six in an epoch, a loss every 8, a checkpoint every 16: in the midst of an epoch
    more = ["--train-method", "smyrf:2x4", "--epochs", "25", "--pad", pad, "--batch", "6"]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, *_command(models, data, killed, *more)],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    for _ in range(1200):
        if list(killed.glob("*/checkpoint-32/whole-*")) or process.poll() is not None:
            break
        time.sleep(0.05)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    assert not list(killed.glob("*.run.json"))
    (run_folder,) = killed.iterdir()
    at = int(last_checkpoint(run_folder).name.removeprefix("checkpoint-"))
    assert 32 <= at < 150
    (run_folder / "checkpoint-149").mkdir()  # one that the kill has left half-written
    for folder in (killed, tmp_path / "whole"):
        done = subprocess.run(
            [*command, *_command(models, data, folder, *more)], env=_environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    resumed, whole = _only_result(killed), _only_result(tmp_path / "whole")
    assert resumed["seconds"] is None and whole["seconds"] > 0
    assert resumed["n_steps"] == whole["n_steps"] == 150
    assert resumed["losses"] == whole["losses"]
    for one, other in zip(resumed["evaluations"], whole["evaluations"], strict=True):
        assert one["metrics"] == other["metrics"]
    weights = [torch_weights(folder) for folder in (killed, tmp_path / "whole")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def torch_weights(folder):
    from safetensors.torch import load_file

    (file,) = folder.glob("*/model/model.safetensors")
    return load_file(file)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_do_what_one_does(launcher, models, data, tmp_path):
    if launcher == "torchrun":
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "smyrf"]
    else:
        # Its option for a CPU starts one process, or several by MPI; this one starts several of whatever there is.
        several = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        several += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "smyrf"]
    more = ["--train-method", "smyrf:2x4", "--eval-method", "dense", "--eval-method", "smyrf:2x4", "--epochs", "5"]
    for folder, words in (("one", ["-m", "smyrf"]), ("two", several)):
        done = subprocess.run(
            [sys.executable, *words, *_command(models, data, tmp_path / folder, *more, kind="calm")],
            env=_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("1 of 1: RTE") == 1  # one of the processes speaks
    one, two = _only_result(tmp_path / "one"), _only_result(tmp_path / "two")
    assert (one["n_processes"], two["n_processes"]) == (1, 2)
    assert one["n_steps"] == two["n_steps"] == 20
    # The same rows in every step and no dropout: only hashes differ, and the order of sums.
    for (_, a), (_, b) in zip(one["losses"], two["losses"], strict=True):
        assert a == pytest.approx(b, abs=0.02)
    for a, b in zip(one["evaluations"], two["evaluations"], strict=True):
        assert a["n_rows"] == b["n_rows"] == 16
        assert a["metrics"]["accuracy"] == pytest.approx(b["metrics"]["accuracy"], abs=0.13)  # two of sixteen rows


def test_a_batch_that_processes_cannot_share_is_refused(models, data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="batch_size=16 must be a multiple of the 3 processes"):
        prepare(Recipe(task="rte", model=models["bert"]), data)
