"""Our receiver inside vLLM's workers: it loads FP8 weights as they come, and a ledger checks them.

vLLM calls `register` through the entry point `vllm.general_plugins` in every process it starts,
before it looks up the worker extension that NeMo RL named; the name then means our subclass of it.
No line of NeMo RL or vLLM changes, whichever executor runs the workers.

The stream proves that our receiver is in place: it opens with a sentinel that only our receiver
removes, and vLLM's own loader stops at a name that it does not know.

A first refit is loaded by vLLM's own loader. If its bytes are then found where we expect them
(`verify: bytes`), we know where each tensor lies. Later ones are copied there, since that loader
looks every name up anew: 37,000 of Qwen3-30B-A3B, each refit. Their bytes are compared too.

With LoRA later refits bring the weights that adapters change, and no others. The rest must still
hold the bytes that were proven before, and is compared with them each time.

A receiver that stopped half-way would leave the sender waiting, 120 seconds for an answer or for
ever in a broadcast. So the receiver keeps an error, takes the stream to its end, and then raises.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
# NeMo RL and vLLM stand on the path of a run, not of a type check; torch._foreach_* is public.
from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8_nemo.glue import wire
from fp8_nemo.glue.destination import Destination
from fp8_nemo.glue.ledger import Ledger, RefitProof
from fp8_nemo.glue.manifest import KV_SUFFIXES, MANIFEST, SENTINEL, sent_again
from fp8_nemo.glue.refit import encode, in_groups
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.nemo import aligned, decode
from fp8_nemo.nemo.engine_memory import EngineMemory, Proven, attentions
from fp8_nemo.nemo.marlin.staging import Staging, keep_repacked
from fp8_nemo.nemo.worker_settings import ENGINE_FP8, WorkerSettings

Extension: Any = object  # NeMo RL's, which is known when `receiver` is called
EXTENSIONS = ("VllmInternalWorkerExtension", "VllmInternalWorkerExtensionWithCheckpointEngine")


def register() -> None:
    """Put our receiver in the place of NeMo RL's worker extension, in this process.

    An aligned engine gets the trainer's operations here too, before its model is built, and decode
    over an FP8 cache its kernel. FP8 workers that NeMo RL cannot patch are patched here. vLLM may
    call this more than once, and in processes that hold no weights.
    """
    settings = WorkerSettings.from_environment()
    if settings is None:
        return
    aligned.register(settings.precision)
    if settings.glue.decodes_by_xqa(settings.precision):
        decode.register()
    if text := os.environ.get(ENGINE_FP8):
        _patch_for_fp8(json.loads(text))
    from nemo_rl.models.generation.vllm import vllm_backend

    for name in EXTENSIONS:
        stock = getattr(vllm_backend, name, None)
        if stock is not None and not hasattr(stock, "fp8_nemo_report"):
            setattr(vllm_backend, name, receiver(stock, settings))


def _patch_for_fp8(config: dict[str, Any]) -> None:
    """Apply NeMo RL's FP8 patches in this process, once; it does so itself under executor V1."""
    from nemo_rl.models.generation.vllm.quantization import fp8

    if not fp8.fp8_patches_applied:
        fp8.apply_fp8_patches(None, fp8.FP8Config(**config))


def receiver(stock: type, settings: WorkerSettings) -> type:
    """Make a subclass of NeMo RL's worker extension that is a `Receiver`, under the same name.

    Args:
        stock: `VllmInternalWorkerExtension` of main 7ea279a or v0.7.0.
        settings: of the run.
    """
    return type(stock.__name__, (Receiver, stock), {"fp8_nemo_settings": settings})


