"""`attend` of the native backend against the reference in float64: odd shapes, strides, lists, masks and numbers.

A quick run is part of `make test`; `make test-slow` tries thousands of examples more.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from problems import STRIDES, attend, strided
from smyrf.backends import BACKENDS, backends
from smyrf.backends.native import extension
from smyrf.grouping.groups import FarKeys, Groups

if "native" not in BACKENDS:  # where the package was installed without a compiler
    pytest.skip(backends()["native"], allow_module_level=True)

SEED = torch.tensor(2**40 + 7)
isa = pytest.mark.parametrize("isa", extension.instruction_sets())
# Sanitizers make everything several times slower.
quick = settings(max_examples=10 if "SMYRF_NATIVE" in os.environ else 25)
thorough = settings(max_examples=2000, derandomize=False, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True, repr=False)
class Problem:
    """One call of `attend`, in float64; `inputs` are to be expanded to `shapes` and laid out as `strides` say."""

    inputs: tuple[Tensor, Tensor, Tensor]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[str, ...]
    lists: tuple[Groups, ...]
    scale: float
    dropout_p: float
    index: torch.dtype
    loss: str

    def __repr__(self):  # only sizes: thousands of numbers would hide them
        lists = [(*g.shape, g.causal, g.multiplicity is not None, g.n_far) for g in self.lists]
        sizes = [float(x.abs().max()) for x in self.inputs]
        rest = (self.strides, self.scale, self.dropout_p, self.index, self.loss)
        return f"Problem({self.shapes}, {lists}, largest {sizes}, {rest})"

    def _repr_pretty_(self, printer, cycle):  # hypothesis has its own idea of dataclasses
        printer.text(repr(self))


# Blocks of the kernel are 64 queries and 256 keys, vectors have 2 to 16 numbers: sizes on both sides of all of them.
lengths = st.one_of(st.integers(1, 90), st.sampled_from([127, 128, 129, 300]))
widths = st.one_of(st.integers(1, 37), st.sampled_from([48, 64, 65, 100]))
slots = st.one_of(st.integers(0, 80), st.sampled_from([64, 65, 128, 129]))
sizes = st.one_of(st.integers(0, 80), st.sampled_from([255, 256, 257, 513]))


@st.composite
def problems(draw):
    batch, kv_heads, repeat = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n, m, d, e, heads = draw(lengths), draw(lengths), draw(widths), draw(widths), kv_heads * repeat
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = (batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, e)
    q, k, v = (random(*(draw(st.sampled_from([1, x])) for x in shape[:2]), *shape[2:]) for shape in shapes)
    q, k = draw(st.sampled_from([1e-30, 1e-3, 1.0, 30.0, 1e4])) * q, draw(st.sampled_from([1e-3, 1.0, 1.0, 10.0])) * k
    lists = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 2, 3, 4, 11]))):
        lists.append(draw(groups(random, generator, batch * heads, n, m, d, e)))
    return Problem(
        inputs=(q, k, v),
        shapes=shapes,
        strides=tuple(draw(st.sampled_from(["contiguous", *STRIDES])) for _ in range(3)),
        lists=tuple(lists),
        scale=draw(st.sampled_from([0.3, 0.3, 0.3, -0.7, 0.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0])),
        index=draw(st.sampled_from([torch.int32, torch.int64])),
        loss=draw(st.sampled_from(["squares", "sum", "heads inside"])),
    )


@st.composite
def groups(draw, random, generator, rows, n, m, d, e):
    """A list of groups with empty slots; now and then without groups, queries or keys at all."""
    n_groups, n_slots, size = draw(st.integers(0, 4)), draw(slots), draw(sizes)
    n_rows = draw(st.sampled_from([1, rows]))  # one row for all of them, or each its own
    places = n_groups * n_slots
    # A query stands in one slot at most.
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(n_rows)])
    queries = torch.nn.functional.pad(order, (0, max(0, places - n)), value=-1)[:, :places]
    queries = queries[:, torch.randperm(places, generator=generator)].view(n_rows, n_groups, n_slots)
    keys = torch.randint(-1, m, (n_rows, n_groups, size), generator=generator)
    if draw(st.booleans()):  # whole groups without a key
        keys[torch.rand(n_rows, n_groups, generator=generator) < 0.3] = -1
    causal, far, multiplicity = draw(st.booleans()), None, None
    if not causal and draw(st.booleans()):
        n_far, n_table = draw(st.integers(1, 3)), draw(st.integers(1, 9))
        # A table that groups share, with far keys that are in several groups and some that are in none.
        index = torch.randint(n_table, (n_groups, n_far), generator=generator, dtype=torch.int32)
        bias = random(rows, n_table).masked_fill(random(rows, n_table) < -1, -torch.inf)
        far = FarKeys(random(rows, n_table, d), random(rows, n_table, e), bias, index)
    if draw(st.booleans()):
        multiplicity = torch.randint(1, 4, (rows, n_groups, n_slots, size), generator=generator, dtype=torch.int16)
    queries, keys = (x.expand(rows, -1, -1) for x in (queries, keys))
    return Groups(queries, keys, causal=causal, multiplicity=multiplicity, far=far)


def run(backend, dtype, problem):
    """Output, log-sum-exp and all gradients."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in problem.inputs]
    fars = [g.far and [x.to(dtype, copy=True).requires_grad_() for x in g.far[:3]] for g in problem.lists]
    index = problem.index if backend == "native" else torch.int64
    lists = [
        Groups(g.queries.to(index), g.keys.to(index), g.causal, g.multiplicity, far and FarKeys(*far, g.far.of_group))
        for g, far in zip(problem.lists, fars, strict=True)
    ]
    q, k, v = (
        (strided(x, how) if backend == "native" else x).expand(shape)
        for x, how, shape in zip(leaves, problem.strides, problem.shapes, strict=True)
    )
    options = {"scale": problem.scale, "dropout_p": problem.dropout_p, "seed": SEED}
    out, lse = attend(q, k, v, lists, backend=backend, **options)
    if problem.loss == "sum":  # a gradient whose strides are all zero
        loss = out.sum()
    elif problem.loss == "heads inside":  # and one that lies as a model's next layer leaves it
        x = out.transpose(1, 2).flatten(2)
        loss = (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum()
    else:
        loss = out.double().square().sum()
    wanted = [*leaves, *(x for far in fars if far is not None for x in far)]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [out.detach(), lse, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True))]


