import itertools
import json

import pytest
import torch

import smyrf
from benchmarks import crossover
from smyrf import Smyrf, Tangent
from smyrf.backends import find_backend
from smyrf.tools import subprocess_memory
from smyrf.tools.bench import measurement, peak_memory, plot, roofline, run, table
from smyrf.tools.bench.baselines import attention_function, eager_smyrf, needed_bytes
from smyrf.tools.bench.measurement import Measurement
from smyrf.tools.bench.problems import PRESETS, Problem, Suite
from smyrf.tools.results import command_line, write_results

PROBLEM = Problem(batch=1, heads=2, length=256, width=16, dtype="float32", backward=False)


def test_presets_are_the_papers_experiments():
    assert all(batch == 1 for batch, _ in PRESETS["batch1"].shapes)
    assert [n for _, n in PRESETS["batch1"].shapes] == [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert len(PRESETS["batch1"].methods) > 1
    assert all(batch * n == 65536 for batch, n in PRESETS["fixed-tokens"].shapes)


def test_the_native_preset_has_all_powers_of_two():
    assert PRESETS["native"].shapes == tuple((1, 2**i) for i in range(7, 17))
    assert PRESETS["native"].methods == (Smyrf(4, 64),)


def test_inputs_are_the_same_for_everyone():
    assert all(torch.equal(a, b) for a, b in zip(PROBLEM.inputs(), PROBLEM.inputs(), strict=True))


def test_the_eager_formulation_is_the_same_method():
    """One cluster is dense; several give an error like ours."""
    q, k, v = PROBLEM.inputs()
    dense = attention_function("sdpa", None)(q, k, v)
    torch.testing.assert_close(eager_smyrf(q, k, v, Smyrf(3, 256)), dense, atol=1e-5, rtol=1e-5)
    method = Smyrf(8, 32)
    theirs = (eager_smyrf(q, k, v, method) - dense).norm()
    ours = (attention_function("smyrf", method)(q, k, v) - dense).norm()
    assert 0.8 < float(theirs / ours) < 1.25


@pytest.mark.parametrize("name", ["smyrf", "eager smyrf", "sdpa", "eager dense"])
def test_every_contender_can_be_differentiated(name):
    problem = Problem(1, 2, 128, 8, "float32", backward=True)
    problem.bind(attention_function(name, Smyrf(2, 32)))()


def test_peak_memory_is_that_of_the_call_alone():
    if subprocess_memory.can_measure():
        pytest.skip(subprocess_memory.can_measure())
    matrix = 2 * 2048 * 2048 * 4  # scores of two heads
    problem = Problem(1, 2, 2048, 16, "float32", backward=False)
    dense = peak_memory.extra_bytes("eager dense", problem, None, 1, None)
    assert matrix < dense < 4 * matrix
    assert peak_memory.extra_bytes("sdpa", problem, None, 1, None) < matrix / 8
    assert peak_memory.extra_bytes("tangent", problem, Tangent(128), 1, None) < matrix


def test_a_process_that_fails_says_why():
    broken = Smyrf()
    object.__setattr__(broken, "n_hashes", 0)
    with pytest.raises(RuntimeError, match="memory of smyrf at length 64 failed: ValueError: smyrf: n_hashes=0"):
        peak_memory.extra_bytes("smyrf", Problem(1, 1, 64, 4, "float32", False), broken, 1, None)


def test_what_does_not_fit_is_skipped_with_a_reason(monkeypatch):
    large = Problem(1, 4, 65536, 64, "float32", False)
    assert needed_bytes("eager dense", large, None) == 2 * 4 * 65536**2 * 4 + 4 * 4 * 65536 * 64 * 4
    assert run._why_not(Measurement(Problem(1, 4, 4 * 10**9, 64, "float32", False), "sdpa", None)).startswith("needs")
    monkeypatch.setattr(run, "_available_bytes", lambda: 10**6)
    reason = run._why_not(Measurement(Problem(1, 4, 4096, 64, "float32", False), "eager dense", None))
    assert reason == "needs 1 GB"
    odd = Measurement(Problem(1, 4, 100, 64, "float32", False), "eager smyrf", Smyrf(4, 64))
    assert "not a multiple" in run._why_not(odd)


@pytest.fixture
def measurements():
    backward = Problem(**{**PROBLEM.__dict__, "backward": True})
    found = []
    for problem in (PROBLEM, backward):
        found += [
            Measurement(problem, "smyrf", Smyrf(4, 64), 0.5, 30_000_000),
            Measurement(problem, "eager smyrf", Smyrf(4, 64), 2.0, 90_000_000),
            Measurement(problem, "sdpa", None, 1.0, 10_000_000),
            Measurement(problem, "eager dense", None, skipped="needs 69 GB"),
        ]
    return found


def test_ratios_are_within_one_problem(measurements):
    ours = measurements[0]
    assert measurement.speedup(measurements, ours) == 2.0
    assert measurement.speedup(measurements, ours, "eager smyrf") == 4.0
    assert measurement.memory_ratio(measurements, ours) == 3.0
    assert measurement.speedup(measurements, measurements[3]) is None
    assert measurement.speedup(measurements[1:2], measurements[1]) is None


def test_the_bound_counts_two_products_forward_and_seven_in_all(measurements):
    """2 · rows · key visits · (D + E) at 100 GFLOP/s."""
    problem = Problem(batch=3, heads=5, length=700, width=11, dtype="float64", backward=False)
    visits = 4 * 64  # 11 clusters of 64 keys at most
    forward = 2 * 3 * 5 * 700 * visits * (11 + 11)
    assert roofline.flops(problem, Smyrf(4, 64)) == forward
    both = Problem(**{**problem.__dict__, "backward": True})
    assert roofline.flops(both, Smyrf(4, 64)) == 3.5 * forward
    tangent = Tangent(100)
    assert roofline.flops(problem, tangent) == forward / visits * tangent.key_visits(700)
    one = Measurement(problem, "smyrf", Smyrf(4, 64), seconds=3 * forward / 100e9, gemm_gflops=100.0)
    assert one.times_gemm_bound == pytest.approx(3.0)


def test_baselines_and_half_precision_have_no_bound():
    assert roofline.products("bfloat16") == roofline.products("float16") == {}
    assert roofline.gflops({"sdpa": 1.0}) is None
    for name, method, rate in (("smyrf", Smyrf(), None), ("eager smyrf", Smyrf(), 100.0), ("sdpa", None, 100.0)):
        assert Measurement(PROBLEM, name, method, 0.5, gemm_gflops=rate).times_gemm_bound is None
    assert Measurement(PROBLEM, "smyrf", Smyrf(), gemm_gflops=100.0).times_gemm_bound is None


def test_the_rate_is_that_of_the_fastest_product(monkeypatch):
    monkeypatch.setattr(roofline, "SIZES", (8, 16))
    calls = roofline.products("float32")
    for call in calls.values():
        call()
    assert roofline.gflops(dict(zip(calls, (1.0, 2.0), strict=True))) == 2 * 16**3 / 2.0 / 1e9


def test_backends_are_compared_within_one_method_and_problem():
    found = [
        Measurement(PROBLEM, "smyrf", Smyrf(4, 64), 0.5, backend="native"),
        Measurement(PROBLEM, "smyrf", Smyrf(8, 64), 9.0, backend="torch"),
        Measurement(PROBLEM, "smyrf", Smyrf(4, 64), 2.0, backend="torch"),
        Measurement(PROBLEM, "sdpa", None, 1.0),
    ]
    assert [measurement.speedup_over_backend(found, one) for one in found] == [4.0, None, None, None]


def test_a_result_file_can_be_repeated(measurements, tmp_path, monkeypatch):
    path = tmp_path / "new" / "out.json"
    monkeypatch.setattr("sys.argv", ["/usr/bin/smyrf", "bench", "--preset", "batch1"])
    write_results(path, measurement.rows(measurements), threads=2, config={"memory": True})
    data = json.loads(path.read_text())
    assert data["command"] == "smyrf bench --preset batch1"
    assert data["threads"] == 2
    assert {"cpu", "torch", "numpy", "python", "smyrf", "commit", "backend"} <= set(data["machine"])
    assert data["results"][0]["speedup_over_sdpa"] == 2.0
    assert data["results"][0]["method"]["n_hashes"] == 4
    assert data["results"][3]["skipped"] == "needs 69 GB"
    assert {"gemm_gflops", "times_gemm_bound", "speedup_over_torch_backend"} <= set(data["results"][0])
    assert not list(path.parent.glob("*.tmp"))


def test_a_row_names_the_backend_that_ran_it():
    default = find_backend(None, torch.device("cpu")).name
    found = [
        Measurement(PROBLEM, "smyrf", Smyrf(4, 64), backend="reference"),
        Measurement(PROBLEM, "smyrf", Smyrf(4, 64)),
        Measurement(PROBLEM, "eager smyrf", Smyrf(4, 64)),
    ]
    assert [row["backend"] for row in measurement.rows(found)] == ["reference", default, None]


def test_the_command_of_a_script_names_the_script(monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/levels.py", "--json", "a b.json"])
    assert command_line() == "python benchmarks/levels.py --json 'a b.json'"
    monkeypatch.setattr("sys.argv", ["/src/smyrf/__main__.py", "tune"])
    assert command_line() == "smyrf tune"


def test_tables_show_one_direction(shown, measurements):
    text = shown(table.table(measurements, "title", backward=False))
    assert "Smyrf 4×64" in text
    assert "needs 69 GB" in text
    assert "2.0" in text
    assert "backward" not in text
    assert "GEMM" not in text  # an empty column


def test_a_table_with_every_column_fits_into_80_characters(shown):
    problem = Problem(1, 4, 65536, 64, "float32", True)
    found = [
        Measurement(problem, "smyrf", Smyrf(4, 64), 0.3, 130_000_000, backend="native", gemm_gflops=150.0),
        Measurement(problem, "smyrf", Smyrf(4, 64), 0.9, 130_000_000, backend="torch", gemm_gflops=150.0),
        Measurement(problem, "eager smyrf", Smyrf(4, 64), 2.1, 900_000_000, gemm_gflops=150.0),
        Measurement(problem, "sdpa", None, 45.0, 120_000_000, gemm_gflops=150.0),
    ]
    text = shown(table.table(found, "title", backward=True))
    rows = [line.replace("│", " ").split() for line in text.splitlines() if "· native" in line]
    bound = found[0].times_gemm_bound
    assert rows == [
        [
            "65,536",
            "Smyrf",
            "4×64",
            "·",
            "native",
            "300",
            "ms",
            "150",
            "7.00",
            "3.00",
            f"{bound:.2f}",
            "130",
            "MB",
            "1.08",
        ]
    ]
    assert "at 150 GFLOP/s" in text.replace("\n", " ")
    assert "…" not in text


def test_plots_are_written_as_png_and_svg(measurements, tmp_path):
    written = plot.plot(measurements, tmp_path / "plots" / "out", "title")
    assert [file.suffix for file in written] == [".png", ".svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in written[1].read_text()


def test_a_whole_run_measures_everything(console, monkeypatch):
    monkeypatch.setattr(roofline, "SIZES", (8, 16))
    monkeypatch.setattr(run, "TIMING_SECONDS", 0.02)
    suite = Suite(problems=(PROBLEM,), methods=(Smyrf(2, 32), Smyrf(4, 32)))
    kept = []
    found = run.run(suite, threads=1, memory=False, console=console, keep=kept.append)
    assert kept == [found]  # saved after its only problem
    assert [one.label for one in found] == ["Smyrf 2×32", "Smyrf 4×32", "eager smyrf 2×32", "sdpa", "eager dense"]
    assert all(one.seconds > 0 for one in found)


def test_backends_run_side_by_side_and_baselines_can_be_left_out(console, monkeypatch):
    monkeypatch.setattr(roofline, "SIZES", (8, 16))
    monkeypatch.setattr(run, "TIMING_SECONDS", 0.02)
    suite = Suite(
        (PROBLEM,), (Smyrf(2, 32), Tangent(32)), ("reference", "torch"), without=("eager dense", "eager smyrf")
    )
    found = run.run(suite, threads=1, memory=False, console=console, keep=lambda measurements: None)
    ours = ["Smyrf 2×32 · reference", "Smyrf 2×32 · torch", "Tangent 32 · reference", "Tangent 32 · torch"]
    assert [one.label for one in found] == [*ours, "sdpa"]
    assert all(one.seconds > 0 for one in found)
    assert len({one.gemm_gflops for one in found}) == 1
    assert all((one.times_gemm_bound is None) == (one.name == "sdpa") for one in found)


def test_the_encoder_script_measures_every_attention(tmp_path, capsys):
    from benchmarks import encoder

    out = tmp_path / "encoder.json"
    threads = torch.get_num_threads()
    arguments = ["--lengths", "400", "300", "--layers", "1", "--turns", "1", "--threads", "1", "--json", str(out)]
    try:
        encoder.main(arguments)
    finally:
        torch.set_num_threads(threads)
    data = json.loads(out.read_text())
    assert [row["length"] for row in data["results"]] == [400] * 4 + [300] * 4
    assert [row["attention"] for row in data["results"]] == ["sdpa", "Tangent(256)", "Smyrf(4, 64)", "no attention"] * 2
    assert data["results"][0]["speedup_over_sdpa"] == 1.0
    assert data["results"][0]["share_of_attention"] < 1.0
    assert data["config"]["layers"] == 1
    assert {"cpu", "torch", "commit"} <= set(data["machine"])
    assert "1 layer of" in capsys.readouterr().out


def test_the_encoder_script_leaves_the_model_as_it_was():
    from benchmarks import encoder

    model, tokens = encoder.encoder(1, 300)
    with torch.no_grad():
        before = model(tokens).last_hidden_state
        for name in (*encoder.METHODS, encoder.VALUES):
            assert encoder.forward_seconds(model, tokens, name) > 0
            assert torch.equal(model(tokens).last_hidden_state, before)


def test_a_fitted_exponent_is_that_of_a_power_and_knows_how_sure_it_is():
    from benchmarks.complexity import fit

    lengths = [4096, 8192, 16384, 32768]
    exact = fit(lengths, [1e-9 * n**1.5 for n in lengths])
    assert exact.exponent == pytest.approx(1.5)
    assert exact.margin == pytest.approx(0.0, abs=1e-6)
    assert exact.local == pytest.approx((1.5,) * 3)
    noisy = fit(lengths, [1e-9 * n**2 * factor for n, factor in zip(lengths, (1.0, 1.2, 0.9, 1.1), strict=True)])
    assert abs(noisy.exponent - 2.0) < noisy.margin
    assert fit(lengths[:2], [1.0, 2.0]).margin is None
    assert fit(lengths[:1], [1.0]) is None


def test_the_complexity_script_writes_times_exponents_and_a_figure(tmp_path, capsys):
    from benchmarks import complexity

    out = tmp_path / "complexity.json"
    threads = torch.get_num_threads()
    arguments = ["--lengths", "600", "300", "450", "--seconds", "0.01", "--threads", "1", "--json", str(out)]
    try:
        complexity.main([*arguments, "--plot", str(tmp_path / "figure")])
    finally:
        torch.set_num_threads(threads)
    results = json.loads(out.read_text())["results"]
    assert [row["attention"] for row in results] == ["Smyrf(4, 64)", "Tangent(256)", "sdpa"]
    assert all(row["lengths"] == [300, 450, 600] and len(row["fit"]["local"]) == 2 for row in results)
    assert (tmp_path / "figure.png").stat().st_size > 0
    assert "95%" in capsys.readouterr().out


def test_crossover_cases_cover_every_value_and_none_comes_twice():
    found = list(itertools.islice(crossover.cases([1, 2], seed=0), 900))
    assert len(set(found)) == len(found)
    assert all(case.fits for case in found)
    for name, values in (
        ("width", crossover.WIDTHS),
        ("heads", crossover.HEADS),
        ("batch", crossover.BATCHES),
        ("cluster_size", crossover.CLUSTER_SIZES),
        ("kind", crossover.KINDS),
        ("dtype", ("float32", "float64", "bfloat16", "float16")),
        ("backward", (False, True)),
        ("threads", (1, 2)),
    ):
        assert {getattr(case, name) for case in found} == set(values)
    assert set(crossover.LENGTHS) < {case.length for case in found}
    assert list(itertools.islice(crossover.cases([1, 2], seed=0), 900)) == found
    drawn = [case for case in found if case.dtype == "float16" and case.kind == "tangent causal" and case.backward]
    assert drawn  # combinations too


def test_an_exact_case_is_known():
    assert crossover.Case(64).is_exact
    assert not crossover.Case(65).is_exact
    assert crossover.Case(200, cluster_size=8, kind="smyrf causal").is_exact
    assert not crossover.Case(300, cluster_size=8, kind="tangent causal").is_exact


@pytest.mark.skipif(smyrf.backends()["native"].startswith("not available"), reason="the native kernel was not built")
def test_the_crossover_script_keeps_every_case(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crossover, "SECONDS", 0.001)
    monkeypatch.setattr(crossover, "LONGER", 0.001)
    some = [crossover.Case(16), crossover.Case(300, kind="tangent causal", backward=True, dtype="bfloat16")]
    monkeypatch.setattr(crossover, "cases", lambda threads, seed: iter(some))
    out = tmp_path / "crossover.json"
    threads = torch.get_num_threads()
    try:
        crossover.main(["--threads", "1", "--json", str(out)])
    finally:
        torch.set_num_threads(threads)
    data = json.loads(out.read_text())
    assert [row["length"] for row in data["results"]] == [16, 300]
    first = data["results"][0]
    assert first["length"] == 16 and first["exact"]
    assert first["ratio"] == first["native_seconds"] / first["torch_seconds"]
    assert "worst from 128 tokens on" in capsys.readouterr().out


def test_crossover_tables_put_the_worst_first(shown):
    base = {**crossover.Case(128).__dict__, "exact": False, "torch_seconds": 1.0}
    rows = [{**base, "length": n, "native_seconds": r, "ratio": r} for n, r in ((128, 0.5), (200, 1.5), (4096, 0.25))]
    lines = [line for line in shown(crossover.worst(rows, 2)).splitlines() if "smyrf 64" in line]
    assert [line.replace("│", " ").split()[0] for line in lines] == ["1.50", "0.50"]
    assert "128 to 255" in shown(crossover.by_length(rows))