class Receiver(Extension):
    """Receive, in NeMo RL's worker extension, what our policy workers send.

    NeMo RL calls the methods without `fp8_nemo` in their names, and the driver the others.
    """

    fp8_nemo_settings: WorkerSettings
    state_dict_info: dict[str, Any]
    """NeMo RL's: names, shapes and types of the next refit, in its order."""
    fp8_nemo_engine: EngineMemory | None = None
    fp8_nemo_refit: Refit | None = None
    fp8_nemo_proof: RefitProof | None = None
    fp8_nemo_problems: Sequence[str] = ()
    fp8_nemo_refits = 0

    def prepare_refit_info(self, *arguments: Any, **options: Any) -> None:
        """Count refits from here on, as the sender does, and let vLLM load the first one."""
        self.fp8_nemo_refits = 0
        if self.fp8_nemo_engine is not None:
            self.fp8_nemo_engine.proven = None
        super().prepare_refit_info(*arguments, **options)

    def update_weights_via_ipc_zmq(self) -> bool:
        """Prove what comes from a trainer on the same GPU."""
        return self.fp8_nemo_proven(super().update_weights_via_ipc_zmq)

    def update_weights_from_collective(self, *arguments: Any, **options: Any) -> bool:
        """Prove what comes by NCCL."""
        update = super().update_weights_from_collective  # takes none before NeMo RL #3651
        return self.fp8_nemo_proven(partial(update, *arguments, **options))

    def _load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        if self.fp8_nemo_refit is None:
            super()._load_weights(weights)
        else:
            self.fp8_nemo_refit.take(weights, super()._load_weights)

    def _weight_update_errors_are_fatal(self) -> bool:
        return self.fp8_nemo_settings.glue.has_receiver

    def fp8_nemo_proven(self, update: Callable[[], bool]) -> bool:
        """Run NeMo RL's update as one proven refit, and keep what failed for the driver."""
        self.fp8_nemo_refit, self.fp8_nemo_proof, self.fp8_nemo_problems = None, None, ()
        model, settings = self.model_runner.model, self.fp8_nemo_settings
        if not settings.glue.has_receiver:  # recalibration alone is ours
            landed = update()
        else:
            if self.fp8_nemo_engine is None:
                keep_repacked(model, settings.shape, settings.precision)
                self.fp8_nemo_engine = EngineMemory(model, settings)
            self.fp8_nemo_refits += 1
            self.fp8_nemo_refit = Refit(self.fp8_nemo_engine, settings, self.fp8_nemo_refits)
            try:
                with self.fp8_nemo_expecting(settings.adapted(self.fp8_nemo_refits)):
                    self.fp8_nemo_proof = self.fp8_nemo_refit.close(update)
                if settings.precision.is_exact:
                    aligned.check(model)
            except RefitError as error:  # NeMo RL's actor prints it, and says False
                self.fp8_nemo_problems = error.problems
                raise
            landed = True
        if settings.precision.cache.is_quantized:
            _keep_kv_scales(self.model_runner, attentions(model, settings.shape.layers))
        return landed

    @contextmanager
    def fp8_nemo_expecting(self, adapted: Sequence[str]) -> Iterator[None]:
        """Let NeMo RL's update expect the adapted weights alone; everything if there are none."""
        if not adapted:
            yield
            return
        whole = self.state_dict_info
        self.state_dict_info = sent_again(whole, adapted)
        try:
            yield
        finally:
            self.state_dict_info = whole

    def fp8_nemo_report(self) -> dict[str, Any]:
        """Return the last refit's proof; empty before a refit, and with `verify: off`."""
        proof = self.fp8_nemo_proof
        return asdict(proof) if proof is not None else {}

    def fp8_nemo_layout_problems(self) -> list[str]:
        """List the tensors that a refit would not find in the memory of a sleeping engine."""
        settings = self.fp8_nemo_settings
        if not settings.glue.has_receiver or settings.glue.verify == "off":
            return []
        try:
            EngineMemory(self.model_runner.model, settings).check_asleep()
        except RefitError as error:
            return error.problems
        except (AttributeError, KeyError) as error:  # a module of vLLM's has another name
            return [_reason(error)]
        return []


