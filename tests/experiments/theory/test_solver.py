import pytest
import torch

from smyrf import Smyrf
from smyrf.experiments.theory import solver
from smyrf.experiments.theory.biclustering import against_optimum, mass_costs, n_biclusterings, search, softmax_costs

pytest.importorskip("ortools")


def scores(n_queries, n_keys, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (n_queries, n_keys))
    return q @ k.T


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("costs", [softmax_costs, mass_costs])
@pytest.mark.parametrize("shape", [(8, 8, 4), (6, 9, 3), (9, 6, 3), (8, 8, 2), (4, 8, 4)])
def test_the_solver_equals_search(shape, costs, seed):
    *lengths, n_clusters = shape
    problem = costs(scores(*lengths, seed), n_clusters)
    assert solver.solve(problem).total == pytest.approx(search(problem).total, abs=1e-6)


def test_equal_costs_give_whole_clusters():
    problem = softmax_costs(torch.zeros(6, 6), 3)
    assert solver.solve(problem).total == pytest.approx(search(problem).total, abs=1e-9)


def test_the_solver_goes_beyond_search():
    assert n_biclusterings(16, 16, 8) > 10**15
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, 4, dtype=torch.float64, generator=generator)
    problem = softmax_costs(q @ k.T, 8)
    (found,) = against_optimum(q, k, [Smyrf(4, 2)], 8, solve=solver.solve)
    assert problem.row_bound() <= found.optimum**2 <= min(found.rounds) ** 2


def test_no_proof_in_time_is_an_error():
    with pytest.raises(TimeoutError, match=r"seconds=0\.001"):
        solver.solve(softmax_costs(scores(12, 12, 0), 3), seconds=0.001)


def test_bad_input_is_named(monkeypatch):
    problem = softmax_costs(torch.zeros(4, 4), 2)
    with pytest.raises(ValueError, match="seconds=0 must be positive"):
        solver.solve(problem, seconds=0)
    monkeypatch.setattr(solver, "MAX_VARIABLES", 23)
    with pytest.raises(ValueError, match="n_queries=4 and 6 sets of keys make 24 variables, more than 23"):
        solver.solve(problem)


def test_a_missing_solver_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.linear_solver", None)
    with pytest.raises(ModuleNotFoundError, match=r"smyrf\[theory\]"):
        solver.solve(softmax_costs(torch.zeros(4, 4), 2))
