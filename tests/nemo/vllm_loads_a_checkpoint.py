"""vLLM's own loader, on a CPU, over a checkpoint that recipes.quantize_checkpoint made.

    python vllm_loads_a_checkpoint.py FOLDER MODEL PRECISION PORT

Built as on a Hopper GPU (`vllm_on_a_cpu.py`), from the folder's own config.json alone. Prints how
many tensors of the checkpoint lie in vLLM's parameters byte by byte, the names of the others, and
the methods of vLLM's linears.
"""

# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path

import torch
import vllm.platforms
from safetensors.torch import load_file
from vllm_on_a_cpu import Hopper


def loaded(folder, port, kv):
    """vLLM's model after its loader, before anything is relaid for kernels."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=512,
        moe_backend="triton", skip_tokenizer_init=True, kv_cache_dtype="fp8" if kv else "auto",
    ).create_engine_config()  # fmt: skip
    config.parallel_config.disable_custom_all_reduce = True
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1, backend="gloo")
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


def methods_of(model):
    from vllm.model_executor.layers.linear import LinearBase

    linears = (module for module in model.modules() if isinstance(module, LinearBase))
    return sorted({type(module.quant_method).__name__ for module in linears})


def main():
    folder, name, precision, port = sys.argv[1:]
    vllm.platforms._current_platform = Hopper()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from fp8_nemo.glue.manifest import KV_SUFFIXES
    from fp8_nemo.nemo.engine_memory import Part, Rank, engine_parts
    from fp8_nemo.nemo.marlin.layout import arriving, modules
    from fp8_nemo.recipe.compose import compose

    [recipe] = compose([f"model={name}", f"precision={precision}"])
    model = loaded(Path(folder), port, recipe.precision.rollout_kv == "fp8")
    parameters = {n: p.data for n, p in model.named_parameters()}
    shape = recipe.model.shape
    parts = engine_parts(parameters, shape, recipe.precision, Rank()) | {
        wire: Part(parameters[f"{module.path}.{held}"][rows])
        for module in modules(shape, recipe.precision)  # in four bits, as they lie before Marlin
        for wire, (held, rows) in arriving(module).items()
    }
    tensors = {n: t for f in Path(folder).glob("*.safetensors") for n, t in load_file(f).items()}
    found = {"same": 0, "other": [], "methods": methods_of(model)}
    for key, tensor in tensors.items():
        if key.endswith(KV_SUFFIXES):
            stem, _, scale = key.removesuffix(".attn.q_scale").rpartition(".")
            own = key if "attn.q_scale" in key else f"{stem}.attn.{scale}"
            same = parameters[own].item() == tensor.to(parameters[own].dtype).item()
        else:
            held = parts[key].tensor.contiguous().view(torch.uint8)
            same = torch.equal(held, tensor[parts[key].of_wire].contiguous().view(torch.uint8))
        found["same"] += same
        found["other"] += [] if same else [key]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
