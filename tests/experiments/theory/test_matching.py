import math
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smyrf.experiments.theory.biclustering import Biclustering, mass_costs, objective, search, softmax_costs
from smyrf.experiments.theory.matching import (
    Matching,
    by_pairs,
    by_triples,
    chosen_triples,
    clusters_by_pairs,
    clusters_by_triples,
    draw,
    with_special_keys,
)


@st.composite
def instances(draws, largest=3, most=6):
    size = draws(st.integers(1, largest))
    triples = st.tuples(*[st.integers(0, size - 1)] * 3)
    return Matching(size, tuple(sorted(draws(st.sets(triples, min_size=size, max_size=most)))))


@given(instances())
def test_a_matching_is_found_where_some_choice_of_triples_is_one(instance):
    exists = any(instance.is_matching(choice) for choice in combinations(instance.triples, instance.n))
    found = instance.solve()
    assert (found is not None) == exists
    assert found is None or instance.is_matching(found)


def test_drawn_instances_are_repeatable_and_of_both_kinds():
    assert draw(3, 5, seed=1) == draw(3, 5, seed=1)
    assert {draw(3, 6, seed=seed).solve() is None for seed in range(20)} == {True, False}


# The paper's construction.


def has_pair_matching(pairs, n):
    return any(all((i, order[i]) in pairs for i in range(n)) for order in permutations(range(n)))


@settings(deadline=None)
@given(instances(most=12))
def test_a_matching_reaches_the_threshold_of_the_papers_construction(instance):
    found = instance.solve()
    if found is not None:
        reduction = by_pairs(instance)
        assert reduction.problem.total(clusters_by_pairs(instance, found)) == reduction.threshold


@settings(deadline=None)
@given(instances(most=12), st.sampled_from([(4.0, 1.0), (1.0, 0.99), (100.0, 0.01)]))
def test_the_papers_construction_asks_for_pairs_alone(instance, rewards):
    """Its threshold is the largest mass there can be, reached where the pairs have matchings, whatever the triples."""
    reduction = by_pairs(instance, *rewards)
    best = search(reduction.problem).total
    pairs = [{(x, y) for x, y, _ in instance.triples}, {(y, z) for _, y, z in instance.triples}]
    assert best >= reduction.threshold - 1e-9
    assert reduction.is_reached(best) == all(has_pair_matching(some, instance.n) for some in pairs)


@settings(deadline=None)
@given(instances(most=4))
def test_the_papers_construction_is_right_where_triples_are_all_that_pairs_allow(instance):
    pairs = {(x, y) for x, y, _ in instance.triples}, {(y, z) for _, y, z in instance.triples}
    joined = Matching(instance.n, tuple(sorted({(x, y, z) for x, y in pairs[0] for v, z in pairs[1] if v == y})))
    assert joined.is_joined()
    reduction = by_pairs(joined)
    assert reduction.is_reached(search(reduction.problem).total) == (joined.solve() is not None)


def test_the_papers_construction_needs_the_smaller_reward_for_z():
    with pytest.raises(ValueError, match=r"r1=1\.0 and r2=1\.0 must be positive"):
        by_pairs(Matching(1, ((0, 0, 0),)), 1.0, 1.0)


# Its way to the softmax.


def test_with_special_keys_the_objective_tends_to_squares_and_a_square_of_sums():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    clusters = Biclustering(torch.tensor([[0, 2], [1, 3]]), torch.tensor([[0, 3, 4, 6, 8], [1, 2, 5, 7, 9]]))
    a = 9.0
    value = objective(with_special_keys(p, a), clusters.together()) ** 2
    outside = p.exp() * ~clusters.together()[:, :6]
    limit = float((outside.square().sum(1) + outside.sum(1).square()).sum())
    assert value * math.exp(2 * a) == pytest.approx(limit, rel=0.01)
    assert limit > 1.5 * float(outside.square().sum())


