"""A real vLLM Llama in four bits on a CPU, refitted by NeMo RL's extension with our receiver.

    python vllm_in_four_bits.py MODEL PORT

vLLM believes in a Hopper GPU (`vllm_on_a_cpu.py`); the one operation of its repacking that runs on
a GPU alone, `gptq_marlin_repack`, is vLLM's own reference of it in NumPy. The multiplication is not
run. Prints one JSON object.
"""

# pyright: reportMissingImports=false
import dataclasses
import json
import os
import sys
import tempfile

import torch
import vllm.platforms
from vllm_on_a_cpu import Hopper, config_of, small, worker_of


def repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
    """`ops.gptq_marlin_repack` by vLLM's reference (marlin_utils_test.py)."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test as reference

    codes = torch.stack([(b_q_weight >> (4 * i)) & 0xF for i in range(8)], dim=1).flatten(0, 1)
    order = reference.get_weight_perm(num_bits)
    return reference.marlin_weights(codes, size_k, size_n, num_bits, order)


def engine_of(folder, precision, shape):
    """vLLM's configuration in four bits, by the arguments that our generation worker adds."""
    from vllm.engine.arg_utils import EngineArgs

    from fp8_nemo.nemo.marlin.layout import quantization

    return EngineArgs(
        model=folder, dtype="bfloat16", load_format="dummy", enforce_eager=True,
        max_model_len=512, skip_tokenizer_init=True, **quantization(precision, shape.layers),
    ).create_engine_config()  # fmt: skip


def model_of(config, load):
    """vLLM's model, its weights loaded by `load` and repacked by vLLM."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
        load(model)
        for module in model.modules():
            if type(module).__name__ == "Attention":
                module.impl.process_weights_after_loading = lambda *_, **__: None
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def held(model):
    return {n: p.data for n, p in model.named_parameters()}


def memory(model):
    spaces = {n: m.workspace for n, m in model.named_modules() if hasattr(m, "workspace")}
    tensors = held(model) | spaces
    return {n: (t.data_ptr(), tuple(t.shape), str(t.dtype)) for n, t in tensors.items()}


def differing(one, other):
    bits = {n: t.contiguous().flatten().view(torch.uint8) for n, t in held(one).items()}
    theirs = {n: t.contiguous().flatten().view(torch.uint8) for n, t in held(other).items()}
    assert bits.keys() == theirs.keys()
    return [n for n in bits if not torch.equal(bits[n], theirs[n])]


def methods(model):
    from vllm.model_executor.layers.linear import LinearBase

    return {
        name: [type(module.quant_method).__name__,
               type(getattr(module.quant_method, "kernel", None)).__name__]
        for name, module in model.named_modules()
        if isinstance(module, LinearBase) or name == "lm_head"
    }  # fmt: skip


def main():
    name, port = sys.argv[1:]
    vllm.platforms._current_platform = Hopper()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    import vllm._custom_ops as ops

    ops.gptq_marlin_repack = repack
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights

    from fp8_nemo.glue.manifest import MANIFEST, SENTINEL
    from fp8_nemo.glue.refit import refit_stream
    from fp8_nemo.glue.wire import RefitError, named_shapes
    from fp8_nemo.nemo.worker_settings import WorkerSettings
    from fp8_nemo.recipe.compose import compose
    from fp8_nemo.recipe.options.precision import Glue

    [recipe] = compose([f"model={name}", "precision=nvfp4-w4a16", "precision.first_layers_bf16=1"])
    shape = dataclasses.replace(small(recipe.model.shape), layers=3)
    precision = recipe.precision
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, shape=shape))
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1, backend="gloo")
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        config = engine_of(folder, precision, shape)
        others = engine_of(folder, precision, shape)
    model = model_of(config, lambda made: initialize_dummy_weights(made, config.model_config))
    from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension as stock

    def wire(salt, number, verify):
        draw = torch.Generator().manual_seed(salt)
        named = {
            n: (torch.randn(s, generator=draw) * 0.05).bfloat16()
            for n, s in named_shapes(shape).items()
        }
        return list(refit_stream(named.items(), precision, None, num_layers=shape.layers,
                                 verify=verify, number=number))  # fmt: skip

    begun, found = memory(model), {"methods": methods(model), "refits": [], "refused": {}}
    for verify in ("bytes", "names", "off"):
        settings = WorkerSettings.of(recipe, loss_corrects=True)
        worker = worker_of(
            stock, dataclasses.replace(settings, glue=Glue(verify=verify)), model, config
        )
        worker.fp8_nemo_layout = worker.fp8_nemo_layout_problems()
        for number in (1, 2):
            sent = wire(10 * number, number, verify)
            worker.wire = sent
            worker.update_weights_via_ipc_zmq()
            checkpoint = [pair for pair in sent if pair[0] not in (SENTINEL, MANIFEST)]
            native = model_of(others, lambda made, all_=checkpoint: made.load_weights(all_))
            found["refits"].append({
                "proof": {k: v for k, v in worker.fp8_nemo_report().items() if k != "sent_digests"},
                "differ": differing(model, native), "moved": memory(model) != begun,
                "layout": worker.fp8_nemo_layout,
                "left": len(worker.fp8_nemo_refit.staging.free),
            })  # fmt: skip
    run = WorkerSettings.of(recipe, loss_corrects=True)
    q = "model.layers.1.self_attn.q_proj.weight"

    def flipped(name, tensor):
        if name != q:
            return tensor
        tensor = tensor.clone()
        tensor.view(-1)[100] ^= 1
        return tensor

    def doubled(name, tensor):
        return tensor * 2 if name == q + "_scale_2" else tensor

    for what, change in (("flipped", flipped), ("doubled", doubled), ("lost", None)):
        worker = worker_of(stock, run, model, config)
        worker.wire = [
            (n, change(n, x) if change else x)
            for n, x in wire(5, 1, "bytes")
            if change or n != q + "_scale"
        ]
        try:
            worker.update_weights_via_ipc_zmq()
        except RefitError as error:
            found["refused"][what] = error.problems
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {"VLLM_USE_DEEP_GEMM": "0"}
    main()
