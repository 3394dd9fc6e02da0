"""A real vLLM model on a CPU, refitted by NeMo RL's own extension with our receiver around it.

    python vllm_on_a_cpu.py MODEL PRECISION RANK SIZE PORT EXPERTS

vLLM is told that it runs on a Hopper GPU, so it makes the parameters that it makes there; weights
are loaded by its own loaders and finished by NeMo RL's patches of it. Left out: the transport, and
what only a GPU can run (attention kernels, DeepGEMM's relayout). Prints one JSON object.
"""

# pyright: reportMissingImports=false
import dataclasses
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

HOPPER = 90


def number(capability):
    return capability if isinstance(capability, int) else capability[0] * 10 + capability[1]


class Hopper(NonNvmlCudaPlatform):
    dist_backend = "gloo"

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def has_device_capability(cls, capability, device_id=0):
        return number(capability) <= HOPPER

    @classmethod
    def is_device_capability(cls, capability, device_id=0):
        return number(capability) == HOPPER

    @classmethod
    def is_device_capability_family(cls, capability, device_id=0):
        return capability // 10 == HOPPER // 10

    @classmethod
    def get_device_name(cls, device_id=0):
        return "NVIDIA H200"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 141 * 2**30

    @classmethod
    def check_if_supports_dtype(cls, dtype):
        return

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 132

    @classmethod
    def get_device_communicator_cls(cls):
        module = "vllm.distributed.device_communicators.base_device_communicator"
        return f"{module}.DeviceCommunicatorBase"


def vllm_model(path, recipe, rank, size, port, experts):
    """The model as a worker of vLLM's holds it before its first refit, and vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights
    from vllm.utils.torch_utils import set_default_torch_dtype

    fp8, shape = recipe.precision.rollout_linear == "fp8", recipe.model.shape
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "ignored_layers": [f"model.layers.{n}.mlp.gate" for n in range(shape.layers)],
    }  # fmt: skip
    if not shape.experts:
        del quantization["ignored_layers"]
    how = {"quantization": "fp8", "hf_overrides": {"quantization_config": quantization}}
    arguments = EngineArgs(
        model=str(path), dtype="bfloat16", load_format="dummy", enforce_eager=True,
        max_model_len=512, moe_backend="triton", skip_tokenizer_init=True,
        **(how if fp8 else {}),
        kv_cache_dtype="fp8" if recipe.precision.rollout_kv == "fp8" else "auto",
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.parallel_config.tensor_parallel_size = size
    config.parallel_config.world_size = size
    config.parallel_config.rank = rank
    config.parallel_config.enable_expert_parallel = experts
    config.parallel_config.disable_custom_all_reduce = True
    patch_fp8(recipe, size)
    with set_current_vllm_config(config):
        meet = f"tcp://127.0.0.1:{port}"
        init_distributed_environment(size, rank, meet, rank, backend="gloo")
        initialize_model_parallel(size, 1, backend="gloo")
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
        initialize_dummy_weights(model, config.model_config)
        for module in model.modules():
            if type(module).__name__ == "Attention":
                module.impl.process_weights_after_loading = lambda *_, **__: None
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model, config


def small(shape):
    """The same family, with shards of whole blocks on two ranks, and a padded vocabulary."""
    few = {"layers": 2, "hidden": 512, "heads": 4, "kv_heads": 2, "head_dim": 128, "vocab": 300}
    experts = {"ffn": 512, "experts": 4, "experts_per_token": 2, "expert_ffn": 256}
    return dataclasses.replace(shape, **few, **(experts if shape.experts else {"ffn": 512}))


def config_of(shape):
    from transformers import AutoConfig

    experts = {
        "moe_intermediate_size": shape.expert_ffn, "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    config = AutoConfig.for_model(
        shape.family, intermediate_size=shape.expert_ffn or shape.ffn,
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, max_position_embeddings=1024,
        **(experts if shape.experts else {}),
    )  # fmt: skip
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    config.architectures = [f"{names[shape.family]}ForCausalLM"]
    return config


def patch_fp8(recipe, size):
    """NeMo RL's patches of vLLM, as its generation worker applies them."""
    import vllm.utils.deep_gemm
    from nemo_rl.models.generation.vllm.quantization import fp8

    vllm.utils.deep_gemm.should_use_deepgemm_for_fp8_linear = lambda *_, **__: False
    if recipe.precision.rollout_linear == "fp8":
        kv = "fp8" if recipe.precision.rollout_kv == "fp8" else "auto"
        fp8.apply_fp8_patches(None, fp8.FP8Config(model_parallel_size=size, kv_cache_dtype=kv))


