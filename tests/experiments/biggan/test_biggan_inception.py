"""The Inception network of published scores, and files that would run code."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from smyrf.__main__ import app
from smyrf.experiments.biggan.checkpoints import CheckpointError, fill
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.features import FeatureError, FeatureNetwork, is_torchscript
from smyrf.experiments.biggan.inception import Block, Inception
from smyrf.experiments.biggan.networks import Generator

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(scope="module")
def network():
    """Small random weights, whose features differ between images."""
    with torch.device("meta"):
        made = Inception().eval().requires_grad_(False)
    made.to_empty(device="cpu")
    source = torch.Generator().manual_seed(0)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(module.weight, generator=source)
    made.fc.bias.fill_(1.0)
    return made


@pytest.fixture(scope="module")
def weights(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("inception") / "pt_inception.pth"
    state = {key: value for key, value in network.state_dict().items() if not key.endswith("num_batches_tracked")}
    torch.save(state, path)  # as the public file, without counters
    return path


def test_names_and_shapes_are_those_of_the_public_file(network):
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    # A convolution has a weight; its batch norm a weight, a bias, a mean, a variance and a counter.
    assert len(shapes) == 94 * 6 + 2
    # torchvision's count of 27,161,264 for 1000 classes, without the auxiliary classifier, for 8 classes more.
    assert sum(weight.numel() for weight in network.parameters()) == 27_161_264 - 3_326_696 + 8 * 2049
    for key, shape in {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Conv2d_4a_3x3.bn.running_var": (192,),
        "Mixed_5b.branch_pool.conv.weight": (32, 192, 1, 1),
        "Mixed_5d.branch3x3dbl_3.conv.weight": (96, 96, 3, 3),
        "Mixed_6a.branch3x3.conv.weight": (384, 288, 3, 3),
        "Mixed_6b.branch7x7_2.conv.weight": (128, 128, 1, 7),
        "Mixed_6d.branch7x7dbl_4.conv.weight": (160, 160, 7, 1),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7b.branch3x3_2b.conv.weight": (384, 384, 3, 1),
        "Mixed_7c.branch3x3dbl_3a.conv.weight": (384, 384, 1, 3),
        "fc.weight": (1008, 2048),
        "fc.bias": (1008,),
    }.items():
        assert shapes[key] == shape, key


def _impulse(size):
    image = torch.zeros(1, 1, size, size)
    image[0, 0, 0, 0] = 9.0
    return image


def test_pooling_is_that_of_published_scores(network):
    """A single bright pixel in a corner, whose 3×3 windows hold four, six or nine pixels."""
    averaged, maximal, halved = (Block(1, {}, pool).pooled for pool in ("average", "max", "halve"))
    assert averaged(_impulse(4))[0, 0, :3, :3].tolist() == [[9 / 4, 9 / 6, 0], [9 / 6, 9 / 9, 0], [0, 0, 0]]
    assert maximal(_impulse(4))[0, 0, :3, :3].tolist() == [[9, 9, 0], [9, 9, 0], [0, 0, 0]]
    assert halved(_impulse(5))[0, 0].tolist() == [[9, 0], [0, 0]]
    kinds = {name: block.pool for name, block in network.named_children() if isinstance(block, Block)}
    assert [name for name, pool in kinds.items() if pool == "halve"] == ["Mixed_6a", "Mixed_7a"]
    assert [name for name, pool in kinds.items() if pool == "max"] == ["Mixed_7c"]


def test_a_block_concatenates_its_branches(network):
    """The last block, written out."""
    block, x = network.Mixed_7c, torch.randn(1, 2048, 2, 2)

    def layer(name, y):
        conv, norm = block.get_submodule(name).conv, block.get_submodule(name).bn
        y = F.conv2d(y, conv.weight, padding=[side // 2 for side in conv.kernel_size])
        return F.relu(F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=0.001))

    one, two = layer("branch3x3_1", x), layer("branch3x3dbl_2", layer("branch3x3dbl_1", x))
    expected = [layer("branch1x1", x), layer("branch3x3_2a", one), layer("branch3x3_2b", one)]
    expected += [layer("branch3x3dbl_3a", two), layer("branch3x3dbl_3b", two)]
    expected.append(layer("branch_pool", F.max_pool2d(x, 3, 1, 1)))
    torch.testing.assert_close(block(x), torch.cat(expected, 1))


def test_weights_by_path_give_features_and_probabilities(network, weights):
    found = FeatureNetwork(weights)
    images = torch.rand(2, 1, 32, 32) * 2 - 1
    seen = found(images)
    assert seen.features.shape == (2, 2048) and seen.probabilities.shape == (2, 1008)
    torch.testing.assert_close(seen.probabilities.sum(1), torch.ones(2))
    bytes_ = ((images + 1) * 127.5).round() / 127.5 - 1
    x = F.interpolate(bytes_.expand(-1, 3, -1, -1), size=(299, 299), mode="bilinear", align_corners=False)
    for name, layer in list(network.named_children())[:-1]:
        x = layer(x)
        if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
            assert x.shape[-1] == {"Conv2d_2b_3x3": 147, "Conv2d_4a_3x3": 71}[name]
            x = F.max_pool2d(x, 3, 2)
    features = F.adaptive_avg_pool2d(x, 1).flatten(1)  # (2, 2048)
    torch.testing.assert_close(seen.features, features)
    torch.testing.assert_close(seen.probabilities, (features @ network.fc.weight.T).softmax(1))
    assert float((features[0] - features[1]).abs().max()) > 1e-3


def test_weights_that_do_not_fit_are_named(network, tmp_path):
    state = dict(network.state_dict())
    cases = {
        r"fc.weight has the shape \(1000, 2048\), it must be \(1008, 2048\)": {"fc.weight": torch.zeros(1000, 2048)},
        r"extra is unknown to an inception of this shape": {"extra": torch.zeros(1)},
        r"fc.bias holds values that are not finite": {"fc.bias": torch.full((1008,), torch.nan)},
    }
    for sentence, changes in cases.items():
        with pytest.raises(CheckpointError, match=f"other.pth: {sentence}"):
            fill(network, {**state, **changes}, Path("other.pth"))
    config = Config(resolution=32, channels=2, n_latent=8, attention=())
    torch.save(Generator(config).state_dict(), tmp_path / "g.pth")
    with pytest.raises(FeatureError, match=r"g.pth: Conv2d_1a_3x3.conv.weight is missing; it is a generator"):
        FeatureNetwork(tmp_path / "g.pth")


class _Writes(nn.Module):
    """Writes a file when it is loaded, and another when it is run."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.folder, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.folder, self.training = state
        torch.save(torch.zeros(1), self.folder + "/loaded")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.folder + "/ran")
        return x.mean((2, 3))


