"""What has been done already in the process that tests fork theirs from: imports, nearly all."""

import fp8_nemo.recipes.compare
import fp8_nemo.recipes.grpo
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

import conftest  # noqa: F401
import fp8_nemo.export.convert
import fp8_nemo.local.run
import fp8_nemo.report.figures
import fp8_nemo.report.html.render  # noqa: F401
from fp8_nemo.recipe.compose import compose

MODELS = (modeling_llama.LlamaForCausalLM, modeling_qwen3_moe.Qwen3MoeForCausalLM)
for model in MODELS:  # compiles the patterns of all models' names, once a process
    get_checkpoint_conversion_mapping(model.config_class.model_type)

for precision in ("bf16", "fp8-linear", "fp8-kv-attn"):  # what most lines of tests choose
    compose([f"precision={precision}"])
