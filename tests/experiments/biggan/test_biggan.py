"""BigGAN's networks and checkpoints, against the checkpoint's list of keys and a plain reference."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smyrf import Dense, Smyrf, Tangent
from smyrf.experiments.biggan import spectral
from smyrf.experiments.biggan.blocks import AttentionBlock, BatchNorm
from smyrf.experiments.biggan.checkpoints import (
    CheckpointError,
    load_discriminator,
    load_generator,
    read_state,
    save_network,
)
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.networks import Discriminator, Generator, attention_blocks, set_method

KEYS = json.loads((Path(__file__).parent / "biggan128_keys.json").read_text())
SMALL = Config(resolution=32, channels=4, n_classes=7, n_latent=20, n_shared=5, attention=(16,))


def lively(network, seed=0):
    """Random weights everywhere, also where training begins with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        value.copy_(noise.abs() + 0.5 if name.endswith("stored_var") else noise * 0.3 + (name.endswith("gamma")))
    return network


@pytest.mark.parametrize("kind", [Generator, Discriminator])
def test_keys_and_shapes_are_those_of_the_public_checkpoints(kind):
    with torch.device("meta"):
        network = kind(Config())
    found = {key: list(value.shape) for key, value in network.state_dict().items()}
    assert found == KEYS[kind.__name__.lower()]


# The original network, by the book, on a state dict: what the public code computes in evaluation.


def _weight(state, name):
    matrix, u = state[f"{name}.weight"].flatten(1), state[f"{name}.u0"]
    v = u @ matrix
    v = v / v.norm().clamp(min=1e-6)
    u = v @ matrix.T
    u = u / u.norm().clamp(min=1e-6)
    return state[f"{name}.weight"] / (v @ matrix.T @ u.T)


def _conv(state, name, x):
    weight = _weight(state, name)
    return F.conv2d(x, weight, state.get(f"{name}.bias"), padding=weight.shape[-1] // 2)


def _norm(state, name, x, condition):
    mean, var = (state[f"{name}.stored_{one}"][:, None, None] for one in ("mean", "var"))
    x = (x - mean) / (var + 1e-5).sqrt()
    if condition is None:
        return x * state[f"{name}.gain"][:, None, None] + state[f"{name}.bias"][:, None, None]
    gain = 1 + condition @ _weight(state, f"{name}.gain").T
    bias = condition @ _weight(state, f"{name}.bias").T
    return x * gain[:, :, None, None] + bias[:, :, None, None]


def _attend(state, name, x):
    theta = _conv(state, f"{name}.theta", x).flatten(2)
    phi = F.max_pool2d(_conv(state, f"{name}.phi", x), 2).flatten(2)
    g = F.max_pool2d(_conv(state, f"{name}.g", x), 2).flatten(2)
    weights = torch.softmax(torch.einsum("bcn,bcm->bnm", theta, phi), -1)
    out = torch.einsum("bcm,bnm->bcn", g, weights).reshape(len(x), -1, *x.shape[2:])
    return state[f"{name}.gamma"] * _conv(state, f"{name}.o", out) + x


def reference_images(state, z, classes, n_blocks):
    first, *parts = z.chunk(n_blocks + 1, 1)
    h = (first @ _weight(state, "linear").T + state["linear.bias"]).reshape(len(z), -1, 4, 4)
    for number in range(n_blocks):
        name, condition = f"blocks.{number}.0", torch.cat([state["shared.weight"][classes], parts[number]], 1)
        x = h.repeat_interleave(2, 2).repeat_interleave(2, 3)
        h = F.relu(_norm(state, f"{name}.bn1", h, condition)).repeat_interleave(2, 2).repeat_interleave(2, 3)
        h = _conv(state, f"{name}.conv1", h)
        h = _conv(state, f"{name}.conv2", F.relu(_norm(state, f"{name}.bn2", h, condition)))
        h = h + _conv(state, f"{name}.conv_sc", x)
        if f"blocks.{number}.1.gamma" in state:
            h = _attend(state, f"blocks.{number}.1", h)
    h = F.relu(_norm(state, "output_layer.0", h, None))
    return torch.tanh(_conv(state, "output_layer.2", h))


def reference_scores(state, images, classes, n_halving, n_blocks):
    h = images
    for number in range(n_blocks):
        name = f"blocks.{number}.0"
        x = h if number == 0 else F.relu(h)
        main = _conv(state, f"{name}.conv2", F.relu(_conv(state, f"{name}.conv1", x)))
        short = _conv(state, f"{name}.conv_sc", h) if f"{name}.conv_sc.weight" in state else h
        h = F.avg_pool2d(main, 2) + F.avg_pool2d(short, 2) if number < n_halving else main + short
        if f"blocks.{number}.1.gamma" in state:
            h = _attend(state, f"blocks.{number}.1", h)
    h = F.relu(h).sum((2, 3))
    score = h @ _weight(state, "linear").T + state["linear.bias"]
    return score + (_weight(state, "embed")[classes] * h).sum(1, keepdim=True)


@pytest.mark.parametrize(("resolution", "n_blocks", "attention"), [(32, 3, 16), (64, 4, 32), (128, 5, 64)])
def test_images_of_a_public_checkpoint_are_those_of_the_original_network(tmp_path, resolution, n_blocks, attention):
    config = Config(
        resolution=resolution, channels=2, n_classes=7, n_latent=5 * (n_blocks + 1), n_shared=6, attention=(attention,)
    )
    state = lively(Generator(config)).state_dict()
    torch.save(state, tmp_path / "G_ema.pth")
    loaded = load_generator(tmp_path / "G_ema.pth")
    assert loaded.config == config
    z, classes = torch.randn(3, config.n_latent), torch.tensor([0, 6, 3])
    with torch.no_grad():
        ours = loaded(z, classes)
    exact = reference_images({name: value.double() for name, value in state.items()}, z.double(), classes, n_blocks)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=0)
    assert torch.equal(ours, loaded(z, classes))  # nothing changes by looking


