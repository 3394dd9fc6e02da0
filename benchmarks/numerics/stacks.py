"""The real vLLM and the real Megatron on the tokens of a budget, each in a process of its own.

python -m benchmarks.numerics.stacks vllm|megatron MODEL FOLDER --precision fp8-e2e ...

is what `mismatch_budget --stacks` starts: one engine samples the tokens, scores them by prefill and
shows what its modules made there; one GPTModel of Megatron-Core scores them. Each leaves
`FOLDER/SIDE.safetensors`: `logprobs.NAME` `[N, S - prompt]`, the engine's `tokens` `[N, S]`, and
`seen.OP.PLACE.LAYER` `[T, ...]` by the names of `table_forward.forward`'s calls. Each has a log.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.numerics import flash_for_te
from benchmarks.numerics.table_forward import Shape

LIMIT = 300  # seconds a side may take
SHARE = 0.4  # of the GPU, which has to be free for vLLM
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_DEEP_GEMM_WARMUP": "skip",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""Of both sides; `--env` changes it. FlashInfer's kernel of fewer than 32 rows is off."""
PASSED = ("precision", "engine", "attention", "sequences", "tokens", "prompt", "seed")


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return what both sides have in their environment."""
    flash = flash_for_te.ENVIRONMENT if options.attention == "flash" else {}
    return ENVIRONMENT | flash | dict(pair.split("=", 1) for pair in options.env)


# The parent's part


def ask(side: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one side; return what its log says of its choices, and its seconds.

    Raises:
        RuntimeError: it failed or took too long; the end of its log.
    """
    words = [word for name in PASSED for word in (f"--{name}", str(getattr(options, name)))]
    words += ["--align"] * options.align
    command = [sys.executable, "-m", __name__, side, str(options.model), str(folder), *words]
    log = folder / f"{side}.log"
    with log.open("wb") as opened:
        try:
            done = subprocess.run(command, stdout=opened, stderr=subprocess.STDOUT,
                                  env=os.environ | environment(options), timeout=LIMIT)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{side}: {LIMIT} s; {_end(log)}") from None
    if done.returncode or not (folder / f"{side}.safetensors").is_file():
        raise RuntimeError(f"{side}: exit code {done.returncode}; {_end(log)}")
    from benchmarks.speed.decode_profile import told, without_folders

    return {"log": told(without_folders(log.read_text(errors="replace")))[:80]}


def _end(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-12:])


def read(side: str, folder: Path, device: str) -> dict[str, Tensor]:
    """Return what a side left; nothing if it failed."""
    file = folder / f"{side}.safetensors"
    return load_file(file, device=device) if file.is_file() else {}


# vLLM

