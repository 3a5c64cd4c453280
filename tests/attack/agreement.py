"""Whether backends agree on a drawn call: on its groups, on attention to the same groups, on outputs and gradients.

Groups are discrete, and where two hashes or two sides of a tree tie to rounding, either choice is right. So groups are
checked first. Attention to the groups of one backend is compared whatever they are; outputs and gradients of whole
calls are compared where the groups are equal. What is left out is counted.

Shapes: batch, heads, N queries, M keys, E value width.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf import Smyrf
from smyrf.backends.registry import BACKENDS
from tests.attack.drawn_calls import Drawn
from tests.attack.grouped_calls import Grouped, Part, attend_to, group_by, parts_of, rounding_decides, same_groups
from tests.attack.rounding import compare, eps, score_error, sum_error

# The reference runs one row at a time, in Python.
MAX_QUERIES, MAX_PAIRS = 800, 400_000


def is_small(drawn: Drawn) -> bool:
    """Whether the reference takes little time."""
    n, m = drawn.q.shape[2], drawn.k.shape[2]
    return n <= MAX_QUERIES and n * m <= MAX_PAIRS


def check_outputs(draw: random.Random, drawn: Drawn, out: Tensor, tally: Counter[str]) -> list[str]:
    """Two backends give the same output."""
    if drawn.options["dropout_p"] > 0.0 or not is_small(drawn):
        return []
    names = draw.sample(list(BACKENDS), 2)
    parts = parts_of(drawn)
    groups = _groups(parts, names, tally, torch.Generator().manual_seed(draw.getrandbits(40)))
    failures = list(groups.failures)
    on_shared = [
        torch.empty(*drawn.q.shape[:3], drawn.v.shape[-1], dtype=torch.promote_types(drawn.v.dtype, torch.float32))
        for _ in names
    ]
    for part, grouped in zip(parts, groups.of_first, strict=True):
        for name, whole in zip(names, on_shared, strict=True):
            whole[:, part.heads] = attend_to(grouped.lists, name, part.call).to(whole.dtype)
    tally["outputs compared, groups of one backend"] += 1
    failures += compare(drawn, *on_shared, f"{' and '.join(names)} differ on the same groups", tally)
    if groups.are_equal:
        tally["outputs compared, whole calls"] += 1
        outputs = [drawn.run(backend=name) for name in names]
        failures += compare(drawn, *outputs, f"{' and '.join(names)} differ", tally)
    return failures


def check_gradients(draw: random.Random, drawn: Drawn, weight: Tensor, tally: Counter[str]) -> list[str]:
    """A backend's gradients are those that autograd finds through the reference, in float64.

    Args:
        weight: ``(batch, heads, N, E)``, the gradient of the output.
    """
    names = ["reference", draw.choice([name for name in BACKENDS if name != "reference"])]
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    with torch.no_grad():
        groups = _groups(parts_of(drawn), names, tally, generator)
    failures = list(groups.failures)
    if groups.are_equal:
        tally["gradients compared, whole calls"] += 1
        expected, found = (gradients(drawn, name, weight) for name in names)
    else:
        tally["gradients compared, groups of one backend"] += 1
        expected, found = (_gradients_on_reference_groups(drawn, name, weight) for name in names)
    sizes = natural_sizes(drawn, weight)
    relative = 64 * eps(drawn) + 2 * sum_error(drawn) + 8 * score_error(drawn)
    for name, ours, wanted in zip("qkv", found, expected, strict=True):
        error, allowed = float((ours - wanted).abs().nan_to_num(torch.inf).max()), sizes[name] * min(2.0, relative)
        if error > allowed:
            failures.append(
                f"{names[1]}: the gradient of {name} differs from the reference's by {error:.3g} > {allowed:.3g}"
            )
    return failures


def gradients(drawn: Drawn, backend: str | None, weight: Tensor) -> list[Tensor]:
    """Gradients of q, k and v, zeros where there are none."""
    leaves = _leaves(drawn)
    return _differentiate(drawn.run(**leaves, backend=backend), leaves, weight)


def _gradients_on_reference_groups(drawn: Drawn, backend: str, weight: Tensor) -> list[Tensor]:
    """Gradients of q, k and v through attention of a backend to the groups of the reference."""
    leaves = _leaves(drawn)
    out = weight.new_zeros(weight.shape)
    for part in parts_of(drawn, **leaves):
        lists = group_by("reference", part.call, part.method).lists
        out = out.index_copy(1, torch.tensor(part.heads), attend_to(lists, backend, part.call))
    return _differentiate(out, leaves, weight)


def _leaves(drawn: Drawn) -> dict[str, Tensor]:
    return {name: getattr(drawn, name).detach().clone().requires_grad_() for name in "qkv"}


def _differentiate(out: Tensor, leaves: dict[str, Tensor], weight: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(out, list(leaves.values()), weight, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, leaves.values(), strict=True)]


def natural_sizes(drawn: Drawn, weight: Tensor) -> dict[str, float]:
    """Bounds of the gradients of q, k and v: sums of products of norms."""
    q, k, v, grad = (float(x.double().norm(dim=-1).max()) for x in (drawn.q, drawn.k, drawn.v, weight))
    n_terms = drawn.q.shape[2] * (drawn.q.shape[1] // drawn.k.shape[1])
    return {
        "q": abs(drawn.scale) * k * v * grad,
        "k": n_terms * abs(drawn.scale) * q * v * grad,
        "v": n_terms * grad,
    }


@dataclass(frozen=True)
class _Groups:
    """Groups of the parts of a call by two backends."""

    of_first: list[Grouped]
    are_equal: bool
    failures: tuple[str, ...]


def _groups(parts: list[Part], names: list[str], tally: Counter[str], generator: torch.Generator) -> _Groups:
    """Group by two backends; a difference that rounding does not explain is a failure.

    Orders of hashes are checked one by one. Other trees must be what changes of the size of rounding errors give the
    reference too.
    """
    of_first, are_equal, failures = [], True, []
    for part in parts:
        ours, theirs = (group_by(name, part.call, part.method, check=True) for name in names)
        of_first.append(ours)
        failures += ours.failures + theirs.failures
        tally["groups compared"] += 1
        if same_groups(ours.lists, theirs.lists):
            continue
        are_equal = False
        if isinstance(part.method, Smyrf):
            tally["groups differ: hashes tie to rounding"] += 1
        elif rounding_decides(part.call, part.method, generator):
            tally["groups differ: trees tie to rounding"] += 1
        else:
            failures.append(f"{' and '.join(names)} give other groups, which rounding does not explain")
    return _Groups(of_first, are_equal, tuple(failures))
