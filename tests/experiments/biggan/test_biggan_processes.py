"""Training BigGAN with several processes."""

import pytest
import torch

pytest.importorskip("accelerate")

from safetensors.torch import load_file

# `smyrf`, each process of which writes into a folder what it has seen and where it has ended.
PROGRAM = """
import os
import sys

import torch

from smyrf.experiments.biggan.pictures import Pictures
from smyrf.experiments.biggan.train import Run
from smyrf.__main__ import main

folder = sys.argv.pop(1)
take, train, taken = Pictures.__getitem__, Run.train, []


def watched_take(pictures, index):
    taken.append(index)
    return take(pictures, index)


def watched_train(run, **options):
    train(run, **options)
    networks = run._networks()
    found = {
        "taken": taken,
        "losses": [vars(one) for one in run.losses],
        "schedule": run.schedule.state_dict(),
        "weights": {name: dict(network.named_parameters()) for name, network in networks.items()},
        "statistics": dict(run.generator.named_buffers()),
    }
    torch.save(found, os.path.join(folder, os.environ["RANK"] + ".pt"))


Pictures.__getitem__, Run.train = watched_take, watched_train
main()
"""


@pytest.mark.slow
def test_two_processes_train_the_same_networks_on_images_of_their_own(npz, tmp_path, launch):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [tmp_path / "program.py", tmp_path]
    words += ["biggan", "train", npz, "--resolution", "32", "--channels", "2", "--colours", "1", "--latent", "8"]
    words += ["--method", "smyrf:2x32", "--batch", "4", "--steps", "4", "--max-error", "0.01", "--adapt-every", "2"]
    words += ["--ema-start", "3", "--log-every", "4", "--threads", "1", "--output", tmp_path / "runs"]
    done = launch(*words, n_processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 4: losses") == 1  # one of the processes speaks
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    # Two of a batch's four images each, and every image once before any comes again.
    assert len(first["taken"]) == len(second["taken"]) == 8
    together = [index for start in (0, 2, 4, 6) for one in (first, second) for index in one["taken"][start : start + 2]]
    assert sorted(together[:10]) == list(range(10))
    # Latents of their own too: statistics of normalisation are those of a process.
    assert any(not torch.equal(value, second["statistics"][key]) for key, value in first["statistics"].items())
    assert first["losses"] == second["losses"] and first["schedule"] == second["schedule"]
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    for name, weights in first["weights"].items():
        saved = load_file(run / "checkpoint-4" / f"{name}.safetensors")
        for key, value in weights.items():
            assert torch.isfinite(value).all() and torch.equal(value, saved[key]), key
            assert torch.equal(value, second["weights"][name][key]), f"{name}: {key}"
