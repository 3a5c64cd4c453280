"""Attention inside a batch of equal groups, and its gradient: the arithmetic of the torch backend.

Two forms with one interface. *Fused* calls PyTorch's flash operators. *Explicit* writes the scores out, a slab at a
time: for groups of ordinary size this is faster, because it reuses its buffers, and it covers what those operators
refuse (E ≠ D, dropout, gradients of biases, other devices).

Backward takes the *merged* log-sum-exp and output of a query, over all its lists: P = exp(S − LSE) is then its final
weight, and the gradients of the lists add up.

Shapes: G groups, C queries and S keys in each, D width, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.backends.torch.workspace import Workspace

# Scores that the explicit form has in memory at once: 2 MB of float32, which stays in a CPU's cache.
MAX_SCORES = 1 << 19
# Keys per group from which the CPU's flash operator is faster than the explicit form: measured as equal at 128 keys, a
# sixth faster at 256, a quarter at 1,024.
FUSED_FROM = 256

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA_FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


@dataclass(slots=True)
class Block:
    """A batch of G groups, gathered and ready to multiply.

    Args:
        q: ``(G, C, D)``.
        k: ``(G, S, D)``.
        v: ``(G, S, E)``.
        bias: added to the scores, ``(G, 1, S)`` or ``(G, C, S)``, or None.
        kept: dropout's factors ``(G, C, S)``, or None.
        causal: query slot i sees only key slots j <= i.
        n_far: the last n_far of the S keys are far keys, whose biases need gradients.
        scale: of the scores.
        fused: whether PyTorch's flash operators do the work.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    kept: Tensor | None
    causal: bool
    n_far: int
    scale: float
    fused: bool


def can_fuse(q: Tensor, v: Tensor, n_keys: int, *, biased: bool, dropout: bool, n_far: int) -> bool:
    """Whether the flash operators can do groups of `n_keys` keys, and do them faster."""
    if dropout or n_far or q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return n_keys >= FUSED_FROM
    return q.device.type == "cuda" and not biased and q.dtype != torch.float64


def forward(block: Block, out: Tensor, mass: Tensor, base: Tensor, scratch: Workspace) -> None:
    """Writes Σ exp(S − base) v ``(G, C, E)``, Σ exp(S − base) ``(G, C)`` and the bases ``(G, C)``.

    The output is the first divided by the second: whoever merges several of them divides once for all.
    Mass and base stay apart, because base + log(mass) rounds the mass away where scores are large.
    Without any key these are 0, 0 and -inf.
    """
    if not block.fused:
        _explicit_forward(block, out, mass, base, scratch)
        return
    q, k, v = block.q[:, None], block.k[:, None], block.v[:, None]  # (G, 1, C, D) …
    if q.device.type == "cuda":
        o, s = _cuda_forward(q, k, v, block.causal, block.scale)
    else:
        bias = _with_causal(block)
        o, s = _CPU_FORWARD(q, k, v, 0.0, block.causal and bias is None, attn_mask=bias, scale=block.scale)
        if bias is not None:  # a row without any key comes back with log-sum-exp 0
            s = s.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    out.copy_(o[:, 0])
    base.copy_(s[:, 0])
    mass.copy_(base != -torch.inf)


