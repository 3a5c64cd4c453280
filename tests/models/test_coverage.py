"""The table of architectures in docs/coverage.md: what it states is what runs show."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

from transformers import AttentionMaskInterface

from smyrf.models.transformers import REPLACED
from tests.zoo.architectures import Architecture
from tests.zoo.attending import Attending
from tests.zoo.check import LARGEST_DIFFERENCE, CheckError, check
from tests.zoo.entries import ARCHITECTURES
from tests.zoo.page import PAGE, read, render, state

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
STATED = read()
TEXT = ("text encoder", "encoder–decoder", "decoder")


# WavLM hands PyTorch two kinds of masks.
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning")
@pytest.mark.parametrize("name", BY_NAME)
def test_architecture_is_covered_as_the_page_states(name):
    row = check(BY_NAME[name])
    assert state(row) == STATED[name], f"run `python -m tests.zoo` to write {PAGE.name} again"
    if row.verdict == "refused":
        return
    assert row.difference < LARGEST_DIFFERENCE
    assert row.generated is not False
    assert row.padded or row.architecture.family not in TEXT


def test_page_lists_the_zoo():
    assert list(STATED) == [architecture.name for architecture in ARCHITECTURES]
    assert len(BY_NAME) == len(ARCHITECTURES)


def test_page_is_read_as_it_was_written(tmp_path):
    rows = [check(BY_NAME[name]) for name in ("BERT", "ModernBERT", "MPNet")]
    page = tmp_path / "page.md"
    page.write_text(render(rows), encoding="utf-8")
    assert read(page) == {row.architecture.name: state(row) for row in rows}


def test_lost_padding_is_noticed(monkeypatch):
    check(BY_NAME["BERT"])
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, REPLACED, lambda *_, **__: None)
    with pytest.raises(CheckError, match="one cluster differs"):
        check(BY_NAME["BERT"])


def test_case_that_could_not_show_an_error_is_an_error(monkeypatch):
    monkeypatch.setattr("tests.zoo.check.SENSITIVITY", 100.0)
    with pytest.raises(CheckError, match="uniform attention"):
        check(BY_NAME["BERT"])


def test_attention_is_seen_whatever_code_computes_it():
    class Own(nn.Module):
        def forward(self, x):
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    class Function(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x[:, :3], x[:, :3])

    class Heads(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x[:, :1], x, x)[0]

    model = nn.Sequential(Own(), nn.Linear(8, 8), Function(), Heads(8, 2, batch_first=True)).eval()
    with torch.inference_mode(), Attending(model) as attending:
        model(torch.randn(2, 5, 8))
    assert attending.n_queries == {"0": 5, "2": 5, "3": 1}


def test_unknown_option_is_an_error():
    bert = BY_NAME["BERT"]
    wrong = Architecture("BERT", bert.family, bert.model, {**bert.options, "hiden_size": 32}, bert.batch)
    with pytest.raises(ValueError, match="hiden_size"):
        wrong.build()
