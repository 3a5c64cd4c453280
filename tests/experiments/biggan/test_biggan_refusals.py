"""What is wrong with weights, images, networks and places of BigGAN: one sentence that names it."""

import os
import struct
import warnings
from dataclasses import replace

import numpy
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")
pytest.importorskip("safetensors")

from filelock import FileLock
from PIL import Image, ImageOps

from smyrf.__main__ import app
from smyrf.experiments.biggan.checkpoints import CheckpointError, load_discriminator, load_generator, save_network
from smyrf.experiments.biggan.config import DISCRIMINATOR, Config
from smyrf.experiments.biggan.networks import Discriminator, Generator
from smyrf.experiments.biggan.pictures import PictureError, load_pictures
from smyrf.experiments.biggan.recipe import Recipe
from smyrf.experiments.biggan.train import DivergedError, Run

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
CONFIG = Config(resolution=32, channels=2, n_classes=3, n_latent=8, n_shared=4, attention=(16,), n_colours=1)
LONG = "a" * 300


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Weights of both networks, in both kinds of files, and images."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("biggan")
    for name, network in (("g", Generator(CONFIG)), ("d", Discriminator(CONFIG))):
        save_network(network, folder / f"{name}.safetensors")
        torch.save(network.state_dict(), folder / f"{name}.pth")
    chance = numpy.random.default_rng(0)
    numpy.savez(folder / "a.npz", images=chance.integers(0, 256, (6, 32, 32), numpy.uint8), labels=numpy.arange(6) % 3)
    numpy.savez(folder / "one.npz", images=chance.integers(0, 256, (1, 32, 32), numpy.uint8))
    return folder


