"""Take q, k and v out of any model that calls ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smyrf.models.sdpa_mode import SdpaCall, SdpaMode


class Captured(NamedTuple):
    """Arguments of one attention call.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``.
        v: ``(batch, kv_heads, M, E)``.
        scale: of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


class CaptureAttention(SdpaMode):
    """Inside the block, remembers the arguments of every attention call; the calls run as they would.

    Attributes:
        calls: the arguments, in the order of the calls.
        masks: the mask and the causal flag of each call.
        n_restricted: how many of the calls had a causal or another mask.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 5, 4)
        >>> with CaptureAttention() as capture:
        ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> len(capture.calls), capture.calls[0].scale
        (1, 0.5)
    """

    sees_ours = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Captured] = []
        self.masks: list[tuple[Tensor | None, bool]] = []

    @property
    def n_restricted(self) -> int:
        return sum(is_causal or _hides(mask) for mask, is_causal in self.masks)

    def attend(self, call: SdpaCall, run: Callable[[], Tensor]) -> Tensor:
        q, k, v = call.query.detach(), call.key.detach(), call.value.detach()
        self.calls.append(Captured(q, k, v, q.shape[-1] ** -0.5 if call.scale is None else call.scale))
        self.masks.append((call.attn_mask, call.is_causal))
        return run()


def _hides(mask: Tensor | None) -> bool:
    """Whether a mask changes anything."""
    if mask is None:
        return False
    return not bool(mask.all()) if mask.dtype == torch.bool else bool(mask.any())


def capture_attention(run: Callable[[], Any]) -> list[Captured]:
    """The attention calls of `run`, without gradients.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> capture_attention(lambda: layer(torch.randn(3, 4)))
        []
    """
    with torch.no_grad(), CaptureAttention() as capture:
        run()
    return capture.calls
