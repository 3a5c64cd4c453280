"""Images and videos."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.zoo import batches
from tests.zoo.architectures import Architecture
from tests.zoo.batches import IMAGE_SIZE, PATCH_SIZE, Batch
from tests.zoo.entries.sizes import BART_LAYERS, IMAGE, LAYERS, VIT, WIDTH

FRAMES = 4
VIDEO = {**VIT, "image_size": batches.VIDEO_SIZE, "num_frames": FRAMES}
DINO = {**LAYERS, **IMAGE, "hidden_size": 32, "mlp_ratio": 2}
SWIN = {
    "image_size": IMAGE_SIZE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": (1, 2),
    "num_heads": (2, 4),
    "window_size": 3,
}
PYRAMID = {"num_encoder_blocks": 2, "depths": (1, 1), "hidden_sizes": (16, 32)}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}


def _model(name: str, model: str, batch: Callable[[], Batch] = batches.images, **options: Any) -> Architecture:
    return Architecture(name, "vision", model, options, batch)


VISION = (
    _model("ViT", "ViTModel", **VIT),
    _model("DeiT", "DeiTModel", **VIT),
    _model("BEiT", "BeitModel", **VIT, layer_scale_init_value=1.0),
    _model(
        "BEiT with relative positions",
        "BeitModel",
        **VIT,
        layer_scale_init_value=1.0,
        use_relative_position_bias=True,
    ),
    _model("DINOv2", "Dinov2Model", **DINO),
    _model("DINOv2 with registers", "Dinov2WithRegistersModel", **DINO),
    _model("DINOv3", "DINOv3ViTModel", **VIT, num_register_tokens=2),
    _model("ViT-MAE", "ViTMAEModel", batches.masked_images, **VIT),
    _model("ViT-MSN", "ViTMSNModel", **VIT),
    _model("I-JEPA", "IJepaModel", **VIT),
    _model("CLIP, vision alone", "CLIPVisionModel", **VIT),
    _model("SigLIP, vision alone", "SiglipVisionModel", **VIT),
    _model(
        "SigLIP 2, vision alone",
        "Siglip2VisionModel",
        batches.patches,
        **WIDTH,
        **LAYERS,
        patch_size=PATCH_SIZE,
        num_patches=36,
    ),
    _model("AIMv2", "Aimv2VisionModel", **VIT),
    _model("VideoMAE", "VideoMAEModel", batches.videos, **VIDEO),
    _model(
        "ViViT",
        "VivitModel",
        batches.videos,
        **WIDTH,
        **LAYERS,
        image_size=batches.VIDEO_SIZE,
        num_frames=FRAMES,
        tubelet_size=(2, PATCH_SIZE, PATCH_SIZE),
    ),
    _model(
        "V-JEPA 2",
        "VJEPA2Model",
        partial(batches.videos, argument="pixel_values_videos"),
        **LAYERS,
        hidden_size=48,
        mlp_ratio=2.0,
        crop_size=batches.VIDEO_SIZE,
        patch_size=PATCH_SIZE,
        frames_per_clip=FRAMES,
        pred_hidden_size=48,
        pred_num_attention_heads=4,
        pred_num_hidden_layers=1,
    ),
    _model("YOLOS", "YolosModel", **{**VIT, "image_size": (IMAGE_SIZE, IMAGE_SIZE)}, num_detection_tokens=5),
    _model("DPT", "DPTModel", **VIT),
    _model(
        "Depth Anything",
        "DepthAnythingForDepthEstimation",
        partial(batches.images, "predicted_depth"),
        patch_size=PATCH_SIZE,
        reassemble_hidden_size=32,
        reassemble_factors=(2, 1),
        neck_hidden_sizes=(8, 8),
        fusion_hidden_size=8,
        head_hidden_size=8,
        backbone_config={"model_type": "dinov2", **DINO, "out_indices": [1, 2], "reshape_hidden_states": False},
    ),
    _model(
        "DETR",
        "DetrModel",
        partial(batches.padded_images, size=4 * IMAGE_SIZE),
        **BART_LAYERS,
        d_model=32,
        num_queries=7,
        backbone_config=RESNET,
    ),
    _model(
        "Segformer",
        "SegformerModel",
        **PYRAMID,
        sr_ratios=(2, 1),
        num_attention_heads=(2, 4),
        patch_sizes=(7, 3),
        strides=(4, 2),
        mlp_ratios=(2, 2),
    ),
    _model(
        "SAM",
        "SamModel",
        batches.points,
        vision_config={
            **LAYERS,
            **IMAGE,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "output_channels": 16,
            "window_size": 3,
            "global_attn_indexes": (1,),
            "num_pos_feats": 8,
        },
        prompt_encoder_config={**IMAGE, "hidden_size": 16, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    ),
    _model("Swin", "SwinModel", **SWIN),
    _model("Swin v2", "Swinv2Model", **SWIN, pretrained_window_sizes=(0, 0)),
    _model(
        "PVT",
        "PvtModel",
        **PYRAMID,
        image_size=IMAGE_SIZE,
        sequence_reduction_ratios=(2, 1),
        num_attention_heads=(2, 4),
        patch_sizes=(4, 2),
        strides=(4, 2),
        mlp_ratios=(2, 2),
    ),
    _model(
        "Hiera",
        "HieraModel",
        partial(batches.images, size=32),
        embed_dim=16,
        image_size=(32, 32),
        depths=(1, 1),
        num_heads=(1, 2),
        num_query_pool=1,
        masked_unit_size=(2, 2),
        masked_unit_attention=(True, False),
    ),
    _model("TimeSformer", "TimesformerModel", batches.videos, **VIDEO),
    _model("data2vec, vision", "Data2VecVisionModel", **VIT, layer_scale_init_value=1.0),
    _model("PoolFormer", "PoolFormerModel", **PYRAMID, patch_sizes=(7, 3), strides=(4, 2), padding=(2, 1)),
)
