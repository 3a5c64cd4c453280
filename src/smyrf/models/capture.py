"""Capture the attention calls of any model that calls ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.models.masks import read_mask
from smyrf.models.sdpa_calls import SdpaMode


class CaptureAttention(SdpaMode):
    """Inside the block, records every attention call; the calls run as without it.

    Attributes:
        calls: in order, without gradients.
        n_restricted: number of calls with a causal flag or a mask that hides or adds something.

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
        self.calls: list[Call] = []

    @property
    def n_restricted(self) -> int:
        return sum(call.is_causal or call.key_mask is not None or call.only_dense is not None for call in self.calls)

    def attend(self, call: Call, mask: Tensor | None, lead: torch.Size, run: Callable[[], Tensor]) -> Tensor:
        out = run()
        call = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
        self.calls.append(call if mask is None else read_mask(call, mask))
        return out


def capture_attention(run: Callable[[], Any]) -> list[Call]:
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
