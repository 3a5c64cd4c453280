"""Peak memory of a model's forward pass on one document, in a fresh process.

The process runs this module: ``python -m smyrf.tools.compare.memory '{"name": …}'`` prints the bytes beyond model and
inputs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from smyrf.methods import Method, method_from_dict
from smyrf.models.replace import replace_attention
from smyrf.tools.compare.inputs import Batch
from smyrf.tools.compare.load_model import load_reader
from smyrf.tools.encoders import stretch_positions
from smyrf.tools.subprocess_memory import ask, peak_bytes

# Return freed memory to the system at once, so that a second pass cannot reuse what the first one left.
_AT_ONCE = {"MALLOC_TRIM_THRESHOLD_": "65536"}


def extra_bytes(name: str, kind: str, batch: Batch, methods: Mapping[str, Method], threads: int, label: str) -> int:
    """Peak memory of a forward pass beyond the model and its inputs, in bytes.

    Args:
        name: of the model.
        kind: what it reads.
        methods: of the replaced layers, by layer name.
        label: for errors.

    Raises:
        RuntimeError: says why it could not be measured.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        inputs = str(Path(folder) / "inputs.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in batch.items()}, inputs)
        request = json.dumps(
            {
                "name": name,
                "kind": kind,
                "inputs": inputs,
                "methods": {layer: method.to_dict() for layer, method in methods.items()},
                "threads": threads,
            }
        )
        return ask("smyrf.tools.compare.memory", request, label, _AT_ONCE)


def _measure(request: str) -> int:
    from safetensors.torch import load_file

    data = json.loads(request)
    torch.set_num_threads(data["threads"])
    model, kind = load_reader(data["name"], data["kind"])
    batch = load_file(data["inputs"])
    if kind == "text":
        batch = stretch_positions(model, batch["input_ids"].shape[1]) | batch

    def run(batch: Batch = batch) -> None:
        with torch.no_grad():
            model(**batch)

    run()  # loads the weights, and has libraries set up what they set up once
    if data["methods"]:
        replace_attention(model, {layer: method_from_dict(method) for layer, method in data["methods"].items()})
        if kind == "text":  # warm up the methods, on an eighth of the text
            run({name: tensor[:, : max(1, tensor.shape[1] // 8)] for name, tensor in batch.items()})
    return peak_bytes(run)


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