def test_torchscript_that_writes_files_is_refused_before_it_is_loaded(tmp_path):
    (tmp_path / "out").mkdir()
    path = tmp_path / "writes.pt"
    torch.jit.script(_Writes(str(tmp_path / "out"))).save(str(path))
    assert is_torchscript(path)
    words = ["biggan", "score", str(tmp_path / "g.pth"), "--features", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "--allow-torchscript" in done.stderr and "runs code from the file" in done.stderr
    for refused in (path, path.rename(tmp_path / "writes.safetensors")):
        with pytest.raises(FeatureError):
            FeatureNetwork(refused)
    assert not list((tmp_path / "out").iterdir())
    # The file does write: it is what the flag warns of.
    FeatureNetwork(tmp_path / "writes.safetensors", allow_torchscript=True).check(3, 8)
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"loaded", "ran"}


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("command", ["features", "checkpoint"])
def test_pickles_are_refused_without_advice_to_unpickle_them(tmp_path, how, command):
    path = tmp_path / "bad.pth"
    content = {"a": _Runs(str(tmp_path / "ran"))}
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    words = ["score", str(path), "--features", str(path)] if command == "features" else ["sample", str(path)]
    done = CliRunner().invoke(app, ["biggan", *words, *(["--output", str(tmp_path / "o")] * (words[0] == "sample"))])
    assert done.exit_code == 2 and not (tmp_path / "ran").exists()
    assert "cannot be read: it is damaged, or holds other objects than tensors" in done.stderr
    assert "weights_only" not in done.output
