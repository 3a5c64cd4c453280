"""What `tune` promises and what other text gives: ``python benchmarks/tuned.py --json …``.

MiniLM at 512 tokens: tuned on four documents with the fallback off, checked on sixteen others. The error of a layer is
that of its whole output, over all heads and documents.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

import smyrf
from smyrf.call import Call
from smyrf.tools.analysis.error import output_errors
from smyrf.tools.encoders import minilm_attention
from smyrf.tools.results import write_results

N_TUNED, N_OTHERS, LENGTH = 4, 16, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls = minilm_attention(N_TUNED + N_OTHERS, LENGTH)
    tuned = [(*(x[:N_TUNED] for x in call.qkv), call.scale) for call in calls]
    others = [Call(*(x[N_TUNED:] for x in call.qkv), call.scale) for call in calls]
    table = Table(title="smyrf.tune on MiniLM, 512 tokens, checked on other documents", title_justify="left")
    for name in ("max_error", "seconds", "key visits", "error, mean", "worst layer", "worst / max_error"):
        table.add_column(name, justify="right")
    rows = []
    for max_error in (0.05, 0.1, 0.2):
        start = time.perf_counter()
        plan = smyrf.tune(tuned, max_error=max_error, fallback=False)
        seconds = time.perf_counter() - start
        errors = [output_errors([call], method)[0] for call, method in zip(others, plan.methods, strict=True)]
        rows.append({"max_error": max_error, "seconds": seconds, "memory_share": plan.memory_share, "errors": errors})
        cells = (f"{seconds:.1f}", f"{plan.memory_share:.1%}", f"{fmean(errors):.3f}", f"{max(errors):.3f}")
        table.add_row(str(max_error), *cells, f"{max(errors) / max_error:.2f}")
    Console().print(table)
    if arguments.json is not None:
        config = {"tuned on": N_TUNED, "checked on": N_OTHERS, "length": LENGTH}
        write_results(arguments.json, rows, threads=1, config=config)


if __name__ == "__main__":
    main()
