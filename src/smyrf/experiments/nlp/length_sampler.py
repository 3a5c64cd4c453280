"""Sample batches of similar lengths, which need little padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

# Rows are sorted within this many batches. Fewer mean more padding, more mean less randomness.
N_BATCHES = 50


class GroupedByLength(Sampler[int]):
    """Random order of rows in which neighbours have similar lengths.

    The order depends only on the seed and the epoch, so that a resumed run sees the same batches.

    Args:
        lengths: length of each row.
        batch_size: rows per batch.
        seed: seed of the order.

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
        """Set the epoch; call it before each one."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self), generator=generator)
        groups = [part[self._lengths[part].argsort()] for part in torch.split(order, self._batch_size * N_BATCHES)]
        batches = [batch for part in groups for batch in torch.split(part, self._batch_size)]
        # An incomplete batch must stay last, or all batches after it would be cut differently.
        short = batches.pop() if len(batches[-1]) < self._batch_size else None
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        yield from torch.cat(mixed if short is None else [*mixed, short]).tolist()


class SetEpoch(TrainerCallback):  # type: ignore[misc]
    """Set the epoch of a sampler. accelerate does not do so when it skips batches of a resumed run."""

    def __init__(self, order: GroupedByLength) -> None:
        self._order = order

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._order.set_epoch(int(state.epoch or 0))


def lengths(rows: Any) -> list[int]:
    """Number of tokens in each row of a `datasets.Dataset`."""
    return [len(ids) for ids in rows["input_ids"]]


def longest_first(rows: Any) -> Any:
    """Sort a `datasets.Dataset` by length, longest first, so that peak memory shows at once."""
    return rows.select(torch.tensor(lengths(rows)).argsort(descending=True, stable=True).tolist())
