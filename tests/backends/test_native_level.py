"""A level of Tangent attention in the extension against the same by PyTorch's operators."""

import pytest
import torch

from smyrf import Tangent
from smyrf.backends.native import extension
from smyrf.backends.torch.workspace import workspace
from smyrf.grouping.tangent import levels
from smyrf.grouping.tangent.candidates import Candidates
from smyrf.grouping.tangent.levels import tangent_groups
from smyrf.methods.levels import Level

if extension.MISSING:  # where the package was installed without a compiler
    pytest.skip(extension.MISSING, allow_module_level=True)
from smyrf.backends.native import level as native

isa = pytest.mark.parametrize("isa", extension.instruction_sets())


@isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("n", "m", "width", "value_width", "method", "masked"),
    [
        (700, 900, 17, 5, Tangent(128), True),
        (1024, 1024, 32, 32, Tangent(256), False),
        (1500, 1111, 8, 33, Tangent(100), True),
        (2048, 2048, 16, 16, Tangent(200, levels=2), False),
        (130, 2500, 3, 1, Tangent(90), False),
    ],
)
def test_a_level_is_that_of_pytorchs_operators(monkeypatch, isa, dtype, n, m, width, value_width, method, masked):
    q, k, v = (torch.randn(2, 2, *shape, dtype=dtype) for shape in ((n, width), (m, width), (m, value_width)))
    mask = torch.rand(2, m) > 0.3 if masked else None
    monkeypatch.setattr(extension, "ISA", isa)
    (found,) = tangent_groups(q, k, v, method, scale=0.3, key_mask=mask)
    monkeypatch.setattr(extension, "MISSING", "left out")
    (expected,) = tangent_groups(q, k, v, method, scale=0.3, key_mask=mask)
    assert torch.equal(found.queries, expected.queries)
    same = found.keys.sort(-1).values == expected.keys.sort(-1).values
    assert same.float().mean() > 0.999  # two that are equal but for rounding may change places
    for a, b in zip(found.extra, expected.extra, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def run(function, k, v, centroids, n_near, n_far, hidden=None, **kwargs):
    """One level with a single head, all keys, no spread and no weights."""
    n, n_clusters = len(k), len(centroids)
    level = Level(n_clusters=n_clusters, cluster_size=1, n_candidates=n, n_near=n_near, n_far=n_far)
    keys = Candidates(torch.cat([k, v], dim=-1), hidden, torch.arange(n)[None])
    zeros, leaf = torch.zeros(1, n, dtype=k.dtype), torch.zeros(1, n, dtype=torch.int64)
    kept = torch.full((1, n_clusters, n_near), -7)
    vectors = torch.full((1, n_clusters, n_far, k.shape[-1] + v.shape[-1]), torch.nan, dtype=k.dtype)
    bias = torch.full((1, n_clusters, n_far), torch.nan, dtype=k.dtype)
    spread = torch.zeros(1, n_clusters, 1, dtype=k.dtype)
    function(keys, level, centroids[None], spread, (zeros, zeros, leaf), 0, kept, vectors, bias, **kwargs)
    return kept, vectors, bias


@isa
@pytest.mark.parametrize("n_clusters", [1, 5, 64, 67])
def test_a_sample_that_is_not_like_the_rest_does_no_harm(monkeypatch, isa, n_clusters):
    """Every sixteenth key, which are those that are looked at first, is far better than all the others."""
    monkeypatch.setattr(extension, "ISA", isa)
    n, n_near = 4096, 300
    k, v, centroids = torch.randn(n, 7), torch.randn(n, 3), torch.rand(n_clusters, 7) + 1
    k[::16] += 10
    kept, vectors, bias = run(native.keep_and_fold, k, v, centroids, n_near, 8)
    with workspace(k.device) as scratch:
        expected = run(levels.keep_and_fold, k, v, centroids, n_near, 8, scratch=scratch)
    assert torch.equal(kept, expected[0])
    torch.testing.assert_close(vectors, expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias, expected[2], rtol=1e-4, atol=1e-4)


def test_of_equal_keys_the_first_are_kept_and_hidden_ones_last():
    k, v, centroids = torch.ones(50, 4), torch.randn(50, 2), torch.ones(3, 4)
    hidden = torch.zeros(1, 50, dtype=torch.bool)
    hidden[0, :5] = True
    kept, vectors, bias = run(native.keep_and_fold, k, v, centroids, 10, 4, hidden)
    assert torch.equal(kept, torch.arange(5, 15).expand(1, 3, 10))
    assert torch.isneginf(bias[:, :, 0]).all()  # 0 … 11: five are hidden, the others kept
    assert (vectors[:, :, 0] == 0).all()
    torch.testing.assert_close(vectors[0, 0, 3, 4:], v[37:].mean(0))
    all_hidden, _, bias = run(native.keep_and_fold, k, v, centroids, 10, 4, ~torch.zeros_like(hidden))
    assert torch.equal(all_hidden, torch.arange(10).expand(1, 3, 10))
    assert torch.isneginf(bias).all()


def test_all_candidates_may_be_kept():
    k, v, centroids = torch.randn(9, 4), torch.randn(9, 2), torch.randn(2, 4)
    kept, vectors, bias = run(native.keep_and_fold, k, v, centroids, 9, 3)
    assert torch.equal(kept, torch.arange(9).expand(1, 2, 9))
    assert torch.isneginf(bias).all()
    assert (vectors == 0).all()
