"""Backends: every one implements all stages of a call, forward and backward (`smyrf.grouping.stages`)."""

from smyrf.backends.registry import BACKENDS, attend, backends, check_backend, find_backend

__all__ = ["BACKENDS", "attend", "backends", "check_backend", "find_backend"]
