"""Custom operators as PyTorch sees them: schemas, fake results, gradients, and programs that are exported with them."""

import pytest
import torch

import smyrf
from smyrf.backends import BACKENDS, torch_backend
from smyrf.backends.operators import differentiable
from smyrf.grouping.causal import causal_groups
from smyrf.grouping.group import group
from smyrf.grouping.groups import Extra, Groups, pack

SEED = torch.tensor(11)
OPERATORS = {"torch": (torch_backend._attend, torch_backend._attend_backward)}
if "native" in BACKENDS:
    from smyrf.backends.native import attend as native

    OPERATORS["native"] = (native._attend, native._attend_backward)
backends = pytest.mark.parametrize("backend", OPERATORS)

CASES = {
    "plain": {},
    "dropout": {"dropout_p": 0.2},
    "deduplicated": {"method": smyrf.Smyrf(2, 8, deduplicate=True)},
    "causal": {"causal": True},
    "extra keys": {"method": smyrf.Tangent(12, levels=1)},
    "extra keys, dropout": {"method": smyrf.Tangent(12, levels=2), "dropout_p": 0.2},
    "shared keys": {"heads": 6, "kv_heads": 2},
    "half": {"dtype": torch.float16},
    "bfloat16, extra keys": {"dtype": torch.bfloat16, "method": smyrf.Tangent(12, levels=1)},
    "double": {"dtype": torch.float64},
}


def arguments(
    dtype=torch.float32, method=None, causal=False, dropout_p=0.0, heads=3, kv_heads=3, requires_grad=True, n=31, m=37
):
    """What the forward operator is called with."""
    if causal:
        n, m = 300, 310
    q, k, v = (torch.randn(1, h, x, w) for h, x, w in ((heads, n, 13), (kv_heads, m, 13), (kv_heads, m, 7)))
    q, k, v = (x.to(dtype).requires_grad_(requires_grad) for x in (q, k, v))
    make = causal_groups if causal else group
    lists = make(q, k, v, method or smyrf.Smyrf(2, 8), seed=SEED, scale=0.3)
    # Extra keys as inputs, not as what another operator has made of k and v.
    lists = [
        Groups(g.queries, g.keys, g.causal, g.repeats, g.extra and Extra(*(x.detach() for x in g.extra))) for g in lists
    ]
    tensors, layout = pack(lists)
    for x in differentiable(tensors):
        x.requires_grad_(requires_grad)
    return q, k, v, tensors, layout, 0.3, dropout_p, SEED if dropout_p else None


@backends
@pytest.mark.parametrize("case", CASES)
def test_forward_obeys_pytorchs_rules(backend, case):
    torch.library.opcheck(OPERATORS[backend][0], arguments(**CASES[case]))


@backends
@pytest.mark.parametrize("case", CASES)
def test_backward_obeys_pytorchs_rules(backend, case):
    forward, backward = OPERATORS[backend]
    inputs = arguments(**CASES[case], requires_grad=False)
    out, lse = forward(*inputs)
    torch.library.opcheck(backward, (torch.randn_like(out), out, lse, *inputs))


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
    assert any(f"smyrf.attend{'_native' if backend == 'native' else ''}" in str(n.target) for n in program.graph.nodes)
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
