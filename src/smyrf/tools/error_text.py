"""Errors of other libraries, in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """First line of an error message, or the error's class if the message is empty.

    PyTorch's message on a pickle that it refuses advises to unpickle it after all; another takes its place.

    Example:
        >>> first_line(OSError("no such file\\nin this folder")), first_line(EOFError())
        ('no such file', 'EOFError')
        >>> first_line(RuntimeError("Weights only load failed. Set `weights_only` to False"))
        'it is damaged, or holds other objects than tensors, which are never unpickled'
    """
    if "weights_only" in str(error):
        return "it is damaged, or holds other objects than tensors, which are never unpickled"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
