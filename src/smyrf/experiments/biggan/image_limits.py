"""Upper limits of `--number`: far above any use, and below what fills the memory before the first image."""

from __future__ import annotations

from smyrf.tools.cli.validation import need_at_least, refuse

# Images in a figure or a table of attention maps, and images of a score; 50,000 are usual for the latter.
MAX_SHOWN, MAX_SCORED = 10_000, 1_000_000


def need_images(number: int, *, least: int = 1, most: int = MAX_SHOWN) -> None:
    """Refuse a number of images outside the limits.

    Example:
        >>> need_images(8)
    """
    need_at_least(least, number=number)
    if number > most:
        refuse(f"--number {number} must be at most {most:,}")
