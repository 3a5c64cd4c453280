"""The arithmetic of the torch backend's `select_and_fold`: near keys and far keys of one level."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from smyrf.backends.torch import far, near
from smyrf.backends.torch.workspace import workspace

CPU = torch.device("cpu")


@given(n=st.integers(1, 40), n_far=st.integers(1, 9), seed=st.integers(0, 999))
def test_a_far_key_is_the_tangent_of_its_groups_mass(n, n_far, seed):
    """At the centroid it has the group's weight and mean value, and nowhere more weight than the group."""
    torch.manual_seed(seed)
    k, v, centroid = torch.randn(1, n, 5), torch.randn(1, n, 3), torch.randn(1, 2, 5)
    hidden = torch.rand(1, 2, n) < 0.3
    scores = (centroid @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf)
    found, biases = far.fold(scores.clone(), torch.cat([k, v], -1), centroid, n_far)
    q = torch.randn(2, 50, 5)
    for cluster in range(2):
        for i, run in far.runs(n, n_far):
            far_key, far_value = found[0, cluster, i].split([5, 3])
            bias, here = biases[0, cluster, i], ~hidden[0, cluster, run]
            if not here.any():
                assert bias == -torch.inf
                assert (far_key == 0).all()
                continue
            keys, values = k[0, run][here], v[0, run][here]
            mass = (keys @ centroid[0, cluster]).logsumexp(0)
            torch.testing.assert_close(far_key @ centroid[0, cluster] + bias, mass)
            mean = (keys @ centroid[0, cluster]).softmax(0) @ values
            torch.testing.assert_close(far_value, mean, atol=1e-5, rtol=1e-5)
            ours = q[cluster] @ far_key + bias
            assert (ours <= (q[cluster] @ keys.T).logsumexp(-1) + 1e-4).all()


def test_folding_has_the_gradients_of_its_formula():
    k, v, centroid = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((23, 5), (23, 3), (4, 5)))
    hidden = torch.rand(2, 4, 23) < 0.3
    k.requires_grad_()
    v.requires_grad_()

    def formula():
        scores = (centroid @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        keys, values, bias = [], [], []
        for _, run in far.runs(23, 3):
            weights = scores[..., run].softmax(-1)
            keys.append(weights @ k[:, run])
            values.append(weights @ v[:, run])
            bias.append(scores[..., run].logsumexp(-1) - (keys[-1] * centroid).sum(-1))
        return torch.cat([torch.stack(keys, 2), torch.stack(values, 2)], -1), torch.stack(bias, 2)

    expected = formula()
    grads = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, (k, v), grads)
    with torch.no_grad():
        vectors = torch.cat([k, v], -1)
        scores = (centroid @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        found = far.fold(scores.clone(), vectors, centroid, 3)
        into = torch.zeros_like(vectors)
        far.fold_backward(scores, vectors, centroid, *found, *grads, into)
    for ours, theirs in zip((*found, into), (*expected, torch.cat(wanted, -1)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_choose_finds_the_largest_in_ascending_places():
    scores = torch.randn(3, 5, 50)
    chosen = near.choose(scores, 7)
    assert torch.equal(chosen, scores.topk(7).indices.sort(-1).values)
    assert torch.equal(near.choose(scores, 50)[0, 0], torch.arange(50))


def test_a_key_is_ranked_by_what_it_may_do_to_the_output():
    spread, of_key, weight = torch.tensor([[[0.5], [2.0]]]), torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[0.0, -1.0]]])
    with workspace(CPU) as scratch:
        found = near.score(torch.tensor([[[1.0, 0.0], [0.0, -torch.inf]]]), spread, of_key, weight, scratch)
    torch.testing.assert_close(found, torch.tensor([[[2.5, 3.5], [6.0, -torch.inf]]]))


def test_spread_and_weight_are_what_their_formulas_say():
    k, v, variance = torch.randn(2, 40, 5), torch.randn(2, 40, 3), torch.rand(2, 5)
    mask = torch.rand(2, 40) < 0.6
    k, v = k * mask[..., None], v * mask[..., None]
    with workspace(CPU) as scratch:
        spread, key_variance = near.key_spread(k, variance, mask, scratch)
        weight = near.value_weight(v, mask, scratch)
    for row in range(2):
        valid_k, valid_v = k[row][mask[row]], v[row][mask[row]]
        sigma_sq = ((valid_k - valid_k.mean(0)).square() * variance[row]).sum(-1)
        torch.testing.assert_close(spread[row][mask[row]], (sigma_sq / sigma_sq.mean()).sqrt())
        torch.testing.assert_close(key_variance[row], valid_k.var(0, correction=0))
        away = (valid_v - valid_v.mean(0)).square().sum(-1)
        torch.testing.assert_close(weight[row][mask[row]], 0.5 * (away / away.mean() + 1e-4).log())


def test_own_keys_come_first_unless_masked():
    scores = torch.tensor([[[1.0, 2.0, -torch.inf], [3.0, 4.0, 5.0]]])
    near.prefer_own(scores, torch.tensor([[[0, 7, 0]]]))
    assert scores[0, 0].tolist() == [torch.inf, 2.0, -torch.inf]
    assert scores[0, 1].tolist() == [3.0, 4.0, 5.0]
