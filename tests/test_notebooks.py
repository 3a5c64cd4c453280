"""Notebooks: each runs from its first cell to its last, on small data and a small model, and has no outputs."""

import os
from pathlib import Path

import pytest
import torch

import tiny

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("datasets")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

import smyrf  # noqa: E402
from smyrf.experiments.biggan import Config, Generator, save_network  # noqa: E402

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# What a notebook leaves below its working directory.
FILES = {
    "biggan": [f"images/{name}.png" for name in ("dense", "swap", "clusters")],
    "how_it_works": [],
    "inspect": [],
    "quickstart": [],
    "finetune": [f"runs/report/{name}" for name in ("report.md", "report.json", "glue.png", "backandforth.png")],
}


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Small settings of every notebook; what kernels write goes to a temporary folder."""
    for task in ("rte", "imdb"):
        tiny.write_task(tmp_path / "data", task, n_train=32, n_eval=16)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    torch.manual_seed(0)
    small = Config(resolution=64, channels=4, n_classes=5, n_latent=10, n_shared=6, attention=(64,))
    save_network(Generator(small), tmp_path / "small.safetensors")
    for name in ("TASK", "OUTPUT"):
        monkeypatch.delenv(f"SMYRF_NOTEBOOK_{name}", raising=False)
    return {
        **os.environ,
        "PYTHONPATH": str(Path(smyrf.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SMYRF_CACHE": str(tmp_path / "cache"),
        "SMYRF_DATA": str(tmp_path / "data"),
        "SMYRF_MODEL": tiny.save_encoder(tmp_path / "encoder"),
        "SMYRF_NOTEBOOK_TRAIN_ROWS": "32",
        "SMYRF_NOTEBOOK_EVAL_ROWS": "16",
        "SMYRF_NOTEBOOK_STEPS": "4",
        "SMYRF_BIGGAN": str(tmp_path / "small.safetensors"),
        "SMYRF_NOTEBOOK_IMAGES": "2",
    }


# The others take longer, and run in `make test-slow`.
QUICK = ("quickstart", "how_it_works")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS]
)
def test_a_notebook_runs_to_its_end(name, environment, tmp_path):
    notebook, work = read(name), tmp_path / "work"
    work.mkdir()
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(work)}}
    )
    client.execute(env=environment)  # raises where a cell does
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shows = [output for output in outputs if "image/png" in output.get("data", {})]
    assert bool(shows) == (name != "quickstart")
    for file in FILES[name]:
        assert (work / file).stat().st_size > 0


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_valid_and_without_outputs(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code_cells(notebook):
        assert cell.outputs == [] and cell.execution_count is None


def test_there_are_notebooks():
    assert sorted(FILES) == NOTEBOOKS
