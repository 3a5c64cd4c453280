"""The way back from a replaced model: restoring, saving, copying, blocks of dense, and models that share a config."""

import copy

import pytest
import torch
from torch import nn

import smyrf
from small_transformers import EXACT, KERNEL, SIZES, TOKENS, bart, bert, both, run, text

pytest.importorskip("transformers")
from transformers import BertConfig, BertModel


def test_by_name_at_loading_and_after_saving(tmp_path):
    model, arguments = bert(), text()
    dense = run(model, arguments)
    smyrf.replace_attention(model, smyrf.Tangent(0.25))
    fast = run(model, arguments)
    model.save_pretrained(tmp_path)
    assert "smyrf" not in (tmp_path / "config.json").read_text()
    loaded = BertModel.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, arguments), dense)
    loaded = BertModel.from_pretrained(tmp_path, attn_implementation="smyrf")  # Tangent(0.25) by default
    assert torch.equal(run(loaded, arguments), fast)
    with smyrf.dense(loaded):
        assert torch.equal(run(loaded, arguments), dense)
    assert torch.equal(run(loaded, arguments), fast)
    smyrf.restore_attention(loaded)
    assert torch.equal(run(loaded, arguments), dense)


def test_replacing_twice_still_goes_back_to_the_start():
    model, arguments = bert(attn_implementation="eager"), text(40)
    dense = run(model, arguments)
    smyrf.replace_attention(model, EXACT)
    smyrf.replace_attention(model, smyrf.Tangent(0.3))
    with smyrf.dense(model):
        assert model.config._attn_implementation == "eager"
        assert torch.equal(run(model, arguments), dense)
    assert model.config._attn_implementation == "smyrf_replaced"
    smyrf.restore_attention(model)
    smyrf.restore_attention(model)  # once more does nothing
    assert model.config._attn_implementation == "eager"
    assert torch.equal(run(model, arguments), dense)


def test_what_a_user_has_set_since_then_stays():
    model = bert()
    smyrf.replace_attention(model, EXACT)
    model.set_attn_implementation("eager")
    smyrf.restore_attention(model)
    assert model.config._attn_implementation == "eager"


def test_a_copy_is_a_model_of_its_own():
    model, arguments = bert(), text()
    report = smyrf.replace_attention(model, smyrf.Tangent(0.25))
    other = copy.deepcopy(model)
    assert torch.equal(run(other, arguments), run(model, arguments))
    assert report.calls.served == 2
    smyrf.restore_attention(other)
    assert (other.config._attn_implementation, model.config._attn_implementation) == ("sdpa", "smyrf_replaced")


def test_only_what_was_given_is_replaced():
    """A config may be shared: by the other half of a model, by another model, by one that is made of it."""
    model, arguments = bart(), both()
    dense = run(model, arguments)
    smyrf.replace_attention(model.get_encoder(), EXACT, backend=KERNEL)
    torch.testing.assert_close(run(model, arguments), dense, atol=1e-4, rtol=1e-4)

    config = BertConfig(**SIZES, **TOKENS, max_position_embeddings=1024)
    first, second = BertModel(config).eval(), BertModel(config).eval()
    arguments = text()
    dense = run(second, arguments)
    report = smyrf.replace_attention(first, smyrf.Tangent(0.1))
    assert torch.equal(run(second, arguments), dense)
    third = BertModel(first.config).eval()
    third.load_state_dict(second.state_dict())
    assert torch.equal(run(third, arguments), dense)
    assert report.calls.served == 0


def test_dense_is_left_by_an_exception_too():
    model = bert()
    smyrf.replace_attention(model, EXACT)
    with pytest.raises(RuntimeError, match="inside"), smyrf.dense(model):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "smyrf_replaced"


def test_blocks_of_dense_may_overlap():
    model = bert()
    layer = smyrf.nn.SmyrfAttention(smyrf.Tangent(0.25))
    smyrf.replace_attention(model, EXACT)
    both_of_them = nn.ModuleList([model, layer])
    first, second = smyrf.dense(both_of_them), smyrf.dense(both_of_them)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (model.config._attn_implementation, layer.method) == ("sdpa", smyrf.Dense())
    second.__exit__(None, None, None)
    assert (model.config._attn_implementation, layer.method) == ("smyrf_replaced", smyrf.Tangent(0.25))


@pytest.mark.parametrize("change", [smyrf.restore_attention, lambda model: smyrf.replace_attention(model, EXACT)])
def test_nothing_is_changed_inside_a_block_of_dense(change):
    model = bert()
    smyrf.replace_attention(model, EXACT)
    with smyrf.dense(model), pytest.raises(ValueError, match=r"inside a block of smyrf\.dense"):
        change(model)
    assert model.config._attn_implementation == "smyrf_replaced"
