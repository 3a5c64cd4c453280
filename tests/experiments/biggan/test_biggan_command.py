"""`smyrf biggan` as it is typed."""

import json
import warnings
from dataclasses import replace

import numpy
import pytest
import torch
from typer.testing import CliRunner

from smyrf import Dense, Smyrf
from smyrf.__main__ import app
from smyrf.experiments.biggan.checkpoints import save_network
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.networks import Generator, attention_blocks
from smyrf.experiments.biggan.sample import compare
from smyrf.experiments.biggan.score import PAPER
from smyrf.methods import parse_methods

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

runner = CliRunner()
CONFIG = Config(resolution=32, channels=4, n_classes=7, n_latent=20, n_shared=5, attention=(32,))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small generator as a public checkpoint and as one of ours."""
    torch.manual_seed(0)
    network = Generator(CONFIG)
    for block in attention_blocks(network):
        torch.nn.init.constant_(block.gamma, 1.0)
    folder = tmp_path_factory.mktemp("weights")
    torch.save(network.state_dict(), folder / "G_ema.pth")
    save_network(network, folder / "g.safetensors")
    # Attention at 64×64 pixels, as in the paper's table.
    save_network(Generator(replace(CONFIG, resolution=64, channels=2, attention=(64,))), folder / "g64.safetensors")
    return folder


@pytest.mark.parametrize("name", ["G_ema.pth", "g.safetensors"])
def test_a_figure_of_several_methods(weights, tmp_path, name):
    words = ["--methods", "dense,smyrf:4x32,tangent:0.125,levels=1", "--number", "3", "--classes", "1,6"]
    words += ["--truncation", "0.5", "--output", str(tmp_path / "figure"), "--json", str(tmp_path / "t.json")]
    done = runner.invoke(app, ["biggan", "sample", str(weights / name), *words])
    assert done.exit_code == 0, done.output
    assert "Smyrf 4×32" in done.output and "Tangent 12.5%" in done.output
    assert (tmp_path / "figure.png").exists() and (tmp_path / "figure.svg").exists()
    data = json.loads((tmp_path / "t.json").read_text())
    dense, smyrf, tangent = data["rows"]
    assert (dense["memory"], dense["distance_to_dense"]) == (1.0, 0.0)
    assert smyrf["memory"] == 0.125 and tangent["memory"] <= 0.125
    assert 0.0 < smyrf["distance_to_dense"] < 1.0


def test_a_plain_grid(weights, tmp_path):
    words = ["--number", "5", "--seed", "2", "--output", str(tmp_path / "grid")]
    done = runner.invoke(app, ["biggan", "sample", str(weights / "G_ema.pth"), *words])
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]


def test_the_same_latents_in_every_row_and_the_generator_as_it_was():
    torch.manual_seed(0)
    network = Generator(CONFIG)
    for block in attention_blocks(network):
        torch.nn.init.constant_(block.gamma, 1.0)
    methods = parse_methods("smyrf:1x1024,smyrf:4x64,tangent:1.0")
    rows = compare(network, methods, 2, seed=3)
    assert rows[0].distance < 1e-5 > rows[2].distance  # one cluster, and all keys: exact
    assert [row.label for row in rows[:2]] == ["Smyrf 1×1024\n100% memory", "Smyrf 4×64\n25% memory"]
    assert rows[1].distance > 0.0
    again = compare(network, methods[1:2], 2, seed=3)
    assert torch.equal(again[0].images, rows[1].images)
    assert [block.attend.method for block in attention_blocks(network)] == [Dense()] and network.training


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.pth"], "nowhere.pth cannot be read"),
        (["{g}", "--methods", "dens"], "--methods: 'dens' is not a method"),
        (["{g}", "--classes", "a"], "--classes a must be numbers separated by commas"),
        (["{g}", "--classes", "7"], "class 7 must be from 0 to 6"),
        (["{g}", "--number", "0"], "--number 0 must be at least 1"),
        (["{g}", "--truncation", "-1"], "truncation=-1.0 must be positive"),
        (["{g}", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["{g}", "--output", "{g}/x"], "cannot be written"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(weights, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{g}", str(weights / "G_ema.pth")) for word in words]
    done = runner.invoke(app, ["biggan", "sample", *words])
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr.replace("\n", " ") and "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


class _Sees(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        small = torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)
        return small, small[:, :5] * 10


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A feature network and real images."""
    folder = tmp_path_factory.mktemp("features")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(_Sees()).save(str(folder / "sees.pt"))
    chance = numpy.random.default_rng(0)
    numpy.savez(folder / "real.npz", images=chance.integers(0, 256, (12, 40, 36, 3), numpy.uint8))
    return folder


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scores_beside_the_papers(weights, place, tmp_path):
    words = [
        "--features",
        str(place / "sees.pt"),
        "--allow-torchscript",
        "--real",
        str(place / "real.npz"),
        "--number",
        "12",
    ]
    words += ["--methods", "dense,smyrf:64x32,tangent:0.25", "--json", str(tmp_path / "s.json")]
    done = runner.invoke(app, ["biggan", "score", str(weights / "g64.safetensors"), *words])
    assert done.exit_code == 0, done.output
    assert "92.09 ± 1.83" in done.output and "12.18" in done.output
    dense, smyrf, _tangent = json.loads((tmp_path / "s.json").read_text())["scores"]
    assert dense["frechet_distance"] > 0 and dense["frechet_distance_to_dense"] == pytest.approx(0.0, abs=1e-6)
    assert smyrf["frechet_distance_to_dense"] >= 0.0 and smyrf["paper"]["fid"] == 12.18
    assert len(dense["inception_score"]) == 2
    # With as many rounds and clusters of as many queries the share is another one at 32×32 pixels.
    done = runner.invoke(app, ["biggan", "score", str(weights / "G_ema.pth"), *words])
    assert done.exit_code == 0 and "paper" not in done.output


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_papers_table_is_a_preset(weights, place, tmp_path):
    words = [
        "--features",
        str(place / "sees.pt"),
        "--allow-torchscript",
        "--number",
        "2",
        "--preset",
        "table1",
        "--json",
        str(tmp_path / "s.json"),
    ]
    done = runner.invoke(app, ["biggan", "score", str(weights / "g64.safetensors"), *words])
    assert done.exit_code == 0, done.output
    scores = json.loads((tmp_path / "s.json").read_text())["scores"]
    found = [(one["paper"]["fid"], one["paper"]["inception_score"][0]) for one in scores]
    # The paper's table: memory, rounds, C, inception score, FID; 4096 queries on 1024 keys.
    table = """
    100  1    4096  93.79  11.30
    50   32   64    91.91  12.18
    50   64   32    92.09  12.18
    50   128  16    91.59  12.10
    25   32   32    87.90  13.34
    25   64   16    88.45  13.45
    25   128  8     89.61  13.19
    12.5 32   16    81.67  16.08
    12.5 64   8     82.87  16.00
    12.5 128  4     82.10  16.03
    """
    rows = [line.split() for line in table.strip().splitlines()]
    assert found == [(float(row[4]), float(row[3])) for row in rows]
    for row, method in zip(rows, PAPER, strict=True):
        assert 100 * method.memory_share(1024, 4096) == float(row[0])
        assert method == (Dense() if row[1] == "1" else Smyrf(int(row[1]), int(row[2])))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--features", "{p}/none.pt"], "none.pt cannot be read"),
        (
            ["--features", "{p}/sees.pt", "--allow-torchscript", "--real", "{p}/none"],
            "none is neither a folder nor an .npz file",
        ),
        (["--features", "{p}/sees.pt", "--preset", "table2"], "--preset table2 must be table1"),
        (["--features", "{p}/sees.pt", "--number", "1"], "--number 1 must be at least 2"),
        (["--features", "{p}/sees.pt", "--methods", "x"], "--methods: 'x' is not a method"),
    ],
)
def test_bad_input_of_a_score_gives_one_sentence(weights, place, words, sentence):
    words = [word.replace("{p}", str(place)) for word in words]
    done = runner.invoke(app, ["biggan", "score", str(weights / "G_ema.pth"), *words])
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr.replace("\n", " ") and "Traceback" not in done.output
