"""UNets, transformers and autoencoders of diffusers, from small configurations written here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.coverage.script import Sample, Script, train

__all__ = ["group", "names", "script"]

BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        **BLOCKS,
        "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "UNet2DConditionModel": {
        "sample_size": 16,
        **BLOCKS,
        "down_block_types": DOWN,
        "up_block_types": UP,
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
    },
    "UNet3DConditionModel": {
        "sample_size": 8,
        **BLOCKS,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 8,
    },
    "UNet1DModel": {
        "sample_size": 64,
        "block_out_channels": (16, 16, 32),
        "extra_in_channels": 32,
        "in_channels": 2,
        "out_channels": 2,
    },
    "ControlNetModel": {
        **BLOCKS,
        "down_block_types": DOWN,
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
        "conditioning_embedding_out_channels": (8, 16),
    },
    "AutoencoderKL": {
        **BLOCKS,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "VQModel": {
        **BLOCKS,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "num_vq_embeddings": 16,
    },
    "AutoencoderTiny": {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
        "latent_magnitude": 3,
    },
    "AsymmetricAutoencoderKL": {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "down_block_out_channels": (16, 32),
        "norm_num_groups": 8,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "up_block_out_channels": (16, 32),
    },
    "Transformer2DModel": {
        **HEADS,
        "in_channels": 16,
        "norm_num_groups": 8,
        "num_layers": 2,
        "cross_attention_dim": 16,
    },
    "DiTTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "num_layers": 2,
        "sample_size": 8,
        "num_embeds_ada_norm": 10,
        "norm_num_groups": 8,
    },
    "PixArtTransformer2DModel": {
        **HEADS,
        "num_layers": 2,
        "sample_size": 8,
        "cross_attention_dim": 16,
        "caption_channels": 16,
        "out_channels": 8,
        "use_additional_conditions": False,
    },
    "SD3Transformer2DModel": {
        **HEADS,
        "sample_size": 8,
        "num_layers": 2,
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 16,
        "pos_embed_max_size": 8,
        "in_channels": 4,
        "out_channels": 4,
    },
    "FluxTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (2, 2, 4),
    },
    "AuraFlowTransformer2DModel": {
        **HEADS,
        "sample_size": 8,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "pos_embed_max_size": 64,
    },
    "PriorTransformer": {
        **HEADS,
        "num_layers": 2,
        "embedding_dim": 16,
        "num_embeddings": 4,
        "additional_embeddings": 4,
    },
    "AutoencoderDC": {
        "latent_channels": 4,
        "attention_head_dim": 8,
        "encoder_block_types": ("ResBlock",) * 2,
        "decoder_block_types": ("ResBlock",) * 2,
        "encoder_block_out_channels": (8, 16),
        "decoder_block_out_channels": (8, 16),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), ()),
        "decoder_qkv_multiscales": ((), ()),
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu",
    },
}


def names() -> Iterator[str]:
    import diffusers

    yield from (name for name in CONFIGURATIONS if hasattr(diffusers, name))


def group(name: str) -> str:
    return (
        "autoencoders"
        if name in ("VQModel",) or "Autoencoder" in name
        else "UNets"
        if "Net" in name
        else "transformers"
    )


def script(name: str) -> Script:
    return train(lambda: sample(name))


def sample(name: str) -> Sample:
    """A model with inputs as its training script gives them."""
    import diffusers

    model = getattr(diffusers, name)(**CONFIGURATIONS[name]).train()
    time, text = torch.tensor([3, 7]), torch.randn(2, 5, 16)
    kwargs: dict[str, Any] = {"timestep": time}
    match name:
        case "UNet2DModel":
            args: tuple[Any, ...] = (torch.randn(2, 3, 16, 16),)
        case "UNet1DModel":
            args = (torch.randn(2, 2, 64),)
        case "UNet2DConditionModel":
            args, kwargs = (torch.randn(2, 4, 16, 16),), {**kwargs, "encoder_hidden_states": text}
        case "UNet3DConditionModel":
            args, kwargs = (torch.randn(2, 4, 2, 8, 8),), {**kwargs, "encoder_hidden_states": text}
        case "ControlNetModel":
            args = (torch.randn(2, 4, 16, 16),)
            kwargs |= {"encoder_hidden_states": text, "controlnet_cond": torch.rand(2, 3, 32, 32)}
        case "Transformer2DModel":
            args, kwargs = (torch.randn(2, 16, 8, 8),), {"encoder_hidden_states": text}
        case "DiTTransformer2DModel":
            args, kwargs = (torch.randn(2, 4, 8, 8),), {**kwargs, "class_labels": torch.tensor([1, 2])}
        case "PixArtTransformer2DModel":
            more = {"encoder_hidden_states": text, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
            args, kwargs = (torch.randn(2, 4, 8, 8),), kwargs | more
        case "SD3Transformer2DModel":
            more = {"encoder_hidden_states": text, "pooled_projections": torch.randn(2, 16)}
            args, kwargs = (torch.randn(2, 4, 8, 8),), kwargs | more
        case "AuraFlowTransformer2DModel":
            args, kwargs = (torch.randn(2, 4, 8, 8),), {"timestep": time / 10, "encoder_hidden_states": text}
        case "FluxTransformer2DModel":
            args, kwargs = (torch.randn(2, 9, 4),), {"timestep": time / 10, "encoder_hidden_states": text}
            kwargs |= {
                "pooled_projections": torch.randn(2, 16),
                "img_ids": torch.zeros(9, 3),
                "txt_ids": torch.zeros(5, 3),
            }
        case "PriorTransformer":
            args = (torch.randn(2, 16),)
            kwargs |= {"proj_embedding": torch.randn(2, 16), "encoder_hidden_states": torch.randn(2, 4, 16)}
        case _:
            args, kwargs = (torch.rand(2, 3, 16, 16),), {}
    return Sample(model=model, args=args, kwargs=kwargs)
