"""The native kernel beyond what all kernels are tested for: instruction sets, odd numbers, what it says of itself."""

import pytest
import torch

from smyrf import extension
from smyrf.groups import Groups
from smyrf.kernels import BACKENDS, attend, backends, check_backend

if "native" not in BACKENDS:  # where the package was installed without a compiler
    pytest.skip(backends()["native"], allow_module_level=True)


isa = pytest.mark.parametrize("isa", extension.instruction_sets())


@isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_stays_in_its_row(monkeypatch, isa, bad):
    monkeypatch.setattr(extension, "ISA", isa)
    q, k, v = torch.randn(3, 1, 1, 50, 12).unbind()
    q[0, 0, 13, 5] = bad
    groups = [Groups(torch.arange(50).view(1, 2, 25), torch.arange(50).view(1, 2, 25))]
    out = attend(q, k, v, groups, backend="native")[0]
    assert out[0, 0, 13].isnan().all()
    assert out[0, 0, torch.arange(50) != 13].isfinite().all()


@isa
def test_large_scores_do_not_overflow(monkeypatch, isa):
    monkeypatch.setattr(extension, "ISA", isa)
    q, k, v = torch.randn(3, 1, 2, 70, 9).unbind()
    groups = [Groups(torch.arange(70).expand(2, 1, 70), torch.arange(70).expand(2, 1, 70))] * 2
    for factor in (1e3, 1e10, 1e18):
        out, lse = attend(factor * q, factor * k, v, groups, backend="native")
        expected, expected_lse = attend(factor * q, factor * k, v, groups, backend="reference")
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_the_kernels_that_there_are_can_be_asked_for():
    assert set(backends()) == {"reference", "torch", "native"}
    assert extension.instruction_sets()[-1] in backends()["native"]
    check_backend("native")


def test_an_instruction_set_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(extension, "ISA", "avx10")
    x = torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match="isa='avx10' cannot be run on this machine"):
        attend(x, x, x, [Groups(torch.arange(4).view(1, 1, 4), torch.arange(4).view(1, 1, 4))], backend="native")


@pytest.mark.parametrize("which", ["queries", "keys"])
def test_an_index_out_of_range_is_refused(which):
    """As the other kernels do."""
    x, index = torch.randn(1, 1, 4, 8), torch.arange(4).view(1, 1, 4)
    with pytest.raises((IndexError, ValueError), match=r"range|bounds"):
        attend(x, x, x, [Groups(**{"queries": index, "keys": index, which: index + 3})], backend="native")


def test_scores_of_minus_infinity_alone_give_nan_as_elsewhere():
    q, k = torch.ones(2, 1, 1, 4, 8).unbind()
    q[0, 0, 1, 0] = -torch.inf
    groups = [Groups(torch.arange(4).view(1, 1, 4), torch.arange(4).view(1, 1, 4))]
    for backend in BACKENDS:
        assert attend(q, k, k, groups, backend=backend)[0][0, 0, 1].isnan().all()


def test_no_rows_give_no_rows():
    x, index = torch.empty(0, 2, 4, 8), torch.empty(0, 1, 4, dtype=torch.int64)
    assert attend(x, x, x, [Groups(index, index)], backend="native")[0].shape == x.shape
