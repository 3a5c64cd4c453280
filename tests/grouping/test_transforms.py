"""Distances between queries and keys under each transform of hashing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smyrf import methods
from smyrf.grouping.transforms import L2LSH_POWERS, L2LSH_RADIUS, TRANSFORMS, Lifted, asymmetric, transform


def lift(name, q, k, **kwargs):
    F, G = transform(name, q.square().sum(-1), k.square().sum(-1), **kwargs)
    return F.apply(q), G.apply(k)


def distances(F, G):
    return (F[..., :, None, :] - G[..., None, :, :]).square().sum(-1)


@pytest.fixture
def q():
    return torch.randn(2, 3, 11, 7, dtype=torch.float64)


@pytest.fixture
def k():
    return 2 * torch.randn(2, 3, 13, 7, dtype=torch.float64)


def largest(x):
    return x.square().sum(-1).amax(-1)[..., None, None]


def test_asymmetric_distance_depends_on_the_inner_product_alone(q, k):
    """‖F(q) − G(k)‖² = 2 (M_Q² + M_K² − q·k), eq. 5."""
    F, G = lift("asymmetric", q, k)
    torch.testing.assert_close(distances(F, G), 2 * (largest(q) + largest(k) - q @ k.mT))


def test_asymmetric_maps_to_one_ball(q, k):
    F, G = lift("asymmetric", q, k)
    radius = (largest(q) + largest(k))[..., 0]
    torch.testing.assert_close(F.square().sum(-1), radius.expand(F.shape[:-1]))
    torch.testing.assert_close(G.square().sum(-1), radius.expand(G.shape[:-1]))


def test_ablations_have_the_distances_of_the_appendix(q, k):
    q_sq, k_sq = q.square().sum(-1)[..., None], k.square().sum(-1)[..., None, :]
    inner, max_k = q @ k.mT, largest(k)
    torch.testing.assert_close(distances(*lift("none", q, k)), q_sq + k_sq - 2 * inner)
    torch.testing.assert_close(distances(*lift("xbox", q, k)), q_sq + max_k - 2 * inner)
    torch.testing.assert_close(distances(*lift("h2lsh", q, k)), 2 * max_k - 2 * (max_k / q_sq).sqrt() * inner)
    u = L2LSH_RADIUS / max_k.sqrt()
    last = (u**2 * k_sq) ** (2**L2LSH_POWERS)
    torch.testing.assert_close(distances(*lift("l2lsh", q, k)), q_sq + L2LSH_POWERS / 4 - 2 * u * inner + last)


def test_masked_keys_take_no_part_in_the_largest_norm(q, k):
    mask = torch.rand(2, 1, 13) > 0.3
    F, G = lift("asymmetric", q, k, key_mask=mask)
    loud = torch.where(mask[..., None], k, 1e6)
    F2, G2 = lift("asymmetric", q, loud, key_mask=mask)
    assert torch.equal(F, F2)
    assert torch.equal(G.masked_fill(~mask[..., None], 0), G2.masked_fill(~mask[..., None], 0))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_broken_vector_does_not_move_the_others(name, q, k):
    F, G = lift(name, q, k)
    q, k = q.clone(), k.clone()
    q[0, 0, 3, 2], k[0, 0, 5] = torch.nan, torch.inf
    keep_q, keep_k = torch.arange(11) != 3, torch.arange(13) != 5
    # The longest vectors may have been the broken ones: compare with a problem without them.
    small_F, small_G = lift(name, q[..., keep_q, :], k[..., keep_k, :])
    F, G = lift(name, q, k)
    torch.testing.assert_close(F[0, 0, keep_q], small_F[0, 0])
    torch.testing.assert_close(G[0, 0, keep_k], small_G[0, 0])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_vectors_of_zeros_stay_finite(name):
    F, G = lift(name, torch.zeros(1, 5, 3), torch.zeros(1, 4, 3))
    assert F.isfinite().all()
    assert G.isfinite().all()


def test_methods_list_the_transforms_that_exist():
    assert set(methods.TRANSFORMS) == set(TRANSFORMS)


@st.composite
def vectors(draw):
    """Queries ``(N, D)`` and keys ``(M, D)`` of very different lengths."""
    n, m, width = (draw(st.integers(1, most)) for most in (7, 5, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return tuple(
        torch.randn(count, width, dtype=torch.float64, generator=generator)
        * (
            draw(st.sampled_from([0.0, 1.0, 3.0])) * torch.randn(count, 1, dtype=torch.float64, generator=generator)
        ).exp()
        for count in (n, m)
    )


@given(vectors())
def test_a_larger_inner_product_is_a_smaller_distance_for_all_queries_and_keys(drawn):
    """Step 1 of the algorithm (the paper prints it the wrong way round), for all pairs of pairs."""
    q, k = drawn
    inner, away = (q @ k.T).flatten(), distances(*lift("asymmetric", q, k)).flatten()
    rounding = 1e-9 * float(largest(q) + largest(k))
    larger = inner[:, None] > inner + rounding
    nearer = away[:, None] < away - 2 * rounding
    assert not (larger & ~(away[:, None] < away)).any()
    assert not (nearer & ~(inner[:, None] > inner)).any()


@given(vectors(), st.floats(1.0, 100.0), st.floats(1.0, 100.0))
def test_any_upper_bound_on_the_norms_will_do(drawn, looser_q, looser_k):
    q, k = drawn
    max_q, max_k = looser_q * largest(q)[..., 0], looser_k * largest(k)[..., 0]
    F, G = asymmetric(q.square().sum(-1), k.square().sum(-1), max_q, max_k)
    F, G = F.apply(q), G.apply(k)
    radius = float(max_q + max_k)
    torch.testing.assert_close(distances(F, G), 2 * (radius - q @ k.T), rtol=1e-9, atol=1e-9 * radius)
    for x in (F, G):
        torch.testing.assert_close(x.square().sum(-1), torch.full((len(x),), radius, dtype=x.dtype))


@pytest.mark.parametrize("inner", [-1.0, 1.0])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_only_ours_sees_equal_inner_products_at_equal_distances(name, inner):
    """The appendix's case against the others: q_1·k = q_2·k, ‖q_1‖ < ‖q_2‖.

    It says that h2lsh puts the longer query nearer. That is so where the inner product is negative; where it is
    positive, which is what counts, the shorter one is nearer, as for the others.
    """
    k = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[inner, 0.5], [inner, 3.0]], dtype=torch.float64)
    short, long = distances(*lift(name, q, k))[:, 0]
    if name == "asymmetric":
        torch.testing.assert_close(short, long)
    elif name == "h2lsh" and inner < 0:
        assert short > long
    else:
        assert short < long


def test_hashes_are_as_far_apart_as_the_transformed_vectors(q, k):
    """h(F(q)) − h(G(k)) is normal with the distance as its deviation: what makes eq. 14 sensitive to locality."""
    F, G = lift("asymmetric", q[0, 0], k[0, 0])
    a = torch.randn(F.shape[-1], 20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    apart = (F @ a)[:, None] - (G @ a)[None]  # (N, M, rounds)
    torch.testing.assert_close(apart.square().mean(-1), distances(F, G), rtol=0.05, atol=0.0)


def test_constant_coordinates_are_made_on_the_device_of_the_vectors():
    lifted = Lifted(1.0, (0.5, torch.zeros(3, device="meta")))
    assert lifted.apply(torch.ones(3, 5, device="meta")).shape == (3, 7)