def backward(
    block: Block, grad: Tensor, out: Tensor, lse: Tensor, delta: Tensor, scratch: Workspace
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and of the far keys' biases, ``(G, n_far)``.

    Args:
        grad: ``(G, C, E)``, of the merged output.
        out: ``(G, C, E)``, the merged output; read only by the fused form.
        lse: ``(G, C)``, merged; +inf for a query that has no weights at all.
        delta: ``(G, C)``, Σ grad · out; read only by the explicit form.
    """
    if not block.fused:
        return _explicit_backward(block, grad, lse, delta, scratch)
    q, k, v = block.q[:, None], block.k[:, None], block.v[:, None]
    grad, out, lse = grad[:, None].to(q.dtype), out[:, None].to(q.dtype), lse[:, None]
    if q.device.type == "cuda":
        dq, dk, dv = _cuda_backward(grad, q, k, v, out, lse, block.causal, block.scale)
    else:
        bias = _with_causal(block)
        causal = block.causal and bias is None
        dq, dk, dv = _CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=block.scale)
    return dq[:, 0], dk[:, 0], dv[:, 0], None


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _CUDA_FORWARD(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse[..., : q.shape[2]]  # the operator pads the log-sum-exps


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=torch.inf)
    rng = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset of no dropout
    wanted = [True, True, True, False]
    dq, dk, dv = _CUDA_BACKWARD(grad, q, k, v, None, out, lse, rng, rng, 0.0, wanted, causal, scale=scale)[:3]
    return dq, dk, dv


def _with_causal(block: Block) -> Tensor | None:
    """The bias with the causal mask in it, ``(G, 1, 1 or C, S)``: the operator takes one of the two."""
    if block.bias is None:
        return None
    bias = block.bias.masked_fill(_hidden(block, 0, block.q.shape[1]), -torch.inf) if block.causal else block.bias
    return bias[:, None]


def _hidden(block: Block, first: int, last: int) -> Tensor:
    """Which keys the queries first … last − 1 must not see, (C, S)."""
    position = torch.arange(first, last, device=block.q.device)
    return position[:, None] < torch.arange(block.k.shape[1], device=block.q.device)


def _slabs(block: Block) -> list[tuple[int, int]]:
    """Where to cut the C queries so that a slab's scores stay small."""
    n_groups, slots, _ = block.q.shape
    step = max(1, MAX_SCORES // (n_groups * block.k.shape[1]))
    return [(first, min(first + step, slots)) for first in range(0, slots, step)]


def _scores(block: Block, first: int, last: int, scratch: Workspace) -> Tensor:
    """S = scale · q kᵀ + bias for the queries first … last − 1, (G, C, S)."""
    q, k = block.q[:, first:last], block.k.transpose(1, 2)
    scores = scratch.get("scores", (len(q), last - first, k.shape[2]), q.dtype)
    if block.bias is None:
        torch.baddbmm(scores, q, k, beta=0, alpha=block.scale, out=scores)
    else:
        bias = block.bias if block.bias.shape[1] == 1 else block.bias[:, first:last]
        torch.baddbmm(bias, q, k, alpha=block.scale, out=scores)
    if block.causal:
        scores.masked_fill_(_hidden(block, first, last), -torch.inf)
    return scores


def _explicit_forward(block: Block, out: Tensor, mass: Tensor, base: Tensor, scratch: Workspace) -> None:
    for first, last in _slabs(block):
        whole = last - first == out.shape[1]
        o, m, top = (x if whole else x[:, first:last] for x in (out, mass, base))
        weights = _scores(block, first, last, scratch)
        shift = torch.amax(weights, -1, out=top)  # (G, C)
        if block.bias is not None:
            shift = top.masked_fill(top == -torch.inf, 0.0)  # a query without keys: exp(-inf - 0) = 0
        weights.sub_(shift[..., None]).exp_()
        torch.sum(weights, -1, out=m)
        if block.kept is not None:
            weights *= block.kept[:, first:last]
        if whole:
            torch.bmm(weights, block.v, out=o)
        else:
            o.copy_(torch.bmm(weights, block.v))


def _explicit_backward(
    block: Block, grad: Tensor, lse: Tensor, delta: Tensor, scratch: Workspace
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    n_far, dtype = block.n_far, block.q.dtype
    dq = scratch.get("dq", tuple(block.q.shape), dtype)
    dk = scratch.get("dk", tuple(block.k.shape), dtype).zero_()
    dv = scratch.get("dv", tuple(block.v.shape), dtype).zero_()
    dbias = block.q.new_zeros(len(block.q), n_far) if n_far else None
    for first, last in _slabs(block):
        part = grad[:, first:last]  # (G, C, E)
        weights = _scores(block, first, last, scratch).sub_(lse[:, first:last, None]).exp_()  # P = exp(S − LSE)
        dscores = scratch.get("dscores", tuple(weights.shape), dtype)
        torch.bmm(part, block.v.transpose(1, 2), out=dscores)  # dO Vᵀ
        if block.kept is None:
            dv.baddbmm_(weights.transpose(1, 2), part)
        else:
            kept = block.kept[:, first:last]
            dscores *= kept
            dv.baddbmm_((weights * kept).transpose(1, 2), part)
        dscores.sub_(delta[:, first:last, None]).mul_(weights)  # dS = P ∘ (dO Vᵀ − δ)
        dq[:, first:last] = torch.bmm(dscores, block.k).mul_(block.scale)
        dk.baddbmm_(dscores.transpose(1, 2), block.q[:, first:last], alpha=block.scale)
        if dbias is not None:
            dbias += dscores[..., -n_far:].sum(1)
    return dq, dk, dv, dbias
