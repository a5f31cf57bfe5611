"""Networks of MONAI, small, on volumes or images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.coverage.script import Sample, Script, train

__all__ = ["group", "names", "script"]

IN_OUT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
UNET = {"channels": (4, 8, 16), "strides": (2, 2)}

CONFIGURATIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet": (IN_OUT | UNET | {"num_res_units": 1, "dropout": 0.1}, (1, 32, 32)),
    "BasicUNet": (IN_OUT | {"features": (4, 4, 8, 8, 8, 4)}, (1, 32, 32)),
    "BasicUNetPlusPlus": (IN_OUT | {"features": (4, 4, 8, 8, 8, 4)}, (1, 32, 32)),
    "AttentionUnet": (IN_OUT | UNET, (1, 32, 32)),
    "SegResNet": (
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "init_filters": 8, "dropout_prob": 0.1},
        (1, 16, 16, 16),
    ),
    "SegResNetVAE": (
        {"input_image_size": (16, 16), "spatial_dims": 2, "in_channels": 1, "out_channels": 2},
        (1, 16, 16),
    ),
    "SegResNetDS": (IN_OUT | {"init_filters": 8, "blocks_down": (1, 1)}, (1, 16, 16)),
    "DynUNet": (
        IN_OUT
        | {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16)},
        (1, 32, 32),
    ),
    "UNETR": (
        IN_OUT | {"img_size": 32, "feature_size": 4, "hidden_size": 32, "mlp_dim": 32, "num_heads": 4},
        (1, 32, 32),
    ),
    "SwinUNETR": (
        {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 2,
            "feature_size": 12,
            "depths": (1, 1, 1, 1),
            "num_heads": (1, 1, 2, 2),
        },
        (1, 32, 32, 32),
    ),
    "VNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 32, 32)),
    "DenseNet": (IN_OUT | {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)}, (1, 32, 32)),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "pretrained": False, "spatial_dims": 2, "num_classes": 3},
        (3, 64, 64),
    ),
    "resnet10": ({"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2}, (1, 16, 16, 16)),
    "SEResNet50": ({"spatial_dims": 2, "in_channels": 3, "num_classes": 2}, (3, 32, 32)),
    "ViT": (
        {
            "in_channels": 1,
            "img_size": 16,
            "patch_size": 4,
            "hidden_size": 32,
            "mlp_dim": 64,
            "num_layers": 2,
            "num_heads": 4,
            "classification": True,
            "spatial_dims": 2,
        },
        (1, 16, 16),
    ),
    "ViTAutoEnc": (
        {
            "in_channels": 1,
            "img_size": 16,
            "patch_size": 4,
            "hidden_size": 32,
            "mlp_dim": 64,
            "num_layers": 2,
            "num_heads": 4,
            "spatial_dims": 2,
        },
        (1, 16, 16),
    ),
    "AutoEncoder": (IN_OUT | {"channels": (4, 8), "strides": (2, 2)}, (1, 32, 32)),
    "VarAutoEncoder": (
        {
            "spatial_dims": 2,
            "in_shape": (1, 16, 16),
            "out_channels": 1,
            "latent_size": 4,
            "channels": (4, 8),
            "strides": (2, 2),
        },
        (1, 16, 16),
    ),
    "HighResNet": ({"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "dropout_prob": 0.1}, (1, 12, 12, 12)),
    "RegUNet": (IN_OUT | {"num_channel_initial": 4, "depth": 2}, (1, 16, 16)),
    "FlexibleUNet": (
        {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2},
        (3, 32, 32),
    ),
    "MedNeXt": (IN_OUT | {"init_filters": 4, "encoder_expansion_ratio": 2, "decoder_expansion_ratio": 2}, (1, 32, 32)),
    "Classifier": ({"in_shape": (1, 16, 16), "classes": 2, "channels": (4, 8), "strides": (2, 2)}, (1, 16, 16)),
    "Regressor": ({"in_shape": (1, 16, 16), "out_shape": (1,), "channels": (4, 8), "strides": (2, 2)}, (1, 16, 16)),
    "DiffusionModelUNet": (
        IN_OUT
        | {
            "channels": (8, 16),
            "attention_levels": (False, True),
            "norm_num_groups": 8,
            "num_res_blocks": 1,
            "num_head_channels": 8,
        },
        (1, 16, 16),
    ),
    "AutoencoderKL": (
        IN_OUT
        | {
            "channels": (8, 16),
            "num_res_blocks": (1, 1),
            "attention_levels": (False, False),
            "latent_channels": 2,
            "norm_num_groups": 8,
        },
        (1, 16, 16),
    ),
    "VQVAE": (
        IN_OUT
        | {
            "channels": (8, 8),
            "num_res_channels": (8, 8),
            "downsample_parameters": ((2, 4, 1, 1),) * 2,
            "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
            "num_embeddings": 8,
            "embedding_dim": 4,
        },
        (1, 16, 16),
    ),
    "PatchDiscriminator": ({"spatial_dims": 2, "channels": 8, "in_channels": 1, "num_layers_d": 2}, (1, 32, 32)),
}


def names() -> Iterator[str]:
    from monai.networks import nets

    yield from (name for name in CONFIGURATIONS if hasattr(nets, name))


def group(name: str) -> str:
    return "networks"


def script(name: str) -> Script:
    return train(lambda: sample(name))


def sample(name: str) -> Sample:
    """A network and a batch of two."""
    from monai.networks import nets

    options, shape = CONFIGURATIONS[name]
    more = {"timesteps": torch.tensor([1, 2])} if name == "DiffusionModelUNet" else {}
    return Sample(model=getattr(nets, name)(**options), args=(torch.rand(2, *shape),), kwargs=more)