def check(isa, problem):
    """As near as rounding allows; in float32 twice the reference's own error, and a little where that is lucky."""
    before, extension.ISA = extension.ISA, isa
    try:
        exact = run("reference", torch.float64, problem)
        q, k, v = (float(x.norm(dim=-1).max()) + 2.0 for x in problem.inputs)
        v /= 1.0 - problem.dropout_p if problem.dropout_p < 1.0 else 1.0  # what is kept grows
        largest = v * v * max(q, k)  # of what is added up in a gradient, perhaps to zero …
        rounded = 1.0 + abs(problem.scale) * q * k / 100  # … by weights that are as uncertain as large scores are
        n_lists = len(problem.lists)
        terms = (
            max(one.shape[2] for one in problem.lists) ** 0.5
        )  # queries whose errors add up in the gradient of a key
        for ours, theirs in zip(run("native", torch.float64, problem), exact, strict=True):
            near(ours, theirs, 1e3 * torch.finfo(torch.float64).eps * largest * rounded * n_lists)
        plain = run("reference", torch.float32, problem)
        for ours, theirs, others in zip(run("native", torch.float32, problem), exact, plain, strict=True):
            error = float((others.double() - theirs).nan_to_num(posinf=0, neginf=0).abs().max()) if ours.numel() else 0
            allowed = 8 * torch.finfo(torch.float32).eps * largest * rounded * max(1.0, terms)
            near(ours, theirs, 2 * error + allowed, rtol=2e-5)
    finally:
        extension.ISA = before


def near(ours, theirs, bound, rtol=1e-13):
    assert ours.shape == theirs.shape
    finite = theirs.isfinite()
    assert torch.equal(ours[~finite].double(), theirs[~finite])  # -inf of a query without keys
    errors = (ours.double() - theirs)[finite].abs()
    bound += rtol * float(theirs[finite].abs().max()) if finite.any() else 0.0  # a gradient may be the sum of thousands
    assert errors.le(bound).all(), f"{float(errors.max())} > {bound} of {float(theirs[finite].abs().max())}"


@isa
@given(problem=problems())
@quick
def test_it_is_the_reference_on_any_problem(isa, problem):
    check(isa, problem)


@pytest.mark.slow
@isa
@given(problem=problems())
@thorough
def test_it_is_the_reference_on_thousands_of_problems(isa, problem):
    check(isa, problem)


