"""Training BigGAN."""

import copy
import shutil
import signal
from dataclasses import replace

import numpy
import pytest
import torch

pytest.importorskip("accelerate")

from safetensors.torch import load_file
from typer.testing import CliRunner

from smyrf import Smyrf
from smyrf.__main__ import app
from smyrf.experiments.biggan.checkpoints import CheckpointError
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.determinism import step_seed
from smyrf.experiments.biggan.networks import attention_blocks
from smyrf.experiments.biggan.pictures import Pictures, load_pictures
from smyrf.experiments.biggan.recipe import PRESETS, Recipe
from smyrf.experiments.biggan.train import DivergedError, Run


@pytest.fixture(scope="module")
def pictures(npz):
    return load_pictures(npz, 32, 1, flip=True)


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


def test_a_step_is_the_books(pictures, tmp_path):
    """Hinge losses, two rates, two parts, an average: the same by plain operations on copies of the networks."""
    options = {"accumulate": 2, "generator_rate": 1e-3, "discriminator_rate": 4e-3, "ema": 0.75}
    run = Run(replace(recipe(2, **options), ema_start=0), pictures, tmp_path)
    for block in [*attention_blocks(run.generator), *attention_blocks(run.discriminator)]:
        torch.nn.init.constant_(block.gamma, 0.7)
    generator, discriminator = copy.deepcopy(run.generator).train(), copy.deepcopy(run.discriminator).train()
    before = {key: value.clone() for key, value in run.average.network.named_parameters()}
    betas = run.recipe.beta1, run.recipe.beta2
    steps = [
        torch.optim.Adam(network.parameters(), rate, betas, run.recipe.epsilon)
        for network, rate in ((generator, 1e-3), (discriminator, 4e-3))
    ]
    torch.manual_seed(step_seed(run.recipe.seed, 2, 0, 0))
    found = torch.zeros(4, dtype=torch.float64)
    for part in (0, 1):
        images, classes = run._real(0, part)
        z, drawn = torch.randn(2, 8), torch.randint(3, (2,))
        with torch.no_grad():
            fake = generator(z, drawn)
        scores = discriminator(torch.cat([images, fake]), torch.cat([classes, drawn]))
        real_score, fake_score = scores[:2], scores[2:]
        loss = (1 - real_score).clamp(min=0).mean() + (1 + fake_score).clamp(min=0).mean()
        (loss / 2).backward()
        found[1:] += torch.stack([loss, real_score.mean(), fake_score.mean()]).detach().double() / 2
    steps[1].step()
    for _ in (0, 1):
        z, drawn = torch.randn(2, 8), torch.randint(3, (2,))
        loss = -discriminator(generator(z, drawn), drawn).mean()
        torch.autograd.backward(loss / 2, inputs=list(generator.parameters()))
        found[0] += loss.detach().double() / 2
    steps[0].step()
    with pytest.raises(StopIteration):
        run.train(log_every=1, save_every=100, grid_every=100, done=stop)
    assert list(vars(run.losses[0]).values())[1:] == pytest.approx(found.tolist(), rel=1e-5)
    for ours, book in ((run.generator, generator), (run.discriminator, discriminator)):
        for (key, value), other in zip(ours.named_parameters(), book.parameters(), strict=True):
            torch.testing.assert_close(value, other, atol=1e-6, rtol=1e-4, msg=key)
    after = dict(run.generator.named_parameters())
    for key, value in run.average.network.named_parameters():
        torch.testing.assert_close(value, 0.75 * before[key] + 0.25 * after[key], msg=key)


def stop(losses):
    raise StopIteration


def test_the_average_is_a_copy_until_its_first_step(pictures, tmp_path):
    run = Run(replace(recipe(4, ema=0.75), ema_start=3), pictures, tmp_path)
    trained, averaged = [], []

    def look(losses):
        for found, network in ((trained, run.generator), (averaged, run.average.network)):
            found.append(torch.cat([weight.detach().flatten() for weight in network.parameters()]))

    run.train(grid_every=100, done=look)
    assert [torch.equal(*both) for both in zip(trained, averaged, strict=True)] == [True, True, False, False]
    for step in (2, 3):
        torch.testing.assert_close(averaged[step], 0.75 * averaged[step - 1] + 0.25 * trained[step])


