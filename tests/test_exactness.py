"""Theorem 2: under its three assumptions the merge of hashing rounds (eq. 15) is dense attention.

Clusters are drawn first, then scores that meet the assumptions with them: a query's large scores are on keys that it
meets equally often (fairness), at least once (effectiveness), and all other weights are zero in float64 (sparsity).
"""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from problems import attend, backends
from smyrf.experiments.theory.biclustering import meetings
from smyrf.grouping.groups import Groups

# Beside scores of a few units its weight underflows to zero: e^−1000.
SMALL = -1000.0


@st.composite
def rounds(draw):
    """Random balanced clusters, H rounds of them, with N ≠ M."""
    n_clusters, n_rounds = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    n_queries, n_keys = (n_clusters * draw(st.integers(1, 4)) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lists = [
        Groups(*(torch.randperm(n, generator=generator).view(1, n_clusters, -1) for n in (n_queries, n_keys)))
        for _ in range(n_rounds)
    ]
    return lists, meetings(lists, n_queries, n_keys), generator


def large_keys(counts, fair, generator):
    """K_q of each query, ``(N, M)`` bool: some of the keys that it meets, equally often if `fair`; never none."""
    chosen = torch.zeros_like(counts, dtype=torch.bool)
    for row, met in zip(chosen, counts, strict=True):
        first = met.nonzero()[torch.randint(int((met > 0).sum()), (), generator=generator), 0]
        alike = met == met[first] if fair else met > 0
        row |= alike & (torch.rand(met.shape, generator=generator) < 0.5)
        row[first] = True
    return chosen


def vectors(large, generator):
    """q and k whose scores are a few units on K_q and small elsewhere: any P is a product, P I."""
    p = 2.0 * torch.randn(large.shape, dtype=torch.float64, generator=generator)
    p = torch.where(large, p, SMALL)
    v = torch.randn(p.shape[1], 5, dtype=torch.float64, generator=generator)
    return p[None, None], torch.eye(p.shape[1], dtype=torch.float64)[None, None], v[None, None]


def dense(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@backends
@settings(deadline=None, max_examples=60)
@given(rounds())
def test_theorem_2_merged_rounds_are_exact_under_its_assumptions(backend, drawn):
    lists, counts, generator = drawn
    q, k, v = vectors(large_keys(counts, True, generator), generator)
    out, _ = attend(q, k, v, lists, scale=1.0, backend=backend)
    torch.testing.assert_close(out, dense(q, k, v), rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(rounds())
def test_deduplicated_rounds_need_no_fairness(drawn):
    lists, counts, generator = drawn
    q, k, v = vectors(large_keys(counts, False, generator), generator)
    lists = [replace(one, multiplicity=counts[one.queries[0, :, :, None], one.keys[0, :, None]][None]) for one in lists]
    out, _ = attend(q, k, v, lists, scale=1.0)
    torch.testing.assert_close(out, dense(q, k, v), rtol=1e-10, atol=1e-12)


def one_query(first, second, p):
    """A query that meets keys 0 and 1 in so many rounds, and the error of its output; a second query fills clusters."""
    here, there = torch.tensor([[[0], [1]]]), torch.tensor([[[1], [0]]])
    lists = [Groups(here, here)] * first + [Groups(here, there)] * second
    q = torch.tensor([[p, [0.0, 0.0]]], dtype=torch.float64)[None]
    k = v = torch.eye(2, dtype=torch.float64)[None, None]
    out, _ = attend(q, k, v, lists, scale=1.0)
    return float((out - dense(q, k, v))[0, 0, 0].norm())


def test_each_assumption_of_theorem_2_is_needed():
    assert one_query(2, 2, [1.0, 2.0]) < 1e-12  # all hold
    assert one_query(2, 1, [1.0, 2.0]) > 0.1  # unfair: the first key counts twice
    assert one_query(2, 0, [1.0, 2.0]) > 0.1  # ineffective: the second key is never met
    assert one_query(2, 1, [1.0, SMALL]) < 1e-12  # a key without weight may be met as often as it likes
    assert one_query(2, 1, [1.0, 0.0]) > 0.1  # but not one with some
