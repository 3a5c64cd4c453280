"""Take q, k and v out of any model that calls ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


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


class CaptureAttention(TorchFunctionMode):
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

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Captured] = []
        self.masks: list[tuple[Tensor | None, bool]] = []

    @property
    def n_restricted(self) -> int:
        return sum(is_causal or _hides(mask) for mask, is_causal in self.masks)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._remember(*args, **kwargs)
        if func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        attend = F.scaled_dot_product_attention

        # PyTorch runs what it hands to a mode with the mode switched off, and this function attends inside.
        def remembered(*args: Any, **kwargs: Any) -> Tensor:
            self._remember(*args, **kwargs)
            return attend(*args, **kwargs)

        with patch.object(F, "scaled_dot_product_attention", remembered):
            return func(*args, **kwargs)

    def _remember(self, *args: Any, **kwargs: Any) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (named[name].detach() for name in ("query", "key", "value"))
        scale = named.get("scale")
        self.calls.append(Captured(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale))
        self.masks.append((named.get("attn_mask"), bool(named.get("is_causal"))))


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
