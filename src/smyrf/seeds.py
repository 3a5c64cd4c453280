"""Seeds: the randomness of one call as one number, from which projections and dropout are drawn.

The number is a CPU tensor: it can be drawn inside a compiled graph, it is saved for the backward pass instead of what
was drawn from it, and the same number gives the same clusters on every device. Without a generator it comes from
PyTorch's own, which activation checkpointing restores.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Seeds from a user are smaller, so that further seeds can be counted from them.
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


def check_seed(seed: object, name: str = "seed", bits: int = 62) -> None:
    """Raises unless `seed` is an int in [0, 2**bits).

    Example:
        >>> check_seed(-1)
        Traceback (most recent call last):
        ValueError: seed=-1 must be in [0, 2**62)
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{name}={seed!r} must be an int")
    if not 0 <= seed < 2**bits:
        raise ValueError(f"{name}={seed} must be in [0, 2**{bits})")


def check_generator(generator: object, name: str = "generator") -> None:
    """Raises unless it is None, a seed, or a generator that will not be advanced twice."""
    if generator is None:
        return
    if isinstance(generator, int) and not isinstance(generator, bool):
        check_seed(generator, name, bits=63)
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}={generator!r} must be a torch.Generator, an int seed or None")
    # Activation checkpointing runs the forward pass again inside backward. It restores PyTorch's own generators, but
    # not this one: the second run would make other clusters, and wrong gradients.
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ValueError(
            f"{name}={generator} cannot be rewound when a forward pass is run again inside backward "
            "(activation checkpointing): pass an int seed, or None for PyTorch's own generator"
        )
