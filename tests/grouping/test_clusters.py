"""Balanced clusters from sorted hashes, whichever backend sorts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from problems import FAST, backends, make_call, make_groups, problem
from smyrf import Smyrf, methods
from smyrf.backends import find_backend
from smyrf.grouping.clusters import smyrf_groups
from smyrf.methods import SmyrfLayout


def clusters(n, m, method, key_mask=None, batch=2, heads=3, backend=FAST[-1]):
    """Clusters of random vectors, one cluster included, of which `group` makes dense attention."""
    q, k, v = problem(n, m, 5, 5, batch, heads, heads)
    run = find_backend(backend)
    call = run.prepare(make_call(q, k, v, scale=1.0, key_mask=key_mask))
    layout = SmyrfLayout(n, m, is_exact=False, key_visits=0, n_clusters=method.n_clusters(n, m))
    return smyrf_groups(call, method, layout, run)


@backends
@given(n=st.integers(1, 130), m=st.integers(1, 130), size=st.integers(1, 40))
def test_clusters_are_balanced_and_complete_at_every_length(backend, n, m, size):
    for groups in clusters(n, m, Smyrf(2, size), backend=backend):
        rows, n_clusters, slots, keys = groups.shape
        assert slots <= size or n_clusters == m  # never more queries than asked for, unless keys run out
        assert (groups.keys >= 0).all()  # every cluster has equally many keys, and no padding
        for b in range(rows):
            mine = groups.queries[b][groups.queries[b] >= 0]
            assert mine.sort().values.tolist() == list(range(n))  # each query once
            assert set(groups.keys[b].flatten().tolist()) == set(range(m))  # each key at least once
            assert all(len(set(run.tolist())) == keys for run in groups.keys[b])


def test_lengths_that_divide_give_the_papers_partition():
    for groups in clusters(96, 48, Smyrf(4, 16)):
        assert groups.shape == (6, 6, 16, 8)
        assert (groups.queries.flatten(1).sort(-1).values == torch.arange(96)).all()
        assert (groups.keys.flatten(1).sort(-1).values == torch.arange(48)).all()


@backends
def test_clusters_follow_the_hash(backend):
    """On a line, a cluster is an interval of queries and the same interval of keys."""
    q = torch.arange(40.0).view(1, 1, 40, 1)
    (groups,) = make_groups(q, q, q, Smyrf(1, 10, transform="none"), backend, scale=1.0)
    assert torch.equal(groups.queries.sort(-1).values, groups.keys.sort(-1).values)
    assert (groups.queries.sort(-1).values.diff(dim=-1) == 1).all()


@backends
@given(n_valid=st.integers(0, 60), size=st.integers(1, 25))
def test_only_valid_keys_are_in_clusters_and_all_of_them_are(backend, n_valid, size):
    mask = torch.zeros(1, 60, dtype=torch.bool)
    mask[0, torch.randperm(60)[:n_valid]] = True
    for groups in clusters(50, 60, Smyrf(2, size), mask, batch=1, heads=1, backend=backend):
        held = groups.keys[groups.keys >= 0]
        assert set(held.tolist()) == set(mask[0].nonzero().flatten().tolist())
        if n_valid:  # no query is left without a key where there is one
            assert (groups.keys >= 0).any(-1).all()


def test_masks_go_to_their_own_rows():
    mask = torch.stack([torch.arange(30) < 10, torch.arange(30) >= 25])
    for groups in clusters(20, 30, Smyrf(2, 5), mask):
        of_first, of_second = groups.keys[:3], groups.keys[3:]
        assert of_first.max() < 10
        assert of_second[of_second >= 0].min() >= 25


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("hashing", methods.HASHINGS)
def test_deduplicated_pairs_count_once(masked, hashing):
    mask = torch.rand(2, 31) > 0.5 if masked else None
    plain = clusters(37, 31, Smyrf(6, 8, hashing=hashing), mask)
    torch.manual_seed(0)
    if masked:
        torch.rand(2, 31)
    once = clusters(37, 31, Smyrf(6, 8, hashing=hashing, deduplicate=True), mask)
    met = oracle.counts(plain, 37, 31)
    assert met.max() > 1
    assert abs(oracle.counts(once, 37, 31) - (met > 0)).max() < 1e-12