PAGE = 16
PASSES = {"graphs": {"pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}},
          "fused": {"pass_config": {"fuse_norm_quant": True, "fuse_act_quant": True}}}  # fmt: skip
ADDED = {op: ["vllm_c", "native"] for op in ("rms_norm", "fused_add_rms_norm")}
"""Of an aligned engine that is compiled: the norm of eager, which adds in BF16."""
POINTS = {  # modules of a layer: the operation and place whose result they give, and which of it
    "input_layernorm": ("norm", "attention"), "self_attn.qkv_proj": ("gemm", "qkv"),
    "self_attn.attn": ("attention", "attention"), "self_attn.o_proj": ("gemm", "o"),
    "post_attention_layernorm": ("norm", "mlp"), "mlp.act_fn": ("silu", "dense"),
    "mlp.gate_up_proj": ("gemm", "gate_up"), "mlp.down_proj": ("gemm", "down"),
    "mlp.experts": ("sum", "experts"),
}  # fmt: skip


def vllm_side(options: argparse.Namespace) -> dict[str, Tensor]:
    """Sample, score by prefill, and keep what the modules gave in the prefill."""
    from vllm import LLM, SamplingParams

    if options.align:
        from fp8_nemo.nemo.aligned import engine  # noqa: F401  registers, before the model

    shape = Shape.read(options.model)
    N, S, prompt = options.sequences, options.tokens, options.prompt
    arguments: dict[str, Any] = {
        "model": str(_served(options)), "skip_tokenizer_init": True, "dtype": "bfloat16",
        "seed": options.seed, "enable_prefix_caching": False, "max_model_len": S + PAGE,
        "max_num_batched_tokens": max(N * S, 2048), "max_num_seqs": max(N, 16),
        "gpu_memory_utilization": SHARE, "kv_cache_memory_bytes": _kv_bytes(shape, N, S),
        "enforce_eager": options.engine == "eager",
        "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
        "enable_flashinfer_autotune": False,
    }  # fmt: skip
    if shape.experts:
        arguments["moe_backend"] = "triton"
    if options.engine != "eager":
        arguments["compilation_config"] = {"cudagraph_capture_sizes": [N]} | PASSES[options.engine]
        arguments |= {"ir_op_priority": ADDED} if options.align else {}
    llm = LLM(**arguments)
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(3, vocab, (N, prompt), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=S - prompt, temperature=1.0, logprobs=0, ignore_eos=True,
                              detokenize=False)  # fmt: skip
    asked = [{"prompt_token_ids": each} for each in prompts]
    answers = [each.outputs[0] for each in llm.generate(asked, sampling, use_tqdm=False)]
    tokens = [p + list(a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    decode = [[place[token].logprob for place, token in
               zip(a.logprobs, a.token_ids, strict=True)] for a in answers]  # fmt: skip
    seen: dict[str, Tensor] = {}
    if options.engine == "eager":  # a compiled forward calls no module's hook
        llm.apply_model(lambda module: _watch_vllm(module, N * S, seen))
    scoring = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": each} for each in tokens]
    scored = llm.generate(asked, scoring, use_tqdm=False)
    prefill = [[place[token].logprob for place, token in
                zip(each.prompt_logprobs[prompt:], row[prompt:], strict=True)]
               for each, row in zip(scored, tokens, strict=True)]  # fmt: skip
    return {"tokens": torch.tensor(tokens), "logprobs.decode": torch.tensor(decode),
            "logprobs.prefill": torch.tensor(prefill)} | seen  # fmt: skip


def _served(options: argparse.Namespace) -> Path:
    """Return the folder that vLLM loads: in FP8 a conversion by the contract's formula."""
    if options.precision == "bf16":
        return options.model
    from fp8_nemo.export.convert import convert

    made = options.folder / "fp8"
    if not (made / "config.json").is_file():
        convert(options.model, made, ["precision=fp8-linear"], None, lambda *_: None)
    return made


def _kv_bytes(shape: Shape, N: int, S: int) -> int:
    """Return the bytes of a BF16 cache for all sequences and as much again.

    Told its size, vLLM does not measure the GPU, which fails when another process frees memory
    meanwhile (v1/worker/gpu_worker.py:442, 510).
    """
    token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    return 2 * max(N, 16) * (S + 2 * PAGE) * token


def _watch_vllm(module: Any, T: int, seen: dict[str, Tensor]) -> None:
    """Keep what the modules of `POINTS` give to a forward of T tokens."""

    def keep(name: str, found: Any) -> None:
        # A linear gives (output, bias), a norm (output, residual) or the output alone.
        first = found[0] if isinstance(found, tuple) else found
        if isinstance(first, Tensor) and first.shape[0] == T and name not in seen:
            seen[name] = first.detach().flatten(1).clone().cpu()

    def hook(name: str) -> Any:
        return lambda _, __, found: keep(name, found)

    modules = dict(module.named_modules())
    for name, each in modules.items():
        at, _, rest = name.partition("layers.")
        number, _, point = rest.partition(".")
        if at == "model." and point in POINTS:
            op, place = POINTS[point]
            each.register_forward_hook(hook(f"seen.{op}.{place}.{number}"))
    layers = sum(name.startswith("model.layers.") and name.count(".") == 2 for name in modules)
    modules["model.norm"].register_forward_hook(hook(f"seen.norm.final.{layers}"))


# Megatron


def megatron_side(options: argparse.Namespace) -> dict[str, Tensor]:
    """Score the tokens of `FOLDER/tokens.safetensors` as a logprob pass does: packed, in eval."""
    if options.attention == "flash":
        flash_for_te.lend(options.folder)
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.numerics.dialects import logprobs_shard
    from benchmarks.numerics.table_forward import load

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581"}
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    tokens_NS = load_file(options.folder / "tokens.safetensors", device="cuda")["tokens"]
    N, S = tokens_NS.shape
    source = load(options.model, "cuda", fp8=False)
    model = _gpt(source.shape, options.precision == "fp8-e2e", options.attention, S)
    model.load_state_dict(_state(source, model), strict=False)
    seen: dict[str, Tensor] = {}
    _watch_megatron(model, source.shape, seen)
    starts = torch.arange(0, N * S + 1, S, dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts, max_seqlen_q=S, max_seqlen_kv=S,
    )  # fmt: skip
    places = torch.arange(S, device="cuda").repeat(N)[None]
    model.eval()
    with torch.no_grad():
        logits = model(tokens_NS.view(1, -1), places, None, packed_seq_params=packed).float()
    logits_NSV = logits.reshape(N, S, -1)[:, options.prompt - 1 : -1]
    answers = tokens_NS[:, options.prompt :, None]
    found = [logprobs_shard(each).gather(-1, answer)[..., 0]
             for each, answer in zip(logits_NSV, answers, strict=True)]  # fmt: skip
    torch.distributed.destroy_process_group()
    return {"logprobs.megatron": torch.stack(found)} | seen


def _gpt(shape: Shape, fp8: bool, attention: str, longest: int) -> Any:
    """Build the model with the settings that NeMo RL's base configurations and our plans give."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn.functional import silu

    settings: dict[str, Any] = {}
    if shape.experts:
        settings = {
            "num_moe_experts": shape.experts, "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.ffn, "moe_router_dtype": "fp32",
            "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none", "moe_permute_fusion": True,
        }  # fmt: skip
    if fp8:
        settings |= {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads, kv_channels=shape.head_dim, ffn_hidden_size=shape.ffn,
        normalization="RMSNorm", layernorm_epsilon=shape.eps, gated_linear_unit=True,
        activation_func=silu, add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, qk_layernorm=shape.qk_norm, hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=True, bias_dropout_fusion=True,
        apply_rope_fusion=True, masked_softmax_fusion=True, gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=False, attention_backend=AttnBackend[attention],
        perform_initialization=False, **settings,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts or None, moe_grouped_gemm=bool(shape.experts),
        qk_layernorm=shape.qk_norm,
    )  # fmt: skip
    return GPTModel(
        config, spec, shape.vocab, longest, parallel_output=True,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_base=shape.theta,
    ).cuda().bfloat16()  # fmt: skip


def _state(source: Any, model: Any) -> dict[str, Tensor]:
    """Return Megatron's tensors: Q, K and V by KV group, experts one by one.

    Raises:
        ValueError: Megatron has a weight that was not given, or one of another shape.
    """
    shape = source.shape
    per_group = [shape.heads // shape.kv_heads, 1, 1]
    found = {
        "embedding.word_embeddings.weight": source.embedding,
        "decoder.final_layernorm.weight": source.norm,
        "output_layer.weight": source.head,
    }
    for n, layer in enumerate(source.layers):
        at = f"decoder.layers.{n}"
        sizes = [shape.head_dim * each * shape.kv_heads for each in per_group]
        parts = [each.view(shape.kv_heads, -1, shape.hidden)
                 for each in layer.qkv.bf16_OI.split(sizes)]  # fmt: skip
        found |= {
            f"{at}.self_attention.linear_qkv.layer_norm_weight": layer.norm,
            f"{at}.self_attention.linear_qkv.weight": torch.cat(parts, 1).flatten(0, 1),
            f"{at}.self_attention.linear_proj.weight": layer.o.bf16_OI,
        }
        if layer.q_norm is not None:
            found |= {f"{at}.self_attention.q_layernorm.weight": layer.q_norm,
                      f"{at}.self_attention.k_layernorm.weight": layer.k_norm}  # fmt: skip
        if layer.router is None:
            found |= {
                f"{at}.mlp.linear_fc1.layer_norm_weight": layer.norm_2,
                f"{at}.mlp.linear_fc1.weight": layer.w13.bf16_OI,
                f"{at}.mlp.linear_fc2.weight": layer.w2.bf16_OI,
            }
            continue
        found |= {f"{at}.pre_mlp_layernorm.weight": layer.norm_2,
                  f"{at}.mlp.router.weight": layer.router}  # fmt: skip
        for e in range(shape.experts):
            found |= {f"{at}.mlp.experts.linear_fc1.weight{e}": layer.w13.bf16_OI[e],
                      f"{at}.mlp.experts.linear_fc2.weight{e}": layer.w2.bf16_OI[e]}  # fmt: skip
    own = {n: p.shape for n, p in model.named_parameters()}
    wrong = sorted(n for n in own if n not in found or own[n] != found[n].shape)
    if wrong or len(own) != len(found):
        more = sorted(set(found) - set(own))
        raise ValueError(f"Megatron's weights: missing or of another shape {wrong[:6]}, "
                         f"not known {more[:6]}")  # fmt: skip
    return found


def _watch_megatron(model: Any, shape: Any, seen: dict[str, Tensor]) -> None:
    """Keep what the modules give, Q, K and V in vLLM's order of rows."""

    def by_kind(x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], shape.kv_heads, -1, shape.head_dim)
        sizes = [shape.heads // shape.kv_heads, 1, 1]
        return torch.cat([part.flatten(1) for part in heads.split(sizes, dim=2)], 1)

    def hook(name: str, change: Any = lambda x: x) -> Any:
        def keep(_: Any, __: Any, found: Any) -> None:
            first = found[0] if isinstance(found, tuple) else found
            seen[name] = change(first.detach().reshape(-1, first.shape[-1])).contiguous().cpu()

        return keep

    for n, layer in enumerate(model.decoder.layers):
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv.register_forward_hook(hook(f"seen.gemm.qkv.{n}", by_kind))
        attention.core_attention.register_forward_hook(hook(f"seen.attention.attention.{n}"))
        attention.linear_proj.register_forward_hook(hook(f"seen.gemm.o.{n}"))
        if shape.experts:
            mlp.register_forward_hook(hook(f"seen.sum.experts.{n}"))
        else:
            mlp.linear_fc1.register_forward_hook(hook(f"seen.gemm.gate_up.{n}"))
            mlp.linear_fc2.register_forward_hook(hook(f"seen.gemm.down.{n}"))
    final = hook(f"seen.norm.final.{shape.layers}")
    model.decoder.final_layernorm.register_forward_hook(final)


SIDES = {"vllm": vllm_side, "megatron": megatron_side}


def main() -> None:
    """Run one side and leave its file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    for name in PASSED:
        kind = str if name in ("precision", "engine", "attention") else int
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--align", action="store_true")
    options = parser.parse_args()
    found = SIDES[options.side](options)
    new = options.folder / f"{options.side}.new"
    save_file({name: each.contiguous().cpu() for name, each in found.items()}, new)
    new.replace(options.folder / f"{options.side}.safetensors")


if __name__ == "__main__":
    main()
