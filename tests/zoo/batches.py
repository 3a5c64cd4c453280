"""Padded batches for tiny models: what goes in, and where the outputs mean something.

Rows have different lengths, and one of them the full one. Places of padding hold words, pixels and sounds like
any other place, so that a mask that is lost changes the result.

Shapes: B rows, N places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 97
LENGTHS = (37, 23, 30)
DECODER_LENGTHS = (19, 11, 14)
FIRST_WORD = 7  # those below are special tokens
IMAGE_TOKEN = 96
IMAGE_SIZE = 48
VIDEO_SIZE = 24
PATCH_SIZE = 8
MELS = 16


@dataclass(frozen=True)
class Batch:
    """Inputs of a model.

    Args:
        arguments: of its ``forward``.
        compared: outputs, with dots between the parts of a name; each with the places ``(B, N)`` that are not
            padding, None if all count.
        generation: arguments of its ``generate``; None if it has none.
    """

    arguments: Mapping[str, Any]
    compared: Mapping[str, Tensor | None]
    generation: Mapping[str, Any] | None = None

    @property
    def padded(self) -> bool:
        """Whether a mask hides something."""
        return any(name.endswith("mask") and not bool(mask.all()) for name, mask in self.arguments.items())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _places(lengths: Sequence[int], side: str) -> Tensor:
    """True where there is no padding, which is on one side ``(B, N)``."""
    places = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return places if side == "right" else places.flip(1)


def _words(lengths: Sequence[int]) -> Tensor:
    return torch.randint(FIRST_WORD, IMAGE_TOKEN, (len(lengths), max(lengths)), generator=_generator())


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator())


def text(output: str = "last_hidden_state") -> Batch:
    """Sentences with padding on the right, for encoders."""
    places = _places(LENGTHS, "right")
    return Batch({"input_ids": _words(LENGTHS), "attention_mask": places.long()}, {output: places})


def pooled_text() -> Batch:
    """Sentences, of which the model gives one vector each."""
    return Batch(text().arguments, {"pooler_output": None})


def boxed_text() -> Batch:
    """Sentences whose words have a place on a page."""
    corner = torch.randint(0, 50, (len(LENGTHS), max(LENGTHS), 2), generator=_generator())
    return Batch({**text().arguments, "bbox": torch.cat([corner, corner + 20], -1)}, text().compared)


def unmasked_text() -> Batch:
    """Sentences for models that take no mask."""
    return Batch({"input_ids": _words(LENGTHS)}, {"last_hidden_state": None})


def prompts(**further: Any) -> Batch:
    """Prompts with padding on the left, for decoders."""
    places = _places(LENGTHS, "left")
    given = {"input_ids": _words(LENGTHS), "attention_mask": places.long(), **further}
    return Batch(given, {"logits": places}, given)


def numbered_prompts() -> Batch:
    """Prompts with padding on the left and positions that count it: a mask then reaches only attention."""
    batch = prompts()
    positions = torch.arange(max(LENGTHS)).expand(len(LENGTHS), -1).contiguous()
    return Batch({**batch.arguments, "position_ids": positions}, batch.compared, batch.generation)


def _answers() -> tuple[dict[str, Tensor], Tensor]:
    """Words for a decoder after an encoder, padded on the left: on the right causal attention never sees them."""
    places = _places(DECODER_LENGTHS, "left")
    return {"decoder_input_ids": _words(DECODER_LENGTHS), "decoder_attention_mask": places.long()}, places


def text_to_text() -> Batch:
    """Sentences with padding on the right for an encoder, others with padding on the left for its decoder."""
    encoder = text("encoder_last_hidden_state")
    answers, places = _answers()
    return Batch({**encoder.arguments, **answers}, {**encoder.compared, "logits": places}, encoder.arguments)


def images(output: str = "last_hidden_state", size: int = IMAGE_SIZE) -> Batch:
    """Images of one size."""
    return Batch({"pixel_values": _noise(2, 3, size, size)}, {output: None})


def masked_images() -> Batch:
    """Images of which the model looks at some patches, always the same."""
    order = torch.rand(2, (IMAGE_SIZE // PATCH_SIZE) ** 2, generator=_generator())
    return Batch({**images().arguments, "noise": order}, images().compared)


def padded_images(size: int = IMAGE_SIZE) -> Batch:
    """Images of different sizes, with padding below and on the right."""
    mask = torch.ones(2, size, size, dtype=torch.long)
    mask[1, size // 2 :] = 0
    mask[1, :, 3 * size // 4 :] = 0
    return Batch({**images(size=size).arguments, "pixel_mask": mask}, {"last_hidden_state": None})


def videos(argument: str = "pixel_values") -> Batch:
    """Videos of one size, with four frames."""
    return Batch({argument: _noise(2, 4, 3, VIDEO_SIZE, VIDEO_SIZE)}, {"last_hidden_state": None})


def patches() -> Batch:
    """Images as lists of patches with padding at the end."""
    shapes = torch.tensor([[6, 6], [4, 5], [3, 8]])  # height and width in patches
    places = _places(shapes.prod(1).tolist(), "right")
    pixels = _noise(*places.shape, 3 * PATCH_SIZE**2)
    return Batch(
        {"pixel_values": pixels, "pixel_attention_mask": places.long(), "spatial_shapes": shapes},
        {"last_hidden_state": places},
    )


def points() -> Batch:
    """Images, with a point in each to segment."""
    point = torch.tensor([[[[10.0, 20.0]]], [[[30.0, 25.0]]]])
    return Batch({**images().arguments, "input_points": point}, {"pred_masks": None, "iou_scores": None})


def sounds(kernels: Sequence[int], strides: Sequence[int]) -> Batch:
    """Waveforms with padding on the right that convolutions turn into ``LENGTHS`` frames."""
    samples = list(LENGTHS)
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        samples = [(n - 1) * stride + kernel for n in samples]
    mask = _places(samples, "right").long()
    given = {"input_values": _noise(*mask.shape), "attention_mask": mask}
    return Batch(given, {"last_hidden_state": _places(LENGTHS, "right")})


def spectrograms(frames: int) -> Batch:
    """Spectrograms of one length."""
    return Batch({"input_values": _noise(2, frames, MELS)}, {"last_hidden_state": None})


def padded_spectrograms(factor: int = 1) -> Batch:
    """Spectrograms with padding on the right, of which a model keeps one frame in `factor`."""
    mask = _places([factor * n for n in LENGTHS], "right").long()
    given = {"input_features": _noise(*mask.shape, MELS), "attention_mask": mask}
    return Batch(given, {"last_hidden_state": _places(LENGTHS, "right")})


def spectrograms_to_text(frames: int) -> Batch:
    """Spectrograms of one length, and words with padding on the left for the decoder."""
    features = {"input_features": _noise(3, MELS, frames)}
    answers, places = _answers()
    return Batch({**features, **answers}, {"encoder_last_hidden_state": None, "logits": places}, features)


def sounds_to_text(sounds: Batch) -> Batch:
    """Sounds with padding on the right, and words with padding on the left for the decoder."""
    answers, places = _answers()
    compared = {"encoder_last_hidden_state": sounds.compared["last_hidden_state"], "logits": places}
    return Batch({**sounds.arguments, **answers}, compared, sounds.arguments)


def images_to_text() -> Batch:
    """Images, and words with padding on the left for the decoder."""
    pixels = {"pixel_values": _noise(3, 3, IMAGE_SIZE, IMAGE_SIZE)}
    answers, places = _answers()
    return Batch({**pixels, **answers}, {"logits": places}, pixels)


def images_and_text(side: str = "left") -> Batch:
    """Images, and a sentence about each, for two towers. For a causal one padding is on the left, where it is seen."""
    places = _places(LENGTHS, side)
    return Batch(
        {
            "input_ids": _words(LENGTHS),
            "attention_mask": places.long(),
            "pixel_values": _noise(3, 3, IMAGE_SIZE, IMAGE_SIZE),
        },
        {"text_model_output.last_hidden_state": places, "vision_model_output.last_hidden_state": None},
    )


def images_with_text() -> Batch:
    """Images, and a sentence about each with padding on the right, for one tower."""
    sentences = text()
    return Batch({**sentences.arguments, "pixel_values": _noise(3, 3, IMAGE_SIZE, IMAGE_SIZE)}, {"pooler_output": None})


def captions() -> Batch:
    """Images, and the beginning of a sentence about each."""
    return prompts(pixel_values=_noise(3, 3, IMAGE_SIZE // 2, IMAGE_SIZE // 2))


def images_in_prompts(
    n_tokens: int, *, size: int = IMAGE_SIZE // 2, kinds: str | None = None, image_kind: int = 1, **images: Tensor
) -> Batch:
    """Prompts with padding on the left, each with an image.

    Args:
        n_tokens: that stand for an image.
        size: of the images.
        kinds: argument that tells tokens of images, which are of `image_kind`, from words, which are of kind 0.
        images: arguments that are the images; pixels of that size if there are none.
    """
    batch = prompts(**(images or {"pixel_values": _noise(3, 3, size, size)}))
    ids = batch.arguments["input_ids"]
    ids[:, -n_tokens - 3 : -3] = IMAGE_TOKEN  # inside the shortest row
    told = {kinds: image_kind * (ids == IMAGE_TOKEN).long()} if kinds else {}
    given = {**batch.arguments, **told}
    return Batch(given, batch.compared, given)


def image_grids() -> Batch:
    """Prompts with padding on the left, each with an image: 24 patches in two frames, that become 6 tokens."""
    pixels = _noise(len(LENGTHS) * 24, 3 * 2 * PATCH_SIZE**2)
    grids = torch.tensor([[1, 4, 6]] * len(LENGTHS))
    return images_in_prompts(6, kinds="mm_token_type_ids", pixel_values=pixels, image_grid_thw=grids)


def image_tiles() -> Batch:
    """Prompts with padding on the left, each with an image of one tile: 36 patches that become 9 tokens."""
    return images_in_prompts(9, pixel_values=_noise(3, 1, 3, IMAGE_SIZE, IMAGE_SIZE))
