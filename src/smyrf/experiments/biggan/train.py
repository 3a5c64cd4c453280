"""Train BigGAN with the hinge loss; a killed run resumes from its last checkpoint with identical results.

All random choices of a step depend only on the seed, the step and the rank. So a checkpoint holds the weights, the
states of both optimizers, the losses and the schedule, and no state of a random generator.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smyrf.atomic_write import write_json
from smyrf.experiments.biggan.checkpoints import CheckpointError, fill, read_state, save_network
from smyrf.experiments.biggan.determinism import ImageOrder, step_seed
from smyrf.experiments.biggan.grids import save_image, tile
from smyrf.experiments.biggan.latents import draw_inputs, generate
from smyrf.experiments.biggan.networks import Discriminator, Generator, attention_blocks
from smyrf.experiments.biggan.pictures import Pictures
from smyrf.experiments.biggan.recipe import Recipe
from smyrf.experiments.biggan.standing_statistics import collect_statistics
from smyrf.experiments.biggan.tensorboard import Board
from smyrf.experiments.biggan.weight_average import Average
from smyrf.experiments.checkpoint_folders import checkpoint_folders
from smyrf.experiments.save_errors import SaveError, naming_folder
from smyrf.tools.error_text import first_line
from smyrf.tuning.schedule import AdaptiveSchedule

N_KEPT = 2
# Batches for standing statistics, as in the public code.
N_STANDING = 16
# Streams of random numbers.
_WEIGHTS, _IMAGES, _STEP, _GRID, _STANDING = range(5)


class DivergedError(ValueError):
    """Losses or weights are not finite."""


@dataclass(frozen=True)
class Losses:
    """Mean losses since the previous ones.

    Args:
        step: step of the generator.
        real, fake: mean scores of the discriminator.
    """

    step: int
    generator: float
    discriminator: float
    real: float
    fake: float


class Run:
    """A training run and its folder.

    Args:
        recipe: what to train.
        pictures: real images.
        folder: folder of checkpoints and grids.
        n_grid: images per grid.

    Raises:
        ValueError: the images do not fit the recipe, or the folder belongs to another run.
    """

    def __init__(self, recipe: Recipe, pictures: Pictures, folder: Path, *, n_grid: int = 16) -> None:
        from accelerate import Accelerator

        config = recipe.config
        if (pictures.resolution, pictures.n_colours) != (config.resolution, config.n_colours):
            found, wanted = (f"{one.n_colours} colours and {one.resolution} pixels" for one in (pictures, config))
            raise ValueError(f"images have {found}, the recipe has {wanted}")
        if config.n_classes > 1 and len(pictures.class_names) > config.n_classes:
            raise ValueError(f"images have {len(pictures.class_names)} classes, n_classes={config.n_classes}")
        self.recipe, self.pictures, self.folder, self.n_grid = recipe, pictures, folder, n_grid
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        n_processes = self.accelerator.num_processes
        if recipe.batch_size % (recipe.accumulate * n_processes):
            parts = recipe.accumulate * n_processes
            raise ValueError(f"batch_size={recipe.batch_size} must be a multiple of {parts} parts and processes")
        self.n_part = recipe.batch_size // recipe.accumulate // n_processes
        torch.manual_seed(step_seed(recipe.seed, _WEIGHTS))
        self.generator, self.discriminator = Generator(config), Discriminator(config)
        for network in (self.generator, self.discriminator):
            # The fastest memory format for convolutions: saves a fifth of a step on a CPU.
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = Average(self.generator, recipe.ema)
        self.order = ImageOrder(len(pictures), step_seed(recipe.seed, _IMAGES))
        betas = recipe.beta1, recipe.beta2
        self.optimizers = {
            "generator": torch.optim.Adam(self.generator.parameters(), recipe.generator_rate, betas, recipe.epsilon),
            "discriminator": torch.optim.Adam(
                self.discriminator.parameters(), recipe.discriminator_rate, betas, recipe.epsilon
            ),
        }
        both = nn.ModuleDict({"generator": self.generator, "discriminator": self.discriminator})
        self.schedule = (
            None
            if recipe.max_error is None
            else AdaptiveSchedule(both, max_error=recipe.max_error, every=recipe.adapt_every, seed=recipe.seed)
        )
        self.step, self.losses = 0, list[Losses]()
        self._sums = [0.0] * 4  # of losses and scores since they were last logged
        self._resume()
        self._prepare()

    def _prepare(self) -> None:
        prepare = self.accelerator.prepare
        self._generator, self._discriminator = prepare(self.generator), prepare(self.discriminator)
        self.optimizers = {name: prepare(optimizer) for name, optimizer in self.optimizers.items()}
        self.average.network.to(self.accelerator.device)

    def train(
        self,
        *,
        log_every: int = 100,
        save_every: int = 1000,
        grid_every: int = 1000,
        board: Board | None = None,
        done: Callable[[Losses | None], None],
    ) -> None:
        """Train to the recipe's last step.

        Args:
            log_every, save_every, grid_every: steps between losses, checkpoints and grids.
            board: also receives losses and grids.
            done: called after each step, with the losses if they are logged.

        Raises:
            DivergedError: losses or weights are not finite; all checkpoints are from before.
            PictureError: an image cannot be read.
        """
        recipe = self.recipe
        while self.step < recipe.n_steps:
            found = self._one_step().tolist()
            if not all(map(math.isfinite, found)):
                raise DivergedError(f"losses are not finite at step {self.step + 1}: {found}; the run has diverged")
            self._sums = [total + one for total, one in zip(self._sums, found, strict=True)]
            self.step += 1
            self.average.update(self.generator, copies=self.step < recipe.ema_start)
            self._adapt()
            logged = None
            is_last = self.step == recipe.n_steps
            if self.step % log_every == 0 or is_last:
                n_summed = self.step - (self.losses[-1].step if self.losses else 0)
                logged = Losses(self.step, *(total / n_summed for total in self._sums))
                self.losses.append(logged)
                self._sums = [0.0] * 4
                if board is not None:
                    board.add_losses(logged)
                    if self.schedule is not None:
                        board.add_methods({name: one.method for name, one in self.schedule.layers.items()}, self.step)
            is_shown, is_saved = (is_last or self.step % every == 0 for every in (grid_every, save_every))
            if is_shown or is_saved:
                if self.accelerator.is_main_process:
                    self._collect_statistics()
                self._check_weights()
            # The grid comes first: a run that is killed in between writes it again.
            if is_shown and self.accelerator.is_main_process:
                self.save_grid(board)
            if is_saved:
                self.save()
            done(logged)

    def _one_step(self) -> Tensor:
        """Train both networks for a step; return the losses of both, and mean scores of real and fake images."""
        recipe, accelerator = self.recipe, self.accelerator
        torch.manual_seed(step_seed(recipe.seed, _STEP, self.step, accelerator.process_index))
        self.generator.train(), self.discriminator.train()
        found = torch.zeros(4, dtype=torch.float64)
        self.discriminator.requires_grad_(True)
        for critic in range(recipe.n_critic):
            self.optimizers["discriminator"].zero_grad()
            for part in range(recipe.accumulate):
                images, classes = self._real(critic, part)
                z, drawn = self._latents()
                with torch.no_grad():
                    fake = self.generator(z, drawn)
                both = None if classes is None or drawn is None else torch.cat([classes, drawn])
                scores = self._discriminator(torch.cat([images, fake]), both)
                real_score, fake_score = scores.split(len(images))
                loss = F.relu(1.0 - real_score).mean() + F.relu(1.0 + fake_score).mean()
                accelerator.backward(loss / recipe.accumulate)
                share = 1.0 / (recipe.accumulate * recipe.n_critic)
                found[1:] += share * torch.stack([loss, real_score.mean(), fake_score.mean()]).detach().double().cpu()
            self.optimizers["discriminator"].step()
        self.discriminator.requires_grad_(False)  # only passes gradients on to the generator
        self.optimizers["generator"].zero_grad()
        for _ in range(recipe.accumulate):
            z, drawn = self._latents()
            loss = -self.discriminator(self._generator(z, drawn), drawn).mean()
            accelerator.backward(loss / recipe.accumulate)
            found[0] += loss.detach().double().cpu() / recipe.accumulate
        self.optimizers["generator"].step()
        if accelerator.num_processes > 1:  # each process has seen a part of the batch
            found = accelerator.reduce(found.to(accelerator.device), reduction="mean").cpu()
        return found

    def _adapt(self) -> None:
        """Adapt the budget to the error if the recipe asks for it, on all processes and for the average."""
        if self.schedule is None:
            return
        self.schedule()
        was_due = (self.step - 1) % self.recipe.adapt_every == 0
        if was_due and self.accelerator.num_processes > 1:  # each process has measured its own images
            from accelerate.utils import broadcast_object_list

            (state,) = broadcast_object_list([self.schedule.state_dict()])
            self.schedule.load_state_dict(state)
        self._share_methods()

    def _share_methods(self) -> None:
        blocks = zip(attention_blocks(self.generator), attention_blocks(self.average.network), strict=True)
        for block, averaged in blocks:
            averaged.attend.method = block.attend.method

    def _real(self, critic: int, part: int) -> tuple[Tensor, Tensor | None]:
        recipe = self.recipe
        n_parts = recipe.accumulate * self.accelerator.num_processes
        turn = (self.step * recipe.n_critic + critic) * n_parts
        turn += part * self.accelerator.num_processes + self.accelerator.process_index
        rows = [self.pictures[index] for index in self.order.take(turn * self.n_part, self.n_part)]
        images = torch.stack([image for image, _ in rows]).to(self.accelerator.device)
        if recipe.config.n_classes == 1:
            return images, None
        return images, torch.tensor([number for _, number in rows], device=self.accelerator.device)

    def _latents(self) -> tuple[Tensor, Tensor | None]:
        config, device = self.recipe.config, self.accelerator.device
        z = torch.randn(self.n_part, config.n_latent).to(device)
        if config.n_classes == 1:
            return z, None
        return z, torch.randint(config.n_classes, (self.n_part,)).to(device)

    def _collect_statistics(self) -> None:
        """Collect standing statistics of the average, from the same latents each time."""
        network, device = self.average.network, self.accelerator.device
        assert isinstance(network, Generator)
        z, classes = draw_inputs(network, N_STANDING * self.n_part, seed=step_seed(self.recipe.seed, _STANDING))
        some = [None] * N_STANDING if classes is None else torch.split(classes.to(device), self.n_part)
        collect_statistics(network, zip(torch.split(z.to(device), self.n_part), some, strict=True))

    def _check_weights(self) -> None:
        """Raise unless all weights are finite: a step with finite losses can make them infinite."""
        for name, network in self._networks().items():
            for key, value in network.state_dict().items():
                if not torch.isfinite(value).all():
                    raise DivergedError(f"{key} of the {name} is not finite at step {self.step}; the run has diverged")

    def save_grid(self, board: Board | None = None) -> None:
        """Write a grid of images of the averaged generator, from the same latents each time."""
        assert isinstance(self.average.network, Generator)
        z, classes = draw_inputs(self.average.network, self.n_grid, seed=step_seed(self.recipe.seed, _GRID))
        images = generate(self.average.network, z, classes, self.n_part)
        grid = tile(images)
        save_image(grid, self.folder / "grids" / f"{self.step:07d}.png")
        if board is not None:
            board.add_grid(grid, self.step)

    def save(self) -> None:
        """Write a checkpoint atomically, and remove old ones.

        Raises:
            SaveError: it cannot be written; earlier checkpoints stay.
        """
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        final = self.folder / f"checkpoint-{self.step}"
        temporary = final.with_name(final.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with naming_folder(self.folder, final.name):
                self._write(temporary)
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
        except SaveError:
            shutil.rmtree(temporary, ignore_errors=True)  # it may fill the disk
            raise
        for old in checkpoint_folders(self.folder)[:-N_KEPT]:
            shutil.rmtree(old)

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, network in self._networks().items():
            save_network(network, folder / f"{name}.safetensors")
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        torch.save(states, folder / "optimizers.pt")
        state = {
            "step": self.step,
            "recipe": self.recipe.to_dict(),
            "images": self.pictures.fingerprint,
            "losses": [vars(one) for one in self.losses],
            "sums": self._sums,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
        }
        write_json(folder / "state.json", state)

    def _networks(self) -> dict[str, Generator | Discriminator]:
        assert isinstance(self.average.network, Generator)
        return {"generator": self.generator, "discriminator": self.discriminator, "average": self.average.network}

    def _resume(self) -> None:
        """Resume from the last checkpoint, if there is one."""
        if self.accelerator.is_main_process:
            for half in self.folder.glob("checkpoint-*.tmp"):  # from a run that was killed while saving
                shutil.rmtree(half)
        found = checkpoint_folders(self.folder)
        if not found:
            return
        last = found[-1]
        with _named(last / "state.json"):
            state = json.loads((last / "state.json").read_text())
            before, images = Recipe.from_dict(state["recipe"]), str(state["images"])
            self.step = int(state["step"])
            if self.step < 1:
                raise ValueError(f"step={self.step} must be positive")
            self.losses = [Losses(**one) for one in state["losses"]]
            self._sums = [float(total) for total in state["sums"]]
        if before.name != self.recipe.name:
            raise ValueError(f"{self.folder} belongs to another recipe: {before.name}, not {self.recipe.name}")
        if images != self.pictures.fingerprint:
            raise ValueError(f"{self.folder} was started with other images: choose another folder")
        if self.step > self.recipe.n_steps:
            raise ValueError(f"n_steps={self.recipe.n_steps} is less than the {self.step} steps of {self.folder}")
        for name, network in self._networks().items():
            file = last / f"{name}.safetensors"
            with _named(file):
                fill(network, read_state(file), file)
        with _named(last / "optimizers.pt"):
            optimizers = torch.load(last / "optimizers.pt", map_location="cpu", weights_only=True)
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(optimizers[name])
                _check_moments(optimizer)
        if self.schedule is not None:
            with _named(last / "state.json"):
                self.schedule.load_state_dict(state["schedule"])
            self._share_methods()


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file of a checkpoint in its errors, and the remedy."""
    try:
        yield
    except Exception as error:  # damaged files raise many kinds
        what = "" if isinstance(error, CheckpointError) else f"{file} cannot be read: "
        remedy = f"remove {file.parent.name} to resume from the previous checkpoint"
        raise CheckpointError(f"{what}{first_line(error)}; {remedy}") from error


def _check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the state of an optimizer has the shapes of its weights."""
    for weight, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != weight.shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, its weight {tuple(weight.shape)}")
