"""What a model is compared with: methods, and the plan that `smyrf.tune` finds for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from smyrf.methods import Method, Smyrf, Tangent, parse_method
from smyrf.tuning.search import check_target

# Shares of the keys to visit by default, and the cluster size of Smyrf that has the smallest error on MiniLM.
SHARES = (0.125, 0.25, 0.5)
CLUSTER_SIZE = 16


@dataclass(frozen=True)
class Tuned:
    """A method for each layer, found by `smyrf.tune` on the inputs.

    Args:
        max_error: largest error allowed in a layer.
        fallback: stay dense where dense attention is as fast.
    """

    max_error: float
    fallback: bool = True

    def __post_init__(self) -> None:
        check_target(self.max_error)

    @property
    def family(self) -> str:
        """Name of its curve in plots."""
        return "tuned"

    @property
    def label(self) -> str:
        """Name in tables.

        Example:
            >>> Tuned(0.1, fallback=False).label
            'tuned 0.1, no fallback'
        """
        return f"tuned {self.max_error:g}" + ", no fallback" * (not self.fallback)


Contender: TypeAlias = Method | Tuned


def parse_contender(text: str, max_error: float) -> Contender:
    """Parse a method, or tuned or tuned:ERROR, optionally followed by ,fallback=false.

    Args:
        max_error: of tuned without an error.

    Raises:
        ValueError: says what is wrong, and what can be written.

    Example:
        >>> parse_contender("tuned", 0.05), parse_contender("tuned:0.1,fallback=false", 0.05)
        (Tuned(max_error=0.05, fallback=True), Tuned(max_error=0.1, fallback=False))
    """
    also = "; or tuned, tuned:0.1 (error of each layer) and tuned:0.1,fallback=false"
    head, _, option = text.partition(",")
    kind, colon, error = head.partition(":")
    try:
        if kind != "tuned":
            return parse_method(text)
        if option not in ("", "fallback=true", "fallback=false"):
            raise ValueError(f"{text!r} is not a method: {option!r} is unknown")
        try:
            return Tuned(float(error) if colon else max_error, option != "fallback=false")
        except ValueError as wrong:
            raise ValueError(f"{text!r} is not a method: {error!r} is not a number between 0 and 1") from wrong
    except ValueError as wrong:
        raise ValueError(f"{wrong}{also}") from wrong


def default_contenders(n_keys: int, max_error: float) -> list[Contender]:
    """Tangent and Smyrf at the same key visits, and tuned.

    Example:
        >>> [one.label for one in default_contenders(512, 0.05)][:4]
        ['Tangent 12.5%', 'Tangent 25%', 'Tangent 50%', 'Smyrf 4×16']
    """
    return [*default_methods(n_keys), Tuned(max_error)]


def default_methods(n_queries: int) -> list[Method]:
    """Tangent and Smyrf at the same key visits.

    Args:
        n_queries: from which the number of rounds follows.

    Example:
        >>> [one.label for one in default_methods(512)][2:4]
        ['Tangent 50%', 'Smyrf 4×16']
        >>> [one.label for one in default_methods(64)][3:]
        ['Smyrf 1×16', 'Smyrf 2×16']
    """
    rounds = dict.fromkeys(max(1, round(share * n_queries / CLUSTER_SIZE)) for share in SHARES)  # without duplicates
    return [*(Tangent(share) for share in SHARES), *(Smyrf(one, CLUSTER_SIZE) for one in rounds)]


def without_dense(contenders: list[Contender]) -> list[Contender]:
    """Contenders without duplicates and without `Dense`, which is always compared.

    Example:
        >>> from smyrf.methods import Dense
        >>> without_dense([Dense(), Smyrf(8, 16), Smyrf(8, 16)])
        [Smyrf(n_hashes=8, cluster_size=16, ...)]
    """
    return [one for one in dict.fromkeys(contenders) if isinstance(one, Tuned) or not one.is_dense]
