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
    x, vectors = torch.randn(1, 1, 4, 64), torch.randn(2, 66)
    orders = torch.empty(2, 1, 3, 4, dtype=torch.int32)
    extension.native.sort_by_hash(
        False,
        [1, 1, 1, 4, 4, 64, 3],
        extension.rows(x),
        extension.rows(x),
        0,
        vectors.data_ptr(),
        1.0,
        orders[0].data_ptr(),
        orders[1].data_ptr(),
        1,
        "",
    )


def test_an_address_out_of_bounds_ends_the_process():
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import conftest, test_sanitizers
test_sanitizers.out_of_bounds()
print("all is well")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "all is well" not in done.stdout
    assert "AddressSanitizer" in done.stderr
