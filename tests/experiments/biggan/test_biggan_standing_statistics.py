"""Statistics of normalisation that belong to the averaged weights, in memory and in checkpoints."""

import numpy
import pytest
import torch

from smyrf.experiments.biggan.blocks import BatchNorm
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.networks import Generator
from smyrf.experiments.biggan.standing_statistics import collect_statistics

CONFIG = Config(
    resolution=32, channels=2, n_classes=3, n_latent=8, hierarchical=False, n_shared=4, attention=(16,), n_colours=1
)


def latents(n_batches, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 8, generator=drawn), torch.randint(3, (4,), generator=drawn)) for _ in range(n_batches)]


def first_statistics(generator, batches):
    """Of the first normalisation, which sees a linear map of z: mean over batches of their means and variances."""
    found = []
    for z, _ in batches:
        h = generator.linear(z).reshape(len(z), -1, 16)
        found.append((h.mean((0, 2)), h.transpose(1, 2).flatten(0, 1).var(0)))
    means, variances = zip(*found, strict=True)
    return torch.stack(means).mean(0), torch.stack(variances).mean(0)


def test_statistics_are_means_over_the_batches_and_nothing_else_changes():
    torch.manual_seed(0)
    generator, batches = Generator(CONFIG).eval(), latents(5)
    torch.nn.init.constant_(generator.blocks[1][1].gamma, 0.5)
    before = {key: value.clone() for key, value in generator.state_dict().items()}
    mean, variance = first_statistics(generator, batches)
    collect_statistics(generator, batches)
    norm = generator.blocks[0][0].bn1
    torch.testing.assert_close(norm.stored_mean, mean)
    torch.testing.assert_close(norm.stored_var, variance)
    assert not any(module.training for module in generator.modules())
    changed = {key for key, value in generator.state_dict().items() if not torch.equal(value, before[key])}
    norms = {name for name, module in generator.named_modules() if isinstance(module, BatchNorm)}
    assert changed == {f"{name}.{one}" for name in norms for one in ("stored_mean", "stored_var")}
    generator.train()
    generator(*batches[0])  # goes on as before: a tenth of each new batch
    z, _ = batches[0]
    own = generator.linear(z).reshape(4, -1, 16).mean((0, 2))
    torch.testing.assert_close(norm.stored_mean, 0.9 * mean + 0.1 * own, atol=1e-3, rtol=0.05)


def test_a_checkpoint_has_statistics_of_its_averaged_weights(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("safetensors")
    from smyrf.experiments.biggan.checkpoints import load_generator
    from smyrf.experiments.biggan.pictures import load_pictures
    from smyrf.experiments.biggan.recipe import Recipe
    from smyrf.experiments.biggan.train import N_STANDING, Run

    images = numpy.random.default_rng(0).integers(0, 256, (8, 32, 32), numpy.uint8)
    numpy.savez(tmp_path / "images.npz", images=images, labels=numpy.arange(8) % 3)
    pictures = load_pictures(tmp_path / "images.npz", 32, 1)
    recipe = Recipe(config=CONFIG, batch_size=4, n_steps=6, generator_rate=0.05, ema=0.9, ema_start=0)
    run = Run(recipe, pictures, tmp_path / "run", n_grid=4)
    seen = []
    monkeypatch.setattr(
        "smyrf.experiments.biggan.train.collect_statistics", lambda *some: seen.append(collected(*some))
    )
    run.train(done=lambda losses: None)
    (batches,) = seen
    assert len(batches) == N_STANDING and all(len(z) == len(classes) == 4 for z, classes in batches)
    average = load_generator(tmp_path / "run" / "checkpoint-6" / "average.safetensors")
    mean, variance = first_statistics(average, batches)
    norm, live = average.blocks[0][0].bn1, run.generator.blocks[0][0].bn1
    torch.testing.assert_close(norm.stored_mean, mean)
    torch.testing.assert_close(norm.stored_var, variance)
    assert not torch.allclose(live.stored_var, variance, rtol=0.2)  # what was copied belongs to other weights


def collected(generator, batches):
    batches = list(batches)
    collect_statistics(generator, batches)
    return batches
