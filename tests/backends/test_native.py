"""The native backend beyond what all backends are tested for: instruction sets, its boundary, shared far keys."""

import subprocess
import sys

import pytest
import torch

from problems import attend
from smyrf.backends import BACKENDS, backends, check_backend
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
@pytest.mark.parametrize("wrong", [4, 6, 2**32 + 3, -(2**40)])
def test_an_index_out_of_range_is_refused(which, wrong):
    """Also one that int32 would make a valid one of."""
    x, index = torch.randn(1, 1, 4, 8), torch.arange(4).view(1, 1, 4)
    bad = index.clone()
    bad[0, 0, 2] = wrong
    with pytest.raises(IndexError, match=f"{wrong} of {which} is out of range"):
        attend(x, x, x, [Groups(**{"queries": index, "keys": index, which: bad})], backend="native")


def test_heads_without_key_heads_are_refused():
    x, none, index = torch.randn(1, 2, 4, 8), torch.empty(1, 0, 4, 8), torch.arange(4).expand(2, 1, 4)
    with pytest.raises(ValueError, match="do not belong together"):
        attend(x, none, none, [Groups(index, index)], backend="native")


@pytest.mark.parametrize("n_keys", [0, 5])
@pytest.mark.parametrize("n_queries", [0, 3])
def test_empty_tensors_are_no_error(n_queries, n_keys):
    q, k = torch.randn(1, 2, n_queries, 8, requires_grad=True), torch.randn(1, 2, n_keys, 8, requires_grad=True)
    groups = [Groups(*(torch.arange(n).expand(2, 1, n) for n in (n_queries, n_keys)))]
    out, lse = attend(q, k, k, groups, backend="native")
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert (out.shape, lse.shape, dq.shape, dk.shape) == (q.shape, q.shape[:3], q.shape, k.shape)
    if n_keys == 0:
        assert (out == 0).all()
        assert torch.isneginf(lse).all()


def arguments(x, index, **changed):
    """Arguments of `attend_forward`: q = k = v = x and one list with queries = keys = index, some of them changed."""
    known = {"q": x, "k": x, "v": x, "lists": [group_list(index)], "scale": 0.3, "dropout_p": 0.0, "seed": 0}
    results = {"out": torch.empty_like(x), "lse": x.new_empty(x.shape[:3])}
    return known | results | extension.running() | changed


def group_list(index, **changed):
    return extension.native.GroupList(**({"queries": index, "keys": index, "causal": False} | changed))


def shrunk(x):
    """A tensor with a storage that is too small for it."""
    x = x.clone()
    x.untyped_storage().resize_(8)
    return x