class _Recording(Pictures):
    """Keeps which images were asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.taken = []

    def __getitem__(self, index):
        self.taken.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_discriminator_takes_its_steps_on_images_of_their_own(pictures, tmp_path, accumulate):
    watched = _Recording(len(pictures), pictures._read, pictures.class_names, 32, 1)
    run = Run(recipe(3, n_critic=2, accumulate=accumulate), watched, tmp_path)
    steps = []
    for name, wrapped in run.optimizers.items():
        wrapped.optimizer.register_step_post_hook(lambda *_, name=name: steps.append(name))
    run.train(done=lambda losses: None)
    assert steps == ["discriminator", "discriminator", "generator"] * 3
    assert len(watched.taken) == 3 * 2 * 4  # batches of 4
    for start in (0, 10):  # every image once before any comes again
        assert sorted(watched.taken[start : start + 10]) == list(range(10))


def test_a_run_goes_on_with_its_own_images_and_steps_alone(pictures, tmp_path):
    Run(recipe(4), pictures, tmp_path).train(done=lambda losses: None)
    with pytest.raises(ValueError, match="n_steps=2 is less than the 4"):
        Run(recipe(2), pictures, tmp_path)
    images = numpy.random.default_rng(1).integers(0, 256, (10, 32, 32), numpy.uint8)
    numpy.savez(tmp_path / "b.npz", images=images, labels=numpy.arange(10) % 3)
    with pytest.raises(ValueError, match="was started with other images"):
        Run(recipe(6), load_pictures(tmp_path / "b.npz", 32, 1, flip=True), tmp_path)


@pytest.mark.parametrize(("name", "text"), [("state.json", "{"), ("state.json", "{}"), ("optimizers.pt", "x")])
def test_a_damaged_checkpoint_is_named(pictures, tmp_path, name, text):
    Run(recipe(2), pictures, tmp_path).train(done=lambda losses: None)
    (tmp_path / "checkpoint-2" / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*remove checkpoint-2"):
        Run(recipe(2), pictures, tmp_path)


def test_a_run_that_diverges_says_so_and_leaves_no_checkpoint(pictures, tmp_path):
    run = Run(recipe(4), pictures, tmp_path)
    torch.nn.init.constant_(run.discriminator.linear.bias, torch.nan)
    with pytest.raises(DivergedError, match="not finite at step 1"):
        run.train(done=lambda losses: None)
    assert not list(tmp_path.iterdir())


def test_the_budget_follows_the_error_and_survives_a_stop(pictures, tmp_path):
    options = {"max_error": 0.01, "adapt_every": 2}
    whole = Run(recipe(6, **options), pictures, tmp_path / "whole")
    whole.train(done=lambda losses: None)
    methods = [layer.method for layer in whole.schedule.layers.values()]
    assert len(methods) == 2  # one of each network
    assert all(method.n_hashes > 2 for method in methods)
    averaged = [block.attend.method for block in attention_blocks(whole.average.network)]
    assert averaged == [block.attend.method for block in attention_blocks(whole.generator)]
    Run(recipe(3, **options), pictures, tmp_path / "cut").train(done=lambda losses: None)
    again = Run(recipe(6, **options), pictures, tmp_path / "cut")
    again.train(done=lambda losses: None)
    assert again.schedule.history == whole.schedule.history and len(whole.schedule.history) == 6
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())


def test_losses_are_the_same_where_checkpoints_fall_between_them(pictures, tmp_path):
    how = {"log_every": 3, "save_every": 2, "grid_every": 100}
    whole = Run(recipe(6), pictures, tmp_path / "whole")
    whole.train(done=lambda losses: None, **how)
    run = Run(recipe(6), pictures, tmp_path / "cut")

    def stop(losses):
        if run.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(done=stop, **how)
    again = Run(recipe(6), pictures, tmp_path / "cut")
    assert again.step == 4
    again.train(done=lambda losses: None, **how)
    assert again.losses == whole.losses and [losses.step for losses in whole.losses] == [3, 6]


def test_tensorboard_shows_losses_budgets_and_grids(npz, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    more = ["--steps", "8", "--tensorboard", "--max-error", "0.01", "--adapt-every", "4"]
    done = CliRunner().invoke(app, command(npz, tmp_path, *more))
    assert done.exit_code == 0, done.output
    (folder,) = tmp_path.glob("*/tensorboard")
    found = events.EventAccumulator(str(folder), {"scalars": 0, "images": 0})
    found.Reload()
    assert [one.step for one in found.Scalars("loss/generator")] == [4, 8]
    assert [one.step for one in found.Images("images")] == [8]
    rounds = [name for name in found.Tags()["scalars"] if name.startswith("rounds/")]
    assert len(rounds) == 2 and found.Scalars(rounds[0])[-1].value > 2


def test_tensorboard_shows_no_step_of_a_killed_run_twice(npz, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = command(npz, tmp_path, "--steps", "4", "--tensorboard", "--log-every", "1", "--save-every", "2")
    assert CliRunner().invoke(app, words).exit_code == 0
    (run,) = tmp_path.iterdir()
    shutil.rmtree(run / "checkpoint-4")  # as if the run had been killed before it was written
    (file,) = (run / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.0"))  # files are read in the order of their names
    assert CliRunner().invoke(app, words).exit_code == 0
    found = events.EventAccumulator(str(run / "tensorboard"), {"scalars": 0, "images": 0})
    found.Reload()
    assert [one.step for one in found.Scalars("loss/generator")] == [1, 2, 3, 4]
    assert [one.step for one in found.Images("images")] == [4]


def test_recipes_survive_json_and_presets_are_the_papers():
    assert Recipe.from_dict(recipe().to_dict()) == recipe()
    faces = PRESETS["celeba-128/smyrf-4x2048"]
    assert (faces.batch_size, faces.generator_rate, faces.discriminator_rate) == (32, 2e-4, 5e-5)
    assert (faces.beta1, faces.beta2, faces.n_steps) == (0.0, 0.999, 120_000)
    assert faces.config.method.memory_share(4096, 16384) == 0.5
    assert PRESETS["celeba-256/smyrf-4x8192"].config.method.memory_share(16384, 65536) == 0.5


def command(place, output, *more):
    words = ["biggan", "train", str(place), "--resolution", "32", "--channels", "2", "--colours", "1", "--latent", "8"]
    words += ["--method", "smyrf:2x32", "--batch", "4", "--output", str(output), "--threads", "1", "--log-every", "4"]
    return [*words, "--save-every", "4", "--grid-every", "100", "--ema-start", "3", *more]


def test_grids_are_written_at_the_steps_asked_for_and_at_the_last(npz, tmp_path):
    done = CliRunner().invoke(app, command(npz, tmp_path, "--steps", "5", "--grid-every", "2"))
    assert done.exit_code == 0, done.output
    assert sorted(path.stem for path in tmp_path.glob("*/grids/*.png")) == ["0000002", "0000004", "0000005"]


# `smyrf`, which is killed after the step that the first word names.
KILLED = """
import os
import signal
import sys

