"""Maps of clusters, and `smyrf inspect clusters`."""

import pytest
import torch
from typer.testing import CliRunner

from smyrf import Dense, Smyrf, Tangent
from smyrf.__main__ import app
from smyrf.experiments.biggan.checkpoints import save_network
from smyrf.experiments.biggan.clusters import cluster_maps
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.networks import Generator

CONFIG = Config(resolution=64, channels=2, n_classes=3, n_latent=10, n_shared=4, attention=(16, 32))


@pytest.fixture(scope="module")
def generator():
    torch.manual_seed(0)
    return Generator(CONFIG)


def test_every_pixel_has_a_cluster_and_clusters_are_balanced(generator):
    z, classes = torch.randn(3, 10), torch.tensor([0, 1, 2])
    methods = [Smyrf(1, 512), Smyrf(4, 32), Tangent(0.25), Tangent(0.25, levels=2)]
    images, maps = cluster_maps(generator, z, classes, methods, seed=1)
    assert images.shape == (3, 3, 64, 64) and all(one.shape == (3, 32, 32) for one in maps)
    assert torch.stack([one.bincount() for one in maps[0].flatten(1)]).tolist() == [[512, 512]] * 3
    assert torch.stack([one.bincount() for one in maps[1].flatten(1)]).tolist() == [[32] * 32] * 3
    assert all(int(one.max()) > 1 for one in maps[2:])
    again = cluster_maps(generator, z[:1], classes[:1], methods[:2], seed=1)[1]
    assert torch.equal(again[0][0], maps[0][0]) and torch.equal(again[1][0], maps[1][0])
    _, (small,) = cluster_maps(generator, z, classes, [Smyrf(1, 64)], block=0)
    assert small.shape == (3, 16, 16)
    assert generator.training


def test_what_has_no_clusters_is_refused(generator):
    z, classes = torch.randn(1, 10), torch.tensor([0])
    with pytest.raises(ValueError, match="Dense has no clusters"):
        cluster_maps(generator, z, classes, [Dense()])
    with pytest.raises(ValueError, match="block=2 must be one of the generator's 2 attention blocks"):
        cluster_maps(generator, z, classes, [Smyrf(1, 64)], block=2)


def test_the_papers_figure_from_the_command_line(generator, tmp_path):
    pytest.importorskip("safetensors")
    pytest.importorskip("matplotlib")
    save_network(generator, tmp_path / "g.safetensors")
    words = ["inspect", "clusters", str(tmp_path / "g.safetensors")]
    more = ["--methods", "smyrf:1x512,smyrf:1x8,tangent:0.25", "--number", "3", "--output", str(tmp_path / "figure")]
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "figure.png").stat().st_size > 5000
    for suffix in ("pth", "safetensors"):
        done = CliRunner().invoke(app, ["inspect", "clusters", str(tmp_path / f"nowhere.{suffix}")])
        assert done.exit_code == 2 and f"nowhere.{suffix} cannot be read" in done.stderr.replace("\n", " ")
    for options, sentence in (
        (["--methods", "dense"], "--methods: Dense has no clusters"),
        (["--block", "5"], "--block 5 must be from -2 to 1"),
        (["--head", "0"], "--head 0 is for a model, and"),
        (["--layer", "0"], "--layer 0 is for a model, and"),
        (["--images", "photos"], "--images photos is for a model, and"),
        (["--classes", "x"], "--classes x must be numbers"),
        (["--number", "0"], "--number 0 must be at least 1"),
    ):
        done = CliRunner().invoke(app, [*words, *options, "--output", str(tmp_path / "other")])
        assert done.exit_code == 2 and sentence in done.stderr.replace("\n", " ")
