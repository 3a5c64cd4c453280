"""Rows of like lengths in one batch, so that little of it is padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

# Rows are sorted among so many batches. Fewer: more padding. More: batches of an epoch depend less on chance.
N_BATCHES = 50


class GroupedByLength(Sampler[int]):
    """The order of each epoch: by chance, but for rows of like lengths that stand together.

    An order depends on the seed and the epoch alone, so that a run that is resumed sees what it would have seen.

    Args:
        lengths: of all rows.
        batch_size: rows that stand together.
        seed: of the order.

    Example:
        >>> order = GroupedByLength([5, 1, 4, 2], batch_size=2, seed=0)
        >>> sorted(order), len(order)
        ([0, 1, 2, 3], 4)
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        self._lengths = torch.tensor(lengths)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """To be called before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self), generator=generator)
        groups = [part[self._lengths[part].argsort()] for part in torch.split(order, self._batch_size * N_BATCHES)]
        batches = [batch for part in groups for batch in torch.split(part, self._batch_size)]
        # A batch that is not full must stay the last, or all behind it would be cut elsewhere.
        short = batches.pop() if len(batches[-1]) < self._batch_size else None
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        yield from torch.cat(mixed if short is None else [*mixed, short]).tolist()


class SetEpoch(TrainerCallback):  # type: ignore[misc]
    """Tells an order its epoch. accelerate does not reach it where batches of a resumed run are skipped."""

    def __init__(self, order: GroupedByLength) -> None:
        self._order = order

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._order.set_epoch(int(state.epoch or 0))


def lengths(rows: Any) -> list[int]:
    """Tokens of each row of a `datasets.Dataset`."""
    return [len(ids) for ids in rows["input_ids"]]


def longest_first(rows: Any) -> Any:
    """The rows of a `datasets.Dataset` by length: what needs most memory comes first."""
    return rows.select(torch.tensor(lengths(rows)).argsort(descending=True, stable=True).tolist())
