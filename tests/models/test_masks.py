import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import smyrf
from smyrf.call import Call, Reason
from smyrf.models.masks import read_mask

PADDING = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]  # (3, 7)


def read(mask, batch=3, n_queries=5, n_keys=7, is_causal=False):
    heads = mask.shape[1] if mask.dim() == 4 else 2
    q, k = torch.empty(batch, heads, n_queries, 1), torch.empty(batch, heads, n_keys, 1)
    return read_mask(Call(q, k, k, 1.0, is_causal=is_causal), mask)


def what_is_read(call):
    return call.key_mask, call.is_causal, call.only_dense


@pytest.mark.parametrize(
    "mask",
    [
        PADDING[:, None, None],
        PADDING[:, None, None].expand(3, 4, 5, 7),
        PADDING[:, None, None].repeat(1, 4, 5, 1),
        torch.zeros(3, 1, 1, 7).masked_fill(~PADDING[:, None, None], -torch.inf),
        torch.zeros(3, 4, 5, 7).masked_fill(~PADDING[:, None, None], torch.finfo(torch.float16).min),
    ],
    ids=["keys", "expanded", "repeated", "-inf", "min"],
)
def test_padding_is_a_key_mask(mask):
    found = read(mask)
    assert torch.equal(found.key_mask, PADDING)
    assert (found.is_causal, found.only_dense) == (False, None)
    assert read(mask, is_causal=True).is_causal  # the flag of the call stays


@pytest.mark.parametrize("mask", [torch.ones(1, 7, dtype=torch.bool), torch.zeros(5, 7), torch.zeros(3, 1, 5, 7)])
def test_a_mask_that_hides_nothing_is_none(mask):
    assert what_is_read(read(mask)) == (None, False, None)


def test_causal_masks_with_and_without_padding():
    tril = torch.ones(7, 7, dtype=torch.bool).tril()
    assert what_is_read(read(tril, n_queries=7)) == (None, True, None)
    found = read(tril & PADDING[:, None, None], n_queries=7)
    assert found.is_causal and torch.equal(found.key_mask, PADDING)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.randn(5, 7), Reason.BIAS),
        (torch.zeros(5, 7, requires_grad=True), Reason.BIAS),  # it will be learned
        (torch.full((5, 7), torch.nan), Reason.BIAS),
        (torch.ones(3, 2, 5, 7, dtype=torch.bool).index_fill(1, torch.tensor([1]), False), Reason.HEAD_MASK),
        (torch.eye(7, dtype=torch.bool)[:5], Reason.OTHER_MASK),
        (torch.ones(5, 7, dtype=torch.bool).tril(2), Reason.OTHER_MASK),  # a cache: aligned at the end
        (torch.ones(4, 7, dtype=torch.bool), Reason.FOREIGN),  # does not broadcast
        (torch.ones(2, 1, 1, 7, dtype=torch.bool), Reason.FOREIGN),
    ],
)
def test_what_only_dense_attention_can_do_has_a_reason(mask, reason):
    assert what_is_read(read(mask)) == (None, False, reason)


@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_what_is_read_is_the_mask(n_queries, n_keys, random):
    mask = torch.tensor([[random.random() < 0.7 for _ in range(n_keys)] for _ in range(n_queries)])
    if random.random() < 0.5:
        mask = mask[-1:].expand(n_queries, n_keys)
    if random.random() < 0.5:
        mask = mask[-1:] & torch.ones(n_queries, n_keys, dtype=torch.bool).tril()
    key_mask, is_causal, reason = what_is_read(read(mask, 1, n_queries, n_keys))
    if reason is not None:
        return
    found = torch.ones(n_queries, n_keys, dtype=torch.bool)
    found = found.tril() if is_causal else found
    assert torch.equal(found if key_mask is None else found & key_mask, mask)


def test_a_read_mask_gives_the_same_attention():
    q, k, v = torch.randn(3, 3, 2, 7, 4)
    mask = torch.zeros(3, 1, 7, 7).masked_fill(~(torch.ones(7, 7).tril().bool() & PADDING[:, None, None]), -torch.inf)
    call = read_mask(Call(q, k, v, 0.5), mask)
    found = smyrf.attention(q, k, v, method=smyrf.Dense(), key_mask=call.key_mask, is_causal=call.is_causal)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))
