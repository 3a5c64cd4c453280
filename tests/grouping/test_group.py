import pytest
import torch

from smyrf import Dense, Smyrf, Tangent
from smyrf.grouping.group import group


@pytest.mark.parametrize("method", [Dense(), Smyrf(8, 20), Tangent(1.0), Tangent(31)])
def test_what_is_exact_is_one_list_of_all_pairs(method):
    q, k = torch.randn(2, 3, 20, 5), torch.randn(2, 3, 31, 5)
    (groups,) = group(q, k, k, method, seed=torch.tensor(0), scale=1.0)
    assert groups.shape == (6, 1, 20, 31)
    assert groups.extra is None


def test_masked_keys_are_in_no_list():
    q, k = torch.randn(2, 2, 128, 5), torch.randn(2, 2, 96, 5)
    mask = torch.rand(2, 96) > 0.5
    for method in (Dense(), Smyrf(2, 16), Tangent(32)):
        for groups in group(q, k, k, method, seed=torch.tensor(0), scale=1.0, key_mask=mask):
            for row, keys in enumerate(groups.keys):
                assert mask[row // 2][keys[keys >= 0]].all()
