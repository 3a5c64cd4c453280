"""Small models of diffusers with random weights, and what a block might change of them."""

import pytest
import torch

from smyrf import Tangent

diffusers = pytest.importorskip("diffusers")
from diffusers.models import attention_dispatch  # noqa: E402

METHOD = Tangent(48)
N_WORDS = 300


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=1,
        out_channels=4,
    ).eval()  # in training it drops labels
    x, step, label = torch.randn(2, 4, 16, 16), torch.tensor([3, 5]), torch.tensor([1, 2])
    return model, lambda: model(x, step, class_labels=label).sample


def pixart():
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        cross_attention_dim=16,
        sample_size=16,
        patch_size=1,
        caption_channels=12,
        use_additional_conditions=False,
    )
    x, words = torch.randn(2, 4, 16, 16), torch.randn(2, N_WORDS, 12)
    seen = (torch.arange(N_WORDS) < torch.tensor([[280], [N_WORDS]])).long()
    added = {"resolution": None, "aspect_ratio": None}
    return (
        model,
        lambda: (
            model(
                x,
                encoder_hidden_states=words,
                encoder_attention_mask=seen,
                timestep=torch.tensor([3, 5]),
                added_cond_kwargs=added,
            ).sample
        ),
    )


def flux():
    """Image and words in one attention, by ``dispatch_attention_fn``."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    inputs = {
        "hidden_states": torch.randn(2, 256, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.5]),
        "img_ids": torch.randn(256, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return model, lambda: model(**inputs).sample


def sd3():
    """Image and words in one attention, by an old processor."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=12,
        pooled_projection_dim=20,
        out_channels=4,
        pos_embed_max_size=16,
    )
    x, words, pooled = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 12), torch.randn(2, 20)
    return model, lambda: model(x, words, pooled, torch.tensor([3, 5])).sample


def unet(n_words=7):
    return unet_with(torch.randn(2, n_words, 12))


def unet_with(prompt):
    """Self-attention of 256 places, and attention to the words of a prompt, the last three of one being padding."""
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=2,
        norm_num_groups=2,
    )
    x, n_words = torch.randn(2, 4, 16, 16, dtype=prompt.dtype), prompt.shape[1]
    seen = torch.arange(n_words) < torch.tensor([[n_words - 3], [n_words]])
    return model, lambda: model(x, torch.tensor([3, 5]), prompt, encoder_attention_mask=seen).sample


def unet_without_words():
    model = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
    )
    x = torch.randn(2, 3, 16, 16)
    return model, lambda: model(x, torch.tensor([3, 5])).sample


MODELS = {f.__name__: f for f in (dit, pixart, flux, sd3, unet, unet_without_words)}


def state(model):
    """All that the block might change."""
    found = [attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]]
    for module in model.modules():
        processor = getattr(module, "processor", None)
        own = vars(processor).get("_attention_backend", "none of its own") if processor is not None else None
        found.append((vars(module).get("forward"), id(processor), own, len(module._forward_hooks)))
    return found


def attention_names(model):
    return [name for name, module in model.named_modules() if hasattr(module, "processor")]
