"""`torch.compile` sees attention without graph breaks."""

import pytest
import torch

from problems import fast, problem
from smyrf import Dense, Smyrf, Tangent, attention


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()  # each test compiles anew, however many there are


@fast
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"dropout_p": 0.1},
        {"key_mask": torch.arange(300).expand(2, -1) < 200},
        {"method": Smyrf(2, 16, deduplicate=True)},
        {"method": Smyrf(2, 16, hashing="cross_polytope")},
        {"method": Dense()},
        {"method": Tangent(50, levels=1)},
        {"method": Tangent(50, levels=2), "is_causal": True},
        {"method": Tangent(0.25), "key_mask": torch.arange(300).expand(2, -1) < 200, "dropout_p": 0.1},
        {"generator": 5},
    ],
    ids=lambda x: " ".join(f"{name}" for name in x) or "plain",
)
def test_compiles_without_graph_breaks_and_gives_the_same(backend, arguments):
    arguments = {"method": Smyrf(2, 16), **arguments}
    inputs = [x.requires_grad_() for x in problem(300, 300, 8, 8)]

    def run(q, k, v):
        return attention(q * 1.5, k, v, **arguments, backend=backend).square()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for f in (run, compiled):
        torch.manual_seed(3)
        out = f(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@fast
@pytest.mark.parametrize("method", [Smyrf(2, 16), Tangent(30, levels=1), Tangent(0.25, levels=2)])
def test_compiled_code_takes_another_length(backend, method):
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, method=method, generator=1, backend=backend),
        fullgraph=True,
        backend="eager",
        dynamic=True,
    )
    for n in (64, 97, 130):
        q, k, v = problem(n, n, 8, 8)
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, method=method, generator=1, backend=backend))


@fast
@pytest.mark.slow
def test_inductor_gives_the_same(backend):
    inputs = [x.requires_grad_() for x in problem(300, 300, 8, 8)]

    def run(q, k, v):
        return attention(torch.sin(q), k, v, method=Smyrf(2, 16), generator=1, backend=backend).square().sum()

    a = torch.autograd.grad(run(*inputs), inputs)
    b = torch.autograd.grad(torch.compile(run, fullgraph=True)(*inputs), inputs)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