@pytest.mark.parametrize(("resolution", "n_blocks", "n_halving"), [(32, 4, 2), (64, 5, 4), (128, 6, 5)])
def test_scores_of_a_public_checkpoint_are_those_of_the_original_network(tmp_path, resolution, n_blocks, n_halving):
    config = Config(resolution=resolution, channels=2, n_classes=7, attention=(resolution // 2,))
    state = lively(Discriminator(config)).state_dict()
    torch.save(state, tmp_path / "D.pth")
    images, classes = torch.randn(3, 3, resolution, resolution), torch.tensor([0, 6, 3])
    with torch.no_grad():
        ours = load_discriminator(tmp_path / "D.pth")(images, classes)
    state = {name: value.double() for name, value in state.items()}
    exact = reference_scores(state, images.double(), classes, n_halving, n_blocks)
    torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


def test_a_file_that_does_not_fit_is_named_with_its_first_wrong_key(tmp_path):
    state = lively(Generator(SMALL)).state_dict()
    good = tmp_path / "G_ema.pth"
    torch.save(state, good)

    def without(key):
        return {name: value for name, value in state.items() if name != key}

    bad = {
        "blocks.1.0.conv2.bias is missing": without("blocks.1.0.conv2.bias"),
        "shared.weight is missing": without("shared.weight"),
        "blocks.0.0.conv1.weight has the shape (3, 16, 3, 3), it must be (16, 16, 3, 3)": {
            **state, "blocks.0.0.conv1.weight": torch.ones(3, 16, 3, 3),
        },
        "blocks.1.1.gamma holds values that are not finite": {**state, "blocks.1.1.gamma": torch.tensor(float("nan"))},
        "linear.bias is torch.int64": {**state, "linear.bias": torch.ones(256, dtype=torch.int64)},
        "extra is unknown to a generator": {**state, "extra": torch.ones(1)},
    }  # fmt: skip
    for words, damaged in bad.items():
        torch.save(damaged, tmp_path / "bad.pth")
        with pytest.raises(CheckpointError) as error:
            load_generator(tmp_path / "bad.pth")
        assert words in str(error.value) and "bad.pth" in str(error.value)
    (tmp_path / "cut.pth").write_bytes(good.read_bytes()[:-500])
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"state": {"a": 1}}, tmp_path / "nested.pth")
    for name, words in (
        ("cut", "cannot be read"),
        ("empty", "cannot be read"),
        ("no-such", "cannot be read"),
        ("list", "it holds list"),
        ("nested", "state is dict, not a tensor"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_generator(tmp_path / f"{name}.pth")
    with pytest.raises(CheckpointError, match="it is a generator"):
        load_discriminator(good)
    torch.save(Discriminator(SMALL).state_dict(), tmp_path / "D.pth")
    with pytest.raises(CheckpointError, match="it is a discriminator"):
        load_generator(tmp_path / "D.pth")


class _Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def test_nothing_is_unpickled(tmp_path, capsys):
    torch.save({"a": _Evil()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path / "evil.pth")
    assert "unpickled" not in capsys.readouterr().out


def test_our_own_files_come_back(tmp_path):
    pytest.importorskip("safetensors")
    config = Config(resolution=32, channels=4, n_classes=1, hierarchical=False, n_shared=0, n_latent=9, attention=(32,))
    network = lively(Generator(config)).eval()
    save_network(network, tmp_path / "g.safetensors")
    again = load_generator(tmp_path / "g.safetensors", Tangent(0.5))
    assert replace(again.config, method=Dense()) == config
    assert [block.attend.method for block in attention_blocks(again)] == [Tangent(0.5)]
    set_method(again, Dense())
    z = torch.randn(2, 9)
    assert torch.equal(network(z), again(z))
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "method", [Dense(), Smyrf(4, 64), Smyrf(64, 32), Tangent(0.125), Tangent(0.5)], ids=lambda one: repr(one)[:20]
)
def test_4096_queries_on_1024_keys_work_in_every_method(method):
    block = lively(AttentionBlock(16, method))
    x = torch.randn(2, 16, 64, 64, requires_grad=True)
    out = block(x)
    out.square().mean().backward()
    assert out.shape == x.shape and torch.isfinite(x.grad).all() and block.theta.weight.grad.abs().sum() > 0
    if method == Dense():
        state = {f"a.{name}": value for name, value in block.state_dict().items()}
        block.eval()
        torch.testing.assert_close(block(x), _attend(state, "a", x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("resolution", [32, 64])
@pytest.mark.parametrize(("n_classes", "n_shared"), [(1, 0), (7, 5), (7, 0)])
@pytest.mark.parametrize("hierarchical", [False, True])
def test_every_kind_of_network_learns(resolution, n_classes, n_shared, hierarchical):
    config = Config(
        resolution=resolution,
        channels=2,
        n_classes=n_classes,
        n_shared=n_shared,
        n_latent=13,
        hierarchical=hierarchical,
        attention=(16,),
        method=Smyrf(2, 32),
        n_colours=1,
    )
    generator, discriminator = Generator(config), Discriminator(config)
    classes = None if n_classes == 1 else torch.tensor([1, 0, 6])
    images = generator(torch.randn(3, 13), classes)
    assert images.shape == (3, 1, resolution, resolution) and images.abs().max() <= 1.0
    discriminator(images, classes).mean().backward()
    for name, parameter in [*generator.named_parameters(), *discriminator.named_parameters()]:
        # Where γ is 0 nothing behind it is seen; a bias before a normalisation by batch has no effect.
        if not any(part in name for part in ("theta", "phi", ".g.", ".o.")):
            assert parameter.grad is not None, name
    assert all(block.gamma.grad.abs() > 0 for block in attention_blocks(generator))


def test_attention_stands_where_it_is_asked_for():
    config = Config(resolution=128, channels=1, attention=(128, 32), n_classes=1, n_latent=6)
    with torch.device("meta"):
        generator, discriminator = Generator(config), Discriminator(config)
    assert [len(block) for block in generator.blocks] == [1, 1, 2, 1, 2]
    assert [len(block) for block in discriminator.blocks] == [1, 2, 1, 1, 1, 1]  # its blocks see 64 pixels at most


def test_swapping_attention_leaves_weights_alone():
    network = lively(Generator(SMALL)).eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    z, classes = torch.randn(2, 20), torch.tensor([1, 2])
    dense = network(z, classes)
    set_method(network, Smyrf(2, 32), seed=3)
    first, again = network(z, classes), network(z, classes)
    assert torch.equal(first, again) and not torch.equal(first, dense)
    set_method(network, Dense())
    assert torch.equal(network(z, classes), dense)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with pytest.raises(ValueError, match="has no attention block"):
        set_method(nn.Linear(2, 2), Smyrf(1, 2))
    set_method(nn.Linear(2, 2), Dense())  # which it is, as far as there is anything


def test_power_iteration_finds_the_largest_singular_value():
    layer = spectral.Linear(7, 5)
    with torch.no_grad():
        layer.weight.normal_()
    for _ in range(50):
        layer(torch.randn(2, 7))
    value = torch.linalg.matrix_norm(layer.weight, 2)
    torch.testing.assert_close(layer.sv0[0], value, rtol=1e-3, atol=0)
    layer.eval()
    before = layer.u0.clone()
    torch.testing.assert_close(torch.linalg.matrix_norm(layer.normalised_weight(), 2).item(), 1.0, rtol=1e-3, atol=0)
    assert torch.equal(layer.u0, before)


@pytest.mark.parametrize("options", [{}, {"n_shared": 0}, {"n_shared": 0, "hierarchical": False}], ids=str)
def test_training_begins_with_orthogonal_weights(options):
    config = replace(SMALL, **options)
    weights = {
        f"{type(network).__name__}.{name}": weight.detach().flatten(1)
        for network in (Generator(config), Discriminator(config))
        for name, weight in network.named_parameters()
        if weight.dim() > 1
    }
    kinds = ["linear", "blocks.0.0.conv1", "blocks.0.0.conv_sc", "blocks.1.1.theta", "blocks.2.0.bn1.gain"]
    kinds += ["blocks.2.0.bn2.bias", "output_layer.2"] + ["shared"] * bool(config.n_shared)
    assert {f"Generator.{kind}.weight" for kind in kinds} | {"Discriminator.embed.weight"} <= weights.keys()
    for name, matrix in weights.items():
        smaller = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
        torch.testing.assert_close(smaller, torch.eye(len(smaller)), atol=1e-5, rtol=0, msg=f"{name} is not orthogonal")


def test_normalisation_is_that_of_pytorch():
    ours, theirs = BatchNorm(5), nn.BatchNorm2d(5)
    for _ in range(3):
        x = torch.randn(4, 5, 3, 3) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resolution": 100}, "resolution=100 must be one of 32, 64, 128, 256"),
        ({"attention": (7,)}, "attention at 7 must be one of 8, 16"),
        ({"resolution": 32, "attention": (64,)}, "attention at 64 must be one of 8, 16, 32"),
        ({"n_latent": 3}, "n_latent=3 must be at least 6"),
        ({"channels": 0}, "channels=0 must be at least 1"),
        ({"method": "dense"}, "must be a method"),
    ],
)
def test_a_config_refuses_what_cannot_be_built(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Config(**options)


def test_a_config_survives_json():
    config = Config(resolution=64, method=Smyrf(4, 64), attention=(32, 64))
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="has no 'ch'"):
        Config.from_dict({"ch": 96})


def test_wrong_inputs_are_named():
    generator, discriminator = Generator(SMALL), Discriminator(SMALL)
    z, classes = torch.randn(2, 20), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"z has the shape \(2, 19\), it must be \(images, 20\)"):
        generator(z[:, :19], classes)
    with pytest.raises(ValueError, match="classes are missing: the network has 7"):
        generator(z)
    with pytest.raises(ValueError, match="classes must be from 0 to 6, not 1 to 7"):
        generator(z, torch.tensor([1, 7]))
    with pytest.raises(ValueError, match=r"classes have shape \(1,\)"):
        generator(z, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"images have the shape \(2, 3, 16, 16\)"):
        discriminator(torch.randn(2, 3, 16, 16), classes)
