"""Asymmetric transforms F and G: large inner product ⇔ small Euclidean distance (eq. 4, appendix).

A transform multiplies a vector by a factor and appends coordinates: F(q) = [factor · q; extra]. It is kept in these two
parts, because a random projection of F(q) needs only q·a and the extra coordinates, never the long vector itself. Both
depend on q and k only through their norms.

Shapes: N queries, M keys, X extra coordinates; the functions see one or more heads in "…".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Lifted(NamedTuple):
    """The two parts of F(q) or G(k).

    Args:
        factor: ``(…, N)``, by which the vector itself is multiplied, or one number.
        extra: the coordinates that are appended, ``(…, N)`` each, or one number.

    Example:
        >>> import torch
        >>> Lifted(1.0, (torch.zeros(3), 0.5)).apply(torch.ones(3, 5)).shape
        torch.Size([3, 7])
    """

    factor: Tensor | float
    extra: tuple[Tensor | float, ...]

    def apply(self, x: Tensor) -> Tensor:
        """The long vectors [factor · x; extra], ``(…, N, D + X)``."""
        parts = (torch.as_tensor(c, dtype=x.dtype, device=x.device) for c in (self.factor, *self.extra))
        factor, *extra = (part.expand(x.shape[:-1]) for part in parts)
        return torch.cat([factor[..., None] * x, *(column[..., None] for column in extra)], dim=-1)

    def times(self, number: float) -> Lifted:
        """The same for vectors that are `number` times as long."""
        return self._replace(factor=self.factor * number)

    def at(self, rows: slice) -> Lifted:
        """The parts for some rows of the first axis."""
        factor, *extra = (c[rows] if isinstance(c, Tensor) else c for c in (self.factor, *self.extra))
        return Lifted(factor, tuple(extra))


# A transform takes ‖q‖² (…, N), ‖k‖² (…, M), M_Q² and M_K² (…, 1), and gives the parts of F and of G.
Transform = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Lifted, Lifted]]

# Shrivastava and Li's own choice for l2lsh: three powers, keys scaled into a ball of radius 0.83.
L2LSH_POWERS = 3
L2LSH_RADIUS = 0.83


def asymmetric(q_sq: Tensor, k_sq: Tensor, max_q_sq: Tensor, max_k_sq: Tensor) -> tuple[Lifted, Lifted]:
    """Eq. 4: F(q) = [q; 0; √(M_Q² + M_K² − ‖q‖²)], G(k) = [k; √(M_Q² + M_K² − ‖k‖²); 0].

    Then ‖F(q) − G(k)‖² = 2 (M_Q² + M_K² − q·k), which depends only on the inner product.
    """
    radius_sq = max_q_sq + max_k_sq
    return Lifted(1.0, (0.0, _root(radius_sq - q_sq))), Lifted(1.0, (_root(radius_sq - k_sq), 0.0))


def none(q_sq: Tensor, k_sq: Tensor, max_q_sq: Tensor, max_k_sq: Tensor) -> tuple[Lifted, Lifted]:
    """Plain E2LSH: the vectors as they are. Distance ‖q‖² + ‖k‖² − 2 q·k."""
    return Lifted(1.0, ()), Lifted(1.0, ())


def xbox(q_sq: Tensor, k_sq: Tensor, max_q_sq: Tensor, max_k_sq: Tensor) -> tuple[Lifted, Lifted]:
    """F(q) = [q; 0], G(k) = [k; √(M_K² − ‖k‖²)]. Distance ‖q‖² + M_K² − 2 q·k."""
    return Lifted(1.0, (0.0,)), Lifted(1.0, (_root(max_k_sq - k_sq),))


def h2lsh(q_sq: Tensor, k_sq: Tensor, max_q_sq: Tensor, max_k_sq: Tensor) -> tuple[Lifted, Lifted]:
    """F(q) = (M_K / ‖q‖) [q; 0], G(k) = [k; √(M_K² − ‖k‖²)]. Distance 2 M_K² − 2 (M_K / ‖q‖) q·k."""
    q, k = xbox(q_sq, k_sq, max_q_sq, max_k_sq)
    tiny = torch.finfo(q_sq.dtype).tiny  # a query of zeros stays zero
    return q._replace(factor=_root(max_k_sq / q_sq.clamp_min(tiny))), k


def l2lsh(q_sq: Tensor, k_sq: Tensor, max_q_sq: Tensor, max_k_sq: Tensor) -> tuple[Lifted, Lifted]:
    """F(q) = [q; ½; …; ½], G(k) = [Uk; ‖Uk‖²; …; ‖Uk‖^(2^m)] with U M_K = 0.83 and m = 3.

    Distance ‖q‖² + m/4 − 2U q·k + ‖Uk‖^(2^(m+1)), whose last term is small.
    """
    tiny = torch.finfo(k_sq.dtype).tiny
    u_sq = L2LSH_RADIUS**2 / max_k_sq.clamp_min(tiny)  # (…, 1)
    powers = tuple((u_sq * k_sq) ** (2**i) for i in range(L2LSH_POWERS))
    return Lifted(1.0, (0.5,) * L2LSH_POWERS), Lifted(_root(u_sq).expand_as(k_sq), powers)


TRANSFORMS: dict[str, Transform] = {
    "asymmetric": asymmetric,
    "none": none,
    "xbox": xbox,
    "h2lsh": h2lsh,
    "l2lsh": l2lsh,
}


def transform(name: str, q_sq: Tensor, k_sq: Tensor, key_mask: Tensor | None = None) -> tuple[Lifted, Lifted]:
    """The parts of F and G for queries and keys of the given squared norms.

    Args:
        name: one of `TRANSFORMS`.
        q_sq: ``(…, N)``, squared norms of the queries.
        k_sq: ``(…, M)``, squared norms of the keys.
        key_mask: ``(…, M)``, True = may be attended to; other keys take no part in M_K.

    Example:
        >>> import torch
        >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
        >>> F, G = transform("asymmetric", q.square().sum(-1), k.square().sum(-1))
        >>> float((F.apply(q) - G.apply(k)).square().sum())  # 2 (25 + 4 − 8)
        42.0
    """
    max_q_sq = _largest_finite(q_sq)
    max_k_sq = _largest_finite(k_sq if key_mask is None else k_sq.masked_fill(~key_mask, 0.0))
    return TRANSFORMS[name](q_sq, k_sq, max_q_sq, max_k_sq)


def _largest_finite(norms_sq: Tensor) -> Tensor:
    """Largest norm, (…, 1). A vector with inf or NaN must not decide where all the others go."""
    return norms_sq.nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True)


def _root(x: Tensor) -> Tensor:
    return x.clamp_min(0.0).sqrt()  # rounding can make the radicand of the longest vector negative