def refused(*words):
    """The sentence with which a command is refused."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.stderr.replace("\n", " ")


def changed(place, tmp_path, key, change):
    """A public checkpoint of a generator in which one tensor is another."""
    state = torch.load(place / "g.pth", weights_only=True)
    state[key] = change(state[key])
    torch.save(state, tmp_path / "changed.pth")
    return tmp_path / "changed.pth"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: torch.full_like(x, 1e300, dtype=torch.float64), "holds values that are not finite"),
        (lambda x: torch.empty_like(x, device="meta"), "is without data, it must be floating-point"),
    ],
    ids=["too large for float32", "meta"],
)
def test_a_tensor_that_cannot_be_a_weight_is_named(place, tmp_path, change, sentence):
    path = changed(place, tmp_path, "linear.weight", change)
    with pytest.raises(CheckpointError, match=f"changed.pth: linear.weight {sentence}"):
        load_generator(path)


def test_weights_of_eight_bits_are_read(place, tmp_path):
    path = changed(place, tmp_path, "linear.weight", lambda x: x.to(torch.float8_e4m3fn))
    assert load_generator(path).linear.weight.dtype == torch.float32


@pytest.mark.parametrize("command", ["biggan sample", "biggan score", "inspect clusters"])
def test_weights_that_give_no_images_are_refused(place, tmp_path, command, features):
    path = changed(place, tmp_path, "blocks.2.0.conv1.weight", torch.zeros_like)  # its singular value is 0
    more = {"biggan sample": ["--json", tmp_path / "t.json", "--output", tmp_path / "s"]}
    more |= {"biggan score": ["--features", features["sees"], "--allow-torchscript", "--number", "4"]}
    more |= {"inspect clusters": ["--methods", "smyrf:1x32", "--output", tmp_path / "c"]}
    words = [*command.split(), path, *more[command]]
    assert "changed.pth: the generator's weights give images that are not finite" in refused(*words)


@pytest.mark.parametrize("command", ["biggan sample", "biggan score", "inspect biggan", "inspect clusters"])
def test_more_images_than_memory_are_refused_before_the_work(place, command, features):
    more = ["--features", features["sees"], "--allow-torchscript"] if command == "biggan score" else []
    said = refused(*command.split(), place / "g.pth", "--number", 10**12, *more)
    assert "--number 1000000000000 must be at most" in said


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_other_network_is_said_to_be_it(place, tmp_path, suffix):
    assert "it is a discriminator" in refused("biggan", "sample", place / f"d.{suffix}", "--output", tmp_path / "s")
    with pytest.raises(CheckpointError, match="it is a generator"):
        load_discriminator(place / f"g.{suffix}")


@pytest.mark.parametrize(
    ("key", "shape", "sentence"),
    [
        ("embed.weight", (), r"embed.weight has the shape \(\), it must have 2 axes"),
        ("blocks.0.0.conv1.weight", (3,), r"conv1.weight has the shape \(3,\), it must have 4 axes"),
        ("blocks.0.0.conv1.weight", (0, 3, 3, 3), "channels=0"),
    ],
)
def test_shapes_that_no_discriminator_has_are_named(place, tmp_path, key, shape, sentence):
    state = torch.load(place / "d.pth", weights_only=True)
    torch.save({**state, key: torch.zeros(shape)}, tmp_path / "d.pth")
    with pytest.raises(CheckpointError, match=f"d.pth: .*{sentence}"):
        load_discriminator(tmp_path / "d.pth")


# Networks of the original BigGAN code with settings that are not supported, each made from the state dict of ours.


def deep(state):
    """BigGAN-deep: four convolutions in a block."""
    return {**state, "blocks.0.0.conv3.weight": state["blocks.0.0.conv2.weight"]}


def without_spectral_norm(state):
    return {key: value for key, value in state.items() if not key.endswith((".u0", ".sv0"))}


def with_two_singular_values(state):
    return state | {key.removesuffix("0") + "1": value for key, value in state.items() if key.endswith((".u0", ".sv0"))}


def with_own_batch_norm(state):
    """`mybn` keeps its statistics in a module, with a counter."""
    found = {key.replace(".stored_", ".bn.stored_"): value for key, value in state.items()}
    norms = [key.removesuffix("stored_mean") for key in found if key.endswith("stored_mean")]
    return found | {f"{norm}accumulation_counter": torch.zeros(1) for norm in norms}


def with_synchronised_batch_norm(state):
    return {key.replace(".stored_", ".bn.running_"): value for key, value in state.items()}


def with_group_norm(state):
    return {key: value for key, value in state.items() if ".stored_" not in key}


def with_unshared_embedding(state):
    """Every normalisation has an embedding of the class: a row of gains per class, without spectral norm."""
    found = {key: value for key, value in state.items() if not key.endswith(("gain.u0", "gain.sv0", "bias.u0"))}
    found = {key: value for key, value in found.items() if key != "shared.weight" and not key.endswith("bias.sv0")}
    for key, value in found.items():
        if key.endswith(("gain.weight", "bias.weight")):
            found[key] = torch.zeros(CONFIG.n_classes, len(value))
    return found


def with_one_class(state):
    return {**state, "shared.weight": state["shared.weight"][:1]}


def narrow(state):
    """A block's first convolution has as many outputs as inputs."""
    found = dict(state)
    for key, value in state.items():
        if key.endswith("conv1.weight"):
            block = key.removesuffix("conv1.weight")
            n_in, n_out = value.shape[1], state[f"{block}conv2.weight"].shape[0]
            found |= {key: torch.ones(n_in, n_in, 3, 3), f"{block}conv2.weight": torch.ones(n_out, n_in, 3, 3)}
            found |= {f"{block}conv1.bias": torch.ones(n_in), f"{block}conv1.u0": torch.ones(1, n_in)}
    return found


def with_attention_after_every_block(state):
    """At 32×32 pixels the original code takes 16 for the resolution of all four blocks."""
    attention = {key: value for key, value in state.items() if key.startswith("blocks.0.1.")}
    return state | {key.replace("blocks.0", f"blocks.{n}"): value for n in range(4) for key, value in attention.items()}


@pytest.mark.parametrize(
    ("network", "change", "sentence"),
    [
        ("g", deep, r"blocks.0.0.conv3.weight shows BigGAN-deep, which is not supported"),
        ("d", deep, r"blocks.0.0.conv3.weight shows BigGAN-deep, which is not supported"),
        ("g", without_spectral_norm, r"blocks.0.0.conv1.u0 is missing: .* without spectral norm \(G_param"),
        ("d", without_spectral_norm, r"blocks.0.0.conv1.u0 is missing: .* without spectral norm \(D_param"),
        ("d", with_two_singular_values, r"blocks.0.0.conv1.u1 shows spectral norm .* \(num_D_SVs > 1\)"),
        ("g", with_own_batch_norm, r"blocks.0.0.bn1.bn.stored_mean shows BigGAN's own batch norm \(mybn"),
        ("g", with_synchronised_batch_norm, r"bn1.bn.running_mean shows synchronised batch norm \(cross_replica"),
        ("g", with_group_norm, r"bn1.stored_mean is missing: .* other than batch norm \(norm_style"),
        ("g", with_unshared_embedding, r"bn1.gain.weight shows an embedding of 3 classes in every .* \(G_shared=False"),
        ("g", with_one_class, r"shared.weight shows a class embedding of a single class, which is not supported"),
        ("d", narrow, r"blocks.0.0.conv1.weight shows narrow blocks \(D_wide=False\), which are not supported"),
        ("d", with_attention_after_every_block, r"attention after blocks 2 and 3, .* \(D_attn='16' at 32×32 pixels"),
    ],
)
def test_settings_of_the_original_code_that_are_not_supported_are_named(place, tmp_path, network, change, sentence):
    path = tmp_path / "changed.pth"
    torch.save(change(torch.load(place / f"{network}.pth", weights_only=True)), path)
    with pytest.raises(CheckpointError, match=f"changed.pth: .*{sentence}"):
        (load_generator if network == "g" else load_discriminator)(path)


