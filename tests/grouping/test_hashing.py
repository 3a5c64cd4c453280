"""`sort_by_hash` of every backend, the native one with each instruction set."""

import pytest
import torch

from problems import SEED, make_call
from smyrf import Smyrf, methods
from smyrf.backends import find_backend
from smyrf.backends.native import extension
from smyrf.backends.torch.hashing import _argsort
from smyrf.grouping.hashing import HASHES
from smyrf.grouping.transforms import transform


@pytest.fixture(params=["reference", "torch", *(f"native {isa}" for isa in extension.instruction_sets())])
def orders(request, monkeypatch):
    """Orders of queries and keys by one backend."""
    name, _, isa = request.param.partition(" ")
    monkeypatch.setattr(extension, "ISA", isa)
    backend = find_backend(name)

    def run(q, k, key_mask=None, seed=SEED, scale=0.3, n_clusters=6, n_hashes=5, **options):
        call = backend.prepare(make_call(q, k, scale=scale, seed=seed, key_mask=key_mask))
        return backend.sort_by_hash(call, Smyrf(n_hashes, **options), n_clusters)

    return run


@pytest.fixture
def q():
    return torch.randn(2, 3, 97, 13)


@pytest.fixture
def k():
    return torch.randn(2, 3, 113, 13)


@pytest.mark.parametrize("transform", methods.TRANSFORMS)
@pytest.mark.parametrize("hashing", methods.HASHINGS)
def test_every_order_is_a_permutation(orders, q, k, transform, hashing):
    for order in orders(q, k, transform=transform, hashing=hashing):
        assert torch.equal(order.sort(-1).values, torch.arange(order.shape[-1]).expand_as(order))


@pytest.mark.parametrize(("n", "m", "width"), [(97, 113, 13), (1, 2, 1), (64, 700, 32), (5000, 4097, 3)])
def test_projection_sorts_by_the_projection_of_the_transformed_vectors(orders, n, m, width):
    """Eq. 14, computed the long way: [q; 0; √…] · a with the vectors written out."""
    q, k = torch.randn(2, 3, n, width), torch.randn(2, 3, m, width)
    q_order, k_order = orders(q, k)
    a = torch.randn(5, width + 2, generator=torch.Generator().manual_seed(int(SEED))).double()
    x, y = 0.3 * q.double(), k.double()
    radius = x.square().sum(-1).amax(-1, keepdim=True) + y.square().sum(-1).amax(-1, keepdim=True)
    x_rest, y_rest = (radius - x.square().sum(-1)).sqrt()[..., None], (radius - y.square().sum(-1)).sqrt()[..., None]
    F = torch.cat([x, torch.zeros_like(x_rest), x_rest], -1)
    G = torch.cat([y, y_rest, torch.zeros_like(y_rest)], -1)
    for order, lifted in ((q_order, F), (k_order, G)):
        hashes = (lifted @ a.T).transpose(-1, -2).gather(-1, order.long())
        span = hashes.amax(-1, keepdim=True) - hashes.amin(-1, keepdim=True)
        assert (hashes.diff(dim=-1) >= -1e-5 - 2**-18 * span).all()  # the extension's buckets


def test_masked_keys_come_last(orders, q, k):
    mask = torch.rand(2, 113) > 0.4
    _, k_order = orders(q, k, mask)
    for row in range(2):
        n_valid = int(mask[row].sum())
        assert mask[row][k_order[row, :, :, :n_valid]].all()
        assert not mask[row][k_order[row, :, :, n_valid:]].any()


def test_a_row_is_sorted_alike_in_any_batch(orders, q, k):
    mask = torch.rand(2, 113) > 0.4
    whole = orders(q, k, mask)
    for row in range(2):
        alone = orders(q[row : row + 1], k[row : row + 1], mask[row : row + 1])
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[row], b[0])


def test_grouped_keys_are_hashed_with_each_of_their_query_heads(orders):
    q, k = torch.randn(1, 6, 31, 5), torch.randn(1, 2, 37, 5)
    grouped = orders(q, k)
    repeated = orders(q, k.repeat_interleave(3, dim=1))
    for a, b in zip(grouped, repeated, strict=True):
        assert torch.equal(a, b)


