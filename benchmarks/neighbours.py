"""How far nearest-neighbour agreement depends on the documents: ``python benchmarks/neighbours.py --text FILE …``.

`smyrf compare` states one number for one set of documents. Here MiniLM embeds many (mean-pooled, 512 tokens, those that
have them), with dense attention and with others, and the agreement is that of disjoint sets of one size.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import smyrf
from smyrf.tools.compare.drift import cosines, neighbour_agreement, valid_outputs
from smyrf.tools.compare.load_model import load_subject
from smyrf.tools.encoders import MINILM
from smyrf.tools.results import write_results

LENGTH = 512
METHODS = (smyrf.Tangent(0.25), smyrf.Tangent(0.25, levels=2), smyrf.Tangent(0.5), smyrf.Smyrf(8, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=768)
    parser.add_argument("--set", type=int, default=96, help="documents in a set")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    subject = load_subject(
        MINILM, path=arguments.text, length=LENGTH, documents=arguments.documents, batch=8, console=console
    )
    model, inputs = subject.model, subject.inputs
    if any("attention_mask" in batch for batch in inputs.batches):
        sys.exit(f"{arguments.text} has fewer than {arguments.documents} documents of {LENGTH} tokens")

    def embed(what: str) -> torch.Tensor:
        torch.manual_seed(0)
        found = []
        for batch in track(inputs.batches, what, console=console, transient=True):
            with torch.no_grad():
                found.append(valid_outputs(model(**batch).last_hidden_state, None).pooled)
        return torch.cat(found)  # (documents, width)

    dense = embed("dense attention")
    n_sets = len(dense) // arguments.set
    table = Table(
        title=f"nearest neighbours, {n_sets} sets of {arguments.set}: {inputs.says} of {LENGTH} tokens",
        title_justify="left",
    )
    for name in ("attention", "pooled cosine", "same nearest, mean", "least", "most", "first set"):
        table.add_column(name, justify="left" if name == "attention" else "right")
    rows = []
    for method in METHODS:
        smyrf.replace_attention(model, method)
        pooled = embed(method.label)
        smyrf.restore_attention(model)
        sets = [slice(i * arguments.set, (i + 1) * arguments.set) for i in range(n_sets)]
        agreement = [neighbour_agreement(pooled[one], dense[one]) for one in sets]
        cosine = float(cosines(pooled, dense).mean())
        rows.append({"method": method.label, "pooled_cosine": cosine, "agreement": agreement})
        shares = (fmean(agreement), min(agreement), max(agreement), agreement[0])
        table.add_row(method.label, f"{cosine:.4f}", *(f"{share:.1%}" for share in shares))
    console.print(table)
    if arguments.json is not None:
        config = {
            "text": arguments.text.name,
            "documents": len(dense),
            "documents in a set": arguments.set,
            "length": LENGTH,
        }
        write_results(arguments.json, rows, threads=arguments.threads, config=config)


if __name__ == "__main__":
    main()
