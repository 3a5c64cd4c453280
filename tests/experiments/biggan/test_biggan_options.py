"""Options of `smyrf biggan` reach what they are for."""

import json

import numpy
import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("PIL")

from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from smyrf import Smyrf
from smyrf.__main__ import app
from smyrf.experiments.biggan.checkpoints import load_generator, save_network
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.features import FeatureNetwork
from smyrf.experiments.biggan.grids import tile
from smyrf.experiments.biggan.latents import draw_latents, generate
from smyrf.experiments.biggan.networks import Generator
from smyrf.experiments.biggan.pictures import Pictures, load_pictures
from smyrf.experiments.biggan.recipe import Recipe
from smyrf.experiments.biggan.score import real_moments
from smyrf.experiments.biggan.statistics import frechet_distance, moments

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
CONFIG = Config(resolution=32, channels=2, n_classes=7, n_latent=20, n_shared=5, attention=(16,), n_colours=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "g.safetensors"
    save_network(Generator(CONFIG), path)
    return path


class _Sees(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    path = tmp_path_factory.mktemp("features") / "sees.pt"
    torch.jit.script(_Sees()).save(str(path))
    return path


def run(*words):
    done = CliRunner().invoke(app, ["biggan", *map(str, words)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("truncation", [None, 0.5])
@pytest.mark.parametrize("classes", ["1,6", "4"])
def test_images_are_of_the_classes_and_latents_asked_for(weights, tmp_path, classes, truncation):
    words = ["--number", 5, "--seed", 3, "--classes", classes, "--output", tmp_path / "grid"]
    run("sample", weights, *words, *([] if truncation is None else ["--truncation", truncation]))
    z = draw_latents(5, 20, truncation=truncation, seed=3)
    numbers = torch.tensor([1, 6, 1, 6, 1] if classes == "1,6" else [4] * 5)
    expected = tile(generate(load_generator(weights), z, numbers))
    with Image.open(tmp_path / "grid.png") as image:
        found = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("truncation", [None, 0.5])
def test_scores_are_of_the_latents_asked_for(weights, features, npz, tmp_path, truncation):
    words = [
        "--features",
        features,
        "--allow-torchscript",
        "--real",
        npz,
        "--number",
        6,
        "--seed",
        3,
        "--json",
        tmp_path / "s.json",
    ]
    run("score", weights, *words, *([] if truncation is None else ["--truncation", truncation]))
    (found,) = json.loads((tmp_path / "s.json").read_text())["scores"]
    z = draw_latents(6, 20, truncation=truncation, seed=3)
    classes = torch.randint(7, (6,), generator=torch.Generator().manual_seed(4))  # of the seed behind the latents'
    images = generate(load_generator(weights), z, classes)
    pictures = load_pictures(npz, 32, 1)
    real = torch.stack([pictures[index][0] for index in range(10)])
    expected = frechet_distance(*(moments(_Sees()(some)) for some in (images, real)))
    assert found["frechet_distance"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch", [3, 4, 5, 10, 11])
def test_every_real_image_is_looked_at(features, npz, batch):
    pictures = load_pictures(npz, 32, 1)
    expected = moments(_Sees()(torch.stack([pictures[index][0] for index in range(10)])))
    found = real_moments(FeatureNetwork(features, allow_torchscript=True), pictures, batch)
    assert frechet_distance(found, expected) == pytest.approx(0.0, abs=1e-9)


# None of them the default of a training on images of several classes.
OPTIONS = {
    "resolution": 32,
    "channels": 2,
    "colours": 1,
    "latent": 13,
    "no-hierarchical": True,
    "shared": 5,
    "attention": [8, 16],
    "method": "smyrf:2x16",
    "batch": 6,
    "accumulate": 3,
    "steps": 2,
    "critic": 2,
    "generator-rate": 3e-4,
    "discriminator-rate": 7e-5,
    "ema": 0.75,
    "ema-start": 1,
    "flip": True,
    "max-error": 0.3,
    "adapt-every": 7,
    "seed": 11,
    "log-every": 1,
    "save-every": 1,
    "grid-every": 1,
    "tensorboard": True,
    "threads": 3,
}
RECIPE = Recipe(
    config=Config(
        resolution=32,
        channels=2,
        n_classes=3,
        n_latent=13,
        hierarchical=False,
        n_shared=5,
        attention=(8, 16),
        method=Smyrf(2, 16),
        n_colours=1,
    ),
    batch_size=6,
    accumulate=3,
    n_steps=2,
    n_critic=2,
    generator_rate=3e-4,
    discriminator_rate=7e-5,
    ema=0.75,
    ema_start=1,
    flip=True,
    max_error=0.3,
    adapt_every=7,
    seed=11,
)


def test_every_option_of_a_training_is_kept(npz, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    known = get_command(app).commands["biggan"].commands["train"].params
    names = {f"--{name}" for name in (*OPTIONS, "output")}
    assert [one.name for one in known if names.isdisjoint(one.opts + one.secondary_opts)] == ["data", "preset"]
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    words = []
    for name, value in OPTIONS.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", one]
    run("train", npz, *words, "--output", tmp_path)
    (folder,) = tmp_path.iterdir()
    states = [json.loads((folder / f"checkpoint-{step}" / "state.json").read_text()) for step in (1, 2)]
    assert [state["recipe"] for state in states] == [RECIPE.to_dict()] * 2
    assert [losses["step"] for losses in states[1]["losses"]] == [1, 2]
    assert sorted(path.stem for path in folder.glob("grids/*.png")) == ["0000001", "0000002"]
    assert list(folder.glob("tensorboard/*")) and threads[0] == 3


@pytest.mark.parametrize("flip", [True, False])
def test_images_are_mirrored_in_training_where_it_is_asked_for(npz, tmp_path, monkeypatch, flip):
    pytest.importorskip("accelerate")
    plain = load_pictures(npz, 32, 1)
    pixels = [plain[index][0] for index in range(10)]
    take, mirrored = Pictures.__getitem__, []

    def watched(pictures, index):
        image, number = take(pictures, index)
        assert torch.equal(image, pixels[index]) or torch.equal(image, pixels[index].flip(2))
        mirrored.append(not torch.equal(image, pixels[index]))
        return image, number

    monkeypatch.setattr(Pictures, "__getitem__", watched)
    words = ["--resolution", 32, "--channels", 2, "--colours", 1, "--latent", 8, "--batch", 4, "--steps", 2]
    run("train", npz, *words, *(["--flip"] if flip else []), "--output", tmp_path)
    assert len(mirrored) == 8 and set(mirrored) == ({True, False} if flip else {False})
