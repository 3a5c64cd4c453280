"""The run of .ci/sanitize is what it says: the library is the one with sanitizers, and these see what goes wrong."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

LIBRARY = os.environ.get("SMYRF_NATIVE")
if LIBRARY is None:
    pytest.skip("there is no SMYRF_NATIVE: this is not the run with sanitizers", allow_module_level=True)

from smyrf.backends.native import extension  # noqa: E402


def test_the_kernel_is_the_one_with_sanitizers():
    maps = Path("/proc/self/maps").read_text()
    assert extension.native.__file__ == LIBRARY
    assert LIBRARY in maps
    assert "smyrf/_native" not in maps  # the installed one
    assert "libasan" in maps
    assert "libubsan" in maps


def out_of_bounds():
    """A tensor that pretends to have more rows than its memory, which no check can see."""
    x, orders = torch.randn(1, 1, 4, 64), torch.empty(2, 1, 1, 2, 4, dtype=torch.int32)
    vectors = torch.from_numpy(np.lib.stride_tricks.as_strided(np.zeros((1, 66), np.float32), (2, 66)))
    extension.native.sort_by_hash(
        q=x,
        k=x,
        key_mask=None,
        vectors=vectors,
        scale=1.0,
        q_order=orders[0],
        k_order=orders[1],
        **extension.running(),
    )


def test_an_address_out_of_bounds_ends_the_process():
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
import conftest, test_sanitizers
test_sanitizers.out_of_bounds()
print("all is well")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "all is well" not in done.stdout
    assert "AddressSanitizer" in done.stderr
