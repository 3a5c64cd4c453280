"""The native kernel among others: threads of Python, forked processes, and PyTorch's OpenMP runtime."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import smyrf
from problems import attend, make_groups
from smyrf.backends import BACKENDS, backends

if "native" not in BACKENDS:  # where the package was installed without a compiler
    pytest.skip(backends()["native"], allow_module_level=True)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def results(seed, method, n=300, heads=2, backend="native", width=16, **options):
    """Output and gradients of a problem that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, width, generator=generator).requires_grad_() for _ in range(3))
    out = smyrf.attention(q, k, v, method=method, generator=seed, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.2}], ids=["plain", "causal", "dropout"])
@pytest.mark.parametrize("method", [smyrf.Smyrf(3, 32), smyrf.Tangent(64)], ids=["smyrf", "tangent"])
def test_results_do_not_depend_on_the_number_of_threads(method, options, heads):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(results(0, method, 700, heads, **options))
    finally:
        torch.set_num_threads(before)
    assert all(same(others, found[0]) for others in found[1:])


@pytest.mark.parametrize("sizes", [{"n": 3000}, {"n": 513, "width": 33}])
def test_a_row_alone_does_not_depend_on_the_number_of_threads(sizes):
    """PyTorch sums a single product, if it is long or of an odd width, in another order with other threads."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.append(results(0, smyrf.Tangent(0.1), heads=1, **sizes))
    finally:
        torch.set_num_threads(before)
    assert all(same(found[0], one) for one in found[1:])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_of_python_may_call_it_at_once(threads):
    """Forward and backward of different shapes, in more threads than there are processors."""
    cases = [
        (i, method, 150 + 70 * i, 1 + i % 3) for i in range(4) for method in (smyrf.Smyrf(2, 32), smyrf.Tangent(64))
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        expected = [results(*case) for case in cases]
        # PyTorch counts threads for each thread of Python.
        with ThreadPoolExecutor(5, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            found = list(pool.map(lambda case: results(*case), cases * 6))
    finally:
        torch.set_num_threads(before)
    assert all(same(one, expected[i % len(cases)]) for i, one in enumerate(found))


def in_a_child(work, seconds=20.0):
    """What a forked process returns: 0 if `work` is true there, or None if it has not come back in time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
ignored = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@forks
@ignored
def test_a_forked_process_with_one_thread_gives_the_same(two_threads):
    """What a worker of a DataLoader does: it is forked after the kernel has run, and sets one thread."""
    expected = results(0, smyrf.Smyrf(2, 32))

    def work():
        torch.set_num_threads(1)
        return same(results(0, smyrf.Smyrf(2, 32)), expected)

    assert in_a_child(work) == 0


class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return results(i, smyrf.Smyrf(2, 32))[0]


@forks
@ignored
def test_it_runs_in_workers_of_a_data_loader(two_threads):
    expected = [results(i, smyrf.Smyrf(2, 32))[0] for i in range(4)]
    loader = torch.utils.data.DataLoader(
        Dataset(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert same(list(loader), expected)


@forks
@ignored
def test_a_forked_process_with_two_threads_gives_the_same(two_threads):
    """The kernel alone, on so little that PyTorch's own operators take one thread for it."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 300, 16).unbind())
    groups = make_groups(q, k, v, smyrf.Smyrf(2, 32), "native", scale=0.25)

    def run():
        out, _ = attend(q, k, v, groups, backend="native")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    expected = run()
    assert in_a_child(lambda: same(run(), expected), seconds=5.0) == 0


ONE_RUNTIME = """
import re, torch, smyrf
from pathlib import Path

def count():
    return len(list(Path("/proc/self/task").iterdir()))

torch.set_num_threads(2)
torch.randn(1000, 1000).exp().sum()
torch.randn(500, 500) @ torch.randn(500, 500)
q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 4, 600, 16).unbind())

def run(backend):
    for method in (smyrf.Smyrf(2, 32), smyrf.Tangent(64)):
        smyrf.attention(q, k, v, method=method, backend=backend).sum().backward()

run("torch")
before = count()
for _ in range(3):
    run("native")
after = count()
names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
print(before, after, *sorted(x for x in names if re.search(r"lib(gomp|omp|iomp5)[^/]*[.]so", x)), sep="\\n")
"""


@linux
def test_there_is_one_openmp_runtime_and_no_thread_of_our_own():
    """In a process of its own: others would have started threads before."""
    found = subprocess.run([sys.executable, "-c", ONE_RUNTIME], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    before, after, *runtimes = found.stdout.split()
    assert len(runtimes) == 1
    assert int(after) <= int(before)


@linux
def test_without_pytorch_the_extension_says_what_it_misses():
    """Its OpenMP calls are found in PyTorch's runtime: imported alone it must not crash later."""
    from smyrf.backends.native import extension

    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_native", {extension.native.__file__!r})
importlib.util.module_from_spec(spec)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if found.returncode == 0:
        pytest.skip("it was built without OpenMP, and misses nothing")
    assert "ImportError" in found.stderr
    assert "undefined symbol: GOMP" in found.stderr or "undefined symbol: omp" in found.stderr