@pytest.mark.parametrize("resolution", [64, 128])
def test_attention_of_a_discriminator_after_its_last_block_is_named_by_the_block(tmp_path, resolution):
    state = Discriminator(Config(resolution=resolution, channels=1, n_classes=3, attention=())).state_dict()
    last = len(DISCRIMINATOR[resolution]) - 1
    torch.save({**state, f"blocks.{last}.1.gamma": torch.tensor(0.0)}, tmp_path / "d.pth")
    with pytest.raises(CheckpointError, match=f"attention after block {last}, "):
        load_discriminator(tmp_path / "d.pth")


def test_a_public_generator_without_hierarchical_latents_is_loaded(tmp_path):
    config = replace(CONFIG, hierarchical=False)
    torch.save(Generator(config).state_dict(), tmp_path / "g.pth")
    assert load_generator(tmp_path / "g.pth").config == config


@pytest.mark.parametrize("n_classes", [1, 3])
def test_a_generator_without_a_shared_embedding_needs_its_config(tmp_path, n_classes):
    config = replace(CONFIG, n_classes=n_classes, hierarchical=False, n_shared=0)
    torch.save(Generator(config).state_dict(), tmp_path / "g.pth")
    with pytest.raises(CheckpointError, match=r"shared.weight is missing.* config=Config\(n_shared=0"):
        load_generator(tmp_path / "g.pth")
    assert load_generator(tmp_path / "g.pth", config=config).config == config


class _Sees(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        small = torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)
        return small, small


class _Picky(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 2
        return x.flatten(1)


class _Blind(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) / 0.0


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """Networks by name: one that sees, and others that do not."""
    folder = tmp_path_factory.mktemp("features")
    networks = {"sees": _Sees(), "picky": _Picky(), "blind": _Blind()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, network in networks.items():
            torch.jit.script(network).save(str(folder / f"{name}.pt"))
    return {name: folder / f"{name}.pt" for name in networks}


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        ("picky", ["--batch", "3"], "picky.pt fails on 3 images of 1 colours and 32 pixels"),
        ("blind", [], "blind.pt returns features that are not finite"),
        ("sees", ["--real", "{place}/one.npz"], "one.npz has only one image, at least two are needed"),
        ("sees", ["--preset", "table1", "--methods", "dense"], "--preset table1 and --methods dense must not be given"),
        ("sees", ["--preset", "table2"], "--preset table2 must be table1"),
    ],
)
def test_what_cannot_be_scored_is_named(place, features, name, more, sentence):
    more = [word.replace("{place}", str(place)) for word in more]
    words = ["--features", features[name], "--allow-torchscript", "--number", "6", *more]
    assert sentence in refused("biggan", "score", place / "g.safetensors", *words)


def test_a_few_images_have_no_inception_score(place, features):
    words = ["biggan", "score", str(place / "g.safetensors"), "--features", str(features["sees"]), "--number"]
    words.insert(3, "--allow-torchscript")
    few, more = (CliRunner().invoke(app, [*words, number]).output for number in ("9", "20"))
    assert "±" not in few and "±" in more


def test_a_damaged_image_of_a_dataset_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    column = datasets.Features({"image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": b"garbage", "path": None}]}, features=column)
    rows.save_to_disk(str(tmp_path / "rows"))
    assert "rows: image 0 is not a readable image" in refused(
        "biggan", "train", tmp_path / "rows", "--resolution", "32", "--output", tmp_path / "runs"
    )


