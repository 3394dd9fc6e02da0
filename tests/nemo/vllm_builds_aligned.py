"""A real vLLM Llama on a CPU, built before our plugin, and after it without and with `align`.

    python vllm_builds_aligned.py FOLDER PORT

vLLM believes in a Hopper GPU (`vllm_on_a_cpu.py`). Prints the classes that a layer has. The plugin
comes as vLLM's worker starts: by the one wrapper that the synchronous and the asynchronous engine
start (uniproc_executor.py, multiproc_executor.py, ray_executor.py).
"""

# pyright: reportMissingImports=false
import json
import os
import sys

import torch
import vllm.platforms
import vllm.plugins
from vllm_on_a_cpu import Hopper

from benchmarks.numerics import dialects
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe

LAYERS = []


def engine_config(folder):
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=folder, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True,
        quantization="fp8", load_format="dummy", hf_overrides={"quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]}},
    ).create_engine_config()  # fmt: skip
    config.parallel_config.disable_custom_all_reduce = True
    return config


def built(config):
    """A layer's RoPE, SiLU and quantizer, one as DeepGEMM makes it (deep_gemm.py:38-44), a norm."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    rotary_embedding._ROPE_DICT.clear()
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        layer = initialize_model(config).model.layers[0]
        deep_gemm = QuantFP8(
            static=False, group_shape=GroupShape(1, 128), use_ue8m0=False,
            tma_aligned_scales=True, column_major_scales=True,
        )  # fmt: skip
    linear = layer.self_attn.o_proj.quant_method.fp8_linear.quant_fp8
    norm = layer.post_attention_layernorm
    LAYERS.append(layer)
    return layer.self_attn.rotary_emb, layer.mlp.act_fn, linear, deep_gemm, norm


def equal(layer_ops):
    """Whether the operations, called as a layer does, give the trainer's bits."""
    rope, silu, _, quantizer, _ = layer_ops
    S, D = 15, rope.head_size
    x = torch.randn(2 * S, 8 * D).bfloat16()
    q, k, _ = x.split([4 * D, 2 * D, 2 * D], dim=-1)
    positions = torch.arange(S).repeat(2)
    heads = [each.unflatten(-1, (-1, D)) for each in (q, k)]
    turned = [each.flatten(-2) for each in dialects.TRAINER["rope"](*heads, S, rope.base)]
    made = torch.compile(rope, backend="aot_eager", fullgraph=True)(positions, q, k)
    codes, scales = torch.compile(quantizer, backend="aot_eager", fullgraph=True)(x)
    wanted = dialects.TRAINER["quantize"](x)
    return {
        "rope": all(map(torch.equal, made, turned)),
        "silu": torch.equal(silu(x), dialects.TRAINER["silu"](x)),
        "codes": torch.equal(codes.view(torch.uint8), wanted.fp8_TI.view(torch.uint8)),
        "scales": torch.equal(scales, wanted.scale_inv_TQ), "strides": scales.stride(),
    }  # fmt: skip


def normed(norm):
    """Whether the norm, compiled as a layer has it, gives the trainer's bits, and its stream."""
    x, stream = torch.randn(2, 12, norm.hidden_size).bfloat16().unbind(0)
    norm.weight.data = torch.randn(norm.hidden_size).bfloat16()
    run = torch.compile(norm, backend="aot_eager", fullgraph=True)
    found, added = run(x, stream)
    alone = run(x)
    wanted, _ = dialects.TRAINER["norm"](x, stream, norm.weight, norm.variance_epsilon, False)
    return [torch.equal(found, wanted), torch.equal(added, x + stream),
            torch.equal(alone, dialects.TRAINER["norm"](
                None, x, norm.weight, norm.variance_epsilon, False)[0])]  # fmt: skip


def strayed():
    """What an exact engine would name of the layer that was built last, attention apart."""
    from fp8_nemo.glue.wire import RefitError
    from fp8_nemo.nemo.aligned.exact import check

    try:
        check(LAYERS[-1])
    except RefitError as error:
        return [line.split()[3].rstrip(";") for line in error.problems]
    return []


def splits():
    """How vLLM's attention is let split keys that would be split by 32."""
    from vllm.v1.attention.backends import flash_attn

    from fp8_nemo.nemo.aligned.exact import unsplit

    calls = (flash_attn.flash_attn_varlen_func, flash_attn.get_scheduler_metadata)
    assert all(each.__code__ is unsplit(each).__code__ for each in calls)
    return unsplit(lambda **given: given["num_splits"])(num_splits=32)


def names(layer_ops):
    return [type(each).__name__ for each in layer_ops]


class Deviceless:
    def __init__(self, **arguments):
        self.arguments = arguments


class Worker(Deviceless):
    """One of vLLM's, as far as its start."""


def told(align, config):
    """Let a worker of such a run start: vLLM's wrapper finds our entry point."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    recipe = Recipe(precision=Precision(rollout_linear="fp8", align=align))
    os.environ |= WorkerSettings.of(recipe, loss_corrects=True).to_environment()
    vllm.plugins.plugins_loaded = False  # as in a process of its own
    config.parallel_config.worker_cls = "__main__.Worker"
    WorkerWrapperBase().init_worker([{"vllm_config": config, "shared_worker_lock": None}])


def main():
    folder, port = sys.argv[1:]
    vllm.platforms._current_platform = Hopper()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1, backend="gloo")
    config = engine_config(folder)
    before = names(built(config))
    told("none", config)
    kept = names(built(config))
    told("cheap", config)
    told("cheap", config)
    cheap = names(built(config))
    strays = [strayed()]
    told("exact", config)
    ops = built(config)
    print(
        json.dumps(
            {
                "before": before,
                "none": kept,
                "cheap": cheap,
                "exact": names(ops),
                "equal": equal(ops),
                "norm": normed(ops[-1]),
                "splits": splits(),
                "strays": [*strays, strayed()],
            }
        )
    )


if __name__ == "__main__":
    main()
