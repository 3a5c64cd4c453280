"""Bad input to `smyrf.attention` is named before any work."""

import pytest
import torch

import smyrf
from smyrf import Smyrf


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": [1.0]}, TypeError, "q must be a tensor, not list"),
        (
            {"k": torch.ones(2, 3, 10, 4, dtype=torch.int64)},
            TypeError,
            "k must be float16, .* not torch.int64",
        ),
        ({"v": torch.ones(2, 3, 10, 4, dtype=torch.complex64)}, TypeError, "v must be float16, .* not torch.complex64"),
        ({"q": torch.ones(4)}, ValueError, r"q must have at least two axes .* \(4,\)"),
        ({"q": torch.ones(3, 12, 4)}, ValueError, "same number of axes"),
        ({"q": torch.ones(2, 3, 12, 5)}, ValueError, r"same width: q \(2, 3, 12, 5\)"),
        ({"v": torch.ones(2, 3, 11, 4)}, ValueError, "k and v must agree"),
        ({"q": torch.ones(1, 3, 12, 4)}, ValueError, "same leading axes"),
        ({"q": torch.ones(2, 6, 12, 4)}, ValueError, "unless enable_gqa=True"),
        ({"q": torch.ones(2, 4, 12, 4), "enable_gqa": True}, ValueError, "multiple of those of k"),
        ({"q": torch.ones(2, 3, 0, 4)}, ValueError, r"q has the shape \(2, 3, 0, 4\)"),
        ({"q": torch.ones(2, 3, 12, 4).double()}, TypeError, "one dtype, not torch.float64, torch.float32"),
        ({"q": torch.ones(2, 3, 12, 4, device="meta")}, ValueError, "k is on cpu but q is on meta"),
        ({"key_mask": torch.ones(2, 10)}, TypeError, "bool tensor .* not torch.float32"),
        ({"key_mask": [True]}, TypeError, "not list"),
        ({"key_mask": torch.ones(10, dtype=torch.bool)}, ValueError, r"shape \(10,\), but \(2, 10\) is needed"),
        ({"key_mask": torch.ones(2, 12, dtype=torch.bool)}, ValueError, r"shape \(2, 12\)"),
        ({"method": Smyrf}, TypeError, r"write Smyrf\(\)"),
        ({"method": "smyrf"}, TypeError, r"method='smyrf' must be a method \(Smyrf, Tangent, Dense, PerHead\)"),
        ({"scale": float("nan")}, ValueError, "scale=nan must be finite"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p=1.5 must be in \[0, 1\]"),
        ({"scale": "a"}, TypeError, "scale='a' must be a number or None"),
        ({"dropout_p": None}, TypeError, "dropout_p=None must be a number"),
        ({"is_causal": "no"}, TypeError, "is_causal='no' must be a bool"),
        ({"q": torch.ones(2, 3, 12, 4).to(torch.float8_e4m3fn)}, TypeError, "q must be float16, .* not torch.float8"),
        ({"method": torch.ones(3)}, TypeError, r"must be a method \(Smyrf, Tangent, Dense, PerHead\), not Tensor"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' must be None or one of reference, torch"),
        ({"generator": -1}, ValueError, "generator=-1"),
        ({"generator": 2.0}, TypeError, "generator=2.0"),
        ({"generator": True}, TypeError, "generator=True"),
    ],
)
def test_bad_input_is_named_before_any_work(change, error, words):
    arguments = {
        "q": torch.ones(2, 3, 12, 4),
        "k": torch.ones(2, 3, 10, 4),
        "v": torch.ones(2, 3, 10, 4),
        "method": Smyrf(2, 4),
        **change,
    }
    with pytest.raises(error, match=words):
        smyrf.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
