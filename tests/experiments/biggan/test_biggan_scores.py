"""Latents, scores and grids of BigGAN."""

import math
import re

import numpy
import pytest
import torch
from torch import nn

pytest.importorskip("scipy")

from scipy.linalg import sqrtm

from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.features import FeatureNetwork, look
from smyrf.experiments.biggan.grids import save_comparison, save_image, tile
from smyrf.experiments.biggan.latents import draw_classes, draw_latents, generate
from smyrf.experiments.biggan.networks import Generator, attention_blocks
from smyrf.experiments.biggan.score import score
from smyrf.experiments.biggan.statistics import frechet_distance, inception_score, moments
from smyrf.methods import Dense, Smyrf

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
SMALL = Config(resolution=32, channels=2, n_classes=5, n_latent=8, n_shared=3, attention=(16,))


def test_latents_are_normal_within_their_bound():
    z = draw_latents(2000, 20, seed=1)
    assert abs(float(z.mean())) < 0.02 and abs(float(z.std()) - 1.0) < 0.02 and float(z.abs().max()) > 3.0
    cut = draw_latents(2000, 20, truncation=0.7, seed=1)
    assert float(cut.abs().max()) <= 0.7
    # The standard deviation of a normal distribution cut at ±t: 1 − 2 t φ(t) / (2 Φ(t) − 1).
    density = math.exp(-0.5 * 0.7**2) / math.sqrt(2 * math.pi)
    assert float(cut.var()) == pytest.approx(1 - 2 * 0.7 * density / math.erf(0.7 / math.sqrt(2)), rel=0.02)
    assert torch.equal(draw_latents(3, 20, seed=1), z[:3]) and not torch.equal(draw_latents(3, 20, seed=2), z[:3])
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="truncation"):
            draw_latents(1, 1, truncation=bad)


def test_classes_are_those_asked_for_or_any():
    generator = Generator(SMALL)
    assert draw_classes(5, generator, [4, 1], 0).tolist() == [4, 1, 4, 1, 4]
    assert set(draw_classes(200, generator, None, 0).tolist()) == set(range(5))
    with pytest.raises(ValueError, match="class 5 must be from 0 to 4"):
        draw_classes(2, generator, [5], 0)
    single = Generator(Config(resolution=32, channels=2, n_classes=1, n_latent=8, attention=(16,)))
    assert draw_classes(2, single, None, 0) is None
    with pytest.raises(ValueError, match="has only one class"):
        draw_classes(2, single, [0], 0)


def test_images_do_not_depend_on_the_batch_and_leave_the_mode_alone():
    generator = Generator(SMALL).train()
    z, classes = draw_latents(5, 8), torch.arange(5)
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    some, all_at_once = generate(generator, z, classes, batch=2), generate(generator, z, classes, batch=5)
    torch.testing.assert_close(some, all_at_once, atol=1e-5, rtol=0)
    assert generator.training and all(
        torch.equal(value, before[name]) for name, value in generator.state_dict().items()
    )


def test_the_frechet_distance_is_that_of_its_formula():
    a, b = torch.randn(60, 5) @ torch.randn(5, 5), torch.randn(80, 5) @ torch.randn(5, 5) + 1.0
    one, other = a.double().numpy(), b.double().numpy()
    covariances = numpy.cov(one.T), numpy.cov(other.T)
    expected = ((one.mean(0) - other.mean(0)) ** 2).sum() + sum(numpy.trace(each) for each in covariances)
    expected -= 2 * numpy.trace(sqrtm(covariances[0] @ covariances[1]).real)
    assert frechet_distance(moments(a), moments(b)) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(moments(a), moments(a)) == pytest.approx(0.0, abs=1e-6)
    few = moments(torch.randn(3, 50))  # a covariance of rank two
    assert frechet_distance(few, few) == pytest.approx(0.0, abs=1e-5)
    with pytest.raises(ValueError, match="features differ: 5 and 50 wide"):
        frechet_distance(moments(a), few)
    for bad in (torch.ones(1, 5), torch.ones(5), torch.full((3, 2), math.nan)):
        with pytest.raises(ValueError, match="features"):
            moments(bad)


def test_a_score_does_not_hang_on_one_draw_of_hashes(tmp_path):
    config = Config(resolution=32, channels=4, n_classes=10, n_latent=16, n_shared=8, attention=(32,), n_colours=1)
    generator = Generator(config).eval()
    (block,) = attention_blocks(generator)
    block.gamma.data.fill_(1.0)
    seeds = []
    block.attend.register_forward_pre_hook(lambda layer, _: seeds.append((layer.method, layer.seed)))
    network = FeatureNetwork(script(_Plain(), tmp_path / "plain.pt"), allow_torchscript=True)
    methods = (Dense(), Smyrf(2, 16))
    found = list(score(generator, methods, network, 6, seed=5, batch=2))
    assert seeds == [(method, seed) for method in methods for seed in (5, 6, 7)]
    assert [one.to_dense > 0 for one in found] == [False, True]
    again = list(score(generator, methods, network, 6, seed=5, batch=2))
    assert [one.to_dense for one in again] == [one.to_dense for one in found]
    assert (block.attend.method, block.attend.seed) == (Dense(), None)


