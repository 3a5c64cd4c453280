import pytest

from smyrf.methods import Dense, PerHead, Smyrf, Tangent


@pytest.mark.parametrize("method", [Smyrf(4, 16), Tangent(80), Tangent(0.25)])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 1.25, 2.0])
def test_key_visits_follow_the_factor(method, factor):
    scaled = method.scaled(factor, 320, 320)
    assert type(scaled) is type(method)
    assert scaled.key_visits(320) == pytest.approx(factor * method.key_visits(320), rel=0.26)
    assert (factor == 1.0) == (scaled == method)


@pytest.mark.parametrize("method", [Smyrf(4, 16), Tangent(80), Tangent(0.25)])
def test_shares_are_limits(method):
    assert method.scaled(100.0, 320, 320, (0.2, 0.6)).memory_share(320) == pytest.approx(0.6, abs=0.01)
    assert method.scaled(0.01, 320, 320, (0.2, 0.6)).memory_share(320) == pytest.approx(0.2, abs=0.01)


def test_a_short_sequence_does_not_lower_a_size():
    assert Tangent(80).scaled(1.25, 50, 50) == Tangent(80)
    assert Smyrf(40, 16).scaled(1.25, 50, 50) == Smyrf(40, 16)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Dense(), "Dense has no size"),
        (PerHead((Tangent(64), Dense())), "has no size"),
        (Tangent(0.2, n_near=30), "n_near=30 sets the near keys"),
    ],
)
def test_a_method_without_a_size_to_scale_says_so(method, words):
    with pytest.raises(ValueError, match=words):
        method.scaled(2.0, 320, 320)
