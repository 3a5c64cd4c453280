"""From a budget to the sizes of Tangent attention."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smyrf import Tangent
from smyrf.methods.levels import MIN_NEAR, Level, size_levels, visits


@given(n=st.integers(1, 70_000), m=st.integers(1, 70_000), budget=st.floats(1.0, 3000.0), n_levels=st.integers(1, 5))
def test_sizes_fit_together_and_into_the_budget(n, m, budget, n_levels):
    levels = size_levels(n, m, budget, n_levels)
    if not levels:
        return
    assert len(levels) <= n_levels
    candidates = m
    clusters = 0
    for level in levels:
        assert level.n_candidates == candidates
        assert 1 <= level.n_near <= candidates
        assert level.n_clusters > clusters
        assert level.n_clusters & (level.n_clusters - 1) == 0
        assert level.cluster_size == -(-n // level.n_clusters)
        candidates, clusters = level.n_near, level.n_clusters
    assert visits(levels) < m
    assert visits(levels) <= budget or levels[-1].n_near == MIN_NEAR


lengths = st.integers(1, 3000)


@settings(max_examples=600)
@given(
    n=st.integers(1, 3000), m=st.integers(1, 3000), budget=st.integers(1, 3000), levels=st.sampled_from([None, 1, 2, 3])
)
def test_key_visits_are_within_the_budget_or_the_least_that_one_pass_costs(n, m, budget, levels):
    """The least is one cluster of all queries with `MIN_NEAR` near keys and one far key: 1.5 · M / N + MIN_NEAR + 1."""
    budget = min(budget, m)
    least = min(math.ceil(1.5 * m / n + MIN_NEAR + 1), m)  # dense attention costs M
    assert Tangent(budget, levels=levels).key_visits(m, n_queries=n) <= max(budget, least)


@pytest.mark.parametrize("n_levels", [1, 2, 3])
@pytest.mark.parametrize("n", [512, 2048, 5000, 16384])
@pytest.mark.parametrize("share", [0.0625, 0.125, 0.25, 0.5])
def test_the_budget_is_spent(n, n_levels, share):
    """What is left over is rounding, of a whole near key at most per cluster's share of it."""
    levels = size_levels(n, n, share * n, n_levels)
    assert share * n - 2 < visits(levels) <= share * n


def test_given_sizes_are_taken_as_they_are():
    (level,) = Tangent(cluster_size=16, n_near=100, n_far=3, levels=1).sizes(1024)
    assert level == Level(n_clusters=64, cluster_size=16, n_candidates=1024, n_near=100, n_far=3)
    (level,) = Tangent(cluster_size=20, n_near=100, levels=1).sizes(1000)
    assert level.cluster_size == 16  # at most; the number of clusters is a power of two


def test_dense_where_it_costs_no_more():
    assert Tangent(0.25).is_exact(1, 4096)  # one query: scoring all keys is what dense attention does
    assert Tangent(600).is_exact(512, 512)
    assert Tangent(1.0).is_exact(4096, 4096)
    assert not Tangent(0.25).is_exact(4096, 4096)