class Refit:
    """Receive one refit of one worker's model, from before the first tensor to the proof.

    Args:
        engine: the worker's.
        settings: of the run.
        number: by this worker's count, from 1 on.
    """

    def __init__(self, engine: EngineMemory, settings: WorkerSettings, number: int) -> None:
        self.engine, self.settings = engine, settings
        self.failed: Exception | None = None
        self.ledger: Ledger | None = None
        self.places: Destination | None = None
        """Where the refit before put each tensor; None if unproven, or if the model changed."""
        self.staging = Staging(engine.model, settings.shape, settings.precision)
        try:
            engine.look_again()
            _clear_kv_scales(engine.attentions)
            if settings.glue.verify != "off":
                adapted = settings.adapted(number)
                sent, now = engine.sent_specs(settings.wire_precision, adapted), engine.last_seen()
                known, engine.proven = engine.proven, None  # until this one is
                kept = _kept(known, sent) if adapted else None
                verify = settings.glue.verify
                self.ledger = Ledger(
                    sent, now, verify=verify, number=number, kept=kept,
                    engine_quantizes=settings.glue.quantize == "stock",
                )  # fmt: skip
                self.places = now if known and known.destination is now else None
                if torch.cuda.is_available():  # NCCL's receiver loads on streams of its own
                    torch.cuda.synchronize()  # so the poison must be in before
        except Exception as error:  # raised when the stream has ended
            self.failed = error

    def take(
        self, tensors: list[tuple[str, Tensor]], load_as_stock: Callable[[list], None]
    ) -> None:
        """Record and load what arrived: as it is, quantized here, or by NeMo RL's own loader."""
        try:
            ours = [pair for pair in tensors if self._is_ours(*pair)]
            if not self.failed:
                staged = [pair for pair in ours if pair[0] in self.staging.places]
                if staged:
                    self._stage(staged)
                    ours = [pair for pair in ours if pair[0] not in self.staging.places]
                if self.ledger is not None:
                    self.ledger.arrived(ours)
                self._load(ours, load_as_stock)
        except Exception as error:  # raised when the stream has ended
            traceback.print_exc()  # which Ray may not hand on
            names = [name for name, _ in tensors]
            ends = " to ".join([*names[:1], *names[-1:]])
            error.add_note(f"while loading {len(names)} tensors, {ends}")
            self.failed = error

    def close(self, update: Callable[[], bool]) -> RefitProof | None:
        """Take the stream to its end and return the proof; None with `verify: off`.

        Args:
            update: NeMo RL's, which calls `take` with every batch; false if it failed.

        Raises:
            RefitError: it names everything that failed.
        """
        try:
            landed = update()
        except Exception as error:  # of NeMo RL's own checks, or of what finishes the weights
            landed, self.failed = False, self.failed or error
        with suppress(RuntimeError):  # of a device that failed, which is said below
            self.staging.close()
        if isinstance(self.failed, RefitError):
            raise self.failed
        if self.failed or not landed:
            reason = _reason(self.failed) if self.failed else "its message is in the log"
            problems = self.ledger.problems if self.ledger else []
            with suppress(RuntimeError):  # of a device that failed, which the reason says
                problems = self.ledger.wire_problems() if self.ledger else []
            text = f"vLLM could not load the weights: {reason}"
            raise RefitError([text, *problems]) from self.failed
        if self.ledger is None:
            return None
        proof = self.ledger.close(self.engine.destination)
        assert self.ledger.manifest is not None  # else it would not have closed
        sent = self.ledger.manifest.kv_scales
        if broken := list(_stale_host_copies(self.engine.attentions, sent)):
            raise RefitError(broken)
        if self.ledger.is_digested:
            self.engine.proven = Proven(self.ledger.destination, self.ledger.digests)
        return proof

    def _is_ours(self, name: str, tensor: Tensor) -> bool:
        if self.ledger is not None:
            return self.ledger.receive(name, tensor)
        return name not in (SENTINEL, MANIFEST)

    def _stage(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Prove what lies staged of each whole module, and what is made of it for the engine."""
        for whole in self.staging.take(tensors):
            if self.ledger is not None:
                self.ledger.arrived(whole.arrived)
                self.ledger.loading([(n, x if x.ndim else x.view(1)) for n, x in whole.repacked])

    def _load(
        self, tensors: list[tuple[str, Tensor]], load_as_stock: Callable[[list], None]
    ) -> None:
        if self.settings.wire_precision == self.settings.precision:  # it travels as it is held
            self._load_as_held(tensors)
        elif self.settings.glue.quantize == "stock":
            load_as_stock(tensors)
        else:
            for group in in_groups(tensors):
                self._quantize_and_load(group)

    def _quantize_and_load(self, group: list[tuple[str, Tensor]]) -> None:
        found = [pair for pair in group if pair[1].dtype == torch.float32]  # KV scales
        plain = [pair for pair in group if pair[1].dtype != torch.float32]
        if plain:
            layers = self.settings.shape.layers
            quantized = encode(plain, self.settings.precision, num_layers=layers).tensors
            if self.ledger is not None:
                self.ledger.loading(quantized)
            found += quantized
        self._load_as_held(found)

    def _load_as_held(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Copy tensors to their proven places; vLLM loads KV scales, and all of a first refit."""
        if self.places is not None:
            here, scales = self.places.parts, KV_SUFFIXES  # no part: an expert of another rank
            self.places.fill(p for p in tensors if p[0] in here and not p[0].endswith(scales))
            tensors = [pair for pair in tensors if pair[0].endswith(scales)]
        if tensors:
            self.engine.model.load_weights(weights=tensors)


def _kept(known: Proven | None, sent: Container[str]) -> dict[str, int]:
    """Return the digests of what a refit leaves as it is.

    Raises:
        RefitError: no refit before it was proven.
    """
    if known is None:
        raise RefitError(["a refit of adapted weights alone, and none before it was proven"])
    return {name: digest for name, digest in known.digests.items() if name not in sent}


def _reason(error: Exception) -> str:
    """Return what failed, where, and with which tensors: vLLM's loaders assert without a text."""
    text = f"{type(error).__name__} {error}".strip()
    [*_, at] = traceback.extract_tb(error.__traceback__)
    notes = getattr(error, "__notes__", [])
    return ", ".join([f"{text} at {at.filename}:{at.lineno}, `{at.line}`", *notes])


def _clear_kv_scales(of: Sequence[Any]) -> None:
    """Set the scales that vLLM's loader fills to -1, its value for "not loaded", in FP32.

    vLLM makes these parameters in the model's BF16, in which a scale loses 16 of its bits. Without
    clearing, a scale that is lost on the way would leave the previous refit's in place.
    """
    scales = [getattr(each, name) for each in of for name in ("q_scale", "k_scale", "v_scale")]
    for scale in scales:
        scale.data = scale.data.float()
    if scales:
        torch._foreach_zero_(scales)
        torch._foreach_sub_(scales, 1.0)


def _keep_kv_scales(runner: Any, of: Sequence[Any]) -> None:
    """Restore the scales of K and V when the cache wakes up.

    On waking, after the refit, vLLM's model runner V1 fills them with 1.0 (seam wakes-with-ones).
    Qwen3-MoE and every engine over several GPUs get V1. Runner V2 leaves the scales alone.
    """
    reset = getattr(type(runner), "init_fp8_kv_scales", None)
    if reset is None:
        return
    held = {}
    for attention in of:
        names = ("_k_scale", "_v_scale", "k_scale", "v_scale")
        held |= {getattr(attention, n): getattr(attention, n).clone() for n in names}

    def reset_and_keep() -> None:
        """Run vLLM's reset, then put back the scales of the last refit."""
        reset(runner)
        for scale, value in held.items():
            scale.data.copy_(value)

    runner.init_fp8_kv_scales = reset_and_keep


def _stale_host_copies(of: Sequence[Any], sent: dict[str, float]) -> Iterable[str]:
    """Yield a line for each KV scale whose copy on the host is not what was sent.

    Some attention kernels take the copy.
    """
    for layer, attention in enumerate(of):
        copies = (attention._q_scale_float, attention._k_scale_float, attention._v_scale_float)
        for name, copy in zip(wire.kv_scale_names(layer), copies, strict=True):
            if copy != sent[name]:
                yield f"{name}: the engine's host copy is {copy}, sent {sent[name]}"
