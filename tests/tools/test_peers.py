"""The peers of `smyrf bench quality`, which live in benchmarks/peers."""

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

from smyrf.tools.quality.peers import load_peers

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
peers = load_peers(FOLDER)
NAMES = list(peers(64, 512))
SCALE = 0.4


def factory(file, name):
    return getattr(importlib.import_module(f"{peers.__module__}.{file}"), name)


def inputs(n_queries=101, n_keys=89, dtype=torch.float64):
    q = torch.randn(2, 3, n_queries, 7, dtype=dtype)
    k, v = torch.randn(2, 3, n_keys, 7, dtype=dtype), torch.randn(2, 3, n_keys, 5, dtype=dtype)
    return q, k, v


def dense(q, k, v):
    return (SCALE * q @ k.transpose(-1, -2)).softmax(-1) @ v


def map_of(peer, q, k):
    identity = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return peer.run(q, k, identity, SCALE, 0)  # (batch, heads, N, M)


def exact_peers(n_keys, n_queries):
    """Each method with sizes at which it is dense attention."""
    return {
        "oracle": factory("oracle", "oracle_top_k")(n_keys),
        "all keys are top keys": factory("clustered", "improved_clustered")(6, n_keys, n_keys, n_queries),
        "a cluster per query": factory("clustered", "improved_clustered")(n_queries, 9, n_keys, n_queries),
        "one chunk": factory("reformer", "reformer")(1, 1, n_keys),
        "two chunks, each with the one before": factory("reformer", "reformer")(3, 2, n_keys),
        "one block": factory("hyper", "sorted_blocks_and_samples")(1, 0, n_keys),
        "all keys are sampled": factory("hyper", "sorted_blocks_and_samples")(5, n_keys, n_keys),
        "all keys are chosen": factory("routing", "routing")(4, n_keys, n_keys, n_queries),
        "one cluster": factory("random_clusters", "random_clusters")(1, 1, n_keys),
    }


@pytest.mark.parametrize("name", list(exact_peers(5, 5)))
def test_where_nothing_is_left_out_a_peer_is_dense(name):
    q, k, v = inputs()
    out = exact_peers(89, 101)[name].run(q, k, v, SCALE, 0)
    if name == "a cluster per query":  # queries with the same signs share one, so it is only nearly so
        assert (out - dense(q, k, v)).norm() < 0.05 * dense(q, k, v).norm()
    else:
        torch.testing.assert_close(out, dense(q, k, v))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "improved clustered"])
def test_a_budget_of_all_keys_is_dense(name):
    q, k, v = inputs()
    torch.testing.assert_close(peers(89, 89, 101)[name].run(q, k, v, SCALE, 0), dense(q, k, v))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_finite_repeatable_and_differentiable(name):
    q, k, v = (x.float().requires_grad_() for x in inputs())
    peer = peers(32, 89, 101)[name]
    out = peer.run(q, k, v, SCALE, 3)
    assert out.shape == (2, 3, 101, 5)
    assert torch.equal(out, peer.run(q, k, v, SCALE, 3))
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in (out, *gradients))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_function(name):
    """Along one direction, against a difference quotient; the choice of keys stays the same."""
    q, k, v = (x.requires_grad_() for x in inputs(23, 29))
    peer = peers(16, 29, 23)[name]
    steps = [1e-6 * torch.randn_like(x) for x in (q, k, v)]
    ahead, behind = (
        peer.run(*(x + sign * step for x, step in zip((q, k, v), steps, strict=True)), SCALE, 0) for sign in (1, -1)
    )
    cotangent = torch.randn_like(ahead)
    gradients = torch.autograd.grad(peer.run(q, k, v, SCALE, 0), (q, k, v), cotangent)
    wanted = ((ahead - behind) * cotangent).sum() / 2
    found = sum((g * step).sum() for g, step in zip(gradients, steps, strict=True))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_keys", "n_queries"), [(512, 512), (500, 300), (300, 1000)])
