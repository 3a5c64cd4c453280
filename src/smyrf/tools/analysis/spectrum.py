"""Singular values of an attention map and its effective rank, as in the paper's appendix on their decay.

Short maps are decomposed exactly. The largest values of long ones come from block Lanczos on AᵀA with full
orthogonalization; it needs only products with blocks of rows, none of which is stored.

Shapes: A a map, R × M (rows, keys); b vectors of a block, c of the basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.tools.analysis.maps import map_blocks

# Maps with a side of at most this length are decomposed exactly.
SHORT = 1024
# For longer ones: vectors of a block, most passes over the map (more if more values are asked for), and the error
# relative to the largest value at which iteration ends.
BLOCK_SIZE, MAX_PASSES, TOLERANCE = 32, 8, 1e-3


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one head's map, the largest first.

    Args:
        values: all of them, or as many as were asked for.
        size: how many there are.
        square: ‖A‖_F², the sum of all their squares.
        bound: each value is within this distance of a singular value of A; 0 if all are exact. Up to rounding, no
            value exceeds the singular value of the same index.
        fourth: ‖AᵀA‖_F², the sum of all their fourth powers; partly estimated for a long map.
    """

    values: tuple[float, ...]
    size: int
    square: float
    bound: float
    fourth: float

    @property
    def effective_rank(self) -> float:
        """(Σ σ²)² / Σ σ⁴: n if n values are equal and the others zero; 0 for a zero map.

        Example:
            >>> Spectrum((2.0, 2.0, 2.0, 0.0), 4, 12.0, 0.0, 48.0).effective_rank
            3.0
        """
        return min(self.square**2 / self.fourth, float(self.size)) if self.fourth > 0.0 else 0.0

    def rank(self, error: float = 0.1) -> int | None:
        """The smallest rank of a matrix B with ‖A − B‖_F ≤ error · ‖A‖_F; None if it needs more values than are given.

        Example:
            >>> Spectrum((3.0, 4.0**0.5, 0.1), 3, 13.01, 0.0, 97.0).rank()
            2
            >>> Spectrum((3.0,), 3, 13.01, 0.0, 97.0).rank() is None
            True
        """
        rest = self.square
        for count, value in enumerate(self.values, 1):
            rest -= value**2
            if rest <= error**2 * self.square:
                return count
        # With all values given, the rest is rounding.
        return len(self.values) if len(self.values) == self.size else None


def spectrum(head: Call, n_values: int = 64, seed: int = 0) -> Spectrum:
    """Singular values of softmax(scale · q kᵀ): all of a short map, the largest of a long one.

    Rows of padding are left out if queries and keys are the same tokens.

    Args:
        head: one head of one document, from `Call.head`.
        n_values: number of values for a map with both sides longer than `SHORT`; if it is close to all of them, all are
            computed, which is no slower.
        seed: of the first vectors.

    Example:
        >>> x = torch.zeros(1, 1, 8, 4)
        >>> found = spectrum(Call(x, x, x, 0.5))  # uniform attention: rank 1
        >>> [round(value, 6) for value in found.values[:2]], found.rank()
        ([1.0, 0.0], 1)
    """
    if n_values < 1:
        raise ValueError(f"{n_values=} must be at least 1")
    rows = head.read_rows()
    size = min(len(rows), head.n_keys)
    # Lanczos needs room: a basis cannot have more directions than there are.
    if size <= SHORT or BLOCK_SIZE * _passes(n_values)[1] > size:
        return _all_values(head, rows, size)
    return _largest_values(head, rows, n_values, seed)


def _passes(n_values: int) -> tuple[int, int]:
    """Least and most passes over the map; the last directions of a basis contribute little."""
    least = -(-n_values // BLOCK_SIZE) + 2
    return least, max(MAX_PASSES, least)


def _all_values(head: Call, rows: Tensor, size: int) -> Spectrum:
    """Fold rows block by block into the R of a QR decomposition, which has the same singular values."""
    folded = torch.empty(0, head.n_keys, dtype=torch.float64)
    for block in map_blocks(head, rows):
        folded = torch.cat([folded, block.weights.double()])
        if len(folded) > head.n_keys:
            folded = torch.linalg.qr(folded, mode="r").R  # (M, M)
    values = torch.linalg.svdvals(folded)[:size]
    square, fourth = (float(values.pow(power).sum()) for power in (2, 4))
    return Spectrum(tuple(values.tolist()), size, square, 0.0, fourth)


def _largest_values(head: Call, rows: Tensor, n_values: int, seed: int) -> Spectrum:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(head.n_keys, BLOCK_SIZE, dtype=torch.float64, generator=generator)
    vectors = torch.linalg.qr(start).Q  # (M, b)
    basis = images = torch.empty(head.n_keys, 0, dtype=torch.float64)
    values, bound, square = torch.empty(0), torch.inf, 0.0
    least, most = _passes(n_values)
    for step in range(1, most + 1):
        image, square = _gram_product(head, rows, vectors)
        basis, images = torch.cat([basis, vectors], 1), torch.cat([images, image], 1)  # (M, c)
        projected = basis.T @ images  # (c, c)
        squares, turned = torch.linalg.eigh((projected + projected.T) / 2)
        squares, turned = squares.flip(0)[:n_values].clamp(min=0.0), turned.flip(1)[:, :n_values]
        values = squares.sqrt()
        # ‖AᵀA u − s² u‖ bounds |σ² − s²| for some σ, and |σ − s| ≤ |σ² − s²| / s, or its root where s is tiny.
        residual = (images @ turned - basis @ turned * squares).norm(dim=0)
        bound = float(torch.minimum(residual / values.clamp(min=1e-300), residual.sqrt()).max())
        if step >= least and bound <= TOLERANCE * float(values[0]):
            break
        vectors = image
        # Twice: for a map of low rank the remainder is only rounding, which QR scales up.
        for _ in range(2):
            vectors = torch.linalg.qr(vectors - basis @ (basis.T @ vectors)).Q
    size = min(len(rows), head.n_keys)
    return Spectrum(tuple(values.tolist()), size, square, bound, _fourth(head, rows, basis, images, generator))


def _fourth(head: Call, rows: Tensor, basis: Tensor, images: Tensor, generator: torch.Generator) -> float:
    """‖AᵀA‖_F²: exact within the basis, the rest estimated from random vectors (Hutch++, Meyer et al. 2021)."""
    inside = float((basis.T @ images).square().sum())
    across = float(images.square().sum()) - inside  # by symmetry counted twice
    probes = torch.randn(head.n_keys, BLOCK_SIZE, dtype=torch.float64, generator=generator)
    probes -= basis @ (basis.T @ probes)
    image, _ = _gram_product(head, rows, probes)
    image -= basis @ (basis.T @ image)
    return inside + 2.0 * max(across, 0.0) + float(image.square().sum()) / BLOCK_SIZE


def _gram_product(head: Call, rows: Tensor, vectors: Tensor) -> tuple[Tensor, float]:
    """AᵀA X for X ``(M, b)`` and ‖A‖_F², in one pass over the rows."""
    found, square = torch.zeros_like(vectors), 0.0
    for block in map_blocks(head, rows):
        few = vectors.to(block.weights)
        found += (block.weights.T @ (block.weights @ few)).double()
        square += float(block.weights.square().sum(dtype=torch.float64))
    return found, square
