"""A full disk ends a run with one sentence; earlier checkpoints stay, and the same command resumes."""

import errno
import json
import os
from contextlib import ExitStack, contextmanager

import pytest
import torch
from typer.testing import CliRunner

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
for module in ("accelerate", "filelock", "safetensors", "PIL"):
    pytest.importorskip(module)
resource = pytest.importorskip("resource", reason="only Unix limits the size of files")

from smyrf.__main__ import app  # noqa: E402
from smyrf.experiments.biggan.train import Run  # noqa: E402
from smyrf.experiments.nlp.checkpoints import MarkWhole  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


@contextmanager
def full_disk(kind, patch):
    """Writing fails inside the block: torch.save as it does on a full disk, or every file above 4 kB."""
    if kind == "small files":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return

    def fail(*arguments, **options):
        if kind == "RuntimeError":
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nmore")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.context() as context:
        context.setattr(torch, "save", fail)
        yield


def refused(words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "Traceback" not in done.output, done.stderr
    return lines[0]


@pytest.mark.parametrize("kind", ["ENOSPC", "RuntimeError", "small files"])
def test_biggan_resumes_after_a_full_disk(npz, tmp_path, monkeypatch, kind):
    words = ["biggan", "train", npz, "--resolution", 32, "--colours", 1, "--channels", 2, "--latent", 8, "--batch", 2]
    words += ["--save-every", 1, "--grid-every", 9, "--steps", 3, "--output", tmp_path]
    save = Run.save

    def save_on_a_full_disk(run):
        if run.step < 2:
            return save(run)
        with full_disk(kind, monkeypatch):
            return save(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", save_on_a_full_disk)
        said = refused(words)
    (folder,) = tmp_path.iterdir()
    assert str(folder) in said and "checkpoint-2 cannot be written" in said
    assert [path.name for path in folder.glob("checkpoint*")] == ["checkpoint-1"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0 and "step 1 of 3" in done.output
    assert (folder / "checkpoint-3").is_dir()


@pytest.mark.parametrize("kind", ["ENOSPC", "RuntimeError", "small files"])
def test_fine_tuning_resumes_after_a_full_disk(models, data, tmp_path, monkeypatch, kind):
    words = ["finetune", "rte", "--model", models["bert"], "--data", data, "--max-length", 16, "--batch", 8]
    words += ["--max-steps", 21, "--epochs", 6, "--output", tmp_path]  # checkpoints at 10, 20 and 21
    save = transformers.Trainer._save_checkpoint

    def save_on_a_full_disk(trainer, *arguments, **options):
        if trainer.state.global_step < 20:
            return save(trainer, *arguments, **options)
        with full_disk(kind, monkeypatch):
            return save(trainer, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "_save_checkpoint", save_on_a_full_disk)
        said = refused(words)
    (folder,) = tmp_path.iterdir()
    assert str(folder) in said and "cannot be written" in said
    (last,) = folder.glob("checkpoint*")
    steps = []
    monkeypatch.setattr(MarkWhole, "on_step_end", lambda self, args, state, control, **_: steps.append(state), False)
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert len(steps) == 21 - int(last.name.rsplit("-")[-1])


def test_a_cache_of_token_ids_that_cannot_be_written_is_named(models, data, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise ValueError("I/O operation on closed file")  # noqa: B904, as datasets does

    monkeypatch.setattr(datasets.Dataset, "map", fail)
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))
    words = ["finetune", "rte", "--model", models["bert"], "--data", data, "--max-length", 16, "--max-steps", 1]
    said = refused([*words, "--output", tmp_path / "runs"])
    assert f"{tmp_path / 'cache' / 'tokens'}, the cache of token ids, cannot be written: No space left" in said


def test_a_model_or_result_that_cannot_be_written_is_named(models, data, tmp_path, monkeypatch):
    words = ["finetune", "rte", "--model", models["bert"], "--data", data, "--max-length", 16, "--max-steps", 1]
    words += ["--output", tmp_path]
    predict = transformers.Trainer.predict
    with ExitStack() as stack, monkeypatch.context() as patch:

        def fill_the_disk(*arguments, **options):
            found = predict(*arguments, **options)
            stack.enter_context(full_disk("small files", monkeypatch))
            return found

        patch.setattr(transformers.Trainer, "predict", fill_the_disk)
        said = refused(words)
    (folder,) = tmp_path.iterdir()
    assert str(folder) in said and "cannot be written" in said and not list(tmp_path.glob("*.run.json"))
    assert CliRunner().invoke(app, [str(word) for word in words]).exit_code == 0
    (file,) = tmp_path.glob("*.run.json")
    assert json.loads(file.read_text())["n_steps"] == 1
