"""Refits of four bits into a running vLLM, its CUDA graphs on: what it then answers, and proves.

python -m benchmarks.glue.marlin_refit --out benchmarks/results/marlin-refit-h100.json
    [--model small-llama] [--refits 20]

Without NeMo RL. vLLM starts as our generation worker starts it (dummy weights, `modelopt_fp4` with
`W4A16_NVFP4`), and sleeps before each refit and wakes for it, as a colocated engine does. Each
refit brings other random weights: `refit_stream` sends them, in batches through one buffer that is
overwritten after each, as NeMo RL's are; our `Receiver` takes them. After each refit the engine
samples, and the same tokens are scored by a model of transformers in FP32, with weights dequantized
from the bytes that were sent.

`off` is the mean difference of a sampled token's logprob from that reference. It must lie far below
`stale`, the same of the weights before (those of the refit before, or the engine would answer with
old weights), and below `unquantized`, of the weights in BF16 as the trainer has them. `moved` names
parameters and workspaces that changed their address, which the graphs would not know. At the end
the last refit's weights become a checkpoint (`quantize_checkpoint`; `not_shipped` names what has
other bytes there), which vLLM itself loads into an eager engine of another process to score the
same tokens: `eager` is the difference from it, and `eager_off` its own from the reference.
`refused` is what a refit with one flipped bit, and one without a scale, raised;
`after` what a good refit then answers.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from benchmarks import record
from benchmarks.speed import random_model
from fp8_nemo.export.formats import values_of
from fp8_nemo.export.quantized_checkpoint import quantize_checkpoint
from fp8_nemo.glue.manifest import MANIFEST, SENTINEL
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.nemo.marlin.layout import quantization
from fp8_nemo.nemo.receiver import receiver
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import to_json

PROMPTS, PROMPT, ANSWER = 8, 24, 40
BUFFER = 2**26
"""Bytes of a batch, through one buffer; NeMo RL's has a share of the free memory."""
ALIGNED = 512
GRAPHS = [1, 2, 4, 8]
SPREAD = 0.04
"""Deviation of a weight: logits of different models then differ clearly."""
FAR = 0.1
"""Of `stale`, what `off` may be at most."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker is in this process
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
Wire = Sequence[tuple[str, Tensor]]


class Fed:
    """NeMo RL's worker extension but for its transport: it takes a stream from this process."""

    model_runner: Any
    model_config: Any
    device: torch.device
    stream: Iterable[tuple[str, Tensor]]

    def prepare_refit_info(self) -> None:
        """Take NeMo RL's handshake."""

    def _load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        raise AssertionError("the receiver loads four bits itself")

    def update_weights_via_ipc_zmq(self) -> bool:
        """Load batch by batch, then finish the weights as NeMo RL does (vllm_backend.py)."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for batch in through_a_buffer(self.stream, self.device):
            self._load_weights(batch)
        with set_current_vllm_config(self.model_runner.vllm_config):
            process_weights_after_loading(self.model_runner.model, self.model_config, self.device)
        return True


def through_a_buffer(
    stream: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield batches that lie in one buffer, of which nothing is left when the next one is asked."""
    buffer = torch.empty(BUFFER, dtype=torch.uint8, device=device)
    batch: list[tuple[str, Tensor]] = []
    end = 0
    for name, tensor in stream:
        if end + tensor.nbytes > len(buffer):
            yield batch
            wait()
            buffer.fill_(0xFF)
            batch, end = [], 0
            if tensor.nbytes > len(buffer):
                buffer = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
        place = buffer[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        batch.append((name, place.copy_(tensor)))
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    yield batch
    wait()
    buffer.fill_(0xFF)


def wait() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def worker_of(runner: Any, settings: WorkerSettings, device: torch.device) -> Any:
    """Make our receiver around a vLLM model runner.

    Args:
        runner: vLLM's, or what has its `model`, `vllm_config` and `model_config`.
        settings: of the run.
        device: of the model.
    """
    worker: Any = receiver(Fed, settings)()
    worker.model_runner, worker.model_config, worker.device = runner, runner.model_config, device
    return worker


def weights_of(model: torch.nn.Module, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Draw BF16 weights for every parameter of a model; norms lie about 1."""
    draw = torch.Generator(device=device).manual_seed(seed)
    found = {}
    for name, parameter in model.named_parameters():
        weight = torch.randn(parameter.shape, generator=draw, device=device) * SPREAD
        found[name] = (weight + 1 if "norm" in name else weight).bfloat16()
    return found


def sent(wire: Wire) -> dict[str, Tensor]:
    """Return what a stream brings, by checkpoint name."""
    return {name: tensor for name, tensor in wire if name not in (SENTINEL, MANIFEST)}


def not_shipped(source: Path, target: Path, wire: Wire, precision: Precision) -> list[str]:
    """Ship a checkpoint; name the tensors whose bytes are not those of a refit from it."""
    quantize_checkpoint(source, target, precision)
    shipped, brought = (
        {name: save({name: tensor.cpu()}) for name, tensor in tensors.items()}
        for tensors in (load_file(target / "model.safetensors"), sent(wire))
    )
    return sorted({name for name, _ in shipped.items() ^ brought.items()})


@torch.no_grad()
def scored(model: Any, values: Mapping[str, Tensor], tokens: Tensor, begin: int) -> Tensor:
    """Score the tokens behind a prompt with given weights; FP32 `[B, T - begin]`.

    Args:
        model: of transformers, in FP32; its weights are replaced.
        values: by checkpoint name.
        tokens: `[B, T]`.
        begin: length of the prompts.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
    logits = model(tokens).logits[:, begin - 1 : -1].float()
    chosen = tokens[:, begin:, None]
    return logits.log_softmax(-1).gather(-1, chosen)[..., 0]


def arguments_of(folder: Path, **others: Any) -> dict[str, Any]:
    """Return `vllm.LLM`'s arguments that both engines have."""
    return {
        "model": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
        "enable_prefix_caching": False, "gpu_memory_utilization": 0.25, "max_model_len": 512,
        "max_num_seqs": PROMPTS, "generation_config": "vllm", "disable_log_stats": True,
        "enable_flashinfer_autotune": False,
    } | others  # fmt: skip


def sampled(llm: Any, prompts: list[list[int]], seed: int) -> tuple[list[list[int]], Tensor]:
    """Sample an answer to each prompt; return whole sequences, and the answers' logprobs."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=1.0, seed=seed, max_tokens=ANSWER, logprobs=0,
                         ignore_eos=True, detokenize=False)  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], how, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    sequences = [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]
    logprobs = [
        [at[token].logprob for at, token in zip(a.logprobs, a.token_ids, strict=True)]
        for a in answers
    ]
    return sequences, torch.tensor(logprobs)


def eager_scores(folder: Path) -> None:
    """Score `sequences.json` of a folder by vLLM's own loading of its checkpoint, eagerly."""
    from vllm import LLM, SamplingParams

    sequences = json.loads((folder / "sequences.json").read_text())
    llm = LLM(**arguments_of(folder, enforce_eager=True))
    how = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in sequences], how, use_tqdm=False)
    found = [
        [at[token].logprob for at, token in list(zip(o.prompt_logprobs, s, strict=True))[PROMPT:]]
        for o, s in zip(outputs, sequences, strict=True)
    ]
    (folder / "scores.json").write_text(to_json(found))


