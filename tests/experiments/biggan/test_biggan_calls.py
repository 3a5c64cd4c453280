"""Attention calls of a generator, and `smyrf inspect biggan`."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from smyrf import Dense, Smyrf, attention
from smyrf.__main__ import app
from smyrf.experiments.biggan.blocks import BatchNorm
from smyrf.experiments.biggan.calls import generator_calls
from smyrf.experiments.biggan.checkpoints import save_network
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.inspect_input import draw_calls
from smyrf.experiments.biggan.latents import draw_classes, draw_latents, generate
from smyrf.experiments.biggan.networks import Discriminator, Generator, attention_blocks, set_method

runner = CliRunner()
CONFIG = Config(resolution=64, channels=4, n_classes=3, n_latent=10, n_shared=4, attention=(16, 32))


@pytest.fixture(scope="module")
def generator():
    torch.manual_seed(0)
    network = Generator(CONFIG)
    for block in attention_blocks(network):
        torch.nn.init.constant_(block.gamma, 1.0)
    for layer in network.modules():
        if isinstance(layer, BatchNorm):
            layer.stored_var.fill_(0.05)  # a new network's attention is uniform
    return network


@pytest.fixture(scope="module")
def weights(generator, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "G_ema.pth"
    torch.save(generator.state_dict(), path)
    return str(path)


def test_calls_are_those_that_the_blocks_make(generator):
    z, classes = torch.randn(11, 10), torch.arange(11) % 3  # more than are generated at a time
    set_method(generator, Dense())
    outputs = {}
    handles = [
        block.attend.register_forward_hook(lambda _, inputs, output, i=i: outputs.setdefault(i, []).append(output))
        for i, block in enumerate(attention_blocks(generator))
    ]
    expected = generate(generator, z, classes)
    for handle in handles:
        handle.remove()
    set_method(generator, Smyrf(1, 8), seed=5)
    images, calls = generator_calls(generator, z, classes)
    assert torch.equal(images, expected)
    assert [(call.n_queries, call.n_keys, call.name) for call in calls] == [
        (256, 64, "blocks.1.1"),
        (1024, 256, "blocks.2.1"),
    ]
    for i, call in enumerate(calls):
        assert call.q.shape[:2] == (11, 1) and call.scale == 1.0
        output = attention(call.q, call.k, call.v, method=Dense(), scale=call.scale)
        torch.testing.assert_close(output, torch.cat(outputs[i]))
    assert generator.training
    assert all(block.attend.method == Smyrf(1, 8) and block.attend.seed == 5 for block in attention_blocks(generator))
    assert not any(block._forward_pre_hooks for block in attention_blocks(generator))


def test_a_generator_without_attention_is_refused():
    bare = Generator(replace(CONFIG, attention=()))
    with pytest.raises(ValueError, match="the generator has no attention block"):
        draw_calls(bare, "bare.pth", 1)


def test_the_papers_sparsity_and_singular_values_from_the_command_line(weights, generator, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "transformers", None)  # which a BigGAN does not need
    out = tmp_path / "a.json"
    words = ["inspect", "biggan", weights, "--number", "2", "--classes", "1,2", "--truncation", "0.5", "--seed", "3"]
    words += ["--rows", "5000", "--threads", "1", "--json", str(out), "--output", str(tmp_path / "plots")]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "G_ema.pth, 2 generated images, attention at 16×16 and 32×32 pixels" in shown
    assert "Attention maps" in shown and "2 heads are too few" in shown
    data = json.loads(out.read_text())
    assert (data["config"]["classes"], data["config"]["truncation"]) == ([1, 2], 0.5)
    assert data["config"]["generator"]["attention"] == [16, 32]
    _, last = data["results"]
    assert (last["n_queries"], last["n_keys"], last["n_rows"]) == (1024, 256, 2048)
    # By the size of the queries, so that both methods visit as many of the keys, of which there are fewer.
    assert [one["share"] for one in last["outcomes"]] == pytest.approx([0.125, 0.25, 0.5] * 2, rel=0.1)
    z = draw_latents(2, 10, truncation=0.5, seed=3)
    _, (_, call) = generator_calls(generator, z, draw_classes(2, generator, [1, 2], 3))
    maps = (call.q[:, 0] @ call.k[:, 0].mT).softmax(2)
    assert 0.1 < last["below_small"] < 0.999
    assert last["below_small"] == pytest.approx(float((maps < 0.01).float().mean()), abs=1e-4)
    assert last["below_uniform"] == pytest.approx(float((maps < 1 / 256).float().mean()), abs=1e-3)
    assert last["spectrum"]["values"][:4] == pytest.approx(torch.linalg.svdvals(maps[0])[:4].tolist(), rel=1e-2)
    names = {"singular-values", "heads", "mass"}
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {f"{a}.{b}" for a in names for b in ("png", "svg")}


def test_one_block_is_one_head(weights, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.json"
    words = ["inspect", "biggan", weights, "--number", "1", "--block", "-1", "--methods", "smyrf:1x64"]
    words += ["--rows", "20", "--singular", "0", "--json", str(out), "--output", str(tmp_path / "plots")]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 head …" in done.output and "too few" not in done.output
    (found,) = json.loads(out.read_text())["results"]
    assert (found["layer"], found["n_queries"], found["n_rows"]) == (1, 1024, 20)
    assert {file.stem for file in (tmp_path / "plots").iterdir()} == {"mass"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block", "2"], "--block 2 must be from -2 to 1"),
        (["--methods", "smurf"], "--methods: 'smurf' is not a method"),
        (["--number", "0"], "--number 0 must be at least 1"),
        (["--rows", "0"], "--rows 0 must be at least 1"),
        (["--singular", "-1"], "--singular -1 must be at least 0"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--classes", "1,x"], "--classes 1,x must be numbers separated by commas"),
        (["--classes", "3"], "class 3 must be from 0 to 2"),
        (["--truncation", "0"], "truncation=0.0 must be positive"),
        (["--json", "/proc/a/b.json"], "--json /proc/a/b.json cannot be written"),
        (["--output", "/proc/a"], "--output /proc/a/heads.png cannot be written"),
    ],
)
def test_bad_input_gives_one_sentence(weights, arguments, words):
    if "--output" in arguments:
        pytest.importorskip("matplotlib")
    done = runner.invoke(app, ["inspect", "biggan", weights, *arguments])
    assert done.exit_code == 2
    assert words in done.stderr.replace("\n", " ")


def test_weights_that_cannot_be_read_are_named_once(tmp_path):
    pytest.importorskip("safetensors")
    save_network(Discriminator(CONFIG), tmp_path / "d.safetensors")
    save_network(Generator(replace(CONFIG, attention=())), tmp_path / "bare.safetensors")
    torch.save(Discriminator(CONFIG).state_dict(), tmp_path / "D.pth")
    for name, sentence in (
        ("nowhere.pth", "cannot be read"),
        ("D.pth", "shared.weight is missing; it is a discriminator"),
        ("bare.safetensors", "the generator has no attention block"),
    ):
        done = runner.invoke(app, ["inspect", "biggan", str(tmp_path / name)])
        assert done.exit_code == 2 and sentence in done.stderr.replace("\n", " ")
        assert done.stderr.startswith(f"error: {tmp_path / name}")
        assert "Traceback" not in done.output