def worker_of(stock, settings, model, config):
    """Our receiver on NeMo RL's extension, fed from a list by its own lifecycle."""
    from fp8_nemo.nemo import receiver

    class Fed(stock):
        def update_weights_via_ipc_zmq(self):
            with self._weight_update_lifecycle("ipc") as finalize:
                for start in range(0, len(self.wire), 7):
                    self._load_weights(self.wire[start : start + 7])
                finalize()
            return True

        def _maybe_process_mtp_drafter_after_loading(self):
            return

        def _maybe_refit_mtp_drafter(self, weights):
            return

        def _load_draft_weights(self, weights):
            return

    worker = receiver.receiver(Fed, settings)()
    worker.model_config, worker.device = config.model_config, torch.device("cpu")
    worker.model_runner = SimpleNamespace(
        model=model, vllm_config=config, model_config=config.model_config
    )
    return worker


@contextmanager
def watched(model):
    """Yield the names that vLLM's own loader gets meanwhile."""
    seen, load = set(), model.load_weights

    def watching(weights):
        pairs = [*weights]
        seen.update(name for name, _ in pairs)
        return load(pairs)

    model.load_weights = watching
    try:
        yield seen
    finally:
        del model.load_weights


def main():
    name, precision, rank, size, port, experts = sys.argv[1:]
    vllm.platforms._current_platform = Hopper()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from fp8_nemo.glue.manifest import is_sent_again
    from fp8_nemo.glue.refit import refit_stream
    from fp8_nemo.glue.wire import RefitError, kv_scale_names, named_shapes
    from fp8_nemo.nemo.worker_settings import WorkerSettings
    from fp8_nemo.recipe.compose import compose
    from fp8_nemo.recipe.options.precision import Glue

    [recipe] = compose([f"model={name}", "backend=nemo", f"precision={precision}", "glue=ours"])
    shape = small(recipe.model.shape)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, shape=shape))
    settings = WorkerSettings.of(recipe, loss_corrects=True)
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        model, config = vllm_model(folder, recipe, int(rank), int(size), port, experts == "experts")
    from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension as stock

    kv = recipe.precision.rollout_kv == "fp8"
    scales = {n: 0.01 + i / 300 for layer in range(shape.layers)
              for i, n in enumerate(kv_scale_names(layer))} if kv else None  # fmt: skip

    def wire(run, salt, lost=None, number=1, adapted=()):
        draw = torch.Generator().manual_seed(salt)
        named = {
            n: (torch.randn(s, generator=draw) * 0.05).bfloat16()
            for n, s in named_shapes(shape).items()
            if not adapted or is_sent_again(n, adapted)
        }
        stream = refit_stream(
            named.items(), run.wire_precision, scales, num_layers=shape.layers,
            verify=run.glue.verify, number=number,
        )  # fmt: skip
        return [pair for pair in stream if pair[0] != lost]

    found = {"landed": {}, "again": {}, "refused": {}}
    glues = [
        Glue("x", quantize, transfer, verify)
        for quantize in ("fused", "stock")
        for transfer in ("fp8", "bf16")
        for verify in ("bytes", "names")
    ]
    for salt, glue in enumerate(glues):
        run = dataclasses.replace(settings, glue=glue)
        worker = worker_of(stock, run, model, config)
        worker.wire = wire(run, salt)
        worker.update_weights_via_ipc_zmq()
        key = f"{glue.quantize} {glue.transfer} {glue.verify}"
        found["landed"][key] = worker.fp8_nemo_report()["verified_weights"]
        with watched(model) as loaded:
            worker.wire = wire(run, 100 + salt, number=2)
            worker.update_weights_via_ipc_zmq()
        equal = worker.fp8_nemo_report()["equal_digests"]
        found["again"][key] = [equal, len(loaded - {*(scales or ())})]
    run = dataclasses.replace(settings, glue=Glue(), resent=["q_proj", "k_proj", "v_proj"])
    worker = worker_of(stock, run, model, config)
    found["adapted"] = []
    for number in (1, 2):
        sent = wire(run, 200 + number, number=number, adapted=run.adapted(number))
        worker.state_dict_info = {n: (x.shape, x.dtype) for n, x in wire(run, 0)}
        worker.wire = sent
        worker.update_weights_via_ipc_zmq()
        proof = worker.fp8_nemo_report()
        found["adapted"].append([len(sent), proof["verified_weights"], proof["equal_digests"]])
    run = dataclasses.replace(settings, glue=Glue())
    lost = ["model.layers.1.self_attn.q_proj.weight"]
    lost.append("model.embed_tokens.weight" if shape.tied else "lm_head.weight")
    lost += ["model.layers.1.self_attn.k_proj.bias"] * bool(shape.qkv_bias)
    lost += ["model.layers.1.self_attn.k_scale"] * kv
    for each in lost:
        worker = worker_of(stock, run, model, config)
        worker.wire = wire(run, 99, lost=each)
        try:
            worker.update_weights_via_ipc_zmq()
        except RefitError as error:
            found["refused"][each] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    main()
