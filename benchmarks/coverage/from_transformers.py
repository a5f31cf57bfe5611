"""Every model type of transformers, from a tiny configuration, under one of its heads.

Configurations are shrunk by what their fields are called; a type whose fields do not go together is not built. Each
`AutoModelFor…` class is tried with the types that no rarer class has taken already, so that every class and every type
has its row.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.script import NotBuilt, Sample, Script, loss_of, train

__all__ = ["group", "names", "script"]

VOCABULARY, TOKENS = 99, 12

RULES: tuple[tuple[str, int], ...] = (
    (r"(num|n)_?.*(kv|key_value).*heads?$|num_query_groups", 2),
    (r".*heads?$|encoder_attention_heads|decoder_attention_heads|n_head", 4),
    (r"(head_dim|d_kv|kv_channels|attention_head_size|qk_nope_head_dim|v_head_dim|qk_rope_head_dim|qk_head_dim)$", 8),
    (r"vocab_size(_.*)?$|.*_vocab_size$", VOCABULARY),
    (r"(num_|n_)?(.*_)?(layers?|blocks|hidden_layers)$|num_.*_layers|num_layers_per_.*|n_layer|depth", 2),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|mlp_dim|d_inner)$", 40),
    (
        r"(hidden_size|d_model|dim|n_embd|embed_dim|embedding_size|projection_dim|hidden_dim|.*_hidden_size|.*_embed_dim|d_embed|width)$",
        32,
    ),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_topk|num_experts_per_token", 2),
    (r"num_queries|num_object_queries|num_latents", 6),
    (r"image_size|crop_size|img_size", 32),
    (r"patch_size", 8),
    (r"num_labels", 3),
    (r"max_(source|target)_positions|n_positions|n_ctx", 64),
)
"""What fields of a configuration become, by name; only ever smaller."""


def names() -> Iterator[str]:
    from transformers.models.auto import modeling_auto

    mappings = {
        name.removesuffix("_MAPPING_NAMES"): value
        for name, value in vars(modeling_auto).items()
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")
    }
    taken: set[str] = set()
    for head, types in sorted(mappings.items(), key=lambda item: (len(item[1]), item[0])):
        for kind in types:
            if kind not in taken:
                taken.add(kind)
                yield f"{kind}:{head.removeprefix('MODEL_FOR_').lower()}"


def group(name: str) -> str:
    return name.partition(":")[2]


def script(name: str) -> Script:
    return train(lambda: sample(name))


def sample(name: str) -> Sample:
    """A tiny model of a type with inputs made after its signature."""
    from transformers.models.auto import configuration_auto, modeling_auto

    kind, _, head = name.partition(":")
    of = head.upper() if head.startswith("model") else f"MODEL_FOR_{head.upper()}"
    mapping = getattr(modeling_auto, f"{of}_MAPPING", None)
    if mapping is None:
        raise NotBuilt(f"no mapping for {head}")
    last = ""
    for strength in (2, 1, 0):
        try:
            config_class = configuration_auto.CONFIG_MAPPING[kind]
            config = shrunk(config_class(), strength)
            found = mapping[type(config)]
            model_class = found[0] if isinstance(found, tuple) else found
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class(config).parameters())
            if count > 40_000_000:
                raise NotBuilt(f"{count / 1e6:.0f} million parameters with the smallest configuration")
            return _running(model_class, config_class, strength)
        except NotBuilt as error:
            last = last or str(error)
        except Exception as error:
            last = last or f"{type(error).__name__}: {error}"
    raise NotBuilt(" ".join(last.split())[:250])


def shrunk(config: Any, strength: int) -> Any:
    """A configuration with smaller numbers, its parts too.

    Args:
        config: made with its defaults; changed.
        strength: 2 to make everything smaller, 1 to leave widths and heads, 0 for two heads as wide as they are.
    """
    from transformers import PretrainedConfig

    if strength == 0:
        _with_two_heads(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrunk(value, strength)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            _set(config, name, _smaller(name, value, strength))
        elif isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            _set(config, name, _smaller_list(name, list(value), strength))
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and isinstance(layers, int) and "layer" in name and len(value) > layers:
            _set(config, name, value[:layers])
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            _set(config, name, 1 if "bos" in name else 2 if "eos" in name else VOCABULARY - 5)
    if getattr(config, "pad_token_id", 0) is None:
        _set(config, "pad_token_id", 0)
    for name in ("use_cache", "output_attentions", "output_hidden_states"):
        if hasattr(config, name):
            _set(config, name, False)
    return config


def _with_two_heads(config: Any) -> None:
    """Fewer heads, each as wide as it is: rotary sections and low-rank queries belong to a width."""
    try:
        heads, width = config.num_attention_heads, config.hidden_size
    except Exception:  # a part without attention, or one whose layers differ
        return
    if type(heads) is not int or type(width) is not int or heads <= 2 or width % heads:
        return
    each = width // heads
    pairs = getattr(config, "num_key_value_heads", None)
    for name, value in list(vars(config).items()):
        if value == heads and "head" in name:
            _set(config, name, 2)
        elif type(value) is int and name in ("intermediate_size", "moe_intermediate_size", "ffn_dim"):
            _set(config, name, min(value, 64))
        elif value == width and re.search(r"hidden|width|dim|d_model|embed", name):
            _set(config, name, 2 * each)
    if type(pairs) is int and pairs != heads:
        _set(config, "num_key_value_heads", min(pairs, 1 if pairs < heads else 2))


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception as error:  # fields that are checked or computed
        raise NotBuilt(f"{name} cannot be set: {error}") from error


def _smaller(name: str, value: int, strength: int) -> int:
    for pattern, most in RULES:
        if re.fullmatch(pattern, name):
            wide = most in (4, 8, 32) or "kv" in pattern
            return value if strength < 2 and wide and "layers" not in pattern else min(value, most)
    return value


def _smaller_list(name: str, values: list[int], strength: int) -> list[int]:
    if re.search(r"depths|layers|blocks", name):
        return [min(v, 1) for v in values]
    if strength == 2 and re.search(r"hidden_sizes|dims?$|channels|widths|embed", name) and min(values) >= 8:
        return [max(8, v // 8 // 8 * 8) for v in values]
    return values


def _running(model_class: Any, config_class: Any, strength: int) -> Sample:
    """The model with the first inputs with which it runs and has a gradient."""

    def make() -> nn.Module:
        made: nn.Module = model_class(shrunk(config_class(), strength))
        return made

    torch.manual_seed(0)
    config, model = shrunk(config_class(), strength), make().train()
    last = ""
    for labels in (True, False):
        for form in (0, 1, 2, 3):
            torch.manual_seed(0)
            try:
                kwargs = _inputs(model, config, labels, form)
                loss_of(model(**kwargs)).backward()
            except Exception as error:
                last = last or f"{type(error).__name__}: {error}"
                continue
            torch.manual_seed(0)
            return Sample(model=make(), kwargs=kwargs)
    raise NotBuilt(last)


def _inputs(model: Any, config: Any, labels: bool, form: int) -> dict[str, Any]:
    """Inputs by the names of what `forward` takes."""
    parameters = inspect.signature(model.forward).parameters
    needed = {name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    main = getattr(model, "main_input_name", "input_ids")
    wanted = needed | ({main} if main in parameters else set())
    if "decoder_input_ids" in parameters and getattr(config, "is_encoder_decoder", False):
        wanted.add("decoder_input_ids")
    text, vision = (getattr(config, f"{part}_config", None) or config for part in ("text", "vision"))
    vocabulary = getattr(text, "vocab_size", VOCABULARY)
    channels = getattr(vision, "num_channels", 3) or 3
    size = getattr(vision, "image_size", 64) or 64
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    tokens = torch.randint(3, max(4, vocabulary - 6), (2, TOKENS))
    mel = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
    known: dict[str, Any] = {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "attention_mask": torch.ones(2, TOKENS, dtype=torch.long),
        "token_type_ids": torch.zeros(2, TOKENS, dtype=torch.long),
        "bbox": torch.zeros(2, TOKENS, 4, dtype=torch.long),
        "pixel_values": torch.randn(2, channels, height, width),
        "input_features": torch.randn(2, 64, mel) if form else torch.randn(2, mel, 128),
        "input_values": torch.randn(2, 2000)
        if form == 0
        else torch.randn(2, 1, 2000)
        if form == 1
        else torch.randn(2, 1024, 128),
        "past_values": torch.randn(
            2, getattr(config, "context_length", 16) or 16, getattr(config, "num_input_channels", 1) or 1
        ),
        "pixel_values_videos": torch.randn(2, getattr(config, "frames_per_clip", 8) or 8, channels, height, width),
    }
    if main == "pixel_values" and form == 1:
        known["pixel_values"] = torch.randn(2, getattr(config, "num_frames", 4) or 4, channels, height, width)
    if main == "pixel_values" and form == 2:
        known["pixel_values"] = torch.randn(2, channels, 64, 64)
    if form == 0 and main == "input_ids":
        wanted |= {"attention_mask"} & set(parameters)
    if "MultipleChoice" in type(model).__name__:
        known = {
            n: v[:, None].expand(2, 2, *v.shape[1:]).contiguous()
            for n, v in known.items()
            if v.shape[:2] == tokens.shape
        }
    if form == 3:
        wanted |= known.keys() & parameters.keys()
    missing = wanted - set(known)
    if missing:
        raise NotBuilt(f"no input is known for {', '.join(sorted(missing))}")
    found = {name: known[name] for name in sorted(wanted)}
    if labels and "labels" in parameters:
        found["labels"] = _labels(model, tokens, height, width)
    if labels and "start_positions" in parameters:
        found |= {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    return found


def _labels(model: Any, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    name = type(model).__name__
    if "Token" in name or "LM" in name or "Generation" in name or "PreTraining" in name:
        return tokens.clamp(max=2) if "Token" in name else tokens
    if "SemanticSegmentation" in name:
        return torch.randint(0, 2, (2, height, width))
    return torch.tensor([0, 1])
