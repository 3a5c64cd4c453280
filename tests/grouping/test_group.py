"""`group`: from a call and a method to lists of groups."""

import pytest
import torch

from problems import backends, make_groups, problem
from smyrf import Dense, Smyrf, Tangent
from smyrf.grouping.groups import FarKeys, Groups, pack, unpack


@backends
@pytest.mark.parametrize("method", [Dense(), Smyrf(8, 20), Tangent(1.0), Tangent(31)])
def test_what_is_exact_is_one_list_of_all_pairs(backend, method):
    (groups,) = make_groups(*problem(20, 31, 5, 5), method, backend)
    assert groups.shape == (6, 1, 20, 31)
    assert groups.far is None


@backends
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 16), Tangent(32)])
def test_masked_keys_are_in_no_list(backend, is_causal, method):
    q, k, v = problem(300, 290, 5, 5, heads=2, kv_heads=2)
    mask = torch.rand(2, 290) > 0.5
    for groups in make_groups(q, k, v, method, backend, key_mask=mask, is_causal=is_causal):
        for row, keys in enumerate(groups.keys):
            assert mask[row // 2][keys[keys >= 0]].all()


@backends
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 16), Smyrf(2, 16, deduplicate=True), Tangent(32, levels=2)])
def test_indices_are_int32(backend, is_causal, method):
    for groups in make_groups(*problem(300, 290, 5, 5, 1, 1, 1), method, backend, is_causal=is_causal):
        assert groups.queries.dtype == groups.keys.dtype == torch.int32
        assert groups.far is None or groups.far.of_group.dtype == torch.int32


def float_indices(index):
    return Groups(queries=index.float(), keys=index)


def integer_far_keys(index):
    table = torch.zeros(1, 2, 4, dtype=torch.int64)
    return Groups(index, index, far=FarKeys(table, table, table[..., 0], torch.zeros(1, 1, dtype=torch.int32)))


@pytest.mark.parametrize(("build", "words"), [(float_indices, "indices must be"), (integer_far_keys, "far keys")])
def test_groups_of_other_dtypes_are_refused(build, words):
    with pytest.raises(TypeError, match=words):
        build(torch.arange(4, dtype=torch.int32).view(1, 1, 4))


def test_packed_groups_without_all_tensors_are_refused():
    index = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    tensors, layout = pack([Groups(index, index)])
    with pytest.raises(ValueError, match=r"layout=\[0\] needs 2 tensors, not 1"):
        unpack(tensors[:1], layout)
