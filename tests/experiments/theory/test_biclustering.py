from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from problems import attend, make_groups
from smyrf import Smyrf, Tangent
from smyrf.experiments.theory import biclustering
from smyrf.experiments.theory.biclustering import (
    Biclustering,
    SetCosts,
    against_optimum,
    mask,
    mass_costs,
    meetings,
    n_biclusterings,
    objective,
    search,
    softmax_costs,
)


def scores(n_queries, n_keys, seed=0, width=3):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, width, dtype=torch.float64, generator=generator) for n in (n_queries, n_keys))
    return q @ k.T


def every_biclustering(n_queries, n_keys, n_clusters):
    """All orders of queries and keys, cut into runs: each biclustering many times, none left out."""
    for queries in permutations(range(n_queries)):
        for keys in permutations(range(n_keys)):
            yield Biclustering(torch.tensor(queries).view(n_clusters, -1), torch.tensor(keys).view(n_clusters, -1))


@pytest.mark.parametrize(("n_queries", "n_keys", "n_clusters"), [(4, 4, 2), (3, 3, 3), (2, 4, 2), (4, 2, 2), (2, 3, 1)])
def test_search_finds_the_least_objective_of_all_biclusterings(n_queries, n_keys, n_clusters):
    p = scores(n_queries, n_keys)
    best = search(softmax_costs(p, n_clusters))
    values = {}
    for one in every_biclustering(n_queries, n_keys, n_clusters):
        together = one.together()
        values[tuple(together.flatten().tolist())] = objective(p, together)
    assert len(values) == n_biclusterings(n_queries, n_keys, n_clusters)
    assert objective(p, best.clusters.together()) == pytest.approx(min(values.values()), abs=1e-12)
    assert best.total == pytest.approx(min(values.values()) ** 2, abs=1e-12)


def test_costs_of_a_biclustering_are_its_squared_objective():
    p = scores(6, 9)
    problem = softmax_costs(p, 3)
    clusters = Biclustering(torch.tensor([[5, 0], [1, 4], [2, 3]]), torch.tensor([[8, 0, 4], [7, 1, 3], [2, 5, 6]]))
    assert problem.total(clusters) == pytest.approx(objective(p, clusters.together()) ** 2, abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 2.0])
def test_mask_is_the_log_of_epsilon_outside_of_clusters(epsilon):
    p = scores(4, 6)
    together = Biclustering(torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0, 1, 5], [2, 3, 4]])).together()
    masked = mask(p, together, epsilon)
    assert torch.equal(masked[together], p[together])
    assert torch.allclose(masked[~together].exp(), torch.tensor(epsilon, dtype=p.dtype))


def test_distance_of_masked_scores_is_minus_the_mass_but_for_a_constant():
    """Lemma 1: ‖P̂_ε − P‖² = Σ (P + a)² − Σ over pairs that are together."""
    p, a = scores(4, 4), 2.5
    weights = (p + a) ** 2
    problem = mass_costs(weights, 2)
    for clusters in (search(problem).clusters, Biclustering(torch.arange(4).view(2, 2), torch.arange(4).view(2, 2))):
        masked = mask(p, clusters.together(), torch.tensor(-a).double().exp().item())
        assert float((masked - p).square().sum() - weights.sum()) == pytest.approx(problem.total(clusters), abs=1e-12)


def test_one_cluster_is_dense_attention():
    p = scores(5, 7)
    assert search(softmax_costs(p, 1)).total == pytest.approx(0.0, abs=1e-12)


def test_no_biclustering_beats_every_query_on_its_own():
    problem = softmax_costs(scores(8, 8), 4)
    assert problem.row_bound() <= search(problem).total


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(8, 8, 4), (6, 9, 3), (8, 4, 2)]), st.sampled_from([0.3, 1.0, 4.0]))
def test_clusters_of_smyrf_are_feasible_and_never_beat_the_optimum(seed, shape, sharpness):
    n_queries, n_keys, n_clusters = shape
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (n_queries, n_keys))
    methods = [
        Smyrf(3, n_queries // n_clusters, transform=transform, hashing=hashing)
        for transform, hashing in (("asymmetric", "projection"), ("none", "cross_polytope"), ("xbox", "projection"))
    ]
    for found in against_optimum(q, k, methods, n_clusters, scale=sharpness, seed=seed % 1000):
        assert found.feasible
        assert len(found.rounds) == 3
        assert min(found.rounds) >= found.optimum - 1e-9


def test_smyrf_finds_the_optimum_where_clusters_are_far_apart():
    q = torch.tensor([[9.0, 0.0], [-9.0, 0.0], [8.0, 0.0], [-8.0, 0.0]], dtype=torch.float64)
    (found,) = against_optimum(q, q.flip(0), [Smyrf(8, 2)], 2)
    assert min(found.rounds) == pytest.approx(found.optimum, abs=1e-12)


def test_rounds_are_merged_as_attention_merges_them():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 12, 4, dtype=torch.float64, generator=generator)
    method = Smyrf(4, 3)
    rounds = make_groups(q, k, k, method, scale=1.0, seed=torch.tensor(5))
    values = torch.eye(12, dtype=torch.float64)[None, None]
    attention_map, _ = attend(q, k, values, rounds, scale=1.0)
    p = q[0, 0] @ k[0, 0].T
    expected = float((attention_map[0, 0] - p.softmax(-1)).norm())
    assert objective(p, meetings(rounds, 12, 12)) == pytest.approx(expected, abs=1e-12)


