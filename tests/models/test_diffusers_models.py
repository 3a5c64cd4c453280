"""Diffusers models inside a block: every attention module attends by its method, trained, tuned or compiled."""

import pytest
import torch

import smyrf
from small_diffusers import METHOD, MODELS, N_WORDS, attention_names, dit, flux, state, unet, unet_with
from smyrf import Smyrf, Tangent, intercept_diffusers, intercept_sdpa
from smyrf.call import Reason

diffusers = pytest.importorskip("diffusers")


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_it_is_interception_of_every_attention_module(name):
    model, run = MODELS[name]()
    dense, before = run(), state(model)
    with intercept_sdpa(METHOD, from_keys=256) as calls:
        expected = run()
    with intercept_diffusers(model, METHOD) as report:
        out = run()
    assert [layer.name for layer in report.replaced] == attention_names(model)
    assert report.calls == calls
    assert calls.served > 0
    assert torch.equal(out, expected)
    assert not torch.allclose(out, dense, atol=1e-5)
    assert torch.equal(run(), dense)
    assert state(model) == before


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_exact_methods_are_dense_attention(name):
    model, run = MODELS[name]()
    with intercept_diffusers(model, Smyrf(2, 1000), from_keys=0) as report:
        out = run()
    assert torch.equal(out, run())
    assert set(report.calls.dense) == {Reason.EXACT}


@pytest.mark.parametrize("method", [METHOD, Smyrf(2, 1000)], ids=["approximate", "exact"])
@torch.no_grad()
def test_the_named_backend_serves_the_calls(monkeypatch, method):
    named = []

    def attention(*args, backend, **options):
        named.append(backend)
        return smyrf.attention(*args, backend=backend, **options)

    monkeypatch.setattr("smyrf.models.calls.attention", attention)
    model, run = dit()
    with intercept_diffusers(model, method, backend="reference") as report:
        run()
    assert (named, report.calls.served) == (["reference"] * 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [METHOD, Smyrf(2, 32)], ids=lambda m: type(m).__name__)
@torch.no_grad()
def test_masks_reach_the_words_that_they_hide(method, dtype):
    prompt = torch.randn(2, N_WORDS, 12, dtype=dtype)
    model, run = unet_with(prompt)
    model.to(dtype)

    def approximate():
        torch.manual_seed(1)
        with intercept_diffusers(model, method) as report:
            out = run()
        assert report.calls.served == 3 + 4  # the middle block has 64 places of its own, and sees the words
        assert report.calls.dense == {Reason.FEW_KEYS: 1}
        return out

    expected = approximate()
    prompt[0, -3:] = 50.0
    assert torch.equal(approximate(), expected)
    prompt[1, -3:] = 50.0
    changed = approximate()
    assert torch.equal(changed[0], expected[0]) and not torch.allclose(changed[1], expected[1])


@torch.no_grad()
def test_the_few_words_of_a_prompt_are_dense():
    model, run = unet()
    with intercept_diffusers(model, METHOD) as report:
        run()
    layers = {layer.name: layer.calls for layer in report.layers}
    name = "down_blocks.0.attentions.0.transformer_blocks.0."
    assert layers[name + "attn1"].served == 1
    assert layers[name + "attn2"].dense == {Reason.FEW_KEYS: 1}
    assert "dense below 256 keys" in str(report)


@torch.no_grad()
def test_a_method_for_each_name():
    model, run = dit()
    first, second = attention_names(model)
    with intercept_diffusers(model, {first: METHOD, second: Tangent(32)}) as report:
        out = run()
    assert [layer.method for layer in report.layers] == [METHOD, Tangent(32)]
    with intercept_diffusers(model, {second: Tangent(32)}) as report:
        assert not torch.equal(run(), out)
    assert [layer.reason for layer in report.layers] == [Reason.NOT_GIVEN, None]
    assert [layer.calls.total for layer in report.layers] == [0, 1]


def test_a_plan_is_followed():
    model, run = dit()
    arguments = {"hidden_states": torch.randn(1, 4, 16, 16), "timestep": torch.tensor([1])}
    plan = smyrf.tune(model, {**arguments, "class_labels": torch.tensor([2])}, max_error=0.3, fallback=False)
    assert [layer.name for layer in plan.layers] == attention_names(model)
    with intercept_diffusers(model, plan) as report:
        run()
    assert tuple(layer.method for layer in report.layers) == plan.methods
    assert report.calls.served == 2


def pipeline():
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, sample_size=16)
    transformer, _ = dit()
    pipe = diffusers.DiTPipeline(transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def run():
        return torch.tensor(pipe([1], num_inference_steps=2, generator=torch.manual_seed(0), output_type="np").images)

    return pipe, run


def test_a_pipeline_means_its_denoiser():
    pipe, run = pipeline()
    dense = run()
    with intercept_diffusers(pipe, METHOD) as report:
        out = run()
    assert report.model == "DiTPipeline"
    assert [layer.name for layer in report.layers] == [
        "transformer.transformer_blocks.0.attn1",
        "transformer.transformer_blocks.1.attn1",
    ]
    assert report.calls.served == 4
    assert not torch.equal(out, dense)
    assert torch.equal(run(), dense)


@torch.no_grad()
def test_fused_projections():
    model, run = flux()
    model.fuse_qkv_projections()
    with intercept_diffusers(model, METHOD) as report:
        fused = run()
    model.unfuse_qkv_projections()
    with intercept_diffusers(model, METHOD):
        torch.testing.assert_close(run(), fused)
    assert report.calls.served == 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_flow(checkpointing):
    gradients = []
    for wanted in (False, checkpointing):
        torch.manual_seed(0)
        model, run = dit()
        if wanted:
            model.enable_gradient_checkpointing()
        with intercept_diffusers(model, METHOD) as report:
            run().square().sum().backward()
        assert report.calls.served == (4 if wanted else 2)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert any(grad.abs().sum() > 0 for grad in gradients[0])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@torch.no_grad()
def test_a_compiled_model_obeys_the_block():
    torch._dynamo.reset()
    model, run = dit()
    dense = run()
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(), dense)
    with intercept_diffusers(model, METHOD):
        out = run()
    torch.testing.assert_close(run(), dense)
    model._compiled_call_impl = None
    with intercept_diffusers(model, METHOD):
        torch.testing.assert_close(run(), out)
    assert not torch.allclose(out, dense, atol=1e-5)