@pytest.mark.parametrize("budget", [32, 64, 128, 250])
def test_key_visits_are_within_a_tenth_of_the_budget(name, n_keys, n_queries, budget):
    assert peers(budget, n_keys, n_queries)[name].key_visits == pytest.approx(budget, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_a_query_add_up_to_one_on_no_more_keys_than_it_says(name):
    q, k, _ = inputs(96, 96)
    peer = peers(32, 96, 96)[name]
    weights = map_of(peer, q, k)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    if name != "improved clustered":  # it gives the centroid's weights to all others
        assert (weights > 0).sum(-1).max() <= peer.key_visits


def test_improved_clustered_shares_the_weights_of_all_but_top_keys_within_a_cluster():
    """Every row is the centroid's softmax, but for its `n_top` largest, whose mass is kept."""
    q, k, _ = inputs(60, 50)
    weights = map_of(factory("clustered", "improved_clustered")(4, 10, 50, 60), q, k)[0, 0]  # (N, M)
    signs = factory("clustered", "_cluster_signs")(q.flatten(0, 1), 4, 0)[0]  # (N,)
    for cluster in signs.unique():
        members = signs == cluster
        centroid = (SCALE * q[0, 0][members].mean(0) @ k[0, 0].T).softmax(-1)  # (M,)
        top = centroid.topk(10).indices
        rest = torch.ones(50, dtype=torch.bool).index_fill(0, top, False)
        mine = weights[members]
        torch.testing.assert_close(mine[:, rest], centroid[rest].expand(len(mine), -1))
        again = (SCALE * q[0, 0][members] @ k[0, 0][top].T).softmax(-1) * centroid[top].sum()
        torch.testing.assert_close(mine[:, top], again)


def test_sampled_keys_stand_for_those_outside_of_the_block():
    """All scores alike: block and samples together weigh as all keys, the block as its share of them."""
    q, k, _ = inputs(64, 64)
    weights = map_of(factory("hyper", "sorted_blocks_and_samples")(4, 8, 64), torch.zeros_like(q), k)
    largest = weights.amax(-1, keepdim=True)
    outside = weights.masked_fill(weights < 0.999 * largest, 0).sum(-1)  # samples weigh more than keys of the block
    torch.testing.assert_close(outside, torch.full_like(outside, 48 / 64))


def test_reformer_counts_a_pair_once():
    """With equal scores all keys that a query meets have the same weight, in however many rounds."""
    q, k, _ = inputs(64, 64)
    weights = map_of(factory("reformer", "reformer")(6, 8, 64), 1e-9 * q, k)
    for row in weights.flatten(0, 2)[::17]:
        met = row[row > 0]
        torch.testing.assert_close(met, met.mean().expand_as(met))


def test_clusters_of_any_sizes_become_groups_of_one_size():
    cluster = torch.tensor([[2, 0, 2, 2, 0, 2, 2], [1, 1, 1, 1, 1, 1, 1]])
    members, of_group = factory("members", "group_members")(cluster, 4, 3)
    assert members.tolist() == [
        [[1, 4, -1], [0, 2, 3], [5, 6, -1]],
        [[0, 1, 2], [3, 4, 5], [6, -1, -1]],
    ]
    assert of_group.tolist() == [[0, 2, 2], [1, 1, 1]]


def test_runs_are_as_equal_as_can_be():
    order = torch.tensor([[3, 0, 6, 1, 5, 2, 4]])
    assert factory("runs", "cut")(order, 3).tolist() == [[[3, 0, -1], [6, 1, -1], [5, 2, 4]]]
    assert factory("runs", "run_of_each")(order, 3).tolist() == [[0, 1, 2, 0, 2, 2, 1]]


def test_neighbours_in_gray_order_differ_in_one_sign():
    signs = torch.tensor([[float(2 * bool(i & 1 << b) - 1) for b in range(4)] for i in range(16)])  # all 16
    rank = factory("angular", "gray_rank")(signs[None], torch.eye(4))[0]
    assert sorted(rank.tolist()) == list(range(16))
    ordered = signs[rank.argsort()]
    assert all(int((a != b).sum()) == 1 for a, b in itertools.pairwise(ordered))


def test_the_folder_is_loaded_under_a_name_of_its_own():
    assert "peers" not in sys.modules
    assert peers.__module__ == "smyrf_peers_peers"
