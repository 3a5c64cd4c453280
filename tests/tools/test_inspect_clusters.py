"""Clusters on a grid of queries, and `smyrf inspect clusters` of models that read images."""

from dataclasses import replace

import numpy
import pytest
import torch

pytest.importorskip("PIL")

from PIL import Image
from typer.testing import CliRunner

from smyrf import Dense, Smyrf, Tangent
from smyrf.__main__ import app
from smyrf.call import Call
from smyrf.tools.analysis.cluster_grids import cluster_grids
from smyrf.tools.analysis.visited_keys import VisitedKeys, query_clusters
from smyrf.tools.inspect import command
from smyrf.tools.inspect.clusters import image_clusters, plot_clusters
from subjects import SMALL, WIDE, save_bert, save_siglip, save_vit

transformers = pytest.importorskip("transformers")

runner = CliRunner()
VISION = SMALL | WIDE | {"num_hidden_layers": 1, "image_size": 48, "patch_size": 4}


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    save_vit(folder)
    return str(folder)


def _save(folder, model):
    model.save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder)
    return str(folder)


# The maps


@pytest.mark.parametrize("method", [Smyrf(3, 20), Tangent(0.25, levels=1), Tangent(0.25, levels=2)])
def test_clusters_are_those_of_the_head_without_leading_tokens(method):
    q, k, v = torch.randn(2, 4, 405, 7), torch.randn(2, 2, 405, 7), torch.randn(2, 2, 405, 5)
    call = Call(q, k, v, 0.4)
    (numbers,) = cluster_grids(call, [method], head=3, n_leading=5, seed=2)
    assert numbers.shape == (2, 20, 20)
    for document in range(2):
        lists = VisitedKeys(call.head(document, 3), method, seed=2).lists
        its = query_clusters(lists[0 if isinstance(method, Smyrf) else -1], 405)[0]
        assert torch.equal(numbers[document].flatten(), its[5:])


def test_what_has_no_grid_or_no_clusters_is_refused():
    x = torch.randn(1, 1, 17, 4)
    for call, arguments, sentence in (
        (Call(x, x, x, 0.5), {}, "17 queries after 0 leading tokens are no square grid"),
        (Call(x, x, x, 0.5), {"n_leading": 16}, "17 queries after 16 leading tokens are no square grid"),
        (Call(x, x, x, 0.5, is_causal=True), {"n_leading": 1}, "its attention is causal"),
        (Call(x, x, x, 0.5, only_dense="it has a bias"), {"n_leading": 1}, "only dense attention supports: it has"),
    ):
        with pytest.raises(ValueError, match=sentence):
            cluster_grids(call, [Smyrf(1, 4)], **arguments)
    with pytest.raises(ValueError, match="Dense has no clusters"):
        cluster_grids(Call(x, x, x, 0.5), [Dense()], n_leading=1)


# Models


