"""Read a model's numbers from its `config.json`, or say what it is that is not driven here.

`model.shape_from=config` takes them from there instead of from a file of `conf/model`. A model
whose blocks are not those of `KINDS` is refused by what it is, before anything is queued.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.options.model import Model, Shape
from fp8_nemo.recipe.plain import bytes_of, read_json, to_json

NUMBERS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "tied": "tie_word_embeddings",
}
"""Keys of a `Shape` and what `config.json` calls them."""


class Kind(NamedTuple):
    """Say what a `model_type` alone tells: `Kind(qk_norm=True, head_dim=128)`."""

    qk_norm: bool = False
    qkv_bias: bool = False
    head_dim: int | None = None
    """Of a `config.json` that gives none; None: the hidden size over the heads."""
    ropes: tuple[str, ...] = ("default", "yarn")
    """Rotary embeddings that Megatron-Bridge and vLLM both have for it."""


KINDS = {
    "llama": Kind(ropes=("default", "llama3", "linear", "yarn")),
    "qwen2": Kind(qkv_bias=True),
    "qwen3": Kind(qk_norm=True, head_dim=128),
    "qwen3_moe": Kind(qk_norm=True),
}
"""By Hugging Face's `model_type`; what their weights are called stands in `glue/wire.py`."""

MARKS = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "hybrid_override_pattern": "a hybrid with Mamba layers",
    "mamba_d_state": "a hybrid with Mamba layers",
    "full_attention_interval": "a hybrid with linear attention",
    "linear_num_key_heads": "a hybrid with linear attention",
    "vision_config": "a model of images and text",
    "audio_config": "a model of sounds and text",
    "sliding_window": "attention over a sliding window",
    "n_routed_experts": "experts of another kind",
    "num_local_experts": "experts of another kind",
    "num_experts": "experts of another kind",
}
"""Keys that tell what a model of an unknown type is, the most telling first."""
NEEDS = f"must be of {', '.join(KINDS)}: Llama, Qwen2.5, Qwen3 or Qwen3-MoE"


class ModelError(ValueError):
    """Say in one line why a model cannot be read, or be driven."""


def read_shape(model: Model, words: Iterable[str] = ()) -> Model:
    """Fill in the shape and the name that `model.shape_from=config` leaves to the model itself.

    Args:
        model: as it was composed.
        words: of the command line.

    Raises:
        ModelError: it cannot be read, is of another kind, or its shape is also typed.
    """
    if model.shape_from is None:
        return model
    typed = [word.lstrip("+") for word in words if word.lstrip("+").startswith("model.shape.")]
    if typed or model.shape != Shape():
        key, _, value = "".join(typed[:1]).partition("=")
        text = "model.shape_from=config reads the shape from config.json"
        remedy = "leave it out, or describe the model in conf/model/NAME.yaml"
        raise ModelError(str(Mistake(key or "model.shape", value, text, remedy)))
    where, config = config_of(model)
    try:
        shape = shape_of(config)
    except ValueError as error:
        key = "model.path" if model.path else "model.hf_id"
        raise ModelError(str(Mistake(key, where, str(error)))) from error
    name = model.name
    if name == "auto":
        last = Path(model.path).resolve().name if model.path else where.rpartition("/")[2]
        name = re.sub(r"[^\w.-]", "-", last).lstrip(".") or name
    return replace(model, name=name, shape=shape)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a `config.json` describes.

    Raises:
        ValueError: says what the model is that is not driven here, or which number is missing.
    """
    if "quantization_config" in config:
        raise ValueError("is quantized already; training starts from BF16 weights")
    if foreign := what_else(config):
        raise ValueError(f"is {foreign}; {NEEDS}")
    kind = KINDS[config["model_type"]]
    found: dict[str, Any] = {key: config.get(name) for key, name in NUMBERS.items()}
    experts = config.get("num_experts") or config.get("num_local_experts")
    if config["model_type"] == "qwen3_moe":
        found["experts"] = experts
    else:
        found |= dict.fromkeys(("experts", "experts_per_token", "expert_ffn"), 0)
    found["tied"] = bool(found["tied"])
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    if not found["head_dim"] and found["hidden"] and found["heads"]:
        found["head_dim"] = kind.head_dim or found["hidden"] // found["heads"]
    for key, value in found.items():
        if not isinstance(value, int):
            raise ValueError(f"its config.json has {NUMBERS[key]}={to_json(value)}")
    return Shape(**found, qk_norm=kind.qk_norm, qkv_bias=kind.qkv_bias or None)


def what_else(config: Mapping[str, Any]) -> str:
    """Say what a model is that none of `KINDS` covers; empty if one does."""
    kind = KINDS.get(str(config.get("model_type")))
    if kind is None:
        marks = (text for key, text in MARKS.items() if config.get(key))
        return ", ".join([f"model_type={config.get('model_type')}", *list(marks)[:1]])
    rope = rope_type(config)
    others = {
        "attention with biases elsewhere than in Q, K and V": config.get("attention_bias")
        and not kind.qkv_bias,
        "an MLP with biases": config.get("mlp_bias"),
        "attention over a sliding window": config.get("use_sliding_window")
        or "sliding_attention" in (config.get("layer_types") or ()),
        "layers with experts among layers without": config.get("mlp_only_layers")
        or config.get("decoder_sparse_step", 1) != 1,
        f"an MLP of hidden_act={config.get('hidden_act')}": config.get("hidden_act", "silu")
        != "silu",
        f"a rotary embedding of rope_type={rope}": rope not in kind.ropes,
    }
    found = next((text for text, is_so in others.items() if is_so), "")
    return f"model_type={config['model_type']} with {found}" if found else ""


def rope_type(config: Mapping[str, Any]) -> str:
    """Return the rotary embedding of a `config.json`, in transformers' older spellings too."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return str(rope)  # of no known kind, which the reader refuses
    return rope.get("rope_type") or rope.get("type") or "default"


def config_of(model: Model) -> tuple[str, dict[str, Any]]:
    """Return where a model's `config.json` is, for the reader, and what it says.

    Raises:
        ModelError: there is none.
    """
    if model.path:
        return model.path, _read_json(Path(model.path) / "config.json", model.path)
    if not model.hf_id:
        text = "the model is read from a folder or from the hub"
        raise ModelError(str(Mistake("model.path", None, text, "give model.path=FOLDER")))
    return model.hf_id, _hub_config(model.hf_id)


@lru_cache
def _hub_config(name: str) -> dict[str, Any]:
    """Read the configuration of a model on the hub, from the hub's cache if it is there."""
    remedy = "give model.path=FOLDER, or a file of conf/model"
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        text = "huggingface_hub is not installed here, which asks the hub"
        raise ModelError(str(Mistake("model.hf_id", name, text, remedy))) from error
    try:
        return _read_json(Path(hf_hub_download(name, "config.json")), name)
    except ModelError:
        raise
    except Exception as error:  # the network, and who may read what, have many errors of their own
        said = f"its config.json cannot be had ({type(error).__name__})"
        raise ModelError(str(Mistake("model.hf_id", name, said, remedy))) from error


def _read_json(path: Path, where: str) -> dict[str, Any]:
    try:
        content = read_json(bytes_of(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"broken JSON, {error}"
        text = f"its config.json cannot be read ({reason})"
        remedy = "it must be in Hugging Face format"
        raise ModelError(str(Mistake("model.path", where, text, remedy))) from error
    if not isinstance(content, dict):
        raise ModelError(str(Mistake("model.path", where, "its config.json is no object")))
    return content
