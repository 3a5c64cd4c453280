import pytest
import torch
from torch.utils.checkpoint import checkpoint

from smyrf.seeds import check_generator, check_seed


@pytest.mark.parametrize("seed", [0, 2**62 - 1])
def test_seeds(seed):
    check_seed(seed)


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (-1, ValueError, r"seed=-1 must be in \[0, 2\*\*62\)"),
        (2**62, ValueError, r"must be in \[0, 2\*\*62\)"),
        (True, TypeError, "seed=True must be an int"),
        (1.0, TypeError, "seed=1.0 must be an int"),
    ],
)
def test_what_is_no_seed_is_named(seed, error, words):
    with pytest.raises(error, match=words):
        check_seed(seed)


def test_other_limits_and_names():
    check_seed(2**32 - 1, "run_seed", bits=32)
    with pytest.raises(ValueError, match=r"run_seed=4294967296 must be in \[0, 2\*\*32\)"):
        check_seed(2**32, "run_seed", bits=32)
    check_generator(2**63 - 1)
    with pytest.raises(ValueError, match="dropout_generator=-1 must be"):
        check_generator(-1, "dropout_generator")


def test_a_generator_that_would_be_advanced_twice_is_named_as_the_argument():
    generator = torch.Generator()

    def run(x):
        if torch._C._current_graph_task_id() != -1:  # the repeated forward pass
            check_generator(generator, "dropout_generator")
        return x.sin()

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(run, x, use_reentrant=False)
    with pytest.raises(ValueError, match=r"^dropout_generator=.*cannot be rewound"):
        out.sum().backward()
