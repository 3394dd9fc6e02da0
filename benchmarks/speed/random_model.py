"""Write a checkpoint of a real model's shape with random weights and fewer layers, to measure with.

python -m benchmarks.speed.random_model llama31-8b models/8b-shape --layers 8

The tokenizer is the tiny model's, which names fewer tokens than the embedding has rows. Run it with
`model=llama31-8b model.path=models/8b-shape model.shape.layers=8 data=arithmetic`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.model import Shape

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build(shape: Shape, k_bias: float = 0.0) -> PreTrainedModel:
    """Build a model of any family in BF16, its weights about 0.02.

    Args:
        shape: of a model option.
        k_bias: deviation of K's biases, which Qwen2.5 has large: 8 gives K outliers as in verl
            #4435, where a cache in FP8 broke without scales.
    """
    experts = {
        "moe_intermediate_size": shape.expert_ffn,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32768,
        bos_token_id=None,
        **(experts if shape.experts else {"rope_theta": 5e5}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("k_proj.bias"):
                weight.normal_(std=k_bias)
    return model


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="an option of conf/model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="all of them unless given")
    parser.add_argument("--k-bias", type=float, default=0.0, help="deviation of K's biases")
    options = parser.parse_args()
    cell = [f"model={options.model}", "backend=nemo", "precision=bf16"]
    [recipe] = compose([*cell, *([f"model.shape.layers={n}"] if (n := options.layers) else [])])
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build(recipe.model.shape, options.k_bias)
    tokenizer = SHIPPED / ("tiny-qwen3-moe" if recipe.model.shape.experts else "tiny-llama")
    options.folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(options.folder)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, options.folder)
    print(f"{options.folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
