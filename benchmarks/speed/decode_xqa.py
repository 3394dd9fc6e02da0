"""FlashInfer's XQA decode on Hopper in vLLM 0.25.1: as vLLM has it, or with scales a refit reaches.

vLLM takes XQA only if it reaches a server of NVIDIA, whose files XQA does not use: it is compiled
from FlashInfer's sources. And it hands K's and V's scales over as numbers of the host, which a CUDA
graph keeps; FlashInfer takes tensors as well (`xqa_batch_decode_with_kv_cache`).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

ARGUMENTS = {"attention_config": {"backend": "FLASHINFER", "use_trtllm_attention": True}}


def enable(live: bool) -> None:
    """Before the engine starts, in its process: let XQA be chosen; `live` scales are tensors."""
    from vllm.utils import flashinfer
    from vllm.v1.attention.backends.flashinfer import FlashInferImpl

    flashinfer.has_nvidia_artifactory = lambda: True
    if not live:
        return
    forward = FlashInferImpl.forward

    def with_tensors(self: Any, layer: Any, *given: Any, **named: Any) -> Any:
        self.bmm2_scale = layer._v_scale
        return forward(self, layer, *given, **named)

    FlashInferImpl.forward = with_tensors
    FlashInferImpl.get_xqa_bmm1_scale = lambda self, layer, dtype: layer._k_scale * self.scale