def memory_of(model: Any) -> dict[str, int]:
    """Return the address of every parameter, and of every workspace of Marlin's."""
    spaces = {n: m.workspace for n, m in model.named_modules() if hasattr(m, "workspace")}
    tensors = {n: p.data for n, p in model.named_parameters()}
    tensors |= {f"{n}.workspace": space for n, space in spaces.items()}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def kernels_of(model: Any) -> dict[str, int]:
    """Count the linears by the method and kernel that vLLM chose."""
    methods: list[Any] = [m.quant_method for m in model.modules() if hasattr(m, "quant_method")]
    names = (type(x).__name__ + "/" + type(getattr(x, "kernel", x)).__name__ for x in methods)
    return dict(Counter(names))


def flipped(wire: Wire, name: str) -> Wire:
    """Return a stream with one bit of a tensor changed."""
    changed = dict(wire)[name].clone()
    changed.view(torch.uint8).view(-1)[100] ^= 1
    return [(n, changed if n == name else tensor) for n, tensor in wire]


class Bench:
    """One engine, its receiver, and the reference beside it."""

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device) -> None:
        from vllm import LLM

        self.recipe, self.folder, self.device, self.number = recipe, folder, device, 0
        shape = recipe.model.shape
        self.reference: Any = random_model.build(shape).float().eval()
        torch.nn.Module.to(self.reference, device)
        self.reference.config.architectures = [type(self.reference).__name__]
        self.reference.config.save_pretrained(folder)
        asked = quantization(recipe.precision, shape.layers)
        start = time.perf_counter()
        self.llm = LLM(**arguments_of(
            folder, load_format="dummy", enable_sleep_mode=True,
            compilation_config={"cudagraph_capture_sizes": GRAPHS}, **asked,
        ))  # fmt: skip
        self.started = time.perf_counter() - start
        [runner] = self.llm.collective_rpc(lambda w: getattr(w, "worker", w).model_runner)
        self.model = runner.model
        self.worker = worker_of(runner, WorkerSettings.of(recipe, loss_corrects=True), self.device)
        self.worker.prepare_refit_info()
        self.begun = memory_of(self.model)
        self.prompts = torch.randint(
            shape.vocab, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0)
        ).tolist()
        self.before: Mapping[str, Tensor] | None = None

    def refit(self, change: Callable[[Wire], Wire] = lambda wire: wire) -> tuple[Any, Wire, float]:
        """Sleep, wake, refit once with new weights; return these, what was sent, and seconds."""
        self.number += 1
        weights = weights_of(self.reference, self.number, self.device)
        layers, precision = self.recipe.model.shape.layers, self.recipe.precision
        wire = list(refit_stream(weights.items(), precision, None, num_layers=layers,
                                 number=self.number))  # fmt: skip
        self.llm.sleep(level=1)
        self.llm.wake_up(tags=["weights"])
        self.worker.stream = change(wire)
        wait()
        start = time.perf_counter()
        try:
            self.worker.update_weights_via_ipc_zmq()
        finally:
            wait()
            seconds = time.perf_counter() - start
            self.llm.wake_up(tags=["kv_cache"])
        return weights, wire, seconds

    def off(self, values: Mapping[str, Tensor], sequences: Any, logprobs: Tensor) -> float:
        """Return how far the engine's logprobs are from those of the reference, by the mean."""
        tokens = torch.tensor(sequences, device=self.device)
        found = scored(self.reference, values, tokens, PROMPT).cpu()
        return (found - logprobs).abs().mean().item()

    def row(self) -> dict[str, Any]:
        """Refit once, sample, and compare."""
        weights, wire, seconds = self.refit()
        values = dict(values_of(sent(wire), self.recipe.precision))
        self.sequences, self.logprobs = sampled(self.llm, self.prompts, self.number)
        self.last = weights, wire
        ask = self.sequences, self.logprobs
        stale = None if self.before is None else self.off(self.before, *ask)
        proof = self.worker.fp8_nemo_report()
        found = {
            "refit": self.number, "off": self.off(values, *ask), "stale": stale,
            "unquantized": self.off({n: w.float() for n, w in weights.items()}, *ask),
            "moved": [n for n, at in memory_of(self.model).items() if at != self.begun[n]],
            "seconds": seconds,
            **{key: proof[key] for key in ("bytes", "verified_weights", "equal_digests")},
            "changed_bytes": proof["changed"] / proof["sampled"] if proof["sampled"] else None,
        }  # fmt: skip
        self.before = values
        return found

    def refused(self, change: Callable[[Wire], Wire]) -> list[str]:
        """Return what a broken refit raised."""
        try:
            self.refit(change)
        except RefitError as error:
            return error.problems
        return []

    def eager(self) -> dict[str, Any]:
        """Compare the last answers with an eager engine's, from the checkpoint that we ship."""
        source, target = self.folder / "bf16", self.folder / "nvfp4"
        self.reference.config.save_pretrained(source)
        weights, wire = self.last
        save_file({n: x.cpu() for n, x in weights.items()}, source / "model.safetensors")
        unlike = not_shipped(source, target, wire, self.recipe.precision)
        (target / "sequences.json").write_text(to_json(self.sequences))
        command = [sys.executable, "-m", "benchmarks.glue.marlin_refit", "--eager", target]
        subprocess.run([*command, "--out", os.devnull], check=True, timeout=180)
        scores = torch.tensor(json.loads((target / "scores.json").read_text()))
        assert self.before is not None
        return {
            "eager": (scores - self.logprobs).abs().mean().item(),
            "eager_off": self.off(self.before, self.sequences, scores),
            "not_shipped": unlike,
        }


