"""The run of .ci/sanitize is what it says: the library is the one with sanitizers, and these see what goes wrong."""

import os
import subprocess
import sys
from pathlib import Path

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
    """One hash more than there are vectors for, which no caller may ask for."""
    native, x, vectors = extension.native, torch.randn(1, 1, 4, 64), torch.randn(2, 66)
    orders = torch.empty(2, 1, 3, 4, dtype=torch.int32)
    native.sort_by_hash(
        native.HashParams(
            execution=extension.execution(x.dtype),
            batch=1,
            heads=1,
            kv_heads=1,
            n_queries=4,
            n_keys=4,
            width=64,
            n_hashes=3,
            q=extension.rows(x),
            k=extension.rows(x),
            vectors=vectors.data_ptr(),
            scale=1.0,
            q_order=orders[0].data_ptr(),
            k_order=orders[1].data_ptr(),
        )
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
