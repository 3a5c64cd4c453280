"""A text as a head sees it: the cluster of each token, the keys that it visits, and their weights.

A report page and the terminal show this data; `TokenView.as_dict` is its JSON.

Shapes: N tokens, which are both queries and keys; R rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from smyrf.call import Call
from smyrf.methods import Method
from smyrf.models.calls import find_call
from smyrf.tools.analysis.approximate_map import approximate_rows
from smyrf.tools.analysis.maps import map_blocks
from smyrf.tools.analysis.visited_keys import VisitedKeys, query_clusters


@dataclass(frozen=True)
class KeyWeight:
    """One key of one query.

    Args:
        key: number of the token.
        dense: its weight in dense attention.
        approximate: its weight under the method, including its part of far keys.
        met: whether the query visits it directly.
    """

    key: int
    dense: float
    approximate: float
    met: bool

    @property
    def how(self) -> str:
        """How the method treats the key: met, folded into far keys, or missed.

        Example:
            >>> [KeyWeight(0, 0.5, *rest).how for rest in ((0.4, True), (0.4, False), (0.0, False))]
            ['met', 'folded', 'missed']
        """
        if self.met:
            return "met"
        return "folded" if self.approximate > 0.0 else "missed"


@dataclass(frozen=True)
class TokenReach:
    """Keys of one token.

    Args:
        cluster: of its query in the round that is shown; −1 if it is in none.
        n_met: keys that it visits directly, over all rounds.
        keys: those of them that the view shows, in the order of the text.
        captured: their mass in dense attention.
        folded: weight of all other keys under the method, through far keys; 0 for `Smyrf`.
        strongest: the keys with the largest weights in dense attention, largest first.
    """

    cluster: int
    n_met: int
    keys: tuple[int, ...]
    captured: float
    folded: float
    strongest: tuple[KeyWeight, ...]


@dataclass(frozen=True)
class TokenView:
    """A text in one head, by one method.

    Args:
        tokens: of the whole text, with a leading blank where a word begins.
        layer: number of the attention call, from 0.
        name: of the module that makes it.
        round: the round whose clusters are shown; `Tangent` has one, that of its leaves.
        cluster_keys: near keys of each cluster of that round, in sorting order, of the tokens that are shown.
        reaches: one for each token that is shown: the first ones, or all.
    """

    tokens: tuple[str, ...]
    layer: int
    name: str
    head: int
    method: Method
    round: int
    cluster_keys: tuple[tuple[int, ...], ...]
    reaches: tuple[TokenReach, ...]

    @property
    def n_clusters(self) -> int:
        return len(self.cluster_keys)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        label = self.method.label
        return asdict(self) | {"method": self.method.to_dict(), "label": label, "n_clusters": self.n_clusters}


def token_view(
    calls: Sequence[Call],
    tokens: Sequence[str],
    method: Method,
    *,
    layer: int = 0,
    head: int = 0,
    document: int = 0,
    round: int = 0,
    n_strongest: int = 8,
    n_tokens: int | None = None,
    seed: int = 0,
) -> TokenView:
    """Clusters, keys and weights of each token of a document, or of its first ones.

    The method runs on the whole document, since all of it determines the clusters.

    Args:
        calls: from `smyrf.models.calls.model_calls`.
        tokens: of the document, from `token_texts`.
        layer, head, document: index of the call, of its head and of its row.
        round: the round to show. Causal attention is clustered in parts with separate rounds; in the last of them the
            second half of the text attends to the first.
        n_strongest: number of strongest keys of each token to return.
        n_tokens: number of tokens to show from the start; all by default.
        seed: of random methods.

    Raises:
        ValueError: there is no such layer, head, document or round, the call is not between these tokens, or only
            dense attention can serve it.

    Example:
        >>> from smyrf import Smyrf
        >>> x = torch.randn(1, 2, 6, 4)
        >>> view = token_view([Call(x, x, x, 0.5)], "a b c d e f".split(), Smyrf(2, 3), head=1, n_strongest=2)
        >>> view.n_clusters, sorted(one.cluster for one in view.reaches), len(view.reaches[0].strongest)
        (2, [0, 0, 0, 1, 1, 1], 2)
    """
    call = find_call(calls, layer, head, document)
    for name, count in (("n_strongest", n_strongest), ("n_tokens", n_tokens)):
        if count is not None and count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    if not call.n_queries == call.n_keys == len(tokens):
        raise ValueError(
            f"{layer=} attends from {call.n_queries} queries to {call.n_keys} keys, not between {len(tokens)} tokens"
        )
    one = call.head(document, head)
    visited = VisitedKeys(one, method, seed)
    # Blocks on the diagonal of causal attention are not clusters.
    shown = [groups for groups in visited.lists if not groups.causal] or visited.lists
    if not 0 <= round < len(shown):
        raise ValueError(f"{round=} must be from 0 to {len(shown) - 1}: {method.label} has no more")
    groups = shown[round]
    n_shown = len(tokens) if n_tokens is None else min(n_tokens, len(tokens))
    numbers = query_clusters(groups, len(tokens))[0, :n_shown].tolist()
    found: list[TokenReach] = []
    for given in approximate_rows(one, method, torch.arange(n_shown), seed):  # (R, N)
        rows = torch.arange(len(found), len(found) + len(given))
        met = visited.keys(rows)
        weights = torch.cat([block.weights for block in map_blocks(one, rows)])
        captured = (weights * met).sum(1)
        folded = (given * ~met).sum(1).clamp(min=0.0)
        heaviest = weights.topk(min(n_strongest, len(tokens)), dim=1)
        for i in range(len(rows)):
            strongest = [
                KeyWeight(key, weight, float(given[i, key]), bool(met[i, key]))
                for key, weight in zip(heaviest.indices[i].tolist(), heaviest.values[i].tolist(), strict=True)
                if weight > 0.0  # not a masked key
            ]
            found.append(
                TokenReach(
                    cluster=numbers[len(found)],
                    n_met=int(met[i].sum()),
                    keys=tuple(met[i, :n_shown].nonzero()[:, 0].tolist()),
                    captured=float(captured[i]),
                    folded=float(folded[i]),
                    strongest=tuple(strongest),
                )
            )
    cluster_keys = tuple(tuple(its[(its >= 0) & (its < n_shown)].sort().values.tolist()) for its in groups.keys[0])
    return TokenView(tuple(tokens), layer, call.name, head, method, round, cluster_keys, tuple(found))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Tokens as text, with a leading blank where a word begins, for any kind of tokenizer.

    Args:
        tokenizer: of transformers.
        ids: of one document.
    """
    words = tokenizer.convert_ids_to_tokens(list(ids))
    # Byte-pair encoding and SentencePiece mark the start of a word, WordPiece its continuation.
    vocabulary = tokenizer.get_vocab()
    begins = next((mark for mark in ("Ġ", "▁") if any(word.startswith(mark) for word in vocabulary)), None)
    special = set(tokenizer.all_special_ids)
    found = []
    for place, (word, number) in enumerate(zip(words, ids, strict=True)):
        if number in special:
            found.append(f" {word}")
        elif begins == "Ġ":
            found.append(_bytes_of(tokenizer, list(ids), place))
        elif begins == "▁":
            found.append(word.replace("▁", " "))
        else:
            found.append(word[2:] if word.startswith("##") else f" {word}")
    return found


def _bytes_of(tokenizer: Any, ids: list[int], place: int) -> str:
    """The text that a byte-level token adds; "" while a character of several bytes is incomplete."""

    def text(end: int) -> str:
        # Four tokens before: a character has at most four bytes.
        return str(tokenizer.decode(ids[max(0, place - 4) : end])).rstrip("\ufffd")

    return text(place + 1)[len(text(place)) :]
