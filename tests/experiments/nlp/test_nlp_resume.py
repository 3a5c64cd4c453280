"""Runs that are interrupted, and runs of several processes."""

import json
import signal

import pytest
from filelock import FileLock
from typer.testing import CliRunner

pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from smyrf import Smyrf  # noqa: E402
from smyrf.__main__ import app  # noqa: E402
from smyrf.experiments.nlp.checkpoints import MarkWhole, last_checkpoint, remove_all, remove_half_written  # noqa: E402
from smyrf.experiments.nlp.presets import preset_for  # noqa: E402
from smyrf.experiments.nlp.recipe import Recipe  # noqa: E402
from smyrf.experiments.nlp.train import finetune, prepare  # noqa: E402
from smyrf.experiments.run_lock import LockedError  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


def test_what_a_kill_left_of_a_finished_run_is_removed(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=1)
    first = finetune(recipe, tmp_path, data, keep_model=False)
    left = tmp_path / recipe.name(first.inputs) / "checkpoint-1"
    left.mkdir(parents=True)
    assert finetune(recipe, tmp_path, data) == first and not left.parent.exists()


@pytest.mark.parametrize("max_steps", [None, 3])
def test_an_interrupted_evaluation_does_not_cost_the_training(models, data, tmp_path, monkeypatch, max_steps):
    # Two steps in an epoch.
    recipe = Recipe(
        task="rte", model=models["bert"], train_method=Smyrf(2, 4), max_length=16, epochs=6, max_steps=max_steps
    )
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
    assert not steps and again.losses == whole.losses and again.n_steps == whole.n_steps
    assert [one.metrics for one in again.evaluations] == [one.metrics for one in whole.evaluations]


def test_a_model_does_not_depend_on_the_cache_of_token_ids(models, data, tmp_path):
    """A resumed run reads the ids that an interrupted one has written."""
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=1)
    for name in ("first", "second"):
        finetune(recipe, tmp_path / name, data, cache=tmp_path / "cache")
    _check_same_model(tmp_path / "first", tmp_path / "second")


def test_a_run_is_trained_by_one_process_at_a_time(models, data, tmp_path):
    words = ["finetune", "rte", "--model", models["bert"], "--data", data, "--max-length", 16, "--max-steps", 1]
    words = [str(word) for word in (*words, "--output", tmp_path)]
    (recipe,) = preset_for("rte").recipes(("rte",), (0,), model=models["bert"], max_length=16, max_steps=1)
    folder = tmp_path / prepare(recipe, data).name
    folder.mkdir()
    with FileLock(folder / "run.lock"):
        with pytest.raises(LockedError, match="another process is training in"):
            finetune(recipe, tmp_path, data)
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and f"another process is training in {folder}" in done.stderr.replace("\n", "")
    assert (folder / "run.lock").exists()  # as a kill leaves it
    _in_this_process(words)
    assert not (folder / "run.lock").exists()


def test_a_run_of_several_processes_does_not_go_on_in_one(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=2)
    checkpoint = tmp_path / prepare(recipe, data).name / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    for mark in ("whole-0-of-2", "whole-1-of-2"):
        (checkpoint / mark).touch()
    with pytest.raises(ValueError, match="was started with 2 processes and cannot resume with 1"):
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
    for name, damage, words in (
        ("trainer_state.json", b'{"global_step": "two"}', "cannot be read"),
        ("model.safetensors", b"cut", "cannot be read"),
        ("optimizer.pt", None, "has no optimizer.pt"),
        ("rng_state.pth", None, "has no rng_state.pth"),
    ):
        whole = (last / name).read_bytes()
        (last / name).unlink() if damage is None else (last / name).write_bytes(damage)
        with pytest.raises(ValueError, match=rf"{last.name} {words}.*; remove it"):
            finetune(recipe, tmp_path, data)
        (last / name).write_bytes(whole)


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


# `smyrf`, each process of which is killed when it ends the step that the first word names: all processes have marked
# the checkpoint before it, for they exchange gradients in every step.
KILLED = """
import os
import signal
import sys

from smyrf.__main__ import main
from smyrf.experiments.nlp.checkpoints import MarkWhole

last = int(sys.argv.pop(1))


def kill(self, args, state, control, **kwargs):
    if state.global_step == last:
        os.kill(os.getpid(), signal.SIGKILL)


MarkWhole.on_step_end = kill
main()
"""
# 20 steps, four in an epoch, a loss at each and checkpoints at 10 and 20: in the midst of an epoch.
N_STEPS, CHECKPOINT, KILLED_AT = 20, 10, 13


def _words(models, data, output, kind, pad):
    words = ["finetune", "rte", "--model", models[kind], "--data", data, "--output", output, "--max-length", "16"]
    words += ["--lr", "1e-3", "--batch", "8", "--epochs", "5", "--threads", "1", "--pad", pad]
    words += ["--train-method", "smyrf:2x4", "--eval-method", "dense", "--eval-method", "smyrf:2x4"]
    return [str(word) for word in words]


