"""Randomness of one call as one number, from which projections and dropout are drawn.

The number lives in a CPU tensor: it can be drawn inside a compiled graph, it is saved for the
backward pass instead of what was drawn from it, and the same one gives the same clusters on every
device. Without a generator it comes from PyTorch's own, which activation checkpointing restores.
"""

from __future__ import annotations

import torch
from torch import Tensor

SEED_LIMIT = 2**62


def draw_seed(generator: torch.Generator | int | None) -> Tensor:
    """One int64 number, ``()`` on the CPU: the seed itself, or the next number of a generator.

    Example:
        >>> import torch
        >>> draw_seed(3)
        tensor(3)
        >>> g = torch.Generator()
        >>> draw_seed(g.manual_seed(1)) == draw_seed(g.manual_seed(1))
        tensor(True)
    """
    if isinstance(generator, int):
        return torch.tensor(generator, dtype=torch.int64)
    if generator is None:
        return torch.randint(SEED_LIMIT, (), dtype=torch.int64, device="cpu")
    number = torch.randint(SEED_LIMIT, (), dtype=torch.int64, generator=generator, device=generator.device)
    return number.cpu()


def check_generator(generator: object, name: str = "generator") -> None:
    """Raises on what is neither None, a seed nor a generator, and on one that would be advanced twice."""
    if generator is None:
        return
    if isinstance(generator, int) and not isinstance(generator, bool):
        if not 0 <= generator < 2**63:
            raise ValueError(f"{name}={generator} must be in [0, 2**63)")
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}={generator!r} must be a torch.Generator, an int seed or None")
    # Activation checkpointing runs the forward pass again inside backward. It restores PyTorch's own
    # generators, not this one: the second run would make other clusters, and wrong gradients.
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ValueError(
            f"{generator=} cannot be rewound when a forward pass is run again inside backward "
            "(activation checkpointing): pass an int seed, or None for PyTorch's own generator"
        )
