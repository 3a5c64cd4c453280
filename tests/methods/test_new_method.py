"""A method is added in one place: a frozen dataclass, a grouping, and one call that registers both."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import oracle
from problems import default_too, problem
from smyrf import PerHead, Tangent, attention, nn
from smyrf.grouping.by_method import GROUPINGS, register
from smyrf.grouping.groups import Groups
from smyrf.methods import METHODS, Layout, Method, method_from_dict, parse_method, parse_methods


@dataclass(frozen=True)
class Strided(Method):
    """Query i meets the keys j ≡ i modulo `step`."""

    kind: ClassVar[str] = "strided"
    typed: ClassVar[str] = "strided:4 (every fourth key)"

    step: int = 4

    def _plan(self, n_queries, n_keys):
        return Layout(n_queries, n_keys, is_exact=self.step == 1, key_visits=-(-n_keys // self.step))

    @property
    def size_label(self):
        return f"1/{self.step}"

    @classmethod
    def parse_size(cls, text):
        return {"step": int(text)} if text else {}


def strided_groups(call, method, layout, backend):
    def residues(length, hidden=None):
        """Indices of each residue ``(B, step, ⌈length / step⌉)``, -1 where there are no more or where hidden."""
        index = torch.arange(-(-length // method.step) * method.step, dtype=torch.int32)
        index = index.masked_fill(index >= length, -1).view(-1, method.step).T.expand(call.n_rows, -1, -1)
        if hidden is None:
            return index
        row = torch.arange(call.n_rows)[:, None, None] // call.q.shape[1]
        return index.masked_fill(hidden[row, index.clamp(min=0)], -1)

    hidden = None if call.key_mask is None else ~call.key_mask
    return [Groups(queries=residues(call.n_queries), keys=residues(call.n_keys, hidden))]


@pytest.fixture(autouse=True)
def _registered():
    register(Strided, strided_groups)
    yield
    del METHODS["strided"], GROUPINGS[Strided]


def expected(q, k, v, step, visible):
    residue = torch.arange(q.shape[2])[:, None] % step == torch.arange(k.shape[2]) % step
    return oracle.dense(q, k, v, q.shape[-1] ** -0.5, visible & residue)


@default_too
@pytest.mark.parametrize("masked", [False, True])
def test_attention_runs_it(backend, masked):
    q, k, v = problem(dtype=torch.float64)
    mask = torch.rand(2, 113) < 0.6 if masked else None
    visible = torch.ones(2, 1, 1, 113, dtype=torch.bool) if mask is None else mask[:, None, None]
    out = attention(q, k, v, method=Strided(5), key_mask=mask, backend=backend)
    torch.testing.assert_close(out, expected(q, k, v, 5, visible))
    exact = attention(q, k, v, method=Strided(1), key_mask=mask, backend=backend)
    torch.testing.assert_close(exact, oracle.dense(q, k, v, 13**-0.5, visible))


@default_too
def test_the_causal_recursion_runs_it(backend):
    """Exact blocks on the diagonal, the method between them: parts that start at a multiple of `step` keep residues."""
    q, k, v = problem(512, 512, dtype=torch.float64)
    out = attention(q, k, v, method=Strided(4), is_causal=True, backend=backend)
    block = torch.arange(512) // 256
    same = block[:, None] == block
    residue = torch.arange(512)[:, None] % 4 == torch.arange(512) % 4
    sees = torch.ones(512, 512, dtype=torch.bool).tril() & (same | residue)
    torch.testing.assert_close(out, oracle.dense(q, k, v, 13**-0.5, sees))
    assert Strided(4).plan(512, 512, is_causal=True).key_visits == 161  # 128½ on the diagonal, 64 for half the queries


@default_too
def test_gradients_reach_it(backend):
    q, k, v = (x.requires_grad_() for x in problem(23, 19, 3, 2, 1, 1, 1, torch.float64))
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, method=Strided(3), backend=backend), (q, k, v), fast_mode=True
    )


@default_too
def test_a_head_may_have_it(backend):
    q, k, v = problem(dtype=torch.float64)
    out = attention(q, k, v, method=PerHead((Tangent(30), Strided(5), Tangent(30))), backend=backend)
    alone = attention(q[:, 1:2], k[:, 1:2], v[:, 1:2], method=Strided(5), backend=backend)
    torch.testing.assert_close(out[:, 1:2], alone)


def test_it_has_cost_label_and_json():
    assert Strided(5).key_visits(113) == 23
    assert Strided(4).memory_share(1024) == 0.25
    assert Strided(5).label == "Strided 1/5"
    assert Strided(5).family == "Strided"
    assert method_from_dict(json.loads(json.dumps(Strided(5).to_dict()))) == Strided(5)
    heads = PerHead((Strided(5), Tangent(0.25)))
    assert method_from_dict(json.loads(json.dumps(heads.to_dict()))) == heads


def test_it_can_be_typed():
    assert parse_method("strided:5") == Strided(5)
    assert parse_methods("dense,strided:5,tangent:0.25")[1] == Strided(5)
    assert parse_method("strided") == Strided()
    with pytest.raises(ValueError, match=r"is not a method.*strided:4 \(every fourth key\)"):
        parse_method("strided:five")
    with pytest.raises(ValueError, match="its size is missing"):
        parse_method("strided:")


def test_a_module_takes_it():
    layer = nn.MultiheadAttention(16, 2, batch_first=True, method=Strided(4))
    x = torch.randn(2, 30, 16)
    assert layer(x, x, x)[0].shape == x.shape
    assert "Strided(step=4)" in repr(layer)
