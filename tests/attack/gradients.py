"""Gradients of a drawn call: finite, those of an exact method right, those of the others derivatives.

Shapes: batch, heads, N queries, M keys, E value width.
"""

from __future__ import annotations

import random
from collections import Counter

import torch
from torch import Tensor

from smyrf.backends.registry import BACKENDS
from tests.attack import agreement, oracle
from tests.attack.drawn_calls import Drawn
from tests.attack.grouped_calls import attend_to, group_as, group_by, parts_of, same_groups
from tests.attack.rounding import eps, score_error

# How much a step of a difference quotient changes scores. A smaller one follows where others than the near keys of the
# call are selected, or the quotient is not yet the derivative.
STEPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
MAX_QUERIES, MAX_KEYS = 200, 800


def check(draw: random.Random, drawn: Drawn, tally: Counter[str]) -> list[str]:
    """All that is promised of the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    shape = (*drawn.q.shape[:3], drawn.v.shape[-1])
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(drawn.v.dtype)
    grads = agreement.gradients(drawn, drawn.options["backend"], weight)
    largest = [float(x.detach().double().abs().max()) for x in (drawn.q, drawn.k, drawn.v)]
    # Gradients are at most scale · |k| · |v|; float16 ends at 65,504.
    size = abs(drawn.scale) * max(largest[:2]) * largest[2] * shape[2] * drawn.q.shape[-1]
    # Weights are computed again in backward, from scores and log-sum-exps: e to the power of their rounding.
    if size >= 0.1 * torch.finfo(drawn.v.dtype).max or score_error(drawn) >= 0.1:
        tally["gradients left out: too large for the dtype"] += 1
        return []
    for name, grad in zip("qkv", grads, strict=True):
        if not bool(grad.isfinite().all()):
            return [f"the gradient of {name} has {int((~grad.isfinite()).sum())} values that are not finite"]
    failures = _check_sum(drawn, grads, weight)
    n, m = drawn.q.shape[2], drawn.k.shape[2]
    if drawn.is_exact and n * m < 200_000:
        failures += _check_exact(drawn, grads, weight)
    if not drawn.is_exact and drawn.q.dtype == torch.float64:
        if agreement.is_small(drawn):
            failures += agreement.check_gradients(draw, drawn, weight, tally)
        if n <= MAX_QUERIES and m <= MAX_KEYS:
            failures += _check_derivative(draw, drawn, weight, generator, tally)
    return failures


def _check_sum(drawn: Drawn, grads: list[Tensor], weight: Tensor) -> list[str]:
    """Adding a number to all values adds it to all outputs that see any."""
    shown = torch.where(drawn.seen.any(-1)[..., None], weight.double(), 0).sum(2)  # (batch, heads, E)
    shown = shown.unflatten(1, (drawn.k.shape[1], -1)).sum(2)  # (batch, kv_heads, E)
    gap = float((grads[2].double().sum(2) - shown).abs().max())
    # Weights are computed again from the log-sum-exp, which rounds as scores do.
    total = float(weight.double().abs().sum(2).max()) * (weight.shape[1] // drawn.k.shape[1])
    bound = total * min(1.0, 40 * eps(drawn) + 2 * score_error(drawn)) + 1e-9
    return [f"the gradients of v sum to another number: {gap:.3g} > {bound:.3g}"] if gap > bound else []


def _check_exact(drawn: Drawn, grads: list[Tensor], weight: Tensor) -> list[str]:
    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (drawn.q, drawn.k, drawn.v)]
        return torch.autograd.grad(oracle.attend(*leaves, drawn.seen, drawn.scale), leaves, weight.to(dtype))

    exact, plain = gradients(torch.float64), gradients(torch.promote_types(drawn.q.dtype, torch.float32))
    natural = agreement.natural_sizes(drawn, weight)
    failures = []
    for name, ours, wanted, other in zip("qkv", grads, exact, plain, strict=True):
        error = float((other.double() - wanted).abs().nan_to_num(torch.inf).max())
        allowed = 3 * error + natural[name] * min(2.0, 8 * eps(drawn) + 2 * score_error(drawn))
        found = float((ours.double() - wanted).abs().max())
        if found > allowed:
            failures.append(f"the gradient of {name} of an exact method has the error {found:.3g} > {allowed:.3g}")
    return failures


def _check_derivative(
    draw: random.Random, drawn: Drawn, weight: Tensor, generator: torch.Generator, tally: Counter[str]
) -> list[str]:
    """Difference quotients along a random direction of q, of k and of v are what the gradients of a backend say.

    The choice of keys has no gradient, so orders of hashes and trees stay those of the call; near keys are selected
    again and must be the same. Centroids have no gradient either: far keys do not move with q.
    """
    name = draw.choice(list(BACKENDS))
    grads = agreement.gradients(drawn, name, weight)
    with torch.no_grad():
        grouped = [group_by(name, part.call, part.method) for part in parts_of(drawn)]

    def output(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, bool]:
        """The weighted sum of the output, and whether all groups are those of the call."""
        total, are_same = 0.0, True
        for still, moved, fixed in zip(parts_of(drawn, k=k, v=v), parts_of(drawn, q=q, k=k, v=v), grouped, strict=True):
            lists = group_as(fixed, name, still.call, still.method)
            are_same &= same_groups(lists, fixed.lists)
            total += float((attend_to(lists, name, moved.call) * weight[:, moved.heads]).sum())
        return total, are_same

    failures = []
    largest_score = abs(drawn.scale) * float(drawn.q.norm(dim=-1).max()) * float(drawn.k.norm(dim=-1).max())
    total = float(drawn.v.abs().amax() * weight.norm())  # of errors of random signs
    for at, argument in enumerate("qkv"):
        x, grad = getattr(drawn, argument), grads[at]
        says, jumps = "", []
        for change in STEPS:
            step = change / max(1.0, largest_score)
            direction = torch.randn(x.shape, generator=generator, dtype=x.dtype) * x.abs().mean()
            values = []
            for sign in (1, -1):
                inputs = {one: getattr(drawn, one) for one in "qkv"}
                inputs[argument] = x + sign * step * direction
                with torch.no_grad():
                    values.append(output(**inputs))
            found, wanted = (values[0][0] - values[1][0]) / (2 * step), float((grad * direction).sum())
            size = float((grad * direction).square().sum().sqrt())  # of a sum of terms of random signs
            noise = (1e-14 + score_error(drawn)) * total / step
            if not all(are_same for _, are_same in values):
                jumps.append(True)
            elif abs(found - wanted) <= 1e-3 * size + noise:
                informs = noise < 0.1 * size
                tally["derivatives compared" if informs else "derivatives compared, zero to rounding"] += 1
                break
            else:
                jumps.append(False)
                says = f"{name}: the derivative along a direction of {argument} is {found:.6g}, not {wanted:.6g}"
        else:
            if all(jumps):
                tally["derivatives left out: near keys tie"] += 1
            else:
                failures.append(says)
    return failures
