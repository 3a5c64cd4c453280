"""Attention over groups by the book: float64 NumPy, one N × M matrix of counts per head.

Independent of the backends on purpose: dense scores, each pair weighted by how often it meets.
"""

import numpy as np
import torch


def counts(groups, n_queries, n_keys):
    """How often each query meets each key, (B, N, M)."""
    rows = groups[0].queries.shape[0]
    total = np.zeros((rows, n_queries, n_keys))
    for one in groups:
        queries, keys = one.queries.numpy(), one.keys.numpy()
        for b in range(rows):
            for g in range(queries.shape[1]):
                for i, n in enumerate(queries[b, g]):
                    for j, m in enumerate(keys[b, g]):
                        if n < 0 or m < 0 or (one.causal and j > i):
                            continue
                        shared = 1 if one.multiplicity is None else int(one.multiplicity[b, g, i, j])
                        total[b, n, m] += 1.0 / shared
    return total


def attend(q, k, v, groups, scale):
    """Output (batch, heads, N, E) and log-sum-exp (batch, heads, N)."""
    q, k, v = (x.detach().double().numpy() for x in (q, k, v))
    batch, heads, n_queries, _ = q.shape
    repeat = heads // k.shape[1]
    weight = counts(groups, n_queries, k.shape[2]).reshape(batch, heads, n_queries, k.shape[2])
    out = np.zeros((batch, heads, n_queries, v.shape[-1]))
    lse = np.full((batch, heads, n_queries), -np.inf)
    for b in range(batch):
        for h in range(heads):
            scores = scale * q[b, h] @ k[b, h // repeat].T
            for n in range(n_queries):
                seen = weight[b, h, n] > 0
                if not seen.any():
                    continue
                top = scores[n, seen].max()
                mass = weight[b, h, n, seen] * np.exp(scores[n, seen] - top)
                out[b, h, n] = mass @ v[b, h // repeat][seen] / mass.sum()
                lse[b, h, n] = top + np.log(mass.sum())
    return torch.from_numpy(out), torch.from_numpy(lse)


def dense(q, k, v, scale, mask=None):
    """softmax(scale · q kᵀ) v in float64; mask (…, N, M), True = may be attended to."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    scores = scale * q @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v
