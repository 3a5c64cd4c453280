"""The native kernel beyond what all kernels are tested for: instruction sets, odd numbers, what it says of itself."""

import subprocess
import sys

import pytest
import torch

from smyrf.backends import BACKENDS, attend, backends, check_backend
from smyrf.backends.native import extension
from smyrf.grouping.groups import Groups

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


def test_no_rows_have_no_gradients():
    x = torch.empty(0, 2, 4, 8, requires_grad=True)
    index = torch.empty(0, 1, 4, dtype=torch.int64)
    out, _ = attend(x, x, x, [Groups(index, index)], backend="native")
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_a_block_of_scores_of_minus_infinity_leaves_the_others():
    """600 keys are more than one block of them."""
    q, k, v = torch.full((1, 1, 3, 4), 1e20), torch.full((1, 1, 600, 4), -1e20), torch.randn(1, 1, 600, 4)
    k[..., -1, :] = 0
    groups = [Groups(torch.arange(3).view(1, 1, 3), torch.arange(600).view(1, 1, 600))]
    for backend in BACKENDS:
        out = attend(q, k, v, groups, backend=backend)[0]
        torch.testing.assert_close(out, v[:, :, -1:].expand(1, 1, 3, 4))


def test_gradients_of_huge_scores_stay_small():
    """Rounding must not make a weight larger than one."""
    (q, k), v = 1e4 * torch.randn(2, 1, 2, 200, 16), torch.randn(1, 2, 200, 16, requires_grad=True)
    index = torch.arange(200).view(1, 4, 50).expand(2, 4, 50)
    out, _ = attend(q, k, v, [Groups(index, index)] * 2, backend="native")
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert dv.abs().max() <= 2 * 50


def test_gradients_take_any_strides():
    q, k, v, grad = torch.randn(4, 1, 2, 40, 8).unbind()
    index = torch.arange(40).view(1, 1, 40).expand(2, 1, 40)
    out, lse = attend(q, k, v, [Groups(index, index)], backend="native")
    arguments = (q, k, v, [index, index], [0], 8**-0.5, 0.0, None)
    strided = torch.stack([lse, lse], dim=-1)[..., 0]
    expected = torch.ops.smyrf.attend_native_backward(grad, out, lse, *arguments)
    for a, b in zip(torch.ops.smyrf.attend_native_backward(grad, out, strided, *arguments), expected, strict=True):
        assert torch.equal(a, b)


def test_a_package_without_the_extension_says_why():
    code = """
import sys
sys.modules["smyrf._native"] = None
import torch, smyrf
print(smyrf.backends()["native"])
x = torch.randn(1, 2, 300, 8)
for method in (smyrf.Smyrf(2, 32), smyrf.Tangent(64)):
    assert smyrf.attention(x, x, x, method=method, is_causal=True).isfinite().all()
try:
    smyrf.attention(x, x, x, method=method, backend="native")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    why = "not available: it was not built when smyrf was installed, for want of a C++17 compiler"
    assert done.stdout.splitlines() == [why, f"backend='native' is {why}"]
