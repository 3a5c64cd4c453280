"""Tiny diffusers models with random weights: what the block does, and that it leaves nothing behind."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

import smyrf
from smyrf import Dense, Smyrf, Tangent, intercept_diffusers, intercept_sdpa
from smyrf.models.diffusers import COUNTERPARTS

diffusers = pytest.importorskip("diffusers")
from diffusers.models import attention_dispatch, attention_processor  # noqa: E402

METHOD = Tangent(48)
N_WORDS = 300


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=1,
        out_channels=4,
    ).eval()  # in training it drops labels
    x, step, label = torch.randn(2, 4, 16, 16), torch.tensor([3, 5]), torch.tensor([1, 2])
    return model, lambda: model(x, step, class_labels=label).sample


def pixart():
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        cross_attention_dim=16,
        sample_size=16,
        patch_size=1,
        caption_channels=12,
        use_additional_conditions=False,
    )
    x, words = torch.randn(2, 4, 16, 16), torch.randn(2, N_WORDS, 12)
    seen = (torch.arange(N_WORDS) < torch.tensor([[280], [N_WORDS]])).long()
    added = {"resolution": None, "aspect_ratio": None}
    return (
        model,
        lambda: (
            model(
                x,
                encoder_hidden_states=words,
                encoder_attention_mask=seen,
                timestep=torch.tensor([3, 5]),
                added_cond_kwargs=added,
            ).sample
        ),
    )


def flux():
    """Image and words in one attention, by ``dispatch_attention_fn``."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    inputs = {
        "hidden_states": torch.randn(2, 256, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.5]),
        "img_ids": torch.randn(256, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return model, lambda: model(**inputs).sample


def sd3():
    """Image and words in one attention, by an old processor."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=12,
        pooled_projection_dim=20,
        out_channels=4,
        pos_embed_max_size=16,
    )
    x, words, pooled = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 12), torch.randn(2, 20)
    return model, lambda: model(x, words, pooled, torch.tensor([3, 5])).sample


def unet(n_words=7):
    return unet_with(torch.randn(2, n_words, 12))


def unet_with(prompt):
    """Self-attention of 256 places, and attention to the words of a prompt, the last three of one being padding."""
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=2,
        norm_num_groups=2,
    )
    x, n_words = torch.randn(2, 4, 16, 16, dtype=prompt.dtype), prompt.shape[1]
    seen = torch.arange(n_words) < torch.tensor([[n_words - 3], [n_words]])
    return model, lambda: model(x, torch.tensor([3, 5]), prompt, encoder_attention_mask=seen).sample


def unet_without_words():
    model = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
    )
    x = torch.randn(2, 3, 16, 16)
    return model, lambda: model(x, torch.tensor([3, 5])).sample


MODELS = {f.__name__: f for f in (dit, pixart, flux, sd3, unet, unet_without_words)}


def state(model):
    """All that the block might change."""
    found = [attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]]
    for module in model.modules():
        processor = getattr(module, "processor", None)
        own = vars(processor).get("_attention_backend", "none of its own") if processor is not None else None
        found.append((vars(module).get("forward"), id(processor), own, len(module._forward_hooks)))
    return found


@pytest.fixture(autouse=True)
def _default_backend():
    before = attention_dispatch._AttentionBackendRegistry._active_backend
    yield
    attention_dispatch._AttentionBackendRegistry._active_backend = before


def attention_names(model):
    return [name for name, module in model.named_modules() if hasattr(module, "processor")]


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
    assert set(report.calls.dense) == {"the method is exact at this length"}


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
        assert report.calls.dense == {"fewer than 256 keys": 1}
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
    assert layers[name + "attn2"].dense == {"fewer than 256 keys": 1}
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
    assert [layer.reason for layer in report.layers] == ["no method was given for it", ""]
    assert [layer.calls.total for layer in report.layers] == [0, 1]


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


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_every_counterpart_calls_pytorchs_attention(name):
    from smyrf.models.diffusers import _is_eager

    arguments = {"slice_size": 1} if name.startswith("Sliced") else {}
    assert _is_eager(getattr(attention_processor, name)(**arguments))
    assert not _is_eager(getattr(attention_processor, COUNTERPARTS[name])())


@pytest.mark.parametrize("kind", ["eager", "sliced", "xformers"])
@torch.no_grad()
def test_other_processors_make_way_and_come_back(kind):
    model, run = unet()
    if kind == "sliced":
        model.set_attention_slice(1)
    else:
        model.set_attn_processor(
            attention_processor.AttnProcessor() if kind == "eager" else attention_processor.XFormersAttnProcessor()
        )
    before = state(model)
    with intercept_diffusers(model, METHOD) as report:
        out = run()
    assert report.calls.served == 3
    assert state(model) == before
    model.set_default_attn_processor()
    with intercept_diffusers(model, METHOD):
        torch.testing.assert_close(run(), out)


@torch.no_grad()
def test_other_backends_make_way_and_come_back():
    model, run = flux()
    with intercept_diffusers(model, METHOD):
        expected = run()
    model.set_attention_backend("flex")
    attention_dispatch._AttentionBackendRegistry.set_active_backend("flex")  # newer versions do so in the line above
    before = state(model)
    with intercept_diffusers(model, METHOD) as report:
        assert torch.equal(run(), expected)
    assert report.calls.served == 2
    assert state(model) == before
    model.reset_attention_backend()  # which leaves the default
    before = state(model)
    with intercept_diffusers(model, METHOD):
        assert torch.equal(run(), expected)
    assert state(model) == before


@pytest.mark.parametrize("name", MODELS)
def test_an_error_inside_the_block_leaves_nothing_behind(name):
    model, _ = MODELS[name]()
    model.set_attention_backend("flex")
    before = state(model)
    with pytest.raises(RuntimeError, match="halfway"), intercept_diffusers(model, METHOD):
        raise RuntimeError("halfway")
    assert state(model) == before


@torch.no_grad()
def test_a_native_backend_stays():
    model, run = flux()
    model.set_attention_backend("_native_math")
    before = state(model)
    with intercept_diffusers(model, METHOD) as report:
        run()
        assert state(model)[0] == before[0]
        assert all(now[2] == then[2] for now, then in zip(state(model)[1:], before[1:], strict=True))
    assert report.calls.served == 2
    assert state(model) == before


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


class ByHand:
    """A processor of somebody's own, which looks at the attention map."""

    def __call__(self, attn, hidden_states, **_):
        return attn.get_attention_scores(hidden_states, hidden_states)


def test_a_plan_is_followed():
    model, run = dit()
    arguments = {"hidden_states": torch.randn(1, 4, 16, 16), "timestep": torch.tensor([1])}
    plan = smyrf.tune(model, {**arguments, "class_labels": torch.tensor([2])}, max_error=0.3, fallback=False)
    assert [layer.name for layer in plan.layers] == attention_names(model)
    with intercept_diffusers(model, plan) as report:
        run()
    assert tuple(layer.method for layer in report.layers) == plan.methods
    assert report.calls.served == 2


def test_dense_lets_a_model_out_of_its_blocks():
    model, run = dit()
    exact = run()
    with intercept_diffusers(model, METHOD), smyrf.dense(model):
        assert torch.equal(run(), exact)
    with smyrf.intercept_sdpa(METHOD):
        assert not torch.equal(run(), exact)
        with smyrf.dense(model):
            assert torch.equal(run(), exact)


def test_another_thread_cannot_enter_a_block_for_the_same_model():
    model, run = dit()
    exact, errors = run(), []

    def enter():
        try:
            with intercept_diffusers(model, METHOD):
                pass
        except ValueError as error:
            errors.append(str(error))

    with intercept_diffusers(model, METHOD), intercept_diffusers(model, METHOD):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert errors == ["model is inside a block of intercept_diffusers of another thread: share that block"]
    assert torch.equal(run(), exact)
    enter()  # it is free again
    assert len(errors) == 1


def test_a_copy_inside_the_block_is_refused():
    model, _ = dit()
    with intercept_diffusers(model, METHOD), pytest.raises(TypeError, match="cannot be copied inside a block"):
        copy.deepcopy(model)
    assert isinstance(copy.deepcopy(model), type(model))


def test_what_cannot_be_replaced_is_refused_before_anything_changes():
    model, _ = dit()
    first, second = attention_names(model)
    modules = dict(model.named_modules())
    modules[first].processor = ByHand()
    before = state(model)
    with intercept_diffusers(model, METHOD) as report:
        assert "forward" not in vars(modules[first])
    assert [layer.reason for layer in report.layers] == ["its processor ByHand does not call PyTorch's attention", ""]
    for method, words in (
        ({first: METHOD}, f"layer '{first}' cannot attend by another method: its processor ByHand"),
        ({"no.such": METHOD}, f"there is no layer 'no.such'; the layers are {first}, {second}"),
        ({}, "method={} gives no layer a method"),
    ):
        with pytest.raises(ValueError, match=words), intercept_diffusers(model, method):
            pytest.fail("the block ran")
    modules[second].processor = ByHand()
    with pytest.raises(ValueError, match="no attention that can be replaced: its processor ByHand"):
        intercept_diffusers(model, METHOD).__enter__()
    assert state(model)[0] == before[0] and "forward" not in vars(modules[second])


def test_layers_that_are_split_over_devices_or_not_scaled_stay_dense():
    model, _ = dit()
    first, second = (dict(model.named_modules())[name] for name in attention_names(model))
    first.processor._parallel_config = object()
    second.scale_qk, second.processor = False, attention_processor.AttnProcessor()
    with pytest.raises(ValueError, match="it is split over several devices, its scores are not scaled"):
        intercept_diffusers(model, METHOD).__enter__()


@pytest.mark.parametrize(
    ("model", "arguments", "error", "words"),
    [
        (nn.Linear(3, 3), {"method": METHOD}, ValueError, "Linear has no attention module of diffusers"),
        ("a name", {"method": METHOD}, TypeError, "model must be a model or a pipeline of diffusers, not str"),
        (nn.Linear(3, 3), {"method": Tangent}, TypeError, "write Tangent"),
        (nn.Linear(3, 3), {"method": {"x": 3}}, TypeError, "method=3"),
        (nn.Linear(3, 3), {"method": METHOD, "from_keys": -1}, ValueError, "from_keys=-1"),
        (nn.Linear(3, 3), {"method": METHOD, "from_keys": 0.5}, TypeError, "from_keys=0.5"),
    ],
)
def test_bad_arguments(model, arguments, error, words):
    with pytest.raises(error, match=words), intercept_diffusers(model, **arguments):
        pytest.fail("the block ran")


def test_without_diffusers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with pytest.raises(ImportError, match=r"pip install 'smyrf\[diffusers\]'"):
        intercept_diffusers(nn.Linear(3, 3), METHOD).__enter__()


@torch.no_grad()
def test_of_several_blocks_the_innermost_counts():
    model, run = dit()
    with intercept_sdpa(METHOD):
        expected = run()
    with intercept_sdpa(Tangent(32)):
        other = run()
    dense, before = run(), state(model)
    with intercept_sdpa(Tangent(32)) as around, intercept_diffusers(model, METHOD):
        assert torch.equal(run(), expected)
    assert around.total == 0
    with intercept_diffusers(model, METHOD) as outer:
        with intercept_diffusers(model, Tangent(32)):
            assert torch.equal(run(), other)
        with intercept_sdpa(Tangent(32)):
            assert torch.equal(run(), other)
        with intercept_sdpa(Dense()):
            assert torch.equal(run(), dense)
        assert outer.calls.total == 0
        assert torch.equal(run(), expected)
    assert state(model) == before


@torch.no_grad()
def test_other_threads_run_the_same_model():
    model, run = dit()
    with intercept_diffusers(model, METHOD) as report:
        expected, found = run(), []
        thread = threading.Thread(target=lambda: found.append(torch.no_grad()(run)()))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert report.calls.served == 4


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
