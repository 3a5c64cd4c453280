"""Training BigGAN."""

import numpy
import pytest
import torch

pytest.importorskip("accelerate")

from smyrf import Smyrf
from smyrf.biggan.config import Config
from smyrf.biggan.pictures import load_pictures
from smyrf.biggan.recipe import PRESETS, Recipe
from smyrf.biggan.train import Run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    chance = numpy.random.default_rng(0)
    path = tmp_path_factory.mktemp("pictures") / "a.npz"
    numpy.savez(path, images=chance.integers(0, 256, (10, 32, 32), numpy.uint8), labels=chance.integers(0, 3, 10))
    return load_pictures(path, 32, 1, flip=True)


def recipe(n_steps=4, **options):
    config = Config(
        resolution=32,
        channels=2,
        n_classes=3,
        n_latent=8,
        n_shared=4,
        attention=(16,),
        method=Smyrf(2, 32),
        n_colours=1,
    )
    return Recipe(config=config, n_steps=n_steps, batch_size=4, ema_start=2, **options)


def weights(run):
    return {
        f"{name}.{key}": value
        for name, network in run._networks().items()
        for key, value in network.state_dict().items()
    }


def test_a_run_that_goes_on_ends_as_one_that_was_not_interrupted(pictures, tmp_path):
    whole = Run(recipe(4), pictures, tmp_path / "whole", n_grid=4)
    whole.train(log_every=2, save_every=2, done=lambda losses: None)
    first = Run(recipe(2), pictures, tmp_path / "cut", n_grid=4)
    first.train(log_every=2, save_every=2, done=lambda losses: None)
    again = Run(recipe(4), pictures, tmp_path / "cut", n_grid=4)
    assert again.step == 2
    again.train(log_every=2, save_every=2, done=lambda losses: None)
    assert again.losses == whole.losses and len(whole.losses) == 2
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())
    assert sorted(path.name for path in (tmp_path / "cut" / "grids").iterdir()) == ["0000002.png", "0000004.png"]
    with pytest.raises(ValueError, match="belongs to another recipe"):
        Run(recipe(4, seed=1), pictures, tmp_path / "cut")


def test_recipes_survive_json_and_presets_are_the_papers():
    assert Recipe.from_dict(recipe().to_dict()) == recipe()
    faces = PRESETS["celeba-128/smyrf-4x2048"]
    assert (faces.batch_size, faces.generator_rate, faces.discriminator_rate) == (32, 2e-4, 5e-5)
    assert (faces.beta1, faces.beta2, faces.n_steps) == (0.0, 0.999, 120_000)
    assert faces.config.method.memory_share(4096, 16384) == 0.5
    assert PRESETS["celeba-256/smyrf-4x8192"].config.method.memory_share(16384, 65536) == 0.5
