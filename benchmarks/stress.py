"""Hard inputs: ``python benchmarks/stress.py --json benchmarks/results/stress.json``.

The q, k and v of one layer of MiniLM at 2,048 tokens, made hard in one way after another: sharp and flat logits, keys
of very different norms, attention sinks, exact retrieval, masks. Smyrf (the best of three cluster sizes), Tangent with
one and with two levels at equal key visits.

Shapes: B heads, N positions, D width.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from smyrf import Dense, Smyrf, Tangent, attention
from smyrf.tools.analysis.error import relative_error
from smyrf.tools.results import write_results

BUDGET, LENGTH, N_HEADS, LAYER = 256, 2048, 4, 2


def cases(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor | None]]:
    """Name, q, k, v ``(1, B, N, D)`` and key mask, for scores with scale 1."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n = q.shape[2]
    yield "as they are", q, k, v, None
    for factor in (0.05, 8.0, 100.0):
        yield f"logits × {factor:g}", factor * q, k, v, None
    yield "lognormal key norms", q, k * random(*k.shape[:3], 1).exp(), v, None
    outliers = k.clone()
    outliers[:, :, :: n // 8] *= 20
    yield "eight keys × 20", q, outliers, v, None
    sinks = k.clone()
    direction = q.mean(2, keepdim=True)
    sinks[:, :, :4] = 8 * direction / direction.square().sum(-1, keepdim=True) + 0.1 * k[:, :, :4]
    yield "attention sinks", q, sinks, v, None
    yield "near-uniform attention", 0.005 * q, k, v, None
    unit = F.normalize(random(*q.shape), dim=-1)
    yield "q = k", 8 * unit, 8 * unit, v, None
    order = torch.randperm(n, generator=generator)
    yield "one match for each query", 20 * unit, 5 * unit[:, :, order], v, None
    yield "no structure", 0.5 * random(*q.shape), random(*k.shape), v, None
    for share in (0.5, 0.9, 0.99):
        yield f"{share:.0%} of the keys masked", q, k, v, (torch.arange(n) < n * (1 - share))[None]


def errors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, budget: int) -> dict[str, float]:
    """Relative output errors, and whether all outputs are finite."""
    exact = attention(q, k, v, method=Dense(), key_mask=mask, scale=1.0)

    def error(method: Smyrf | Tangent) -> float:
        out = attention(q, k, v, method=method, key_mask=mask, scale=1.0, generator=0)
        assert out.isfinite().all(), method
        assert method.key_visits(k.shape[2]) <= budget, method
        return relative_error(out, exact)

    return {
        "smyrf": min(error(Smyrf(budget // size, size)) for size in (16, 32, 64)),
        "tangent": error(Tangent(budget, levels=1)),
        "tangent, 2 levels": error(Tangent(budget, levels=2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from smyrf.tools.encoders import minilm_attention

    call = minilm_attention(1, LENGTH)[LAYER]
    q, k, v = call.q[:, :N_HEADS] * call.scale, call.k[:, :N_HEADS], call.v[:, :N_HEADS]
    table = Table(title=f"Hard inputs, N = {LENGTH:,}, {BUDGET} key visits", title_justify="left")
    table.add_column("input")
    rows = []
    for name, *inputs in cases(q, k, v):
        found = errors(*inputs, BUDGET)
        rows.append({"input": name, **found})
        if not table.row_count:
            for method in found:
                table.add_column(method, justify="right")
        table.add_row(name, *(f"{error:.4f}" for error in found.values()))
    Console().print(table)
    if arguments.json is not None:
        config = {"budget": BUDGET, "length": LENGTH, "heads": N_HEADS, "layer": LAYER}
        write_results(arguments.json, rows, threads=torch.get_num_threads(), config=config)


if __name__ == "__main__":
    main()
