"""Where chance comes from: seeds, generators, dropout, and the same clusters again in activation checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from problems import TANGENTS, default_too, fast, problem
from smyrf import Dense, Smyrf, Tangent, attention


@fast
def test_seeds_and_generators_make_it_repeatable(backend):
    q, k, v = problem()
    run = lambda g: attention(q, k, v, method=Smyrf(2, 16), dropout_p=0.2, generator=g, backend=backend)  # noqa: E731
    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    g = torch.Generator().manual_seed(3)
    first, second = run(g), run(g)
    assert not torch.equal(first, second)  # a generator goes on
    assert torch.equal(first, run(g.manual_seed(3)))


def test_without_a_generator_pytorchs_own_decides():
    q, k, v = problem()
    torch.manual_seed(1)
    a = attention(q, k, v, method=Smyrf(2, 16))
    torch.manual_seed(1)
    assert torch.equal(a, attention(q, k, v, method=Smyrf(2, 16)))
    assert not torch.equal(a, attention(q, k, v, method=Smyrf(2, 16)))


@fast
def test_a_seed_does_not_touch_pytorchs_generator(backend):
    q, k, v = problem()
    before = torch.get_rng_state()
    attention(q, k, v, method=Smyrf(2, 16), dropout_p=0.1, generator=3, backend=backend)
    attention(q, k, v, method=Dense(), dropout_p=0.1, generator=3)
    assert torch.equal(before, torch.get_rng_state())


@default_too
@pytest.mark.parametrize("method", [Smyrf(2, 400), Smyrf(8, 400, deduplicate=True), Tangent(1.0), Dense()])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_an_exact_call_leaves_pytorchs_generator_alone(backend, method, is_causal, masked):
    """One cluster has nothing to draw, whichever path serves it."""
    q, k, v = problem(300, 300)
    mask = torch.arange(300).expand(2, -1) < 200 if masked else None
    before = torch.get_rng_state()
    attention(q, k, v, method=method, key_mask=mask, is_causal=is_causal, backend=backend)
    assert torch.equal(before, torch.get_rng_state())


def test_dense_dropout_takes_a_generator_too():
    q, k, v = problem()
    run = lambda g: attention(q, k, v, method=Dense(), dropout_p=0.3, generator=g)  # noqa: E731
    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))


@fast
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [Smyrf(3, 16), *TANGENTS])
def test_activation_checkpointing_recomputes_the_same_clusters(backend, use_reentrant, seed, is_causal, method):
    inputs = [x.requires_grad_() for x in problem(300, 300, dtype=torch.float64)]

    def run(q, k, v):
        return attention(q, k, v, method=method, is_causal=is_causal, dropout_p=0.1, generator=seed, backend=backend)

    torch.manual_seed(2)
    plain = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    torch.manual_seed(2)
    loss = checkpoint(run, *inputs, use_reentrant=use_reentrant).square().sum()
    torch.rand(5)  # whatever happens between forward and backward
    loss.backward()
    for x, expected in zip(inputs, plain, strict=True):
        torch.testing.assert_close(x.grad, expected)


def test_a_generator_that_cannot_be_rewound_is_refused_in_checkpointing():
    inputs = [x.requires_grad_() for x in problem(64, 64)]
    g = torch.Generator()

    def run(q, k, v):
        return attention(q, k, v, method=Smyrf(2, 16), generator=g)

    loss = checkpoint(run, *inputs, use_reentrant=False).sum()
    with pytest.raises(ValueError, match="pass an int seed"):
        loss.backward()
