"""The block around a diffusers model: what makes way for it comes back; other blocks, threads and copies."""

import copy
import threading

import pytest
import torch

import smyrf
from small_diffusers import METHOD, MODELS, dit, flux, state, unet
from smyrf import Dense, Tangent, intercept_diffusers, intercept_sdpa
from smyrf.models.diffusers import COUNTERPARTS

pytest.importorskip("diffusers")
from diffusers.models import attention_dispatch, attention_processor


@pytest.fixture(autouse=True)
def _default_backend():
    before = attention_dispatch._AttentionBackendRegistry._active_backend
    yield
    attention_dispatch._AttentionBackendRegistry._active_backend = before


# What makes way


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


@pytest.mark.parametrize("name", MODELS)
def test_an_error_inside_the_block_leaves_nothing_behind(name):
    model, _ = MODELS[name]()
    model.set_attention_backend("flex")
    before = state(model)
    with pytest.raises(RuntimeError, match="halfway"), intercept_diffusers(model, METHOD):
        raise RuntimeError("halfway")
    assert state(model) == before


# Other blocks, threads and copies


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


def test_dense_lets_a_model_out_of_its_blocks():
    model, run = dit()
    exact = run()
    with intercept_diffusers(model, METHOD), smyrf.dense(model):
        assert torch.equal(run(), exact)
    with smyrf.intercept_sdpa(METHOD):
        assert not torch.equal(run(), exact)
        with smyrf.dense(model):
            assert torch.equal(run(), exact)


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