def test_near_keys_of_tangent_are_between_the_rows_own_best_and_everything():
    generator = torch.Generator().manual_seed(1)
    q, k = 1.5 * torch.randn(2, 8, 3, dtype=torch.float64, generator=generator)
    method = Tangent(7, cluster_size=4, n_near=4, n_far=1)
    (found,) = against_optimum(q, k, [method], 2)
    assert softmax_costs(q @ k.T, 2).row_bound() ** 0.5 <= found.value
    assert found.rounds == (found.value,)


def test_near_keys_of_tangent_may_be_shared_and_beat_the_optimum():
    """Two keys that everybody looks at: one cluster of a biclustering must do without them."""
    q = torch.tensor([[4.0, 1.0], [4.0, -1.0]], dtype=torch.float64).repeat_interleave(4, 0)
    k = torch.tensor([[1.0, 0.0]] * 2 + [[-1.0, 0.1]] * 6, dtype=torch.float64)
    tangent, smyrf = against_optimum(q, k, [Tangent(7, cluster_size=4, n_near=4, n_far=1), Smyrf(1, 4)], 2)
    assert not tangent.feasible
    assert tangent.value < 0.1 * tangent.optimum
    assert smyrf.feasible
    assert smyrf.value >= smyrf.optimum - 1e-12


def test_a_biclustering_is_told_from_other_pairs():
    halves = torch.block_diag(torch.ones(2, 3), torch.ones(2, 3)).long()
    assert biclustering._is_biclustering(halves, 2)
    assert not biclustering._is_biclustering(halves, 1)
    assert not biclustering._is_biclustering(2 * halves, 2)
    crossed = halves.clone()
    crossed[0, [2, 3]], crossed[2, [2, 3]] = torch.tensor([0, 1]), torch.tensor([1, 0])  # the same sums
    assert not biclustering._is_biclustering(crossed, 2)


def test_a_query_without_keys_has_a_row_of_zeros():
    assert objective(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: softmax_costs(torch.zeros(4, 4), 3), "n_clusters=3 must divide n_queries=4 and n_keys=4"),
        (lambda: softmax_costs(torch.zeros(4), 2), r"scores have the shape \(4,\)"),
        (lambda: softmax_costs(torch.full((2, 2), torch.inf), 2), "scores are not finite"),
        (
            lambda: softmax_costs(torch.zeros(40, 40), 4),
            "n_queries=40 .* 33,906,421,120 costs, more than 10,000,000",
        ),
        (lambda: search(softmax_costs(torch.zeros(12, 12), 4)), "n_queries=12 .*use smyrf.experiments.theory.solver"),
        (
            lambda: mask(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), -1.0),
            "epsilon=-1.0 must not be negative",
        ),
        (lambda: Biclustering(torch.tensor([[0, 0]]), torch.tensor([[0]])), "queries=.* must have each of 0 … 1 once"),
        (lambda: Biclustering(torch.tensor([[0]]), torch.tensor([[0], [1]])), "1 clusters of queries and 2 of keys"),
        (lambda: Biclustering(torch.tensor([0]), torch.tensor([[0]])), r"queries have the shape \(1,\)"),
        (
            lambda: against_optimum(torch.randn(8, 2), torch.randn(8, 2), [Smyrf(1, 2)], 2),
            "method=Smyrf.* makes 4 clusters of n_queries=8 and n_keys=8, not n_clusters=2",
        ),
    ],
)
def test_bad_input_is_named(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_too_many_biclusterings_are_refused_before_any_is_tried(monkeypatch):
    monkeypatch.setattr(biclustering, "_partitions", lambda *_: pytest.fail("tried"))
    with pytest.raises(ValueError, match="biclusterings, more than"):
        search(SetCosts(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(16, 1), 4))
