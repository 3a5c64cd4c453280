"""Random calls of `smyrf.attention` against an oracle that shares no code with the package.

A case is drawn from its seed. Exact methods are compared with the oracle; of the others the promises are checked that
hold for any approximation: outputs are convex combinations of visible values, hidden keys and later keys have no
effect, batch entries are independent, a seed repeats a result, backends agree, gradients are derivatives.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attack import agreement, gradients, oracle
from tests.attack.drawn_calls import BAD, Drawn, draw_call, draw_kind
from tests.attack.rounding import compare, eps, gap, score_error, sum_error
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
    tally: Counter[str] = Counter()
    finite = all(bool(x.isfinite().all()) for x in (drawn.q, drawn.k, drawn.v))
    with torch.no_grad():
        out = drawn.run()
    expected = (*drawn.q.shape[:3], drawn.v.shape[-1])
    if out.shape != expected or out.dtype != drawn.v.dtype:
        failures.append(f"output {tuple(out.shape)} {out.dtype}, not {expected} {drawn.v.dtype}")
    else:
        with torch.no_grad():
            failures += (_check_finite if finite else _check_not_finite)(draw, drawn, out, tally)
        if finite and drawn.options["dropout_p"] == 0.0 and draw.random() < 0.35:
            failures += gradients.check(draw, drawn, tally)
    return Verdict(tuple(f"{one} [{drawn.says}]" for one in failures), tally=dict(tally))


def _check_finite(draw: random.Random, drawn: Drawn, out: Tensor, tally: Counter[str]) -> list[str]:
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
        slack = (64 * eps(drawn) + sum_error(drawn) + 1e-6 * (drawn.v.dtype != torch.float64)) * largest
        excess = torch.maximum(low - out, out - high).amax()
        if float(excess) > slack:
            failures.append(f"an output is {float(excess):.3g} outside of the visible values (tolerance {slack:.3g})")
        if drawn.is_exact:
            failures += _check_exact(drawn, out)
    some = (_same_seed, _hidden, _later, _alone, agreement.check_outputs)
    for one in draw.sample(some, 2 if v.numel() > 50_000 else 3):
        failures += one(draw, drawn, out, tally)
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
    allowed = 2 * error + largest * min(2.0, 8 * eps(drawn) + sum_error(drawn) + 2 * score_error(drawn))
    found = float((out.double() - expected).abs().max())
    return [f"an exact method has the error {found:.3g}, allowed is {allowed:.3g}"] if found > allowed else []


def _same_seed(draw: random.Random, drawn: Drawn, out: Tensor, tally: Counter[str]) -> list[str]:
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


def _hidden(draw: random.Random, drawn: Drawn, out: Tensor, tally: Counter[str]) -> list[str]:
    """Masked keys and values have no effect, whatever they hold."""
    if drawn.mask is None:
        return []
    clean, dirty, what = _poison(draw, drawn, ~drawn.mask[:, None, :, None])
    before, now = clean.run(), dirty.run()
    return [] if torch.equal(now, before) else [f"masked keys and values have an effect ({what}): {gap(now, before)}"]


def _later(draw: random.Random, drawn: Drawn, out: Tensor, tally: Counter[str]) -> list[str]:
    """Keys and values after a position reach no output up to it."""
    m = drawn.k.shape[2]
    if not drawn.is_causal or m < 2:
        return []
    at = draw.randrange(m - 1)
    clean, dirty, what = _poison(draw, drawn, (torch.arange(m) > at)[None, None, :, None])
    before, now = clean.run()[:, :, : at + 1], dirty.run()[:, :, : at + 1]
    return [] if torch.equal(now, before) else [f"keys after {at} reach earlier outputs ({what}): {gap(now, before)}"]


def _alone(draw: random.Random, drawn: Drawn, out: Tensor, tally: Counter[str]) -> list[str]:
    """One batch entry run alone gives the same, to rounding."""
    if len(drawn.q) == 1 or drawn.options["dropout_p"] > 0.0:
        return []
    row = draw.randrange(len(drawn.q))
    one = slice(row, row + 1)
    mask = None if drawn.mask is None else drawn.mask[one]
    alone = drawn.run(q=drawn.q[one], k=drawn.k[one], v=drawn.v[one], key_mask=mask)
    tally["batch entries compared"] += 1
    one_drawn = replace(drawn, q=drawn.q[one], k=drawn.k[one], v=drawn.v[one])
    return compare(one_drawn, alone, out[one], f"batch entry {row} alone differs", tally)


def _check_not_finite(draw: random.Random, drawn: Drawn, out: Tensor, tally: Counter[str]) -> list[str]:
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
        failures.append(f"what is not finite changes outputs that cannot see it: {gap(out[apart], clean[apart])}")
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
