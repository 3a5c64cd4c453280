"""Small encoders, data sets and images, and commands in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import smyrf
import tiny
from smyrf.experiments.nlp.tasks import TASKS


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Small random models of the classes that the presets of `smyrf finetune` name; calm has no dropout."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "bert": tiny.save_encoder(folder / "bert"),
        "large": tiny.save_encoder(folder / "bert-large", n_layers=4, hidden_size=32, num_attention_heads=4),
        "roberta": tiny.save_encoder(folder / "roberta", "roberta"),
        "calm": tiny.save_encoder(
            folder / "calm", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_size=32
        ),
    }


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Small files of all tasks of `smyrf finetune`."""
    folder = tmp_path_factory.mktemp("data")
    for name in TASKS:
        tiny.write_task(folder, name)
    return folder


@pytest.fixture(scope="session")
def npz(tmp_path_factory):
    """Images for BigGAN: ten of three classes, none its own mirror image."""
    chance = numpy.random.default_rng(0)
    path = tmp_path_factory.mktemp("images") / "a.npz"
    numpy.savez(path, images=chance.integers(0, 256, (10, 32, 32), numpy.uint8), labels=chance.permutation(10) % 3)
    return path


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """The cache is in a temporary folder."""
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Runs Python with some words in a process, or in several by torchrun, and gives what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(smyrf.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SMYRF_CACHE": str(tmp_path_factory.getbasetemp() / "cache"),
    }

    def run(*words, n_processes=1):
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n_processes]
        words = [*(several if n_processes > 1 else []), *words]
        return subprocess.run(
            [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=600
        )

    return run