def test_an_image_that_breaks_its_reader_is_named(tmp_path, monkeypatch):
    """Of damaged EXIF data PIL makes errors of many kinds."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    pictures = load_pictures(tmp_path, 32)

    def fail(image):
        raise struct.error("unpack requires a buffer of 2 bytes")

    monkeypatch.setattr(ImageOps, "exif_transpose", fail)
    with pytest.raises(PictureError, match=r"a.png is not a readable image: unpack requires"):
        pictures[0]


def test_a_label_that_is_no_class_is_named_with_its_place(tmp_path):
    numpy.savez(tmp_path / "a.npz", images=numpy.zeros((2, 8, 8), numpy.uint8), labels=numpy.array([0, -1]))
    with pytest.raises(PictureError, match="label 1 is -1"):
        load_pictures(tmp_path / "a.npz", 32)


def test_places_that_cannot_be_written_are_refused_before_the_work(place, tmp_path):
    (tmp_path / "figure.svg").mkdir()
    for words in (["biggan", "sample"], ["inspect", "clusters"]):
        words = [*words, place / "g.safetensors", "--methods", "smyrf:1x32,smyrf:1x64"]
        assert "figure.svg is a folder" in refused(*words, "--output", tmp_path / "figure")
        assert "File name too long" in refused(*words, "--output", tmp_path / LONG)
    assert "File name too long" in refused("biggan", "train", LONG, "--output", tmp_path / "runs")
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == ["figure.svg"]


SMALL = ("--resolution", "32", "--colours", "1", "--channels", "2", "--latent", "8", "--batch", "2", "--steps", "2")


def test_a_class_embedding_is_refused_where_there_is_one_class(place, tmp_path):
    words = ["biggan", "train", place / "one.npz", *SMALL, "--output", tmp_path]
    assert "n_shared=64 is for classes" in refused(*words, "--shared", "64")


def test_a_folder_has_one_run_at_a_time(place, tmp_path):
    words = ["biggan", "train", str(place / "a.npz"), *SMALL, "--output", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 0
    (folder,) = tmp_path.iterdir()
    with FileLock(folder / "run.lock"):
        assert "another process is training in" in refused(*words)
    assert CliRunner().invoke(app, words).exit_code == 0


def test_a_place_that_becomes_unwritable_ends_a_run_with_a_sentence(place, tmp_path):
    words = ["biggan", "train", str(place / "a.npz"), *SMALL, "--output", str(tmp_path)]
    assert CliRunner().invoke(app, [*words, "--steps", "1"]).exit_code == 0
    (grids,) = tmp_path.glob("*/grids")
    for file in grids.iterdir():
        file.unlink()
    grids.rmdir()
    grids.write_text("")
    assert "grids cannot be written" in refused(*words)


@pytest.fixture
def pictures(place):
    return load_pictures(place / "a.npz", 32, 1)


def small(n_steps):
    return Recipe(config=CONFIG, n_steps=n_steps, batch_size=2)


def test_weights_that_a_step_has_spoilt_are_not_saved(pictures, tmp_path):
    run = Run(small(4), pictures, tmp_path)

    def spoil(losses):
        if run.step == 2:  # of the third step the losses are finite, and the weights are not
            run.generator.linear.weight.register_hook(lambda gradient: gradient * torch.nan)

    with pytest.raises(DivergedError, match=r"linear.weight of the generator is not finite at step 3"):
        run.train(save_every=1, done=spoil)
    assert Run(small(4), pictures, tmp_path).step == 2


def test_a_damaged_network_of_a_checkpoint_is_named_with_what_to_do(pictures, tmp_path):
    Run(small(2), pictures, tmp_path).train(done=lambda losses: None)
    file = tmp_path / "checkpoint-2" / "average.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"average.safetensors cannot be read: .*; remove checkpoint-2 to resume"):
        Run(small(2), pictures, tmp_path)


def test_moments_of_another_shape_are_named(pictures, tmp_path):
    Run(small(2), pictures, tmp_path).train(done=lambda losses: None)
    file = tmp_path / "checkpoint-2" / "optimizers.pt"
    states = torch.load(file, weights_only=True)
    states["generator"]["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(states, file)
    with pytest.raises(CheckpointError, match=r"optimizers.pt cannot be read: exp_avg has the shape \(3,\)"):
        Run(small(2), pictures, tmp_path)


def test_what_a_kill_has_left_of_a_checkpoint_is_removed(pictures, tmp_path):
    (tmp_path / "checkpoint-7.tmp").mkdir()
    Run(small(2), pictures, tmp_path).train(done=lambda losses: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "grids"]


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_saved_weights_obey_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        save_network(Generator(CONFIG), tmp_path / "g.safetensors")
    finally:
        os.umask(old)
    assert (tmp_path / "g.safetensors").stat().st_mode & 0o777 == 0o644
