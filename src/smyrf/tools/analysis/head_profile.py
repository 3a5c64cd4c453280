"""Profile of a head: how much its attention depends on the query, and how much its output differs from a mean.

Each of these numbers may explain why a head is hard to approximate; `hardness` tests which do.

Shapes: N queries, M keys, D width, E value width, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.tools.analysis.maps import MapBlock, head_vectors


@dataclass(frozen=True)
class HeadProfile:
    """Profile of one head, over some of its queries.

    Args:
        heaviest_key: mean weight of the key with the most; near 1 if all queries attend to one key.
        alike: R ‖mean row‖² / ‖A‖_F²; between 1/R and 1, which means that all queries attend alike.
        query_spread: standard deviation of (q − q̄)·(k − k̄), the part of the scores that differs between queries.
        off_mean: ‖output − mean of the values‖² / ‖output‖².
        output_square: ‖output‖², the denominator of squared errors.
    """

    heaviest_key: float
    alike: float
    query_spread: float
    off_mean: float
    output_square: float


class ProfileSums:
    """Accumulate a profile from the blocks of a head's map.

    Args:
        head: one head of one document, from `Call.head`.

    Example:
        >>> from smyrf.tools.analysis.maps import map_blocks
        >>> x = torch.zeros(1, 1, 6, 4)
        >>> sums = ProfileSums(Call(x, x, x + 1.0, 0.5))
        >>> for block in map_blocks(sums.head):
        ...     output = sums.add(block)
        >>> found = sums.profile()  # uniform attention
        >>> round(found.alike, 6), round(found.heaviest_key, 6), round(found.off_mean, 6), found.output_square
        (1.0, 0.166667, 0.0, 24.0)
    """

    def __init__(self, head: Call) -> None:
        self.head = head
        _, _, self._values = head_vectors(head)
        n_seen = head.n_keys if head.key_mask is None else int(head.key_mask.sum())
        self._mean_value = self._values.double().sum(0) / max(1, n_seen)  # (E,), masked values are zero
        self._row_sum = torch.zeros(head.n_keys, dtype=torch.float64)  # (M,)
        self._n_rows, self._map_square, self._output_square, self._off_square = 0, 0.0, 0.0, 0.0

    def add(self, block: MapBlock) -> Tensor:
        """Add a block and return its output ``(R, E)``."""
        output = block.weights @ self._values  # (R, E)
        self._n_rows += len(block.rows)
        self._row_sum += block.weights.sum(0, dtype=torch.float64)
        self._map_square += float(block.weights.square().sum(dtype=torch.float64))
        self._output_square += float(output.double().square().sum())
        self._off_square += float((output.double() - self._mean_value).square().sum())
        return output

    def profile(self) -> HeadProfile:
        """The profile over all blocks so far."""
        mean_row = self._row_sum / max(1, self._n_rows)
        tiny = torch.finfo(torch.float64).tiny
        return HeadProfile(
            heaviest_key=float(mean_row.max()),
            alike=self._n_rows * float(mean_row.square().sum()) / max(self._map_square, tiny),
            query_spread=query_spread(self.head),
            off_mean=self._off_square / max(self._output_square, tiny),
            output_square=self._output_square,
        )


def query_spread(head: Call) -> float:
    """Standard deviation of scale · (q − q̄)·(k − k̄) over all pairs, computed as scale · √tr(Σ_q Σ_k).

    Example:
        >>> q, k = torch.randn(2, 1, 1, 50, 4).unbind()
        >>> a, b = ((x - x.mean(2, keepdim=True))[0, 0] for x in (q, k))
        >>> pairs = 0.5 * a @ b.T
        >>> abs(query_spread(Call(q, k, k, 0.5)) - float(pairs.square().mean().sqrt())) < 1e-5
        True
    """
    q, k, _ = head_vectors(head)
    q = q[head.read_rows()]
    if head.key_mask is not None:
        k = k[head.key_mask[0].cpu()]
    if len(k) == 0:
        return 0.0
    covariances = [torch.cov(x.double().T, correction=0).view(x.shape[1], -1) for x in (q, k)]  # (D, D)
    return abs(head.scale) * float((covariances[0] * covariances[1]).sum().clamp(min=0.0).sqrt())
