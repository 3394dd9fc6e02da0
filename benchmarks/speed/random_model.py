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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as Qwen3Moe

from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options import Shape

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build(shape: Shape) -> PreTrainedModel:
    """Build a Llama or a Qwen3-MoE in BF16, its weights about 0.02."""
    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
    }
    if not shape.experts:
        config = LlamaConfig(intermediate_size=shape.ffn, rope_theta=5e5, **common)
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    config = Qwen3MoeConfig(
        intermediate_size=shape.expert_ffn,
        moe_intermediate_size=shape.expert_ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **common,
    )
    return Qwen3Moe._from_config(config, dtype=torch.bfloat16)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="an option of conf/model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args()
    cell = [f"model={options.model}", "backend=nemo", "precision=bf16"]
    [recipe] = compose([*cell, f"model.shape.layers={options.layers}"])
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build(recipe.model.shape)
    tokenizer = SHIPPED / ("tiny-qwen3-moe" if recipe.model.shape.experts else "tiny-llama")
    options.folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(options.folder)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, options.folder)
    print(f"{options.folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