def main() -> int:
    """Run it, write the file, and return 1 if an engine answered with other weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small-llama", help="a dense option of conf/model")
    parser.add_argument("--refits", type=int, default=20)
    parser.add_argument("--eager", type=Path, help=argparse.SUPPRESS)
    record.add_options(parser)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    record.need("vllm", "transformers")
    if options.eager:
        eager_scores(options.eager)
        return 0
    [recipe] = compose([f"model={options.model}", "precision=nvfp4-w4a16"])
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(recipe, Path(folder), torch.device("cuda"))
        content: dict[str, Any] = {
            "model": dataclasses.asdict(recipe.model.shape), "prompts": [PROMPTS, PROMPT, ANSWER],
            "engine_start_seconds": bench.started, "methods": kernels_of(bench.model),
            "cuda_graphs": GRAPHS, "rows": [],
        }  # fmt: skip
        for _ in range(options.refits):
            content["rows"].append(bench.row())
            record.keep(options.out, options.commit, **content)
        content |= bench.eager()
        times = record.kernels(lambda: sampled(bench.llm, bench.prompts, 0))
        content["kernels"] = [[name[:120], ms] for name, ms in times if "marlin" in name.lower()]
        q = "model.layers.0.self_attn.q_proj.weight"
        content["refused"] = {
            "flipped bit": bench.refused(lambda wire: flipped(wire, q)),
            "lost scale": bench.refused(lambda wire: [x for x in wire if x[0] != f"{q}_scale"]),
        }
        content["after"] = bench.row()
        rows = [*content["rows"], content["after"]]
        content["passed"] = all(
            not row["moved"] and row["off"] < FAR * (row["stale"] or 1) for row in rows
        ) and all([*content["refused"].values(), not content["not_shipped"]])
        record.keep(options.out, options.commit, **content)
    record.show("refits of four bits", rows)
    print({name: content[name] for name in ("methods", "eager", "eager_off", "refused")})
    print("passed" if content["passed"] else "FAILED: see the file")
    return 0 if content["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