X, INDEX = torch.randn(1, 3, 4, 8), torch.arange(4, dtype=torch.int32).expand(3, 1, 4)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"k": torch.randn(1, 2, 4, 8), "v": torch.randn(1, 2, 4, 8)}, ValueError, "kv_heads=2 must divide heads=3"),
        ({"k": torch.randn(1, 0, 4, 8), "v": torch.randn(1, 0, 4, 8)}, ValueError, "kv_heads=0 must be at least 1"),
        ({"k": torch.randn(2, 3, 4, 8)}, ValueError, r"k has the shape \(2, 3, 4, 8\), but \(1, …, …, 8\) is needed"),
        ({"v": torch.randn(1, 3, 5, 8)}, ValueError, "v has the shape"),
        ({"k": X.double()}, TypeError, "k has the dtype torch.float64, but float32 is needed"),
        ({"q": X.half()}, TypeError, "q has the dtype torch.float16"),
        ({"q": X[0]}, ValueError, "q has the shape"),
        ({"q": torch.randn(1, 1, 1, 1, 1, 1)}, TypeError, "q has 6 axes"),
        ({"q": X.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "q must be contiguous along its last axis"),
        ({"q": X.to("meta")}, TypeError, "q must be a dense tensor on the CPU"),
        ({"q": torch.eye(4).to_sparse()}, TypeError, "q must be a dense tensor on the CPU"),
        ({"q": None}, TypeError, "attend_forward"),
        ({"q": [1.0]}, TypeError, "q must be a tensor, not <class 'list'>"),
        ({"q": shrunk(X)}, ValueError, "q has a storage that is too small"),
        ({"out": torch.empty(1, 3, 4, 7)}, ValueError, "out has the shape"),
        ({"out": torch.empty(1, 3, 8, 8)[:, :, ::2]}, ValueError, "out must be contiguous"),
        ({"lse": shrunk(torch.empty(1, 3, 4))}, ValueError, "lse has a storage that is too small"),
        ({"out": X}, ValueError, "shares memory with"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be in"),
        ({"lists": []}, ValueError, "there is no list of groups"),
        (
            {"lists": lambda: [group_list(INDEX.long())]},
            TypeError,
            "queries has the dtype torch.int64, but int32 is needed",
        ),
        ({"lists": lambda: [group_list(INDEX, keys=INDEX[:2])]}, ValueError, r"keys has the shape \(2, 1, 4\)"),
        (
            {"lists": lambda: [group_list(INDEX, multiplicity=INDEX)]},
            TypeError,
            "multiplicity has the dtype torch.int32",
        ),
        ({"lists": lambda: [group_list(INDEX, far=3)]}, TypeError, "far must be FarKeys or None"),
        ({"lists": [3]}, TypeError, "attend_forward"),
        ({"threads": 0}, ValueError, "threads=0 must be at least 1"),
        ({"threads": 10**6}, ValueError, "threads=1000000 must be at most"),
        ({"isa": "mmx"}, ValueError, "isa='mmx' cannot be run"),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(changed, error, match):
    changed = {name: value() if callable(value) else value for name, value in changed.items()}
    with pytest.raises(error, match=match):
        extension.native.attend_forward(**arguments(X, INDEX, **changed))


def test_arguments_are_keywords():
    known = arguments(X, INDEX)
    extension.native.attend_forward(**known)
    with pytest.raises(TypeError):
        extension.native.attend_forward(*known.values())
    with pytest.raises(TypeError):
        extension.native.attend_forward(**known, stride=1)
    with pytest.raises(TypeError):
        extension.native.GroupList(queries=INDEX, keys=INDEX)


def test_a_tensor_of_a_subclass_is_read_as_a_tensor():
    class Named(torch.Tensor):
        def data_ptr(self):
            return 12345

    expected = arguments(X, INDEX)
    extension.native.attend_forward(**expected)
    found = arguments(X, INDEX, q=X.as_subclass(Named), k=torch.nn.Parameter(X))
    extension.native.attend_forward(**found)
    assert torch.equal(found["out"], expected["out"])


def test_an_output_that_shares_memory_with_an_index_is_refused():
    """The kernel would write over indices that were checked."""
    storage = torch.arange(12, dtype=torch.int32)
    index, lse = storage.view(3, 1, 4) % 4, None
    storage.copy_(index.flatten())
    index, lse = storage.view(3, 1, 4), storage.view(torch.float32).view(1, 3, 4)
    with pytest.raises(ValueError, match=r"(lse|queries|keys) shares memory with (lse|queries|keys)"):
        extension.native.attend_forward(**arguments(X, index, lse=lse))


def test_an_output_that_repeats_its_elements_is_refused():
    """Two threads would write the same element."""
    far_keys = torch.zeros(1, 2, 4).expand(2, 2, 4)
    x, order = torch.zeros(1, 2, 8, 4), torch.arange(8, dtype=torch.int32).expand(2, 8).contiguous()
    with pytest.raises(ValueError, match="far_keys must not repeat its elements"):
        extension.native.select_and_fold(
            q=x,
            k=x.clone(),
            v=x.clone(),
            key_mask=None,
            queries=order.view(2, 2, 4),
            order=order.clone(),
            leaf_of_key=torch.zeros(2, 8, dtype=torch.int32),
            scale=1.0,
            levels=[[2, 3, 1]],
            near=torch.zeros(2, 2, 3, dtype=torch.int32),
            far_keys=far_keys,
            far_values=torch.zeros(2, 2, 4),
            far_bias=torch.zeros(2, 2),
            centroids=torch.zeros(2, 2, 4),
            kept=torch.zeros(2, 6, dtype=torch.int32),
            threads=1,
            isa=extension.instruction_sets()[0],
        )


@pytest.mark.parametrize("kind", ["attribute", "subclass"])
def test_a_tensor_cannot_lie_about_its_memory(kind):
    """Neither by an attribute with the name of a method, nor by a method that returns another tensor."""
    if kind == "attribute":
        q = X.clone()
        q.data_ptr = lambda: 12345
    else:

        class Lying(torch.Tensor):
            def as_subclass(self, _):
                return torch.zeros(1)

        q = X.clone().as_subclass(Lying)
    expected, found = arguments(X, INDEX), arguments(X, INDEX, q=q)
    extension.native.attend_forward(**expected)
    extension.native.attend_forward(**found)
    assert torch.equal(found["out"], expected["out"])


def test_products_of_sizes_that_overflow_are_refused():
    """Expanded tensors have any size at no cost, and sizes of levels are plain numbers."""
    q = torch.zeros(1).expand(1, 2**38, 2**24, 1)
    empty = torch.empty(1, 2**38, 0, 2**24, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"2\^31|2\^40"):
        extension.native.sort_by_hash(
            q=q,
            k=q,
            key_mask=None,
            vectors=torch.empty(0, 3),
            scale=1.0,
            q_order=empty,
            k_order=empty,
            **extension.running(),
        )
    none = torch.empty(0)
    names = ("order", "far_keys", "far_values", "far_bias", "centroids", "kept", "d_far_keys", "d_far_values")
    with pytest.raises(ValueError, match=r"2\^40"):
        extension.native.select_and_fold_backward(
            k=X,
            v=X,
            key_mask=None,
            levels=[(2**31, 2**31, 2**31)] * 4,
            d_far_bias=none,
            dk=X,
            dv=X,
            **dict.fromkeys(names, none),
            **extension.running(),
        )


def shared_far_keys(rows, bad_index=None):
    """Four groups of which several share far keys: the kernel's output and gradients, and the inputs."""
    native, n_groups, n, width, n_table = extension.native, 4, 24, 5, 7
    x = torch.randn(1, rows, n, width, dtype=torch.float64, requires_grad=True)
    table = [
        torch.randn(rows, n_table, *tail, dtype=torch.float64, requires_grad=True) for tail in ((width,), (width,), ())
    ]
    with torch.no_grad():
        table[2][-1, 4] = -torch.inf
    far_index = torch.tensor([[0, 1, 2], [0, 1, 4], [0, 5, 4], [0, 5, 5]], dtype=torch.int32)  # one of them twice
    if bad_index is not None:
        far_index[2, 1] = bad_index
    index = torch.arange(n, dtype=torch.int32).view(1, n_groups, -1).expand(rows, -1, -1)
    out, lse, grad = torch.empty_like(x), torch.empty(1, rows, n, dtype=x.dtype), torch.randn_like(x)
    sums = [torch.zeros_like(t) for t in (x, x, x, *table)]
    names = ("keys", "values", "bias")
    grads = {f"d_{name}": one for name, one in zip(names, sums[3:], strict=True)}
    far = native.FarKeys(index=far_index, **dict(zip(names, table, strict=True)), **grads)
    call = arguments(x, index, lists=[group_list(index, far=far)], out=out, lse=lse)
    native.attend_forward(**call)
    native.attend_backward(**call, grad=grad, dq=sums[0], dk=sums[1], dv=sums[2])
    return [out, *sums], x, table, far_index.long(), grad


# The groups of one row are cut into parts, those of several are not.
several_rows = pytest.mark.parametrize("rows", [1, 2, 5])


@several_rows
def test_groups_may_share_far_keys(rows):
    (out, dq, dk, dv, *of_table), x, (keys, values, bias), index, grad = shared_far_keys(rows)
    by_group = x[0].unflatten(1, (4, -1))  # (rows, L, C, D)
    k, v = torch.cat([by_group, keys[:, index]], 2), torch.cat([by_group, values[:, index]], 2)
    more = torch.cat([torch.zeros(*by_group.shape[:3], dtype=x.dtype), bias[:, index]], 2)
    weights = (0.3 * by_group @ k.transpose(-1, -2) + more[:, :, None]).softmax(-1)
    expected = (weights @ v).flatten(1, 2)[None]
    torch.testing.assert_close(out, expected)
    d_x, *d_table = torch.autograd.grad(expected, (x, keys, values, bias), grad)
    torch.testing.assert_close(dq + dk + dv, d_x)
    for ours, theirs in zip(of_table, d_table, strict=True):
        torch.testing.assert_close(ours, theirs)


@several_rows
def test_gradients_of_shared_far_keys_do_not_depend_on_the_number_of_threads(rows):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.manual_seed(0)
            torch.set_num_threads(threads)
            found.append(shared_far_keys(rows)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("wrong", [-1, 7])
def test_a_far_key_out_of_range_is_refused(wrong):
    with pytest.raises(IndexError, match=f"{wrong} of far keys is out of range: there are 7"):
        shared_far_keys(rows=3, bad_index=wrong)


def test_a_causal_list_has_no_far_keys():
    x, index = torch.randn(1, 1, 4, 8), torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    table, first = torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.int32)
    far = extension.native.FarKeys(keys=table, values=table, bias=table[..., 0].contiguous(), index=first)
    with pytest.raises(ValueError, match="a causal list cannot have far keys"):
        extension.native.attend_forward(**arguments(x, index, lists=[group_list(index, causal=True, far=far)]))


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
    why = "not available: it was not built when smyrf was installed, because no C++17 compiler was found"
    assert done.stdout.splitlines() == [why, f"backend='native' is {why}"]
