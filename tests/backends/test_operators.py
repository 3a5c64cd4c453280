"""Custom operators as PyTorch sees them: schemas, fake results, gradients, and programs that are exported with them."""

import pytest
import torch

import smyrf
from problems import SEED, clustered_problem, make_groups, problem
from smyrf.backends import BACKENDS
from smyrf.backends.operators import differentiable
from smyrf.backends.torch import attend as torch_attend
from smyrf.backends.torch import hashing as torch_hashing
from smyrf.backends.torch import selection as torch_selection
from smyrf.backends.torch import tree as torch_tree
from smyrf.grouping.groups import pack
from smyrf.methods import Tangent

ATTEND = {"torch": (torch_attend._attend, torch_attend._attend_backward)}
SELECT = {"torch": torch_selection._select_and_fold}
if "native" in BACKENDS:
    from smyrf.backends.native import attend as native_attend
    from smyrf.backends.native import hashing as native_hashing
    from smyrf.backends.native import selection as native_selection

    ATTEND["native"] = (native_attend._attend, native_attend._attend_backward)
    SELECT["native"] = native_selection._select_and_fold
backends = pytest.mark.parametrize("backend", ATTEND)

CASES = {
    "plain": {},
    "dropout": {"dropout_p": 0.2},
    "deduplicated": {"method": smyrf.Smyrf(2, 8, deduplicate=True)},
    "causal": {"is_causal": True},
    "far keys": {"method": smyrf.Tangent(12, levels=1)},
    "far keys, dropout": {"method": smyrf.Tangent(12, levels=2), "dropout_p": 0.2},
    "shared keys": {"heads": 6, "kv_heads": 2},
    "half": {"dtype": torch.float16},
    "bfloat16, far keys": {"dtype": torch.bfloat16, "method": smyrf.Tangent(12, levels=1)},
    "double": {"dtype": torch.float64},
}


def arguments(
    dtype=torch.float32,
    method=None,
    is_causal=False,
    dropout_p=0.0,
    heads=3,
    kv_heads=3,
    requires_grad=True,
):
    """Arguments of the forward operator of `attend`."""
    n, m = (300, 310) if is_causal else (31, 37)
    q, k, v = problem(n, m, 13, 7, 1, heads, kv_heads, dtype)
    # Made without gradients: far keys are inputs here, not results of another operator.
    tensors, layout = pack(make_groups(q, k, v, method or smyrf.Smyrf(2, 8), is_causal=is_causal))
    for x in (q, k, v, *differentiable(tensors)):
        x.requires_grad_(requires_grad)
    return q, k, v, tensors, layout, 0.3, dropout_p, SEED if dropout_p else None


@backends
@pytest.mark.parametrize("case", CASES)
def test_attend_obeys_pytorchs_rules(backend, case):
    torch.library.opcheck(ATTEND[backend][0], arguments(**CASES[case]))


@backends
@pytest.mark.parametrize("case", CASES)
def test_the_backward_of_attend_obeys_pytorchs_rules(backend, case):
    forward, backward = ATTEND[backend]
    inputs = arguments(**CASES[case], requires_grad=False)
    out, lse = forward(*inputs)
    torch.library.opcheck(backward, (torch.randn_like(out), out, lse, *inputs))


@pytest.mark.parametrize("masked", [False, True])
def test_the_other_stages_obey_pytorchs_rules(masked):
    q, k, _ = clustered_problem(64, 70, batch=1)
    mask = torch.rand(1, 70) < 0.8 if masked else None
    hashed = (q, k, mask, SEED, 0.3, 2)
    torch.library.opcheck(torch_hashing._sort_by_hash, (*hashed, 5, "asymmetric", "projection"))
    if "native" in BACKENDS:
        torch.library.opcheck(native_hashing._sort_by_hash, hashed)
    torch.library.opcheck(torch_tree._build_tree, (q, k, mask, 8, 5))


@backends
@pytest.mark.parametrize("masked", [False, True])
def test_select_and_fold_obeys_pytorchs_rules(backend, masked):
    """Schema, fake implementation and autograd registration, by PyTorch's own checker."""
    q, k, v = clustered_problem(64, 70, batch=1)
    mask = torch.rand(1, 70) < 0.8 if masked else None
    levels = Tangent(20, levels=2).sizes(70, 64)
    queries, _, keys, leaf_of_key = torch_tree._build_tree(q, k, mask, levels[-1].n_clusters, 8)
    sizes = [size for level in levels for size in level]
    k.requires_grad_()
    v.requires_grad_()
    torch.library.opcheck(SELECT[backend], (q, k, v, mask, queries, keys, leaf_of_key, 0.3, sizes))


class Layer(torch.nn.Module):
    """Attention between two projections, as small as can be."""

    def __init__(self, backend, **options):
        super().__init__()
        self.project, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.backend, self.options = backend, options

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()  # (batch, 2, N, 8)
        found = smyrf.attention(q, k, v, backend=self.backend, **self.options)
        return self.out(found.transpose(1, 2).flatten(2))


LAYERS = {
    "smyrf": {"method": smyrf.Smyrf(2, 16), "generator": 3},
    "smyrf, causal": {"method": smyrf.Smyrf(2, 16), "generator": 3, "is_causal": True},
    "tangent": {"method": smyrf.Tangent(40)},
    "tangent, causal": {"method": smyrf.Tangent(40), "is_causal": True},
}


@backends
@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_program_gives_the_same(backend, name):
    layer = Layer(backend, **LAYERS[name]).eval()
    x = torch.randn(2, 300, 16)
    program = torch.export.export(layer, (x,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert any("smyrf.attend" in one and ("native" in one) == (backend == "native") for one in targets)
    y = torch.randn(2, 300, 16)
    torch.testing.assert_close(program.module()(y), layer(y))


@backends
def test_an_exported_program_takes_another_length(backend):
    """Lengths that clusters divide: padding or none is a choice that export makes once."""
    layer = Layer(backend, **LAYERS["smyrf"]).eval()
    lengths = {1: 16 * torch.export.Dim("clusters", min=7, max=256)}
    program = torch.export.export(layer, (torch.randn(2, 304, 16),), dynamic_shapes=(lengths,))
    for n in (304, 160, 512):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(program.module()(x), layer(x))


@backends
def test_an_exported_tangent_takes_the_lengths_that_have_its_sizes(backend):
    """Sizes follow from the length. Where another length has others, the program refuses it."""
    layer = Layer(backend, **LAYERS["tangent"]).eval()
    dynamic = ({1: torch.export.Dim.AUTO},)
    program = torch.export.export(layer, (torch.randn(2, 300, 16),), dynamic_shapes=dynamic).module()
    for n in (300, 512):
        x = torch.randn(2, n, 16)
        torch.testing.assert_close(program(x), layer(x))
    with pytest.raises((AssertionError, RuntimeError), match="Guard failed"):
        program(torch.randn(2, 137, 16))
