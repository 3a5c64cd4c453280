import pytest
import torch

from smyrf import Dense, Smyrf, Tangent
from smyrf.models.capture import CaptureAttention, capture_attention
from smyrf.tools.analysis.error import output_errors, relative_error


def test_relative_error_is_that_of_the_whole():
    exact = torch.randn(3, 4)
    assert relative_error(exact, exact) == 0
    assert relative_error(2 * exact, exact) == pytest.approx(1.0)


def test_capture_sees_calls_by_position_and_by_name():
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def model():
        sdpa(q, k, v)
        sdpa(query=q, key=k, value=v, scale=0.3)
        sdpa(q, k, value=v, is_causal=False)

    calls = capture_attention(model)
    assert [call.scale for call in calls] == [0.5, 0.3, 0.5]
    assert all(torch.equal(a, b) for call in calls for a, b in zip(call.qkv, (q, k, v), strict=True))


def test_capture_sees_inside_pytorchs_own_modules():
    layer = torch.nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    with torch.no_grad(), CaptureAttention() as capture:
        model(torch.randn(2, 7, 12), src_key_padding_mask=padding)
    assert [call.q.shape for call in capture.calls] == [(2, 3, 7, 4)] * 2
    assert capture.n_restricted == 2
    assert all(torch.equal(call.key_mask, ~padding) and not call.is_causal for call in capture.calls)


def test_minilm_gives_six_layers_of_real_attention(minilm):
    assert len(minilm) == 6
    assert all(call.q.shape == call.k.shape == call.v.shape == (2, 12, 512, 32) for call in minilm)


def test_errors_on_a_pretrained_model_are_those_that_were_measured(minilm):
    """At 128 and 256 key visits, with the best rounds × clusters: 0.66 and 0.48 on eight documents."""

    def mean(method):
        errors = output_errors(minilm, method)
        return sum(errors) / len(errors)

    assert mean(Dense()) == 0
    assert mean(Smyrf(8, 512)) < 1e-5
    assert 0.55 < mean(Smyrf(8, 16)) < 0.72
    assert 0.40 < mean(Smyrf(16, 16)) < 0.53
    assert mean(Smyrf(16, 16, deduplicate=True)) < mean(Smyrf(16, 16))


def test_hashing_matters_more_than_the_transform_on_a_pretrained_model(minilm):
    """Projections beat Reformer's hash; between the transforms there is little here, unlike in Table 6."""

    def mean(**options):
        errors = output_errors(minilm, Smyrf(8, 32, **options))
        return sum(errors) / len(errors)

    ours = mean()
    assert ours < 0.9 * mean(hashing="cross_polytope")
    for transform in ("none", "xbox", "h2lsh", "l2lsh"):
        assert abs(ours - mean(transform=transform)) < 0.03


def test_demo_table_and_plot(minilm, shown, console, tmp_path, monkeypatch):
    from smyrf.tools import demo

    monkeypatch.setattr(
        demo, "METHODS", (Smyrf(2, 64), Smyrf(4, 32), Smyrf(4, 64, deduplicate=True), Tangent(128, levels=1))
    )
    rows = demo.error_rows(minilm[:1], console)
    assert [row["memory_share"] for row in rows] == [0.25, 0.25, 0.5, 0.25]
    text = shown(demo.error_table(rows), width=100)
    best = min(rows[:2], key=lambda row: row["error"])
    assert best["label"] in text
    assert "Tangent 128, one level" in text
    assert all(file.exists() for file in demo.plot_errors(rows, tmp_path / "error"))