from smyrf.__main__ import main
from smyrf.experiments.biggan.train import Run

last, one_step = int(sys.argv.pop(1)), Run._one_step


def kill(run):
    found = one_step(run)
    if run.step + 1 == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


Run._one_step = kill
main()
"""


def trained(folder):
    (run,) = folder.iterdir()
    last = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    names = ("generator", "discriminator", "average")
    return last.name, {name: load_file(last / f"{name}.safetensors") for name in names}


def same(one, other):
    return all(torch.equal(value, other[name][key]) for name, part in one.items() for key, value in part.items())


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been_killed(npz, tmp_path, launch):
    (tmp_path / "killed.py").write_text(KILLED)
    words = command(npz, tmp_path / "killed", "--steps", "8", "--save-every", "2")
    assert launch(tmp_path / "killed.py", 6, *words).returncode == -signal.SIGKILL
    (run,) = (tmp_path / "killed").iterdir()
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    (run / "checkpoint-6.tmp").mkdir()  # one that the kill has left half-written
    for folder in ("killed", "whole"):
        done = CliRunner().invoke(app, command(npz, tmp_path / folder, "--steps", "8", "--save-every", "2"))
        assert done.exit_code == 0, done.output
        assert "step 8: losses" in done.output
    (name, killed), (other, whole) = trained(tmp_path / "killed"), trained(tmp_path / "whole")
    assert name == other == "checkpoint-8" and same(killed, whole)
    assert len(list(run.glob("checkpoint-*"))) == 2


def test_accumulated_parts_see_the_same_images(pictures, tmp_path):
    run = Run(recipe(1, accumulate=2), pictures, tmp_path / "a")
    whole = Run(recipe(1), pictures, tmp_path / "b")
    parts = torch.cat([run._real(0, part)[1] for part in (0, 1)])
    assert torch.equal(parts, whole._real(0, 0)[1])
    run.train(done=lambda losses: None)
    assert run.step == 1 and len(run.losses) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{n}", "--preset", "faces"], "--preset faces must be one of celeba-128/dense-64"),
        (["{n}", "--method", "x"], "--method: 'x' is not a method"),
        (["{n}", "--resolution", "48"], "resolution=48 must be one of 32"),
        (["{n}", "--resolution", "32", "--attention", "64"], "attention at 64 must be one of 8, 16, 32"),
        (["{n}", "--batch", "0"], "batch_size=0 must be at least 1"),
        (["{n}", "--batch", "5", "--accumulate", "2"], "batch_size=5 must be a multiple of accumulate=2"),
        (["{n}", "--generator-rate", "0"], "generator_rate=0.0 must be positive"),
        (["{n}", "--log-every", "0"], "--log-every 0 must be at least 1"),
        (["{n}", "--colours", "2"], "n_colours=2 must be 1 or 3"),
        (["{n}", "--adapt-every", "5"], "--adapt-every 5 needs --max-error"),
        (["{n}", "--resolution", "32", "--max-error", "0.1"], "max_error=0.1 needs a method with a size, not"),
        (["{n}", "--resolution", "32", "--method", "tangent:0.5", "--max-error", "-1"], "max_error=-1.0 must be"),
        (["nowhere"], "nowhere is neither a folder nor an .npz file"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(npz, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["biggan", "train", *(word.replace("{n}", str(npz)) for word in words)])
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr.replace("\n", " ") and "Traceback" not in done.output
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_preset_says_that_it_leaves_classes_out(npz, tmp_path):
    words = ("--preset", "celeba-128/dense-64", "--attention", "16", "--steps", "1")
    done = CliRunner().invoke(app, command(npz, tmp_path, *words))
    assert done.exit_code == 0, done.output
    assert "celeba-128/dense-64 trains without classes: the 3 of" in done.output.replace("\n", " ")


def test_a_run_that_is_killed_at_its_grid_makes_it_when_it_goes_on(pictures, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("smyrf.experiments.biggan.train.save_image", killed)
        with pytest.raises(KeyboardInterrupt):
            Run(recipe(4), pictures, tmp_path, n_grid=4).train(save_every=2, grid_every=2, done=lambda losses: None)
    Run(recipe(4), pictures, tmp_path, n_grid=4).train(save_every=2, grid_every=2, done=lambda losses: None)
    assert sorted(path.name for path in (tmp_path / "grids").iterdir()) == ["0000002.png", "0000004.png"]
