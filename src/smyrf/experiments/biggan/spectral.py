"""Convolutions, linear layers and embeddings with spectral normalisation (Miyato et al., 2018).

Every forward pass estimates the largest singular value by one step of power iteration from a stored vector u0. Training
replaces u0 by the result, evaluation keeps it. Buffers have the names of BigGAN's public checkpoints; `sv0` logs the
last singular value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6


def power_step(matrix: Tensor, u: Tensor, epsilon: float = EPSILON) -> tuple[Tensor, Tensor]:
    """Do one step of power iteration.

    Args:
        matrix: W, ``(rows, columns)``.
        u: estimate of the left singular vector, ``(1, rows)``.

    Returns:
        the singular value σ = v Wᵀ uᵀ, ``()``, with gradients to W, and the next u.

    Example:
        >>> import torch
        >>> matrix = torch.diag(torch.tensor([3.0, 1.0]))
        >>> sigma, u = power_step(matrix, torch.tensor([[1.0, 0.1]]))
        >>> round(sigma.item(), 2)
        3.0
    """
    with torch.no_grad():
        v = F.normalize(u @ matrix, eps=epsilon)  # (1, columns)
        u = F.normalize(v @ matrix.T, eps=epsilon)  # (1, rows)
    return (v @ matrix.T @ u.T).squeeze(), u


class _Normalised(nn.Module):
    """Base class of the layers: the buffers, and the weight divided by σ."""

    weight: nn.Parameter
    u0: Tensor
    sv0: Tensor

    def _add_buffers(self) -> None:
        self.register_buffer("u0", torch.randn(1, self.weight.shape[0]))
        self.register_buffer("sv0", torch.ones(1))
        nn.init.orthogonal_(self.weight)

    def normalised_weight(self) -> Tensor:
        """W / σ, with W flattened to ``(out, rest)`` for σ."""
        sigma, u = power_step(self.weight.flatten(1), self.u0)
        if self.training:
            with torch.no_grad():
                self.u0.copy_(u)
                self.sv0.fill_(sigma.detach())
        return self.weight / sigma


class Conv2d(_Normalised):
    """A convolution with an odd kernel and padding that keeps the resolution."""

    def __init__(self, n_in: int, n_out: int, kernel: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None
        self._add_buffers()

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.normalised_weight(), self.bias, padding=self.weight.shape[2] // 2)


class Linear(_Normalised):
    """A linear layer."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None
        self._add_buffers()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.normalised_weight(), self.bias)


class Embedding(_Normalised):
    """A class embedding."""

    def __init__(self, n_classes: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_classes, width))
        self._add_buffers()

    def forward(self, classes: Tensor) -> Tensor:
        return F.embedding(classes, self.normalised_weight())
