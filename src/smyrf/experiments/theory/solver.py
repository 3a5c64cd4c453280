"""The exact optimum of Attention Biclustering by integer programming, where there are too many biclusterings to try.

What is solved is the problem itself with its softmax, not a linear stand-in: a query's cost depends on its set of keys
alone (`biclustering`), so one variable for each query and each set makes it linear. With y_s = 1 where
the keys of set s are a cluster and x_qs = 1 where query q is in that cluster:

    min Σ f_q(s) x_qs    Σ_{s ∋ k} y_s = 1 for every key    Σ_s x_qs = 1 for every query
                         Σ_q x_qs = C y_s                   x_qs ≤ y_s

Once the y are chosen, the rest is a transport problem with an integral optimum, so x may be any number from 0 to 1.
Clusters have no numbers, so there is no symmetry to break. The price is the number of sets, M choose S: with sets of 2
or 3 keys this goes well beyond search (20 queries and keys in 10 clusters: a second; 15 in 5: six), with half of the
keys in a set it is no better.

The solver is SCIP as OR-Tools brings it, told to stop at a gap of zero. It calculates in floating point: two
biclusterings whose costs differ by less than its tolerance, about 1e-6 of them, are the same to it. Costs are summed
again for what it returns.
"""

from __future__ import annotations

from typing import Any

import torch

from smyrf.experiments.theory.biclustering import Biclustering, Optimum, SetCosts

# Variables x that are handed to the solver at most.
MAX_VARIABLES = 200_000


def solve(problem: SetCosts, *, seconds: float = 600.0) -> Optimum:
    """The optimum, by a solver.

    Args:
        problem: from `softmax_costs` or `mass_costs`.
        seconds: after which to give up.

    Raises:
        ModuleNotFoundError: OR-Tools is not installed.
        ValueError: the problem has more than `MAX_VARIABLES`.
        TimeoutError: the optimum was not found, or not proven, in time.

    Example:
        >>> import torch
        >>> from smyrf.experiments.theory.biclustering import search, softmax_costs
        >>> problem = softmax_costs(torch.randn(6, 6), 3)
        >>> abs(solve(problem).total - search(problem).total) < 1e-6
        True
    """
    try:
        from ortools.linear_solver import pywraplp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the solver is in OR-Tools: pip install 'smyrf[theory]'") from error
    if not seconds > 0:
        raise ValueError(f"{seconds=} must be positive")
    n_queries, n_sets = problem.costs.shape
    if n_queries * n_sets > MAX_VARIABLES:
        raise ValueError(
            f"n_queries={n_queries} and {n_sets:,} sets of keys make {n_queries * n_sets:,} variables, "
            f"more than {MAX_VARIABLES:,}"
        )
    sets, costs = problem.sets.tolist(), problem.costs.tolist()
    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetTimeLimit(int(seconds * 1000))
    is_cluster = [solver.BoolVar("") for _ in sets]  # y
    joins = [[solver.NumVar(0.0, 1.0, "") for _ in sets] for _ in range(n_queries)]  # x
    for key in range(problem.n_keys):
        solver.Add(solver.Sum([y for y, keys in zip(is_cluster, sets, strict=True) if key in keys]) == 1)
    for row in joins:
        solver.Add(solver.Sum(row) == 1)
    for s, y in enumerate(is_cluster):
        solver.Add(solver.Sum([row[s] for row in joins]) == n_queries // problem.n_clusters * y)
        for row in joins:
            solver.Add(row[s] <= y)  # follows from the sum for whole numbers; without it bounds are weaker
    solver.Minimize(solver.Sum([costs[q][s] * joins[q][s] for q in range(n_queries) for s in range(n_sets)]))
    if solver.Solve(_exactly()) != pywraplp.Solver.OPTIMAL:
        raise TimeoutError(f"no optimum was proven in {seconds=}")
    chosen = [s for s, y in enumerate(is_cluster) if y.solution_value() > 0.5]
    # Where several ways to share the queries cost the same, x may be a mixture of them.
    clusters = _share(problem, chosen)
    return Optimum(clusters, problem.total(clusters))


def _share(problem: SetCosts, chosen: list[int]) -> Biclustering:
    """The best way to share the queries among given sets of keys, in whole numbers."""
    from ortools.linear_solver import pywraplp

    size = problem.n_queries // problem.n_clusters
    solver = pywraplp.Solver.CreateSolver("SCIP")
    costs = problem.costs[:, chosen].tolist()  # (N, L)
    joins = [[solver.BoolVar("") for _ in chosen] for _ in costs]
    for row in joins:
        solver.Add(solver.Sum(row) == 1)
    for column in zip(*joins, strict=True):
        solver.Add(solver.Sum(column) == size)
    solver.Minimize(
        solver.Sum([cost * x for row, xs in zip(costs, joins, strict=True) for cost, x in zip(row, xs, strict=True)])
    )
    if solver.Solve(_exactly()) != pywraplp.Solver.OPTIMAL:
        raise RuntimeError("queries could not be shared among the sets that the solver chose")
    queries = [
        [q for q, x in enumerate(column) if x.solution_value() > 0.5] for column in zip(*joins, strict=True)
    ]  # (L, C)
    return Biclustering(torch.tensor(queries), problem.sets[chosen])


def _exactly() -> Any:
    """Options of a solver that stops at no gap but zero; its own is 1e-4."""
    from ortools.linear_solver import pywraplp

    options = pywraplp.MPSolverParameters()
    options.SetDoubleParam(options.RELATIVE_MIP_GAP, 0.0)
    return options
