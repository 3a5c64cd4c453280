"""What `smyrf compare` reads: texts, images, sounds, files or samples, and the part of a model that takes them."""

import gzip
import re
import shutil
import sys
import types
import wave

import pytest
import torch

from smyrf import Tangent
from smyrf.tools.compare import texts
from smyrf.tools.compare.images import read_images, sample_images
from smyrf.tools.compare.input_files import InputError
from smyrf.tools.compare.load_model import load_reader
from smyrf.tools.compare.run import Comparison, valid_tokens
from smyrf.tools.compare.sounds import read_sound, resample
from smyrf.tools.compare.texts import choose_documents, read_documents
from smyrf.tools.encoders import load_pretrained
from subjects import WORDS, loaded

transformers = pytest.importorskip("transformers")


# Texts

PACKED = gzip.compress(b'{"text": "one"}\n' * 5, mtime=0)


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
        ("a.txt.gz", PACKED[:-9], "it cannot be read: Compressed file ended before"),
        ("a.txt.gz", PACKED[:12] + b"\xff" * 4 + PACKED[16:], "it cannot be read: Error -3 while decompressing"),
        ("a.jsonl.gz", PACKED[:-8] + bytes(8), "it cannot be read: CRC check failed"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, "line 1 is not JSON: maximum recursion depth exceeded"),
        ("a.jsonl", b'{"text": ' + b"9" * 5_000 + b"}", "line 1 is not JSON: Exceeds the limit"),
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


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\0" * 200_000, "line 1 has more than 2,000 characters"),
        (b" " * 200_000, "line 1 has more than 2,000 characters"),
        (b"\n" * 200_000, "its first 5,000 characters hold too few documents"),
        (b'{"text": "a"}\n' * 20_000, "its first 5,000 characters hold too few documents"),
    ],
)
def test_a_bomb_is_not_unpacked_to_its_end(tmp_path, monkeypatch, suffix, line, words):
    monkeypatch.setattr(texts, "MOST_CHARACTERS", 5_000)
    monkeypatch.setattr(texts, "LONGEST_DOCUMENT", 2_000)
    path = tmp_path / f"a{suffix}.gz"
    path.write_bytes(gzip.compress(line)[:-8])  # its end would be an error
    with pytest.raises(InputError, match=words):
        list(read_documents(path))


def test_a_paragraph_has_a_greatest_length(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LONGEST_DOCUMENT", 2_000)
    path = tmp_path / "a.txt"
    path.write_text("one\n\n" + "two\n" * 501)
    with pytest.raises(InputError, match="the paragraph at line 3 has more than 2,000 characters"):
        list(read_documents(path))
    path.write_text("one\n\n" + "two\n" * 500)
    assert [len(text) for text in read_documents(path)] == [3, 1999]


def test_only_what_is_asked_for_is_read(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LONGEST_DOCUMENT", 2_000)
    path = tmp_path / "a.txt.gz"
    good = gzip.compress(("the of a in to is and\n" * 100_000).encode())
    path.write_bytes(good[:-100] + bytes(100))
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("bert"))
    assert len(choose_documents(read_documents(path), tokenizer, n_documents=3, length=8)) == 3


def test_long_documents_come_first_then_the_longest_others(saved):
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("bert"))
    given = ["the of", "a " * 9, "in to is", "of " * 6, "and"]
    rows = choose_documents(given, tokenizer, n_documents=3, length=8)
    assert rows == [[1, *[WORDS.index("a")] * 6, 2], [1, *[WORDS.index("of")] * 6, 2], [1, 7, 8, 9, 2]]
    assert rows[0][1] == 6
    with pytest.raises(ValueError, match="length=2 leaves no place for text"):
        choose_documents(given, tokenizer, n_documents=3, length=2)


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
    monkeypatch.setattr("smyrf.tools.compare.inputs.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"it reads images, which needs PIL: pip install 'smyrf\[plots\]'"):
        loaded(saved("vit"))


# Sounds


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


@pytest.mark.parametrize("rate", [0, 1, 2**32 - 1])
def test_an_impossible_sampling_rate_is_refused(tmp_path, rate):
    write_wave(tmp_path / "a.wav", torch.zeros(9, 1))
    content = bytearray((tmp_path / "a.wav").read_bytes())
    content[24:28] = rate.to_bytes(4, "little")
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.wav has {rate:,} samples in a second, which no sound has"):
        read_sound(tmp_path / "a.wav")


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
    assert inputs.says == "1 sound synthesised"
    assert Comparison(model, inputs.batches).n_keys == 1500


# The model


def test_a_pickle_is_refused_without_advice_to_run_it(saved, tmp_path, capsys):
    class Harmful:
        def __reduce__(self):
            return print, ("unpickled",)

    shutil.copytree(saved("bert"), tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save({"a": Harmful()}, tmp_path / "bert" / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match="cannot be loaded: it is damaged, or holds other objects than tensors"
    ) as error:
        load_reader(str(tmp_path / "bert"), None)
    assert "weights_only" not in str(error.value)
    assert "unpickled" not in capsys.readouterr().out


def test_of_two_towers_the_one_is_taken_that_reads_the_inputs(saved, tmp_path):
    model, kind = load_reader(str(saved("siglip")), None)
    assert (type(model).__name__, kind) == ("SiglipTextModel", "text")
    model, kind = load_reader(str(saved("siglip")), "images")
    assert (type(model).__name__, kind) == ("SiglipVisionModel", "images")
    with pytest.raises(InputError, match="SiglipModel reads text, not audio"):
        load_reader(str(saved("siglip")), "audio")


def test_of_an_encoder_decoder_the_encoder_is_compared(saved):
    model, inputs = loaded(saved("bart"))
    comparison = Comparison(model, inputs.batches)
    comparison.dense()
    assert set(comparison.row(Tangent(0.3)).methods) == {"layers.0.self_attn"}


def test_a_length_is_for_text_alone(saved):
    with pytest.raises(ValueError, match="length=7 is for text, and it reads images"):
        loaded(saved("vit"), length=7)


def test_a_model_that_cannot_be_run_on_its_inputs_is_refused(saved):
    model, inputs = loaded(saved("bert"), n_documents=1)
    inputs.batches[0]["input_ids"][0, 0] = 99
    with pytest.raises(ValueError, match=r"BertModel cannot be run on input_ids \(1, 150\): index out of range"):
        Comparison(model, inputs.batches)


def test_code_in_a_model_folder_is_never_run(tmp_path, monkeypatch):
    """Not even if someone agrees: transformers would ask."""
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_pretrained(transformers.AutoModel, str(tmp_path))
    assert not (tmp_path / "ran").exists()