def test_half_precision_is_hashed_in_float32(orders, q, k):
    half = orders(q.bfloat16(), k.bfloat16())
    full = orders(q.bfloat16().float(), k.bfloat16().float())
    assert all(torch.equal(a, b) for a, b in zip(half, full, strict=True))


def test_double_precision_is_hashed_as_it_is(orders, q, k):
    close = q.double() + 1e-12 * torch.randn(q.shape, dtype=torch.float64)
    for a, b in zip(orders(close, k.double()), orders(q, k), strict=True):
        assert (a == b).float().mean() > 0.9


def test_any_strides_and_threads_give_the_same_orders(orders, q, k):
    base = orders(q, k)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    wide = [torch.cat([x, x], dim=-1)[..., : x.shape[-1]] for x in (q, k)]
    threads = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            for pair in (turned, wide):
                assert all(torch.equal(a, b) for a, b in zip(base, orders(*pair), strict=True))
    finally:
        torch.set_num_threads(threads)


def test_seeds_differ_and_repeat(orders, q, k):
    assert torch.equal(orders(q, k)[0], orders(q, k)[0])
    assert not torch.equal(orders(q, k)[0], orders(q, k, seed=SEED + 1)[0])


def test_nan_and_inf_are_sorted_after_all_others_but_before_masked_keys(orders, q, k):
    k[0, 0, 4], k[0, 0, 9] = torch.nan, torch.inf
    mask = torch.ones(2, 113, dtype=torch.bool)
    mask[0, 20] = False
    _, k_order = orders(q, k, mask)
    assert (k_order[0, 0, :, -1] == 20).all()
    assert (k_order[0, 0, :, -3:-1].sort(-1).values == torch.tensor([4, 9])).all()


def test_buckets_of_the_cross_polytope_are_the_nearest_directions():
    x = torch.randn(1, 1, 50, 4)
    lifted, _ = transform("none", x.square().sum(-1), x.square().sum(-1))
    vectors = torch.randn(2, 3, 4)
    buckets = HASHES["cross_polytope"](x, lifted, vectors)
    for h in range(2):
        both = torch.cat([vectors[h], -vectors[h]])
        assert torch.equal(buckets[0, 0, h], (x[0, 0] @ both.T).argmax(-1).float())


def test_argsort_is_stable_and_knows_negative_numbers():
    hashes = torch.tensor([3.0, -1.0, 3.0, -torch.inf, -1.0, torch.inf, -2.5])
    assert torch.equal(_argsort(hashes), hashes.argsort(stable=True))
    many = torch.randint(-9, 9, (4, 1000)).float()
    assert torch.equal(_argsort(many), many.argsort(dim=-1, stable=True))


def test_methods_list_the_hashings_that_exist():
    assert set(methods.HASHINGS) == set(HASHES)


@pytest.mark.parametrize("size", [1e-18, 1e-9, 1e15])
def test_tiny_and_huge_vectors_are_sorted_like_others(orders, q, k, size):
    """As far as a float can tell them apart: a few change places."""
    x = torch.randn(1, 2, 2000, 8)
    base, scaled = orders(x, x)[0], orders(size * x, size * x)[0]
    assert (base == scaled).float().mean() > 0.98


def test_one_hash_far_away_leaves_the_order_of_the_others(orders):
    x = torch.randn(1, 1, 3000, 4)
    far = torch.cat([x, torch.full((1, 1, 1, 4), 1e6)], dim=2)
    order = orders(far, far, transform="none", n_hashes=1)[0][0, 0, 0]
    a = torch.randn(1, 4, generator=torch.Generator().manual_seed(int(SEED)))
    hashes = 0.3 * (x[0, 0] @ a[0])[order[order != 3000].long()]
    assert (hashes.diff() > -1e-5).all()


def test_one_long_vector_leaves_the_order_of_the_others(orders):
    x = torch.randn(1, 1, 3000, 4)
    x[0, 0, 7] *= 1e7
    q_order, _ = orders(x, x, scale=1.0, n_hashes=1)
    a = torch.randn(1, 6, generator=torch.Generator().manual_seed(int(SEED))).double()
    y = x[0, 0].double()
    norms = y.square().sum(-1)
    hashes = (y @ a[0, :4] + a[0, 5] * (2 * norms.max() - norms).clamp(min=0).sqrt())[q_order[0, 0, 0].long()]
    assert (hashes.diff() >= -hashes.abs().max() * 3e-7).all()
