"""Load weights of BigGAN's public PyTorch checkpoints (``G_ema.pth``, ``G.pth``, ``D.pth``), load and save our own.

Public files are state dicts, of which only tensors are unpickled; our own are safetensors. Keys and shapes are
checked one by one, and the first mismatch is reported.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from smyrf.atomic_write import replacing
from smyrf.experiments.biggan.config import BOTTOM, DISCRIMINATOR, GENERATOR, N_KEEPING, Config
from smyrf.experiments.biggan.networks import Discriminator, Generator
from smyrf.methods import Dense, Method
from smyrf.tools.error_text import first_line

Network = TypeVar("Network", bound=Generator | Discriminator)
Filled = TypeVar("Filled", bound=nn.Module)
# Counters of PyTorch's batch norm, which are not used.
_IGNORED = ("num_batches_tracked",)
# Unsupported settings of the original code: by a key that only such networks have, and by a key that only they lack
# beside another. {n} is G or D.
_SHOWN = {
    "blocks.0.0.conv3.weight": "BigGAN-deep, which is",
    "blocks.0.0.conv1.u1": "spectral norm with several singular values (num_{n}_SVs > 1), which is",
    "blocks.0.0.bn1.bn.stored_mean": "BigGAN's own batch norm (mybn=True), which is",
    "blocks.0.0.bn1.bn.running_mean": "synchronised batch norm (cross_replica=True), which is",
}
_LACKED = {
    (
        "blocks.0.0.conv1.u0",
        "blocks.0.0.conv1.weight",
    ): "a network without spectral norm ({n}_param other than 'SN') is",
    (
        "blocks.0.0.bn1.stored_mean",
        "blocks.0.0.bn1.gain.weight",
    ): "a normalisation other than batch norm (norm_style) is",
}


class CheckpointError(ValueError):
    """Weights that cannot be loaded; the message names the file and the first key that does not fit."""


def load_generator(path: Path, method: Method | None = None, config: Config | None = None) -> Generator:
    """Load a generator, in evaluation mode.

    Args:
        path: a ``.pth`` or ``.pt`` state dict of the public code, or ``.safetensors``.
        method: method of its attention blocks; dense by default.
        config: config of the network; by default it is read from the file, or inferred from the weights of a public
            checkpoint with a shared class embedding.

    Raises:
        CheckpointError: the file cannot be read, or a key does not fit.
    """
    return _load(Generator, generator_config, path, method, config)


def load_discriminator(path: Path, method: Method | None = None, config: Config | None = None) -> Discriminator:
    """Load a discriminator, in evaluation mode; arguments as for `load_generator`."""
    return _load(Discriminator, discriminator_config, path, method, config)


def _load(
    kind: type[Network],
    infer: Callable[[dict[str, Tensor], Path], Config],
    path: Path,
    method: Method | None,
    config: Config | None,
) -> Network:
    state = read_state(path)
    _check_supported(kind, state, path)
    try:
        config = config or read_config(path) or infer(state, path)
        with torch.device("meta"):
            network = kind(replace(config, method=Dense() if method is None else method))
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from error
    fill(network, state, path).eval()
    return network


def _check_supported(kind: type[nn.Module], state: dict[str, Tensor], path: Path) -> None:
    """Raise if the keys show a setting of the original code that is not supported."""
    letter = kind.__name__[0]
    for key, what in _SHOWN.items():
        if key in state:
            raise CheckpointError(f"{path}: {key} shows {what.format(n=letter)} not supported")
    for (key, beside), what in _LACKED.items():
        if key not in state and beside in state:
            raise CheckpointError(f"{path}: {key} is missing: {what.format(n=letter)} not supported")
    first, second, gain = (state.get(f"blocks.0.0.{name}.weight") for name in ("conv1", "conv2", "bn1.gain"))
    if first is None or second is None or first.dim() < 2 or second.dim() < 2:
        return
    if gain is not None and gain.dim() == 2 and "blocks.0.0.bn1.gain.u0" not in state and len(gain) != first.shape[1]:
        raise CheckpointError(
            f"{path}: blocks.0.0.bn1.gain.weight shows an embedding of {len(gain)} classes in every normalisation "
            "(G_shared=False), which is not supported"
        )
    if kind is Discriminator and first.shape[0] == first.shape[1] != second.shape[0]:
        raise CheckpointError(
            f"{path}: blocks.0.0.conv1.weight shows narrow blocks (D_wide=False), which are not supported"
        )


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file to the CPU.

    Raises:
        CheckpointError: the file cannot be read, or is not a state dict.
    """
    if path.exists() and not path.is_file():  # a pipe would be read for ever
        raise CheckpointError(f"{path} is not a file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of files that are refused
                state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise many kinds
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{path} is not a state dict: it holds {type(state).__name__}")
    for key, value in state.items():
        if not isinstance(value, Tensor) or not isinstance(key, str):
            raise CheckpointError(f"{path}: {key} is {type(value).__name__}, not a tensor with a name")
        if value.layout != torch.strided:
            raise CheckpointError(f"{path}: {key} is {value.layout}, it must be a plain tensor")
    return state


def read_config(path: Path) -> Config | None:
    """Read the config from a file of ours; None for other files."""
    if path.suffix != ".safetensors":
        return None
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get("config")
    try:
        return None if text is None else Config.from_dict(json.loads(text))
    except (RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: invalid config: {error}") from error


def generator_config(state: dict[str, Tensor], path: Path) -> Config:
    """Infer the config of a generator with a shared class embedding from its weights.

    Raises:
        CheckpointError: the weights are not those of such a generator.
    """
    if "shared.weight" not in state and not _other(Generator, state):
        needed = "config=Config(n_shared=0, …) is needed for a generator without a shared class embedding"
        raise CheckpointError(f"{path}: shared.weight is missing; {needed}")
    axes = {"shared.weight": 2, "linear.weight": 2, "output_layer.2.weight": 4, "blocks.0.0.bn1.gain.weight": 2}
    _check_axes(Generator, state, path, axes)
    n_blocks = _count_blocks(state)
    resolution = _resolution(path, GENERATOR, n_blocks + 1)
    n_colours, width = state["output_layer.2.weight"].shape[:2]
    n_classes, n_shared = state["shared.weight"].shape
    n_chunk = state["blocks.0.0.bn1.gain.weight"].shape[1] - n_shared
    if n_classes == 1:
        raise CheckpointError(
            f"{path}: shared.weight shows a class embedding of a single class, which is not supported"
        )
    if width % GENERATOR[resolution][-1] or width < GENERATOR[resolution][-1]:
        raise CheckpointError(
            f"{path}: output_layer.2.weight has {width} input channels, which do not fit {n_blocks} blocks"
        )
    if n_chunk < 0:
        raise CheckpointError(f"{path}: blocks.0.0.bn1.gain.weight is narrower than shared.weight")
    return Config(
        resolution=resolution,
        channels=width // GENERATOR[resolution][-1],
        n_classes=n_classes,
        n_latent=n_chunk * (n_blocks + 1) if n_chunk else state["linear.weight"].shape[1],
        hierarchical=n_chunk > 0,
        n_shared=n_shared,
        attention=tuple(BOTTOM * 2 ** (number + 1) for number in _with_attention(state)),
        n_colours=n_colours,
    )


def discriminator_config(state: dict[str, Tensor], path: Path) -> Config:
    """Infer the config of a discriminator from its weights; settings of the generator keep their defaults.

    Raises:
        CheckpointError: the weights are not those of a supported discriminator.
    """
    of_classes = {"embed.weight": 2} if "embed.weight" in state else {}
    _check_axes(Discriminator, state, path, {"linear.weight": 2, "blocks.0.0.conv1.weight": 4, **of_classes})
    for key in ("shared.weight", "output_layer.2.weight"):
        if key in state:
            raise CheckpointError(f"{path}: {key} does not belong to a discriminator{_other(Discriminator, state)}")
    n_blocks = _count_blocks(state)
    resolution = _resolution(path, DISCRIMINATOR, n_blocks)
    width, n_colours = state["blocks.0.0.conv1.weight"].shape[:2]
    attention, n_halving = _with_attention(state), n_blocks - N_KEEPING[resolution]
    if late := [str(number) for number in attention if number >= n_halving]:
        setting = "D_attn='16' at 32×32 pixels" if resolution == 32 else "D_attn with 4"
        raise CheckpointError(
            f"{path}: attention after block{'s' * (len(late) > 1)} {' and '.join(late)}, where the image keeps its "
            f"size ({setting} in the original code), is not supported"
        )
    return Config(
        resolution=resolution,
        channels=width // DISCRIMINATOR[resolution][0],
        n_classes=state["embed.weight"].shape[0] if of_classes else 1,
        attention=tuple(resolution >> (number + 1) for number in attention),
        n_colours=n_colours,
    )


def save_network(network: Generator | Discriminator, path: Path) -> None:
    """Save the weights and the config of a network as safetensors, atomically."""
    from safetensors.torch import save

    state = {key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}
    with replacing(path) as temporary:
        # `save_file` would put another file in the place of this one, without its mode and its lock.
        temporary.write_bytes(save(state, {"config": json.dumps(network.config.to_dict())}))


def _check_axes(kind: type[nn.Module], state: dict[str, Tensor], path: Path, axes: Mapping[str, int]) -> None:
    """Raise unless each key is present with its number of axes."""
    for key, n_axes in axes.items():
        if key not in state:
            raise CheckpointError(f"{path}: {key} is missing{_other(kind, state)}")
        if state[key].dim() != n_axes:
            raise CheckpointError(f"{path}: {key} has the shape {tuple(state[key].shape)}, it must have {n_axes} axes")


def _other(kind: type[nn.Module], state: dict[str, Tensor]) -> str:
    """A hint if the weights belong to the other network: only generators have batch norm."""
    if "blocks.0.0.conv1.weight" not in state:
        return ""
    found = Generator if any(key.startswith("blocks.0.0.bn1.") for key in state) else Discriminator
    return "" if found is kind else f"; it is a {found.__name__.lower()}"


def _count_blocks(state: dict[str, Tensor]) -> int:
    return len({number for key in state if key.startswith("blocks.") and (number := key.split(".")[1]).isdecimal()})


def _with_attention(state: dict[str, Tensor]) -> list[int]:
    return [number for number in range(_count_blocks(state)) if f"blocks.{number}.1.gamma" in state]


def _resolution(path: Path, widths: dict[int, tuple[int, ...]], n_widths: int) -> int:
    for resolution, some in widths.items():
        if len(some) == n_widths:
            return resolution
    known = ", ".join(f"{len(some)} ({resolution} pixels)" for resolution, some in widths.items())
    raise CheckpointError(f"{path}: blocks have {n_widths} widths, supported are {known}")


def fill(network: Filled, state: dict[str, Tensor], path: Path) -> Filled:
    """Load weights into a network if all of them fit.

    Args:
        path: file of the weights, for the message.

    Raises:
        CheckpointError: a key does not fit.
    """
    expected = {key: value for key, value in network.state_dict().items() if not key.endswith(_IGNORED)}
    ready = dict[str, Tensor]()
    other = _other(type(network), state)
    for key, value in expected.items():
        if key not in state:
            raise CheckpointError(f"{path}: {key} is missing{other}")
        if state[key].shape != value.shape:
            shapes = f"{tuple(state[key].shape)}, it must be {tuple(value.shape)}"
            raise CheckpointError(f"{path}: {key} has the shape {shapes}{other}")
        if not state[key].is_floating_point() or state[key].is_meta:
            what = "without data" if state[key].is_meta else str(state[key].dtype)
            raise CheckpointError(f"{path}: {key} is {what}, it must be floating-point")
        # Copied, because tensors of a mapped file are not aligned, which changes rounding. Converted before the check,
        # because float64 may exceed float32.
        ready[key] = state[key].to(torch.float32, copy=True)
        if not torch.isfinite(ready[key]).all():
            raise CheckpointError(f"{path}: {key} holds values that are not finite")
    for key in state:
        if key not in expected and not key.endswith(_IGNORED):
            kind = type(network).__name__.lower()
            article = "an" if kind.startswith(tuple("aeiou")) else "a"
            raise CheckpointError(f"{path}: {key} is unknown to {article} {kind} of this shape")
    # A network on the meta device takes these tensors; another keeps its own, to which an optimizer may refer.
    empty = next(network.parameters()).is_meta
    network.load_state_dict(ready, assign=empty)
    return network
