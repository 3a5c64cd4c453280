"""Inception-v3 as published Fréchet distances and inception scores use it.

The network of Szegedy et al. (2016) with the weights that Heusel et al. (2017) chose for the Fréchet distance. Names
and shapes are those of its port to PyTorch, ``pt_inception-2015-12-05-6726825d.pth``. It differs from torchvision's
Inception3: average pooling leaves padding out, the last block has max pooling, and there are 1008 classes.

Shapes: n images, R pixels, W channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smyrf.experiments.biggan.checkpoints import fill, read_state

RESOLUTION, N_FEATURES, N_CLASSES = 299, 2048, 1008
# Channels, height and width of a convolution's kernel. Two of them in a step read the same input.
Kernel: TypeAlias = tuple[int, int, int]
Step: TypeAlias = Kernel | tuple[Kernel, Kernel]
Branches: TypeAlias = Mapping[str, Sequence[Step]]


def _at_35_pixels(n_pooled: int) -> Branches:
    return {
        "branch1x1": [(64, 1, 1)],
        "branch5x5": [(48, 1, 1), (64, 5, 5)],
        "branch3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
        "branch_pool": [(n_pooled, 1, 1)],
    }


def _at_17_pixels(n: int) -> Branches:
    return {
        "branch1x1": [(192, 1, 1)],
        "branch7x7": [(n, 1, 1), (n, 1, 7), (192, 7, 1)],
        "branch7x7dbl": [(n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7)],
        "branch_pool": [(192, 1, 1)],
    }


_TO_17_PIXELS: Branches = {"branch3x3": [(384, 3, 3)], "branch3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)]}
_TO_8_PIXELS: Branches = {
    "branch3x3": [(192, 1, 1), (320, 3, 3)],
    "branch7x7x3": [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
}
_AT_8_PIXELS: Branches = {
    "branch1x1": [(320, 1, 1)],
    "branch3x3": [(384, 1, 1), ((384, 1, 3), (384, 3, 1))],
    "branch3x3dbl": [(448, 1, 1), (384, 3, 3), ((384, 1, 3), (384, 3, 1))],
    "branch_pool": [(192, 1, 1)],
}


class Convolution(nn.Module):
    """A convolution without bias, batch norm and a ReLU."""

    def __init__(self, n_inputs: int, kernel: Kernel, *, stride: int = 1, padded: bool = True) -> None:
        super().__init__()
        n_outputs, height, width = kernel
        padding = (height // 2, width // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(n_inputs, n_outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(n_outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Block(nn.Module):
    """Branches of convolutions on the same input, and a pooling branch; their outputs are concatenated.

    Args:
        pool: "average" (without padding) or "max", followed by the convolution ``branch_pool``; or "halve", a max
            pooling that halves the image, as the last convolution of each branch does.
    """

    def __init__(self, n_inputs: int, branches: Branches, pool: str = "average") -> None:
        super().__init__()
        self.pool, self.branches = pool, dict[str, list[list[str]]]()
        self.n_outputs = n_inputs if pool == "halve" else 0
        for branch, steps in branches.items():
            n, names = n_inputs, list[list[str]]()
            for number, step in enumerate(steps, 1):
                kernels = [step] if isinstance(step[0], int) else list(step)
                base = branch if len(steps) == 1 else f"{branch}_{number}"
                names.append([base] if len(kernels) == 1 else [f"{base}{letter}" for letter in "ab"])
                halves = pool == "halve" and number == len(steps)
                for name, kernel in zip(names[-1], kernels, strict=True):
                    self.add_module(name, Convolution(n, kernel, stride=1 + halves, padded=not halves))
                n = sum(kernel[0] for kernel in kernels)
            self.branches[branch] = names
            self.n_outputs += n

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for branch, steps in self.branches.items():
            y = self.pooled(x) if branch == "branch_pool" else x
            for names in steps:
                y = torch.cat([self.get_submodule(name)(y) for name in names], 1)
            found.append(y)
        return torch.cat([*found, self.pooled(x)] if self.pool == "halve" else found, 1)

    def pooled(self, x: Tensor) -> Tensor:
        """The input of the pooling branch."""
        if self.pool == "average":
            return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        return F.max_pool2d(x, 3, 2) if self.pool == "halve" else F.max_pool2d(x, 3, 1, 1)


class Inception(nn.Module):
    """Features and logits of images.

    Example:
        >>> with torch.device("meta"):
        ...     network = Inception().eval()
        ...     features, logits = network(torch.empty(2, 3, 64, 64))
        >>> features.shape, logits.shape, sum(weight.numel() for weight in network.parameters())
        (torch.Size([2, 2048]), torch.Size([2, 1008]), 23850960)
    """

    def __init__(self) -> None:
        super().__init__()
        stem = {"1a_3x3": (32, 3, 3), "2a_3x3": (32, 3, 3), "2b_3x3": (64, 3, 3), "3b_1x1": (80, 1, 1)}
        stem["4a_3x3"] = (192, 3, 3)
        widths = [3, *(kernel[0] for kernel in stem.values())]
        for (name, kernel), (n_inputs, _) in zip(stem.items(), pairwise(widths), strict=True):
            layer = Convolution(n_inputs, kernel, stride=1 + (name == "1a_3x3"), padded=name == "2b_3x3")
            self.add_module(f"Conv2d_{name}", layer)
        n = widths[-1]
        for name, branches, pool in (
            ("5b", _at_35_pixels(32), "average"),
            ("5c", _at_35_pixels(64), "average"),
            ("5d", _at_35_pixels(64), "average"),
            ("6a", _TO_17_PIXELS, "halve"),
            ("6b", _at_17_pixels(128), "average"),
            ("6c", _at_17_pixels(160), "average"),
            ("6d", _at_17_pixels(160), "average"),
            ("6e", _at_17_pixels(192), "average"),
            ("7a", _TO_8_PIXELS, "halve"),
            ("7b", _AT_8_PIXELS, "average"),
            ("7c", _AT_8_PIXELS, "max"),
        ):
            block = Block(n, branches, pool)
            self.add_module(f"Mixed_{name}", block)
            n = block.n_outputs
        self.fc = nn.Linear(n, N_CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``(n, 2048)`` and logits ``(n, 1008)`` of images ``(n, 3, R, R)`` between −1 and 1.

        Logits leave out the bias, as in published inception scores.
        """
        x = F.interpolate(images, size=(RESOLUTION, RESOLUTION), mode="bilinear", align_corners=False)
        for name, layer in self.named_children():
            if isinstance(layer, Convolution | Block):
                x = layer(x)  # (n, W, R, R)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                x = F.max_pool2d(x, 3, 2)
        features = x.mean((2, 3))  # (n, 2048)
        return features, F.linear(features, self.fc.weight)


def load_inception(path: Path) -> Inception:
    """Load the weights of the network from a state dict, in evaluation mode.

    Args:
        path: a ``.pth`` or ``.pt`` state dict, or ``.safetensors``.

    Raises:
        CheckpointError: the file cannot be read, or a key does not fit.
    """
    state = read_state(path)
    with torch.device("meta"):
        network = Inception()
    return fill(network, state, path).eval().requires_grad_(False)
