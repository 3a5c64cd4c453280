"""The optimum of Attention Biclustering by integer programming, for problems too large to enumerate.

The program is exact, with the softmax: a query's cost depends only on its set of keys (`biclustering`), so one variable
per query and set makes it linear. With y_s = 1 if the keys of set s are a cluster and x_qs = 1 if query q is in it:

    min Σ f_q(s) x_qs    Σ_{s ∋ k} y_s = 1 for every key    Σ_s x_qs = 1 for every query
                         Σ_q x_qs = C y_s                   x_qs ≤ y_s

For given y the rest is a transport problem with an integral optimum, so x may be continuous in [0, 1]. Clusters are
unordered, so there is no symmetry to break. The number of sets is M choose S: with sets of 2 or 3 keys the solver goes
well beyond search (20 queries and keys in 10 clusters take a second, 15 in 5 clusters six); with half of the keys in a
set it does not.

The solver is SCIP from OR-Tools, with a gap of zero. It works in floating point: costs that differ by less than its
relative tolerance of about 1e-6 are equal to it. The cost of its solution is summed again.
"""

from __future__ import annotations

from typing import Any

import torch

from smyrf.experiments.theory.biclustering import Biclustering, Optimum, SetCosts

# Maximum number of variables x.
MAX_VARIABLES = 200_000


def solve(problem: SetCosts, *, seconds: float = 600.0) -> Optimum:
    """Find the optimum by integer programming.

    Args:
        problem: from `softmax_costs` or `mass_costs`.
        seconds: time limit.

    Raises:
        ModuleNotFoundError: OR-Tools is not installed.
        ValueError: the problem has more than `MAX_VARIABLES`.
        TimeoutError: no optimum was proven in time.

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
            solver.Add(row[s] <= y)  # implied for integers by the sum, but tightens the bounds
    solver.Minimize(solver.Sum([costs[q][s] * joins[q][s] for q in range(n_queries) for s in range(n_sets)]))
    if solver.Solve(_exactly()) != pywraplp.Solver.OPTIMAL:
        raise TimeoutError(f"no optimum was proven in {seconds=}")
    chosen = [s for s, y in enumerate(is_cluster) if y.solution_value() > 0.5]
    # If several assignments of queries cost the same, x may be a mixture of them.
    clusters = _assign(problem, chosen)
    return Optimum(clusters, problem.total(clusters))


def _assign(problem: SetCosts, chosen: list[int]) -> Biclustering:
    """Assign queries to given sets of keys at minimum cost."""
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
        raise RuntimeError("queries could not be assigned to the sets that the solver chose")
    queries = [
        [q for q, x in enumerate(column) if x.solution_value() > 0.5] for column in zip(*joins, strict=True)
    ]  # (L, C)
    return Biclustering(torch.tensor(queries), problem.sets[chosen])


def _exactly() -> Any:
    """Solver options with a gap of zero; the default is 1e-4."""
    from ortools.linear_solver import pywraplp

    options = pywraplp.MPSolverParameters()
    options.SetDoubleParam(options.RELATIVE_MIP_GAP, 0.0)
    return options