def test_the_inception_score_counts_classes_that_are_told_apart():
    assert inception_score(torch.full((20, 4), 0.25), 2) == pytest.approx((1.0, 0.0))
    sure = torch.eye(10).repeat(20, 1)[torch.randperm(200)]
    score, _ = inception_score(sure, 1)
    assert score == pytest.approx(10.0)
    with pytest.raises(ValueError, match="n_parts=10 is more than the 3 images"):
        inception_score(torch.ones(3, 2) / 2)


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class _Both(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean((2, 3)), x.amax((2, 3))


class _Inception(nn.Module):
    def forward(self, x: torch.Tensor, return_features: bool = False, no_output_bias: bool = False) -> torch.Tensor:
        assert x.dtype == torch.uint8 and x.shape[1] == 3
        means = x.float().mean((2, 3))
        bias = torch.zeros(3) if no_output_bias else torch.tensor([5.0, 0.0, 0.0])
        return means if return_features else torch.softmax(means + bias, 1)


class _Dictionary(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": x}


class _Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Conv2d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).mean((2, 3))


class _Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def script(module, path):
    torch.jit.script(module).save(str(path))
    return path


def test_feature_networks_of_every_kind_are_understood(tmp_path):
    images = torch.rand(5, 3, 8, 8) * 2 - 1
    plain = FeatureNetwork(script(_Plain(), tmp_path / "plain.pt"), allow_torchscript=True)
    seen = look(plain, iter(images.split(2)))
    torch.testing.assert_close(seen.features, images.mean((2, 3)))
    assert seen.probabilities is None
    both = FeatureNetwork(script(_Both(), tmp_path / "both.pt"), allow_torchscript=True)(images)
    torch.testing.assert_close(both.probabilities.sum(1), torch.ones(5))
    inception = FeatureNetwork(script(_Inception(), tmp_path / "inception.pt"), allow_torchscript=True)
    seen = inception(torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 1, 4, 4))
    assert seen.features.tolist() == [[0.0] * 3, [255.0] * 3]
    torch.testing.assert_close(seen.probabilities, torch.full((2, 3), 1 / 3))  # without the bias of its last layer
    for module, words in ((_Dictionary(), "must return features"), (_Narrow(), "fails on 2 images of 3 colours")):
        with pytest.raises(ValueError, match=words):
            FeatureNetwork(script(module, tmp_path / "odd.pt"), allow_torchscript=True).check(3, 8)
    with pytest.raises(ValueError, match="must return features"):
        FeatureNetwork(script(_Wrong(), tmp_path / "wrong.pt"), allow_torchscript=True)(images)
    (tmp_path / "damaged.pt").write_bytes(b"no")
    for name in ("damaged.pt", "none.pt"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            FeatureNetwork(tmp_path / name, allow_torchscript=True)


def test_grids_hold_every_image(tmp_path):
    from PIL import Image

    images = torch.linspace(-1, 1, 5).reshape(5, 1, 1, 1).expand(5, 3, 64, 64)
    grid = tile(images, 3)
    assert grid.shape == (3, 2 * 66 + 2, 3 * 66 + 2)
    assert [int(grid[0, 30 + 66 * row, 30 + 66 * column]) for row in (0, 1) for column in range(3)] == [
        0, 64, 128, 191, 255, 255,
    ]  # fmt: skip
    assert tile(torch.zeros(4, 1, 32, 32)).shape == (3, 134, 134)  # small images are enlarged
    save_image(grid, tmp_path / "below" / "grid.png")
    with Image.open(tmp_path / "below" / "grid.png") as image:
        assert image.size == (200, 134)
    written = save_comparison(
        [("dense", images), ("Smyrf 64×32\n50%", images)], tmp_path / "figure", "the same latents"
    )
    assert all(path.stat().st_size > 1000 for path in written)


def test_the_papers_figure_labels_its_rows_in_their_order(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    images = torch.zeros(3, 3, 8, 8)
    rows = [("dense", images), ("Smyrf 64×32\n50%", images), ("Tangent 12.5%", images)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text, not as the outlines of its letters
        _, svg = save_comparison(rows, tmp_path / "figure", "the same latents")
    found = re.findall(r"<text[^>]*>([^<]+)</text>", svg.read_text(encoding="utf-8"))
    assert found == ["dense", "Smyrf 64×32", "50%", "Tangent 12.5%", "the same latents"]