def _in_this_process(words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def _only_result(folder):
    (file,) = folder.glob("*.run.json")
    return json.loads(file.read_text())


def _check_same_model(folder, other_folder):
    files, others = ({path.name: path for path in one.glob("*/model/*")} for one in (folder, other_folder))
    assert files.keys() == others.keys() >= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for name, path in files.items():
        assert path.read_bytes() == others[name].read_bytes(), name


def _leave_half_a_checkpoint(folder):
    """Checks what a kill has left, and adds a checkpoint that it interrupted."""
    assert not list(folder.glob("*.run.json"))
    (run_folder,) = folder.iterdir()
    assert last_checkpoint(run_folder).name == f"checkpoint-{CHECKPOINT}"
    (run_folder / f"checkpoint-{N_STEPS - 1}").mkdir()


def _check_same(resumed_folder, whole_folder):
    resumed, whole = _only_result(resumed_folder), _only_result(whole_folder)
    assert resumed["seconds"] is None and whole["seconds"] > 0
    assert resumed["n_steps"] == whole["n_steps"] == N_STEPS == len(whole["losses"])
    assert resumed["losses"] == whole["losses"]
    for one, other in zip(resumed["evaluations"], whole["evaluations"], strict=True):
        assert one["metrics"] == other["metrics"]
    _check_same_model(resumed_folder, whole_folder)


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been_killed(models, data, tmp_path, launch):
    (tmp_path / "killed.py").write_text(KILLED)
    words, whole = (_words(models, data, tmp_path / name, "bert", "max_length") for name in ("killed", "whole"))
    assert launch(tmp_path / "killed.py", KILLED_AT, *words).returncode == -signal.SIGKILL
    _leave_half_a_checkpoint(tmp_path / "killed")
    _in_this_process(words)
    _in_this_process(whole)
    _check_same(tmp_path / "killed", tmp_path / "whole")


def test_an_interrupted_run_goes_on_with_rows_of_like_lengths(models, data, tmp_path, monkeypatch):
    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == KILLED_AT:
            raise KeyboardInterrupt

    words, whole = (_words(models, data, tmp_path / name, "bert", "grouped") for name in ("cut", "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(MarkWhole, "on_step_end", interrupt)
        assert CliRunner().invoke(app, words).exit_code != 0
    _leave_half_a_checkpoint(tmp_path / "cut")
    _in_this_process(words)
    _in_this_process(whole)
    _check_same(tmp_path / "cut", tmp_path / "whole")


def _check_alike(one_folder, two_folder):
    one, two = _only_result(one_folder), _only_result(two_folder)
    assert (one["n_processes"], two["n_processes"]) == (1, 2)
    assert one["n_steps"] == two["n_steps"] == N_STEPS
    # The same rows in every step and no dropout: only hashes and the order of sums differ.
    for (_, a), (_, b) in zip(one["losses"], two["losses"], strict=True):
        assert a == pytest.approx(b, abs=0.02)
    for a, b in zip(one["evaluations"], two["evaluations"], strict=True):
        assert a["n_rows"] == b["n_rows"] == 16
        assert a["metrics"]["accuracy"] == pytest.approx(b["metrics"]["accuracy"], abs=0.13)  # two of sixteen rows


@pytest.mark.slow
def test_two_processes_do_what_one_does_and_go_on_when_they_are_killed(models, data, tmp_path, launch):
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    said = _in_this_process(_words(models, data, one, "calm", "grouped"))
    done = launch("-m", "smyrf", *_words(models, data, two, "calm", "grouped"), n_processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert said.count("1 of 1: RTE") == done.stdout.count("1 of 1: RTE") == 1  # one process prints
    _check_alike(one, two)
    (tmp_path / "killed.py").write_text(KILLED)
    words = _words(models, data, killed, "calm", "grouped")
    dead = launch(tmp_path / "killed.py", KILLED_AT, *words, n_processes=2)
    assert dead.returncode != 0 and "Signal 9 (SIGKILL)" in dead.stderr
    _leave_half_a_checkpoint(killed)
    done = launch("-m", "smyrf", *words, n_processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    _check_same(killed, two)


@pytest.mark.slow
def test_accelerate_launches_two_processes_too(models, data, tmp_path, launch):
    # Its option for a CPU starts one process, or several by MPI; this one starts several on any device.
    several = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    several += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "smyrf"]
    done = launch(*several, *_words(models, data, tmp_path / "two", "calm", "max_length"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("1 of 1: RTE") == 1
    _in_this_process(_words(models, data, tmp_path / "one", "calm", "max_length"))
    _check_alike(tmp_path / "one", tmp_path / "two")


def test_a_batch_that_processes_cannot_share_is_refused(models, data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="batch_size=16 must be a multiple of the 3 processes"):
        prepare(Recipe(task="rte", model=models["bert"]), data)
