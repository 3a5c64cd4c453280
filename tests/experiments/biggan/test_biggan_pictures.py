"""Images from folders, .npz files and datasets."""

import numpy
import pytest
import torch

pytest.importorskip("PIL")

from PIL import Image

from smyrf.experiments.biggan.pictures import PictureError, load_pictures


def save(path, colour, size=(10, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_subfolders_are_classes(tmp_path):
    for number, (name, colour) in enumerate((("cat", (255, 0, 0)), ("dog", (0, 255, 0)), ("cat", (0, 0, 255)))):
        save(tmp_path / name / f"{number}.png", colour)
    found = load_pictures(tmp_path, 8)
    assert found.class_names == ("cat", "dog") and len(found) == 3
    assert [number for _, number in (found[i] for i in range(3))] == [0, 0, 1]
    torch.testing.assert_close(found[0][0][:, 4, 4], torch.tensor([1.0, -1.0, -1.0]))
    grey = load_pictures(tmp_path, 8, 1)
    assert grey[0][0].shape == (1, 8, 8)
    save(tmp_path / "loose.png", (0, 0, 0))
    assert load_pictures(tmp_path, 8).class_names == ("",)  # not all are in a folder


def test_images_are_cut_in_their_middle(tmp_path):
    wide = Image.new("RGB", (30, 10), (0, 0, 0))
    wide.paste((255, 255, 255), (10, 0, 20, 10))
    wide.save(tmp_path / "wide.png")
    pixels, _ = load_pictures(tmp_path, 10)[0]
    assert float(pixels.min()) == 1.0


@pytest.mark.parametrize("n_colours", [1, 3])
def test_half_of_the_images_are_mirrored_from_left_to_right(tmp_path, n_colours):
    images = numpy.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), numpy.uint8)
    numpy.savez(tmp_path / "a.npz", images=images)
    plain = load_pictures(tmp_path / "a.npz", 8, n_colours)
    pixels, _ = plain[1]
    mirrored = torch.stack([pixels[..., 7 - column] for column in range(8)], -1)
    for flipping in (load_pictures(tmp_path / "a.npz", 8, n_colours, flip=True), plain.fitted(8, n_colours, flip=True)):
        found = [flipping[1][0] for _ in range(100)]
        n_plain = sum(torch.equal(one, pixels) for one in found)
        n_mirrored = sum(torch.equal(one, mirrored) for one in found)
        assert n_plain + n_mirrored == 100 and 30 < n_mirrored < 70
    assert all(torch.equal(plain[1][0], pixels) for _ in range(20))  # none where it is not asked for


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 8, 8, 1), (4, 8, 8, 3), (4, 3, 8, 8), (4, 1, 8, 8)])
def test_npz_files_of_every_layout(tmp_path, shape):
    images = numpy.zeros(shape, numpy.uint8)
    images[2] = 255
    numpy.savez(tmp_path / "a.npz", images=images, labels=numpy.array([0, 1, 2, 1]))
    found = load_pictures(tmp_path / "a.npz", 8)
    assert [number for _, number in (found[i] for i in range(4))] == [0, 1, 2, 1] and len(found.class_names) == 3
    assert found[2][0].shape == (3, 8, 8) and float(found[2][0].min()) == 1.0 and float(found[0][0].max()) == -1.0


def test_a_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [Image.new("L", (8, 8), value) for value in (0, 255)], "label": [1, 0]}
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    found = load_pictures(tmp_path / "saved", 8, 1)
    assert found.class_names == ("a", "b") and [found[i][1] for i in range(2)] == [1, 0]
    assert float(found[1][0].mean()) == 1.0


def test_what_is_wrong_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    bad = {
        "no.npz": b"no",
        "folder": None,
    }
    (tmp_path / "no.npz").write_bytes(bad["no.npz"])
    numpy.savez(tmp_path / "other.npz", pictures=numpy.zeros(3))
    numpy.savez(tmp_path / "floats.npz", images=numpy.zeros((2, 8, 8)))
    numpy.savez(tmp_path / "labels.npz", images=numpy.zeros((2, 8, 8), numpy.uint8), labels=numpy.zeros(3, int))
    numpy.savez(tmp_path / "empty.npz", images=numpy.zeros((0, 8, 8), numpy.uint8))
    numpy.savez(tmp_path / "evil.npz", images=numpy.array([{}], object))
    for name, words in (
        ("no.npz", "cannot be read"),
        ("evil.npz", "cannot be read"),
        ("none.npz", "cannot be read"),
        ("other.npz", "has no array 'images'"),
        ("floats.npz", "images are float64"),
        ("labels.npz", "labels are int64"),
        ("empty.npz", "holds no images"),
        ("folder", "has no .png"),
        ("nowhere", "is neither a folder nor an .npz file"),
    ):
        with pytest.raises(PictureError, match=words) as error:
            load_pictures(tmp_path / name, 8)
        assert name in str(error.value)
    (tmp_path / "folder" / "a.png").write_bytes(b"no image")
    with pytest.raises(PictureError, match=r"a\.png is not a readable image"):
        load_pictures(tmp_path / "folder", 8)[0]


def test_images_are_read_as_a_viewer_shows_them(tmp_path):
    ramp = numpy.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(numpy.uint16)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    hidden = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    hidden.save(tmp_path / "b.png")
    halves = Image.new("RGB", (32, 32), "white")
    halves.paste("black", (0, 0, 16, 32))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter
    halves.save(tmp_path / "c.jpg", exif=turned)
    pictures = load_pictures(tmp_path, 32)
    first, second, third = (pictures[i][0] for i in range(3))
    assert abs(float(first.mean())) < 0.02
    assert torch.equal(second, torch.ones(3, 32, 32))
    assert float(third[:, :12].mean()) < -0.9 and float(third[:, 20:].mean()) > 0.9


def test_saved_dictionaries_of_datasets_are_read_and_odd_ones_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("L", (8, 8), 40 * i) for i in range(3)]
    rows = datasets.Dataset.from_dict({"image": images, "label": [0, 2, 1]}).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "dict"))
    assert len(load_pictures(tmp_path / "dict", 32, 1)) == 3
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "test"))
    with pytest.raises(PictureError, match="has no split 'train'"):
        load_pictures(tmp_path / "test", 32, 1)
    for number, label in enumerate((["a", "b", "c"], [0, -1, 1], [0, None, 1], [0, 1, 2**40])):
        odd = datasets.Dataset.from_dict({"image": images, "label": label}).cast_column("image", datasets.Image())
        odd.save_to_disk(str(tmp_path / str(number)))
        with pytest.raises(PictureError, match="must be a class index"):
            load_pictures(tmp_path / str(number), 32, 1)


def test_other_images_have_another_fingerprint(tmp_path):
    chance = numpy.random.default_rng(0)
    found = set()
    for name, n in (("a", 5), ("b", 5), ("c", 6)):
        numpy.savez(tmp_path / f"{name}.npz", images=chance.integers(0, 256, (n, 32, 32), numpy.uint8))
        found.add(load_pictures(tmp_path / f"{name}.npz", 32, 1).fingerprint)
    assert len(found) == 3
    assert load_pictures(tmp_path / "c.npz", 32, 1).fingerprint in found
