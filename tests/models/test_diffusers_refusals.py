"""What `intercept_diffusers` cannot replace, said before anything is changed."""

import sys

import pytest
from torch import nn

from small_diffusers import METHOD, attention_names, dit, state
from smyrf import Tangent, intercept_diffusers
from smyrf.call import Reason

pytest.importorskip("diffusers")
from diffusers.models import attention_processor


class ByHand:
    """A processor of somebody's own, which looks at the attention map."""

    def __call__(self, attn, hidden_states, **_):
        return attn.get_attention_scores(hidden_states, hidden_states)


def test_what_cannot_be_replaced_is_refused_before_anything_changes():
    model, _ = dit()
    first, second = attention_names(model)
    modules = dict(model.named_modules())
    modules[first].processor = ByHand()
    before = state(model)
    with intercept_diffusers(model, METHOD) as report:
        assert "forward" not in vars(modules[first])
    assert [layer.reason for layer in report.layers] == [Reason.OWN_PROCESSOR, None]
    assert report.layers[0].why == "its processor ByHand does not call PyTorch's attention"
    for method, words in (
        ({first: METHOD}, f"layer '{first}' cannot use another method: its processor ByHand"),
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
        (nn.Linear(3, 3), {"method": METHOD, "backend": "fastest"}, ValueError, "backend='fastest' must be"),
    ],
)
def test_bad_arguments(model, arguments, error, words):
    with pytest.raises(error, match=words), intercept_diffusers(model, **arguments):
        pytest.fail("the block ran")


def test_without_diffusers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with pytest.raises(ImportError, match=r"pip install 'smyrf\[diffusers\]'"):
        intercept_diffusers(nn.Linear(3, 3), METHOD).__enter__()
