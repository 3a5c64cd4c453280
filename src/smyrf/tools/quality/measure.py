"""Errors and times of an entrant on given q, k and v, against dense attention.

Shapes: batch, heads, N queries, M keys, D width, E value width; A the map of attention, N × M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.call import Call
from smyrf.tools.analysis.error import relative_error
from smyrf.tools.quality.entrants import Entrant
from smyrf.tuning.timer import best_times

# Seconds to time an entrant, and as many for SDPA beside it.
TIMING_SECONDS = 0.5


class Exact(NamedTuple):
    """Dense attention on one layer.

    Args:
        out: ``(batch, heads, N, E)``.
        cotangent: like `out`, independent normal numbers; None without gradients.
        gradients: of q, k and v; None without gradients.
    """

    call: Call
    out: Tensor
    cotangent: Tensor | None
    gradients: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Quality:
    """Measurements of an entrant. Errors are relative, one number per layer.

    With a normal cotangent R the gradient of the values is dv = AᵀR, and E‖(A − Â)ᵀR‖² = E · ‖A − Â‖_F²
    for a method that is linear in v once its keys are chosen. So the relative error of dv estimates
    that of the map in the Frobenius norm, ‖A − Â‖_F / ‖A‖_F, without an N × M matrix, to within a few
    per cent: M · E normal numbers enter for each head.

    Args:
        out: error of the output.
        dq, dk: errors of the gradients of queries and keys; None if they were not measured.
        map: error of the gradient of the values, which estimates that of the map; None if not measured.
        seconds, sdpa_seconds: best time of a forward call on one document, averaged over layers, both timed
            in turn; None if not measured.
    """

    entrant: Entrant
    out: tuple[float, ...]
    dq: tuple[float, ...] | None = None
    dk: tuple[float, ...] | None = None
    map: tuple[float, ...] | None = None
    seconds: float | None = None
    sdpa_seconds: float | None = None

    @property
    def error(self) -> float:
        """Error of the output, averaged over layers."""
        return fmean(self.out)

    @property
    def relative_time(self) -> float | None:
        """Time as a multiple of that of PyTorch's fused attention."""
        return self.seconds / self.sdpa_seconds if self.seconds and self.sdpa_seconds else None

    def row(self) -> dict[str, Any]:
        """The row of a result file."""
        return {
            "family": self.entrant.family,
            "label": self.entrant.label,
            "ours": self.entrant.ours,
            "settings": self.entrant.settings,
            "budget": self.entrant.budget,
            "key_visits": self.entrant.key_visits,
            "error": self.error,
            "worst_error": max(self.out),
            "map_error": None if self.map is None else fmean(self.map),
            "dq_error": None if self.dq is None else fmean(self.dq),
            "dk_error": None if self.dk is None else fmean(self.dk),
            "dv_error": None if self.map is None else fmean(self.map),
            "error_by_layer": self.out,
            "map_error_by_layer": self.map,
            "dq_error_by_layer": self.dq,
            "dk_error_by_layer": self.dk,
            "seconds": self.seconds,
            "sdpa_seconds": self.sdpa_seconds,
            "time_relative_to_sdpa": self.relative_time,
        }


def exact(call: Call, gradients: bool, seed: int) -> Exact:
    """Dense attention of a layer, and the cotangent for which gradients are compared."""
    q, k, v = (x.detach().requires_grad_(gradients) for x in call.qkv)
    out = F.scaled_dot_product_attention(q, k, v, scale=call.scale)
    if not gradients:
        return Exact(call, out, None, None)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return Exact(call, out.detach(), cotangent, torch.autograd.grad(out, (q, k, v), cotangent))


def measure(entrant: Entrant, layers: Sequence[Exact], *, time: bool, seed: int) -> Quality:
    """Errors on all layers, with gradients if the layers have them, and times if asked for.

    Example:
        >>> import torch
        >>> from smyrf.tools.quality.entrants import all_entrants
        >>> x = torch.randn(1, 2, 16, 8)
        >>> layer = exact(Call(x, x, x, 0.3), gradients=False, seed=0)
        >>> one_cluster = all_entrants([16], 16, 16, None)[0]
        >>> measure(one_cluster, [layer], time=False, seed=0).error < 1e-6
        True
    """
    out: list[float] = []
    by_input: list[list[float]] = [[], [], []]
    for call, exact_out, cotangent, exact_gradients in layers:
        q, k, v = (x.detach().requires_grad_(cotangent is not None) for x in call.qkv)
        found = entrant.run(q, k, v, call.scale, seed)
        out.append(relative_error(found.detach(), exact_out))
        if exact_gradients is not None:
            gradients = torch.autograd.grad(found, (q, k, v), cotangent)
            for errors, gradient, wanted in zip(by_input, gradients, exact_gradients, strict=True):
                errors.append(relative_error(gradient, wanted))
    dq, dk, dv = (tuple(errors) or None for errors in by_input)
    took, sdpa_took = _time(entrant, [layer.call for layer in layers], seed) if time else (None, None)
    return Quality(entrant, tuple(out), dq, dk, dv, took, sdpa_took)


def _time(entrant: Entrant, calls: list[Call], seed: int) -> tuple[float, float]:
    """Seconds per layer of the entrant and of SDPA, on the first document."""
    firsts = [Call(call.q[:1], call.k[:1], call.v[:1], call.scale) for call in calls]

    def ours() -> None:
        with torch.no_grad():
            for call in firsts:
                entrant.run(*call.qkv, call.scale, seed)

    def sdpa() -> None:
        with torch.no_grad():
            for call in firsts:
                F.scaled_dot_product_attention(*call.qkv, scale=call.scale)

    best = dict(best_times({"ours": ours, "sdpa": sdpa}, budget=TIMING_SECONDS))
    return best["ours"] / len(calls), best["sdpa"] / len(calls)
