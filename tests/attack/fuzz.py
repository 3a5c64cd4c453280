"""Random calls of `smyrf.attention` against an oracle that shares no code with the package.

A case is drawn from its seed. Exact methods are compared with the oracle; of the others the promises are checked that
hold for any approximation: outputs are convex combinations of visible values, hidden keys and later keys have no
effect, batch entries are independent, a seed repeats a result, backends agree, gradients are those of the function.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.backends import backends
from tests.attack import oracle
from tests.attack.drawn_calls import BAD, Drawn, draw_call, draw_kind
from tests.attack.verdict import Case, Verdict

PROCESSES, SECONDS = 2, 120.0


def cases(seed: int, n_cases: int | None) -> Iterator[Case]:
    """One case per seed, counted from `seed`."""
    numbers = itertools.count(seed) if n_cases is None else range(seed, seed + n_cases)
    for number in numbers:
        yield {"kind": draw_kind(random.Random(number)), "seed": number}


def check(case: Case) -> Verdict:
    """Run one case and all checks that apply to it."""
    draw = random.Random(case["seed"])
    draw_kind(draw)
    drawn = draw_call(draw, case["kind"])
    failures: list[str] = []
    finite = all(bool(x.isfinite().all()) for x in (drawn.q, drawn.k, drawn.v))
    with torch.no_grad():
        out = drawn.run()
    expected = (*drawn.q.shape[:3], drawn.v.shape[-1])
    if out.shape != expected or out.dtype != drawn.v.dtype:
        failures.append(f"output {tuple(out.shape)} {out.dtype}, not {expected} {drawn.v.dtype}")
    else:
        with torch.no_grad():
            failures += (_check_finite if finite else _check_not_finite)(draw, drawn, out)
        if finite and drawn.options["dropout_p"] == 0.0 and draw.random() < 0.35:
            failures += _check_gradients(draw, drawn)
    return Verdict(tuple(f"{one} [{drawn.says}]" for one in failures))


def _eps(drawn: Drawn) -> float:
    return torch.finfo(drawn.v.dtype).eps


def _score_error(drawn: Drawn) -> float:
    """Bound of the rounding error of a score; half precision is widened."""
    eps = torch.finfo(torch.promote_types(drawn.q.dtype, torch.float32)).eps
    q, k = (float(x.double().norm(dim=-1).max()) for x in (drawn.q, drawn.k))
    return 4 * eps * math.sqrt(drawn.q.shape[-1]) * abs(drawn.scale) * q * k


def _sum_error(drawn: Drawn) -> float:
    """Bound of the relative rounding error of a sum over all keys, whose terms may all be rounded the same way."""
    return drawn.k.shape[2] * torch.finfo(torch.promote_types(drawn.v.dtype, torch.float32)).eps


def _check_finite(draw: random.Random, drawn: Drawn, out: Tensor) -> list[str]:
    seen, v = drawn.seen, drawn.v.double()
    none_seen = ~seen.any(-1)[..., None]  # (batch or 1, 1, N, 1)
    dropout = drawn.options["dropout_p"]
    if not bool(out.isfinite().all()):
        return [f"{int((~out.isfinite()).sum())} outputs are not finite"]
    if bool((torch.where(none_seen, out, 0) != 0).any()):
        return ["a query without visible keys has an output that is not 0"]
    if dropout == 1.0:
        return ["dropout_p=1 leaves an output"] if bool((out != 0).any()) else []
    largest = float(v.abs().max())
    failures = []
    if dropout == 0.0:
        low, high = oracle.bounds(v, seen, drawn.q.shape[1], drawn.is_causal)
        slack = (64 * _eps(drawn) + _sum_error(drawn) + 1e-6 * (drawn.v.dtype != torch.float64)) * largest
        excess = torch.maximum(low - out, out - high).amax()
        if float(excess) > slack:
            failures.append(f"an output is {float(excess):.3g} outside of the visible values (tolerance {slack:.3g})")
        if drawn.is_exact:
            failures += _check_exact(drawn, out)
    for one in draw.sample((_same_seed, _hidden, _later, _alone, _other_backends), 2 if v.numel() > 50_000 else 3):
        failures += one(draw, drawn, out)
    return failures


def _check_exact(drawn: Drawn, out: Tensor) -> list[str]:
    q, k, v = drawn.q, drawn.k, drawn.v
    seen = drawn.seen
    expected = oracle.attend(q.double(), k.double(), v.double(), seen, drawn.scale)
    shown = seen.any(-1)[..., None].expand_as(out)
    # Scores in half precision round more than a kernel's float32: twice the error of PyTorch's own function.
    gqa = q.shape[1] != k.shape[1]
    plain = F.scaled_dot_product_attention(q, k, v, seen, scale=drawn.scale, enable_gqa=gqa)
    error = float((plain.double() - expected)[shown].nan_to_num(1e300).abs().max()) if bool(shown.any()) else 0.0
    largest = float(v.double().abs().max())
    allowed = 2 * error + largest * min(2.0, 8 * _eps(drawn) + _sum_error(drawn) + 2 * _score_error(drawn))
    found = float((out.double() - expected).abs().max())
    return [f"an exact method has the error {found:.3g}, allowed is {allowed:.3g}"] if found > allowed else []


def _same_seed(draw: random.Random, drawn: Drawn, out: Tensor) -> list[str]:
    return [] if torch.equal(drawn.run(), out) else ["the same seed gives another result"]


def _poison(draw: random.Random, drawn: Drawn, where: Tensor) -> tuple[Drawn, Drawn, str]:
    """The call, and one with other keys and values at ``where (batch or 1, 1, M, 1)``, both with equal strides."""
    what = draw.choice(("nan", "inf", "-inf", "large", "other"))
    clean, dirty = (replace(drawn, k=drawn.k.clone(), v=drawn.v.clone()) for _ in range(2))
    if what == "other":
        dirty.k.copy_(torch.where(where, dirty.k.flip(2) + 1, dirty.k))
        dirty.v.copy_(torch.where(where, dirty.v.flip(2) - 1, dirty.v))
    else:
        value = 1e4 if what == "large" else BAD[what]
        dirty.k.masked_fill_(where, value)
        dirty.v.masked_fill_(where, -value)
    return clean, dirty, what


def _hidden(draw: random.Random, drawn: Drawn, out: Tensor) -> list[str]:
    """Masked keys and values have no effect, whatever they hold."""
    if drawn.mask is None:
        return []
    clean, dirty, what = _poison(draw, drawn, ~drawn.mask[:, None, :, None])
    before, now = clean.run(), dirty.run()
    return [] if torch.equal(now, before) else [f"masked keys and values have an effect ({what}): {_gap(now, before)}"]


def _later(draw: random.Random, drawn: Drawn, out: Tensor) -> list[str]:
    """Keys and values after a position reach no output up to it."""
    m = drawn.k.shape[2]
    if not drawn.is_causal or m < 2:
        return []
    at = draw.randrange(m - 1)
    clean, dirty, what = _poison(draw, drawn, (torch.arange(m) > at)[None, None, :, None])
    before, now = clean.run()[:, :, : at + 1], dirty.run()[:, :, : at + 1]
    return [] if torch.equal(now, before) else [f"keys after {at} reach earlier outputs ({what}): {_gap(now, before)}"]


def _alone(draw: random.Random, drawn: Drawn, out: Tensor) -> list[str]:
    """One batch entry run alone gives the same, to rounding; where a tie decides which key is chosen, either may be."""
    if len(drawn.q) == 1 or drawn.options["dropout_p"] > 0.0:
        return []
    row = draw.randrange(len(drawn.q))
    one = slice(row, row + 1)
    mask = None if drawn.mask is None else drawn.mask[one]
    alone = drawn.run(q=drawn.q[one], k=drawn.k[one], v=drawn.v[one], key_mask=mask)
    share = 0.0 if drawn.is_exact or drawn.q.dtype == torch.float64 else 0.1
    return _compare(drawn, alone, out[one], f"batch entry {row} alone differs", share)


def _compare(drawn: Drawn, ours: Tensor, theirs: Tensor, says: str, share: float) -> list[str]:
    """Equal up to rounding of scores, but for a share of the rows, in which rounding decides which keys are chosen."""
    largest = float(drawn.v.double().abs().max())
    allowed = largest * min(2.0, 16 * _eps(drawn) + 2 * _sum_error(drawn) + 4 * _score_error(drawn))
    off = ((ours.double() - theirs.double()).abs() > allowed).any(-1)  # (batch, heads, N)
    if float(off.double().mean()) <= share or _has_ties(drawn):
        return []
    return [f"{says}: {int(off.sum())} of {off.numel()} rows, {_gap(ours, theirs)}, allowed {allowed:.3g}"]


def _has_ties(drawn: Drawn) -> bool:
    """Whether rounding decides about the order of keys or queries: some are equal, or differ by rounding only."""
    if drawn.is_exact:
        return False
    return _score_error(drawn) > 1e-6 or any(
        bool((x[:, :, 1:] == x[:, :, :1]).all(-1).any()) or float(x.abs().max()) == 0.0 for x in (drawn.q, drawn.k)
    )


def _other_backends(draw: random.Random, drawn: Drawn, out: Tensor) -> list[str]:
    """All backends give the same for Smyrf in float64; the reference also sorts in float64, the others in float32."""
    if not (drawn.is_smyrf or drawn.is_exact) or drawn.q.dtype != torch.float64 or drawn.q.shape[2] > 800:
        return []
    if drawn.options["dropout_p"] > 0.0:
        return []
    one, other = draw.sample([name for name, says in backends().items() if "not available" not in says], 2)
    share = 0.0 if drawn.is_exact else 0.3 if "reference" in (one, other) else 0.02
    if share == 0.3 and _equal_in_float32(drawn):
        return []
    return _compare(drawn, drawn.run(backend=one), drawn.run(backend=other), f"{one} and {other} differ", share)


def _equal_in_float32(drawn: Drawn) -> bool:
    """Whether float32 cannot tell hashes apart: they are inner products of vectors lifted to the largest norm."""
    q = float(drawn.q.norm(dim=-1).max()) * abs(drawn.scale)
    k = float(drawn.k.norm(dim=-1).max())
    return min(q, k) < 1e-3 * max(q, k)


def _check_not_finite(draw: random.Random, drawn: Drawn, out: Tensor) -> list[str]:
    """NaN and infinity reach only outputs that can see them; the others are those of a call without them."""
    if drawn.options["dropout_p"] > 0.0:
        return []
    drawn = replace(drawn, q=drawn.q.clone(), k=drawn.k.clone(), v=drawn.v.clone())  # of one layout, as rounding is
    q, k, v = (x.clone().masked_fill_(~x.isfinite(), 0) for x in (drawn.q, drawn.k, drawn.v))
    out, clean = drawn.run(), drawn.run(q=q, k=k, v=v)
    bad_query = ~drawn.q.isfinite().all(-1)  # (batch, heads, N)
    repeat = drawn.q.shape[1] // drawn.k.shape[1]
    bad_key = ~(drawn.k.isfinite().all(-1) & drawn.v.isfinite().all(-1)).repeat_interleave(repeat, dim=1)
    seen = drawn.seen
    # With a query that is not finite, clusters of its head may change; with a key, everyone who may see it may.
    touched = (seen & bad_key[:, :, None]).any(-1)  # (batch, heads, N)
    apart = ~touched & ~bad_query.any(-1, keepdim=True)
    failures = []
    if not torch.equal(out[apart], clean[apart]):
        failures.append(f"what is not finite changes outputs that cannot see it: {_gap(out[apart], clean[apart])}")
    others = ~touched & ~bad_query
    if not bool(out[others].isfinite().all()):
        n_bad = int((~out[others].isfinite()).any(-1).sum())
        failures.append(f"what is not finite makes {n_bad} outputs that cannot see it not finite")
    if drawn.is_exact:  # and those that see it are not finite, unless its weight is zero
        is_nan = drawn.k.isnan().any(-1).repeat_interleave(repeat, dim=1)[:, :, None]  # (batch, heads, 1, M)
        # PyTorch's own kernel gives 0 where all scores are NaN.
        lost = ((seen & is_nan).any(-1) & (seen & ~is_nan).any(-1))[..., None]
        counts = ~(oracle.softmax(drawn.q.double(), drawn.k.double(), seen, drawn.scale) < 1e-30)  # NaN counts
        for channel in range(drawn.v.shape[-1]):
            bad_value = ~drawn.v[..., channel].isfinite().repeat_interleave(repeat, dim=1)  # (batch, heads, M)
            hides = (lost[..., 0] | (counts & bad_value[:, :, None]).any(-1)) & out[..., channel].isfinite()
            if bool(hides.any()):
                failures.append(f"{int(hides.sum())} outputs hide what is not finite in a value that they see")
                break
    return failures


def _check_gradients(draw: random.Random, drawn: Drawn) -> list[str]:
    leaves = [x.detach().clone().requires_grad_() for x in (drawn.q, drawn.k, drawn.v)]
    out = drawn.run(q=leaves[0], k=leaves[1], v=leaves[2])
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, weight, allow_unused=True)
    grads = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, leaves, strict=True)]
    largest = [float(x.detach().double().abs().max()) for x in leaves]
    # Gradients are at most scale · |k| · |v|; float16 ends at 65,504.
    size = abs(drawn.scale) * max(largest[:2]) * largest[2] * out.shape[2] * drawn.q.shape[-1]
    limit = torch.finfo(drawn.v.dtype).max
    # Weights are computed again in backward, from scores and log-sum-exps: e to the power of their rounding.
    if size < 0.1 * limit and _score_error(drawn) < 0.1:
        for name, grad in zip("qkv", grads, strict=True):
            if not bool(grad.isfinite().all()):
                return [f"the gradient of {name} has {int((~grad.isfinite()).sum())} values that are not finite"]
    else:
        return []
    failures = []
    seen = drawn.seen
    # Adding a number to all values adds it to all outputs that see any.
    shown = torch.where(seen.any(-1)[..., None], weight.double(), 0).sum(2)  # (batch, heads, E)
    shown = shown.unflatten(1, (drawn.k.shape[1], -1)).sum(2)  # (batch, kv_heads, E)
    gap = float((grads[2].double().sum(2) - shown).abs().max())
    # Weights are computed again from the log-sum-exp, which rounds as scores do.
    total = float(weight.double().abs().sum(2).max()) * (weight.shape[1] // drawn.k.shape[1])
    bound = total * min(1.0, 40 * _eps(drawn) + 2 * _score_error(drawn)) + 1e-9
    if gap > bound:
        failures.append(f"the gradients of v sum to another number: {gap:.3g} > {bound:.3g}")
    if drawn.is_exact and drawn.q.shape[2] * drawn.k.shape[2] < 200_000:
        failures += _check_exact_gradients(drawn, grads, weight)
    elif drawn.is_smyrf and drawn.q.dtype == torch.float64 and not _has_ties(drawn) and drawn.q.shape[2] < 120:
        failures += _check_derivative(drawn, grads, weight, generator)
    return failures


def _check_exact_gradients(drawn: Drawn, grads: list[Tensor], weight: Tensor) -> list[str]:
    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (drawn.q, drawn.k, drawn.v)]
        return torch.autograd.grad(oracle.attend(*leaves, drawn.seen, drawn.scale), leaves, weight.to(dtype))

    exact, plain = gradients(torch.float64), gradients(torch.promote_types(drawn.q.dtype, torch.float32))
    q, k, v, grad = (float(x.double().norm(dim=-1).max()) for x in (drawn.q, drawn.k, drawn.v, weight))
    n_terms = drawn.q.shape[2] * (drawn.q.shape[1] // drawn.k.shape[1])
    natural = {
        "q": abs(drawn.scale) * k * v * grad,
        "k": n_terms * abs(drawn.scale) * q * v * grad,
        "v": n_terms * grad,
    }
    failures = []
    for name, ours, wanted, other in zip("qkv", grads, exact, plain, strict=True):
        error = float((other.double() - wanted).abs().nan_to_num(torch.inf).max())
        allowed = 3 * error + natural[name] * min(2.0, 8 * _eps(drawn) + 2 * _score_error(drawn))
        found = float((ours.double() - wanted).abs().max())
        if found > allowed:
            failures.append(f"the gradient of {name} of an exact method has the error {found:.3g} > {allowed:.3g}")
    return failures


def _check_derivative(drawn: Drawn, grads: list[Tensor], weight: Tensor, generator: torch.Generator) -> list[str]:
    """Along a random direction; a step that moves a query into another cluster is tried again along others.

    With hashes that are equal to rounding every step does: the output jumps, by as much for the smallest step.
    """
    said, jumps = "", []
    for step in (1e-6, 1e-7, 1e-8, 1e-8, 1e-9):
        directions = [
            torch.randn(x.shape, generator=generator, dtype=x.dtype) * x.abs().mean()
            for x in (drawn.q, drawn.k, drawn.v)
        ]
        wanted = sum(float((grad * one).sum()) for grad, one in zip(grads, directions, strict=True))
        moved = []
        for sign in (1, -1):
            q, k, v = (x + sign * step * one for x, one in zip((drawn.q, drawn.k, drawn.v), directions, strict=True))
            moved.append(float((drawn.run(q=q, k=k, v=v).detach() * weight).sum()))
        found = (moved[0] - moved[1]) / (2 * step)
        size = sum(float((grad.abs() * one.abs()).sum()) for grad, one in zip(grads, directions, strict=True))
        noise = 1e-15 * (float((drawn.v.abs().max() * weight.abs()).sum()) + 1) / step
        if abs(found - wanted) <= 1e-3 * size + 10 * noise + 1e-9:
            return []
        jumps.append(abs(moved[0] - moved[1]))
        said = f"the derivative along a direction is {found:.6g}, by the gradients {wanted:.6g}"
    return [] if jumps[-1] > 0.01 * jumps[0] else [said]


def _gap(one: Tensor, other: Tensor) -> str:
    if one.numel() == 0:
        return "nothing"
    gap = (one.double() - other.double()).abs()
    return f"{int((one != other).any(-1).sum())} rows differ, by up to {float(gap.nan_to_num(torch.inf).max()):.3g}"
