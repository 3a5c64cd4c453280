"""Fréchet distance and inception score, from the features and class probabilities of images.

Fréchet distance (Heusel et al., 2017): between normal distributions with the features' means and covariances.
Inception score (Salimans et al., 2016): exp of the mean KL divergence of p(class | image) from p(class).

Shapes: n images, F features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Mean ``(F,)`` and covariance ``(F, F)`` of features, in float64."""

    n: int
    mean: Tensor
    covariance: Tensor


def moments(features: Tensor) -> Moments:
    """Compute the mean and covariance of features ``(n, F)``.

    Raises:
        ValueError: there are fewer than two rows, or values that are not finite.

    Example:
        >>> import torch
        >>> moments(torch.tensor([[0.0, 1.0], [2.0, 1.0]])).covariance
        tensor([[2., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    if features.dim() != 2 or len(features) < 2:
        raise ValueError(f"features have the shape {tuple(features.shape)}, at least two rows are needed")
    if not torch.isfinite(features).all():
        raise ValueError("features are not finite")
    features = features.double()
    mean = features.mean(0)
    centred = features - mean
    return Moments(len(features), mean, centred.T @ centred / (len(features) - 1))


def frechet_distance(a: Moments, b: Moments) -> float:
    """Compute ‖μ_a − μ_b‖² + tr(Σ_a + Σ_b − 2 (Σ_a^½ Σ_b Σ_a^½)^½).

    Example:
        >>> import torch
        >>> a = moments(torch.tensor([[0.0], [2.0]]))
        >>> round(frechet_distance(a, moments(torch.tensor([[3.0], [5.0]]))), 6)
        9.0
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features differ: {len(a.mean)} and {len(b.mean)} wide")
    root = _square_root(a.covariance)
    # This product is symmetric, and has the eigenvalues of Σ_a Σ_b.
    eigenvalues = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp(min=0.0)
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()
    return max(0.0, float(distance - 2.0 * eigenvalues.sqrt().sum()))


def inception_score(probabilities: Tensor, n_parts: int = 10) -> tuple[float, float]:
    """Mean and standard deviation of the inception score over splits of the images, as it is usually reported.

    Args:
        probabilities: class probabilities ``(n, K)``.
        n_parts: number of splits.

    Example:
        >>> import torch
        >>> score, _ = inception_score(torch.eye(4).repeat(5, 1), n_parts=1)
        >>> round(score, 3)
        4.0
    """
    if len(probabilities) < n_parts:
        raise ValueError(f"{n_parts=} is more than the {len(probabilities)} images")
    scores = []
    for part in torch.tensor_split(probabilities.double(), n_parts):
        logs = part.clamp(min=1e-16).log() - part.mean(0, keepdim=True).clamp(min=1e-16).log()  # (n, K)
        scores.append((part * logs).sum(1).mean().exp())
    found = torch.stack(scores)
    return float(found.mean()), float(found.std(correction=0))


def _square_root(matrix: Tensor) -> Tensor:
    """Square root of a positive semidefinite matrix; eigenvalues below 0 are rounding errors."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0.0).sqrt()) @ vectors.T
