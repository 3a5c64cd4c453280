"""The blocks of BigGAN (Brock et al., 2019): residual blocks, conditional batch norm, attention.

Shapes: B images, C channels, H × W pixels; N = H·W queries, M = N / 4 pooled keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smyrf.experiments.biggan import spectral
from smyrf.methods import Method
from smyrf.nn import SmyrfAttention

EPSILON, MOMENTUM = 1e-5, 0.1


class BatchNorm(nn.Module):
    """Batch normalisation, conditional or not.

    Unconditional gain and bias are parameters; conditional ones are linear maps of the condition c: gain = 1 + A c,
    bias = B c.

    Args:
        n_condition: width of the condition; 0 for none.
        normalised: whether the maps have spectral norm. Maps of one-hot classes have none, as in the public code,
            where it does harm.
    """

    stored_mean: Tensor
    stored_var: Tensor

    def __init__(self, n_channels: int, n_condition: int = 0, normalised: bool = True) -> None:
        super().__init__()
        self.momentum = MOMENTUM
        self.register_buffer("stored_mean", torch.zeros(n_channels))
        self.register_buffer("stored_var", torch.ones(n_channels))
        self.gain: nn.Parameter | nn.Module
        self.bias: nn.Parameter | nn.Module
        if n_condition:
            kind = spectral.Linear if normalised else nn.Linear
            self.gain = kind(n_condition, n_channels, bias=False)
            self.bias = kind(n_condition, n_channels, bias=False)
            for linear in () if normalised else (self.gain, self.bias):
                nn.init.orthogonal_(linear.weight)
        else:
            self.gain = nn.Parameter(torch.ones(n_channels))
            self.bias = nn.Parameter(torch.zeros(n_channels))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        statistics = self.stored_mean, self.stored_var
        if isinstance(self.gain, nn.Parameter) and isinstance(self.bias, nn.Parameter):
            return F.batch_norm(x, *statistics, self.gain, self.bias, self.training, self.momentum, EPSILON)
        assert isinstance(self.gain, nn.Module) and isinstance(self.bias, nn.Module)
        gain, bias = 1.0 + self.gain(condition), self.bias(condition)  # (B, C)
        x = F.batch_norm(x, *statistics, None, None, self.training, self.momentum, EPSILON)
        return x * gain[:, :, None, None] + bias[:, :, None, None]


class GeneratorBlock(nn.Module):
    """Residual block that doubles the resolution: batch norm, upsampling, convolution, batch norm, convolution."""

    def __init__(self, n_in: int, n_out: int, n_condition: int, normalised: bool = True) -> None:
        super().__init__()
        self.conv1 = spectral.Conv2d(n_in, n_out, 3)
        self.conv2 = spectral.Conv2d(n_out, n_out, 3)
        self.conv_sc = spectral.Conv2d(n_in, n_out, 1)
        self.bn1 = BatchNorm(n_in, n_condition, normalised)
        self.bn2 = BatchNorm(n_out, n_condition, normalised)

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        h = F.relu(self.bn1(x, condition))
        h = self.conv1(F.interpolate(h, scale_factor=2))  # (B, C, 2H, 2W)
        h = self.conv2(F.relu(self.bn2(h, condition)))
        return h + self.conv_sc(F.interpolate(x, scale_factor=2))


class DiscriminatorBlock(nn.Module):
    """Residual block of two convolutions that halves the resolution or keeps it.

    Args:
        is_first: the input is an image, to which no ReLU is applied.
        halves: whether the resolution is halved.
    """

    def __init__(self, n_in: int, n_out: int, *, is_first: bool, halves: bool) -> None:
        super().__init__()
        self.is_first, self.halves = is_first, halves
        self.conv1 = spectral.Conv2d(n_in, n_out, 3)
        self.conv2 = spectral.Conv2d(n_out, n_out, 3)
        if n_in != n_out or halves:
            self.conv_sc: spectral.Conv2d | None = spectral.Conv2d(n_in, n_out, 1)
        else:
            self.conv_sc = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.conv1(x if self.is_first else F.relu(x))))
        return self._pool(h) + self._shortcut(x)

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.conv_sc is None:
            return self._pool(x)
        # Pooling and a 1×1 convolution commute up to rounding; this is the order of the public code.
        return self.conv_sc(self._pool(x)) if self.is_first else self._pool(self.conv_sc(x))

    def _pool(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2) if self.halves else x


class AttentionBlock(nn.Module):
    """Attention of all pixels to pooled pixels, added to the input with a learnt weight γ that starts at 0.

    θ makes queries, φ keys and g values, all by 1×1 convolutions; scores are not scaled. `attend.method` and
    `attend.seed` (the seed of hashes; None for PyTorch's global generator) may be changed at any time.

    Args:
        method: attention method.
    """

    def __init__(self, n_channels: int, method: Method) -> None:
        super().__init__()
        # A submodule, so that an AdaptiveSchedule finds it; it has no weights.
        self.attend = SmyrfAttention(method, scale=1.0)
        narrow, half = max(1, n_channels // 8), max(1, n_channels // 2)
        self.theta = spectral.Conv2d(n_channels, narrow, 1, bias=False)
        self.phi = spectral.Conv2d(n_channels, narrow, 1, bias=False)
        self.g = spectral.Conv2d(n_channels, half, 1, bias=False)
        self.o = spectral.Conv2d(half, n_channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        out = self.attend(q, k, v)  # (B, 1, N, C / 2)
        image = out[:, 0].transpose(1, 2).reshape(len(x), -1, *x.shape[2:])  # (B, C / 2, H, W)
        return self.gamma * self.o(image) + x

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries ``(B, 1, N, C / 8)``, keys ``(B, 1, M, C / 8)`` and values ``(B, 1, M, C / 2)``."""
        images = self.theta(x), F.max_pool2d(self.phi(x), 2), F.max_pool2d(self.g(x), 2)
        q, k, v = (image.flatten(2).transpose(1, 2)[:, None] for image in images)
        return q, k, v