@pytest.mark.parametrize("a", [6.0, 9.0, 12.0])
def test_special_keys_do_not_make_the_optimum_that_of_the_mass(a):
    weights = torch.tensor([[1, 1, 3, 4], [3, 4, 4, 4]], dtype=torch.float64)  # e^P
    by_mass = search(mass_costs(weights.square(), 2)).clusters
    best = search(softmax_costs(with_special_keys(weights.log(), a), 2)).clusters
    of_first, of_first_by_mass = (set(one.keys[(one.queries == 0).nonzero()[0, 0]].tolist()) for one in (best, by_mass))
    assert 4 in of_first  # its special key
    assert of_first - {4} != of_first_by_mass


# The construction that holds.


@settings(deadline=None, max_examples=30)
@given(instances(largest=2, most=3))
def test_a_matching_exists_if_and_only_if_the_threshold_is_reached(instance):
    reduction = by_triples(instance)
    best = search(reduction.problem)
    assert reduction.is_reached(best.total) == (instance.solve() is not None)
    if reduction.is_reached(best.total):
        assert instance.is_matching(chosen_triples(instance, best.clusters))


@pytest.mark.parametrize(
    ("n", "n_triples"), [(2, 4), (3, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 5), (4, 6)))]
)
@pytest.mark.parametrize("exists", [True, False])
def test_larger_instances_by_the_solver(n, n_triples, exists):
    pytest.importorskip("ortools")
    from smyrf.experiments.theory.solver import solve

    instance = next(one for seed in range(1000) if ((one := draw(n, n_triples, seed)).solve() is not None) == exists)
    reduction = by_triples(instance)
    best = solve(reduction.problem)
    assert reduction.is_reached(best.total) == exists
    assert not exists or instance.is_matching(chosen_triples(instance, best.clusters))


@settings(deadline=None)
@given(instances())
def test_clusters_of_a_matching_reach_the_threshold_and_nothing_can_be_less(instance):
    reduction = by_triples(instance)
    assert reduction.problem.row_bound() == pytest.approx(reduction.threshold, abs=1e-12)
    found = instance.solve()
    if found is not None:
        clusters = clusters_by_triples(instance, found)
        assert reduction.is_reached(reduction.problem.total(clusters))
        assert set(chosen_triples(instance, clusters)) == set(found)


@settings(deadline=None)
@given(instances())
def test_every_query_is_at_its_least_cost_on_allowed_keys_with_its_own_and_nowhere_else(instance):
    """Steps 1 and 2 of the proof, with room for rounding."""
    reduction = by_triples(instance)
    n_triples, problem = len(instance.triples), reduction.problem
    allowed = reduction.scores > -1.0
    is_least = problem.costs < problem.costs.min(1, keepdim=True).values + 1e-6
    own = torch.zeros_like(is_least)
    own[n_triples:] = (problem.sets[:, None] == torch.arange(n_triples)[:, None]).any(-1).T
    own[:n_triples] = True
    assert torch.equal(is_least, allowed[:, problem.sets].all(-1) & own)


@settings(deadline=None, max_examples=20)
@given(instances(largest=2, most=3))
def test_lemma_1_holds_by_the_same_construction(instance):
    scores = by_triples(instance).scores
    weights = (scores == 0.0).double() + 2.0 * (scores > 0.0)
    problem = mass_costs(weights, len(instance.triples))
    assert (search(problem).total == problem.row_bound()) == (instance.solve() is not None)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: Matching(0, ()), "n=0 must be at least 1"),
        (lambda: Matching(2, ((0, 1, 2),)), r"triple=\(0, 1, 2\) must have three numbers of 0 … 1"),
        (lambda: Matching(2, ((0, 1, 1), (0, 1, 1))), "must differ"),
        (lambda: draw(2, 9, seed=0), "n_triples=9 must be at most n=2"),
        (lambda: by_triples(Matching(2, ((0, 1, 1),))), "fewer than n=2"),
    ],
)
def test_bad_input_is_named(run, message):
    with pytest.raises(ValueError, match=message):
        run()