def test_a_layer_whose_queries_are_no_patches_is_refused(vit):
    loaded = command.load(vit, kind="images", documents=2)
    one, parts, pixels = torch.randn(2, 4, 1, 8), torch.randn(8, 4, 144, 8), torch.randn(2, 3, 48, 96)
    for changed, sentence in (
        ({"calls": [Call(one, one, one, 0.5)]}, "layer=0 has 1 queries for images of 48×48 pixels, which are not a sq"),
        ({"calls": [Call(parts, parts, parts, 0.5)]}, "layer=0 attends within 8 parts of 2 images"),
        ({"inputs": replace(loaded.inputs, batches=({"pixel_values": pixels},))}, r"reads images as \(2, 3, 48, 96\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            image_clusters(replace(loaded, **changed), [Smyrf(1, 16)])


def _models(folder):
    """Image models with 0, 1, 2 and 5 tokens before their 12 × 12 patches."""
    save_siglip(folder / "siglip")
    distilled = transformers.DeiTModel(transformers.DeiTConfig(**VISION), add_pooling_layer=False)
    registers = transformers.Dinov2WithRegistersConfig(**VISION, num_register_tokens=4)
    text = SMALL | {"vocab_size": 16, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2}
    clip = transformers.CLIPConfig(text_config=text, vision_config=VISION)
    return {
        str(folder / "siglip"): 64,
        _save(folder / "deit", distilled): 146,
        _save(folder / "dinov2", transformers.Dinov2WithRegistersModel(registers)): 149,
        _save(folder / "clip", transformers.CLIPModel(clip)): 145,
    }


def test_class_distillation_and_register_tokens_are_left_out(tmp_path):
    for name, n_queries in _models(tmp_path).items():
        loaded = command.load(name, kind="images", documents=2)
        assert loaded.calls[0].n_queries == n_queries
        images, (numbers,) = image_clusters(loaded, [Smyrf(1, 16)], head=1)
        side = 8 if n_queries == 64 else 12
        assert images.shape == (2, 3, 4 * side, 4 * side) and numbers.shape == (2, side, side)
        expected = query_clusters(VisitedKeys(loaded.calls[0].head(1, 1), Smyrf(1, 16), 0).lists[0], n_queries)[0]
        assert torch.equal(numbers[1].flatten(), expected[n_queries - side * side :])


def test_patches_that_are_dropped_leave_no_grid(tmp_path):
    config = transformers.ViTMAEConfig(**VISION, decoder_num_attention_heads=4, decoder_hidden_size=32)
    name = _save(tmp_path, transformers.ViTMAEModel(config))  # a quarter of 144 patches: a square of its own
    loaded = command.load(name, kind="images")
    assert loaded.calls[0].n_queries == 37
    with pytest.raises(ValueError, match="layer=0 has 37 queries for images of 48×48 pixels, which are not a square"):
        image_clusters(loaded, [Smyrf(1, 16)])


def test_images_are_shown_in_their_own_colours(vit, tmp_path):
    pixels = numpy.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    loaded = command.load(vit, kind="images", path=tmp_path)
    images, _ = image_clusters(loaded, [Smyrf(1, 16)])
    torch.testing.assert_close(
        255 * (images[0] + 1) / 2, torch.tensor(pixels).permute(2, 0, 1).float(), atol=1e-2, rtol=0
    )


def test_grey_images_and_a_single_cluster_are_drawn(tmp_path):
    maps = [torch.zeros(1, 4, 4, dtype=torch.int64)]
    written = plot_clusters(torch.zeros(1, 1, 8, 8), maps, [Smyrf(1, 64)], tmp_path / "one", "a title")
    assert [path.name for path in written] == ["one.png", "one.svg"]
    assert "1 cluster -->" in written[1].read_text()


def test_a_title_is_shown_as_it_is(tmp_path):
    """A file may be called anything; dollars make formulas otherwise, or errors."""
    images, maps = torch.zeros(1, 3, 8, 8), [torch.zeros(1, 4, 4, dtype=torch.int64)]
    plot_clusters(images, maps, [Smyrf(1, 16)], tmp_path / "a", title="a$b_{$.pth")
    assert (tmp_path / "a.png").stat().st_size > 0


def test_clusters_of_a_model_from_the_command_line(vit, tmp_path):
    words = ["inspect", "clusters", vit, "--number", "2"]
    done = runner.invoke(app, [*words, "--layer", "1", "--head", "3", "--output", str(tmp_path / "sample")])
    assert done.exit_code == 0, done.output
    shown = (tmp_path / "sample.svg").read_text()
    for text in ("2 crops of a photograph", "layer 1 head 3", "Smyrf 1×73", "Smyrf 1×32", "2 clusters", "5 clusters"):
        assert text in shown
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (90, 60), "teal").save(photos / "a.png")
    more = ["--images", str(photos), "--methods", "smyrf:1x30,tangent:0.25", "--output", str(tmp_path / "photos-out")]
    done = runner.invoke(app, [*words, *more])
    assert done.exit_code == 0, done.output
    assert "1 image from photos, all there are" in (tmp_path / "photos-out.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layer", "2"], "layer=2 must be from 0 to 1"),
        (["--head", "4"], "head=4 must be from 0 to 3"),
        (["--head", "-1"], "--head -1 must be at least 0"),
        (["--number", "0"], "--number 0 must be at least 1"),
        (["--methods", "dense"], "--methods: Dense has no clusters"),
        (["--images", "nowhere"], "--images nowhere: it is not a folder"),
        (["--block", "0"], "--block 0 is for a BigGAN, whose weights end in .pth, .pt, .safetensors, and"),
        (["--classes", "1"], "--classes 1 is for a BigGAN"),
        (["--truncation", "0.5"], "--truncation 0.5 is for a BigGAN"),
        (["--output", "/proc/a/b"], "--output /proc/a/b.png cannot be written"),
    ],
)
def test_bad_input_gives_one_sentence(refused, vit, tmp_path, arguments, words):
    refused(["inspect", "clusters", vit, "--output", str(tmp_path / "a"), *arguments], words)
    assert not list(tmp_path.iterdir())


def test_a_model_that_reads_no_images_has_no_patches(refused, tmp_path):
    save_bert(tmp_path / "bert")
    output = ["--output", str(tmp_path / "a")]
    refused(["inspect", "clusters", str(tmp_path / "bert"), *output], "reads text, not images")
    loaded = command.load(str(tmp_path / "bert"), length=30)
    with pytest.raises(ValueError, match="reads text, which has no patches to show"):
        image_clusters(loaded, [Smyrf(1, 16)])
    refused(["inspect", "clusters", str(tmp_path / "nowhere"), *output], "nowhere: cannot be loaded")