def meetings(lists, shape, causal):
    """Which pairs meet in any list, (batch, heads, N, M); with `causal` only those that a causal list shows."""
    batch, heads, n, m = shape
    met = torch.zeros(batch * heads, n + 1, m + 1, dtype=torch.bool)
    row = torch.arange(batch * heads)[:, None, None, None]
    for g in lists:
        seen = torch.ones(g.shape[2:], dtype=torch.bool)
        seen = (seen.tril() if causal and g.causal else seen).expand(g.shape)
        at = (
            row.expand(g.shape),
            g.queries[..., None].expand(g.shape),
            g.keys[:, :, None].expand(g.shape),
        )  # -1: the last
        met[tuple(x[seen] for x in at)] = True
    return met[:, :n, :m].view(shape)


@st.composite
def poisoned(draw):
    """A problem of moderate numbers, and its twin with a few that are not finite."""
    clean = draw(problems())
    inputs = [x.to(torch.float64).expand(shape).clone() for x, shape in zip(clean.inputs, clean.shapes, strict=True)]
    inputs[0] = inputs[0] / inputs[0].abs().max()
    inputs[1] = inputs[1] / inputs[1].abs().max()
    clean = replace(clean, inputs=tuple(inputs), dropout_p=0.0, scale=0.3)
    which, bad = draw(st.integers(0, 2)), draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    inputs[which] = inputs[which].clone()
    for _ in range(draw(st.integers(1, 3))):
        inputs[which][tuple(draw(st.integers(0, size - 1)) for size in inputs[which].shape)] = bad
    return clean, replace(clean, inputs=tuple(inputs))


def check_poisoned(isa, case):
    """What is not finite reaches those who meet it, and nobody else: not a bit of theirs changes."""
    clean, dirty = case
    before, extension.ISA = extension.ISA, isa
    try:
        repeat = clean.shapes[0][1] // clean.shapes[1][1]
        q, k, v = dirty.inputs
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        shape = (*q.shape[:3], k.shape[2])
        together, sees = (meetings(dirty.lists, shape, causal) for causal in (False, True))
        scores = 0.3 * (q @ k.transpose(-1, -2))
        # One score of NaN or of +inf makes a softmax NaN; -inf is no weight.
        spoiled = (sees & (scores.isnan() | (scores == torch.inf))).any(-1)  # (batch, heads, N)
        spoiled_by_value = (sees[..., None] & ~v.isfinite()[:, :, None]).any(3)  # (batch, heads, N, E)
        poisonous = ~k.isfinite().all(-1) | ~v.isfinite().all(-1)  # (batch, heads, M)
        touched = ~q.isfinite().all(-1) | (together & poisonous[:, :, None]).any(-1)  # (batch, heads, N)
        blocks = torch.stack([~x.isfinite().flatten(2).all(-1) for x in dirty.inputs[1:]]).any(0)  # (batch, kv_heads)
        blocks |= (~q.isfinite()).flatten(2).any(-1).unflatten(1, (-1, repeat)).any(-1)
        for dtype in (torch.float32, torch.float64):
            expected, found = run("native", dtype, clean), run("native", dtype, dirty)
            for x, y in zip(found[:2], expected[:2], strict=True):
                assert torch.equal(x[~touched], y[~touched])
            assert found[0][spoiled].isnan().all()
            assert found[1][spoiled].isfinite().logical_not().all()
            assert not found[0][spoiled_by_value].isfinite().any()
            for x, y in zip(found[2:5], expected[2:5], strict=True):
                ours, theirs = (g.unflatten(1, (blocks.shape[1], -1))[~blocks] for g in (x, y))
                assert torch.equal(ours, theirs)
    finally:
        extension.ISA = before


@isa
@given(case=poisoned())
@quick
def test_what_is_not_finite_reaches_only_those_who_meet_it(isa, case):
    check_poisoned(isa, case)


@pytest.mark.slow
@isa
@given(case=poisoned())
@thorough
def test_what_is_not_finite_is_kept_apart_in_thousands_of_problems(isa, case):
    check_poisoned(isa, case)


@isa
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(problem=problems())
@settings(max_examples=15)
def test_half_precision_is_single_precision_that_is_rounded_once(isa, dtype, problem):
    before, extension.ISA = extension.ISA, isa
    try:
        inputs = tuple((x / x.abs().max()).to(dtype).float() for x in problem.inputs)
        lists = tuple(replace(g, far=None) for g in problem.lists)  # far keys are never rounded
        problem = replace(problem, inputs=inputs, lists=lists)
        low, high = run("native", dtype, problem), run("native", torch.float32, problem)
        assert torch.equal(low[0], high[0].to(dtype))
        assert torch.equal(low[1], high[1])
        assert all(x.dtype == dtype for x in low[2:])
    finally:
        extension.ISA = before
