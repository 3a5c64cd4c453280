"""The native kernel beyond what all kernels are tested for: instruction sets, threads, odd shapes and numbers."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smyrf
from smyrf.groups import Extra, Groups
from smyrf.kernels import BACKENDS, attend, backends, check_backend

if "native" not in BACKENDS:  # where the package was installed without a compiler
    pytest.skip(backends()["native"], allow_module_level=True)
from smyrf import extension

SEED = torch.tensor(7)
isa = pytest.mark.parametrize("isa", extension.instruction_sets())


def close(found, exact, plain, largest):
    """Within twice the error that PyTorch's operators make in the same dtype, and a little where those are lucky."""
    for ours, theirs, others in zip(found, exact, plain, strict=True):
        error = float((others.double() - theirs).abs().nan_to_num().max())
        assert torch.equal(ours.isnan(), theirs.isnan())
        bound = 2 * error + 8 * torch.finfo(ours.dtype).eps * largest
        assert float((ours.double() - theirs).abs().nan_to_num().max()) <= bound


@st.composite
def problems(draw):
    """Any sizes, lists, masks, strides and scales; indices with empty slots."""
    batch, kv_heads, repeat = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    n, m = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    d, e = draw(st.integers(1, 37)), draw(st.integers(1, 37))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, size = kv_heads * repeat, draw(st.sampled_from([1e-3, 1.0, 30.0]))
    q, k, v = size * random(batch, heads, n, d), random(batch, kv_heads, m, d), random(batch, kv_heads, m, e)
    if draw(st.booleans()):  # any strides
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    lists = []
    for _ in range(draw(st.integers(1, 3))):
        rows, n_groups, slots, keys = (
            batch * heads,
            draw(st.integers(1, 4)),
            draw(st.integers(1, 80)),
            draw(st.integers(1, 80)),
        )
        places = n_groups * slots
        order = torch.stack(
            [torch.randperm(n, generator=generator) for _ in range(rows)]
        )  # a query in one slot at most
        queries = torch.nn.functional.pad(order, (0, max(0, places - n)), value=-1)[:, :places]
        queries = queries[:, torch.randperm(places, generator=generator)].view(rows, n_groups, slots)
        index = torch.randint(-1, m, (rows, n_groups, keys), generator=generator)
        causal = draw(st.booleans())
        extra = None
        if not causal and draw(st.booleans()):
            f = draw(st.integers(1, 3))
            bias = random(rows, n_groups, f).masked_fill(random(rows, n_groups, f) < -1, -torch.inf)
            extra = Extra(random(rows, n_groups, f, d), random(rows, n_groups, f, e), bias)
        repeats = None
        if draw(st.booleans()):
            repeats = torch.randint(1, 4, (rows, n_groups, slots, keys), generator=generator, dtype=torch.int16)
        lists.append(Groups(queries, index, causal=causal, repeats=repeats, extra=extra))
    return (q, k, v), lists, draw(st.sampled_from([0.0, 0.3]))


def run(backend, dtype, inputs, lists, dropout_p):
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in inputs)
    extras = [one.extra and Extra(*(x.to(dtype, copy=True).requires_grad_() for x in one.extra)) for one in lists]
    groups = [Groups(g.queries, g.keys, g.causal, g.repeats, extra) for g, extra in zip(lists, extras, strict=True)]
    out, lse = attend(q, k, v, groups, scale=0.3, dropout_p=dropout_p, seed=SEED, backend=backend)
    wanted = [q, k, v, *(x for extra in extras if extra is not None for x in extra)]
    return [out.detach(), lse, *torch.autograd.grad(out.double().square().sum(), wanted)]


@isa
@given(problem=problems())
@settings(max_examples=150)
def test_it_is_the_reference_on_any_problem(isa, problem):
    before, extension.ISA = extension.ISA, isa
    try:
        exact = run("reference", torch.float64, *problem)
        for a, b in zip(run("native", torch.float64, *problem), exact, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
        q, k, v = (float(x.norm(dim=-1).max()) + 2.0 for x in problem[0])
        largest = v * v * max(q, k)  # of what is added up in a gradient, perhaps to zero
        close(run("native", torch.float32, *problem), exact, run("torch", torch.float32, *problem), largest)
    finally:
        extension.ISA = before


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("method", [smyrf.Smyrf(3, 32), smyrf.Tangent(64)], ids=["smyrf", "tangent"])
def test_results_do_not_depend_on_the_number_of_threads(method, heads):
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, heads, 700, 24).unbind())
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            out = smyrf.attention(q, k, v, method=method, generator=0, backend="native")
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True))


def test_several_threads_of_python_may_call_it_at_once():
    inputs = [torch.randn(3, 1, 2, 300 + 50 * i, 16).unbind() for i in range(4)]

    def call(i):
        return smyrf.attention(*inputs[i], method=smyrf.Smyrf(2, 32), generator=0, backend="native")

    expected, found = [call(i) for i in range(4)], {}
    threads = [threading.Thread(target=lambda i=i: found.setdefault(i, [call(i) for _ in range(20)])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, expected[i]) for i, several in found.items() for one in several)


@isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_stays_in_its_row(monkeypatch, isa, bad):
    monkeypatch.setattr(extension, "ISA", isa)
    q, k, v = torch.randn(3, 1, 1, 50, 12).unbind()
    q[0, 0, 13, 5] = bad
    groups = [Groups(torch.arange(50).view(1, 2, 25), torch.arange(50).view(1, 2, 25))]
    out = attend(q, k, v, groups, backend="native")[0]
    assert out[0, 0, 13].isnan().all()
    assert out[0, 0, torch.arange(50) != 13].isfinite().all()


@isa
def test_large_scores_do_not_overflow(monkeypatch, isa):
    monkeypatch.setattr(extension, "ISA", isa)
    q, k, v = torch.randn(3, 1, 2, 70, 9).unbind()
    groups = [Groups(torch.arange(70).expand(2, 1, 70), torch.arange(70).expand(2, 1, 70))] * 2
    for factor in (1e3, 1e10, 1e18):
        out, lse = attend(factor * q, factor * k, v, groups, backend="native")
        expected, expected_lse = attend(factor * q, factor * k, v, groups, backend="reference")
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_the_kernels_that_there_are_can_be_asked_for():
    assert set(backends()) == {"reference", "torch", "native"}
    assert extension.instruction_sets()[-1] in backends()["native"]
    check_backend("native")


def test_an_instruction_set_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(extension, "ISA", "avx10")
    x = torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match="isa='avx10' cannot be run on this machine"):
        attend(x, x, x, [Groups(torch.arange(4).view(1, 1, 4), torch.arange(4).view(1, 1, 4))], backend="native")
