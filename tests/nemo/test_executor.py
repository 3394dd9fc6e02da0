"""An engine over several GPUs: NeMo RL's FP8 patches reach vLLM's workers without NeMo RL."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from fp8_nemo.nemo.worker_settings import ENGINE_FP8, WorkerSettings
from fp8_nemo.recipe.compose import compose

pytestmark = pytest.mark.skipif(
    not os.environ.get("NEMO_RL_ROOT") or importlib.util.find_spec("vllm") is None,
    reason="NeMo RL's packages are not installed here (docs/install.md)",
)
REGISTER = """
import os, sys
from nemo_rl.models.generation.vllm.quantization import fp8
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from fp8_nemo.nemo.receiver import register
from fp8_nemo.nemo.worker_settings import ENGINE_FP8
register()
assert Fp8LinearMethod.process_weights_after_loading is not fp8.process_weights_after_loading
os.environ[ENGINE_FP8] = sys.argv[1]
register(), register()
assert Fp8LinearMethod.process_weights_after_loading is fp8.process_weights_after_loading
print(fp8.global_fp8_config.kv_cache_dtype, len(fp8.fp8_state.vllm_patches))
"""


def settings_of(precision):
    [recipe] = compose([f"precision={precision}"])
    return WorkerSettings.of(recipe, loss_corrects=True)


@pytest.mark.parametrize(
    ("gpus", "precision", "executor", "is_told"),
    [
        (2, "fp8-kv-attn", "1", True),
        (2, "fp8-kv-attn", "0", False),
        (1, "fp8-kv-attn", "1", False),
        (2, "bf16", "1", False),
    ],
)
def test_workers_are_told_of_fp8_where_nemo_rl_does_not_reach_them(
    gpus, precision, executor, is_told, monkeypatch
):
    monkeypatch.syspath_prepend(os.environ["NEMO_RL_ROOT"])
    from nemo_rl.models.generation.vllm.quantization import fp8

    from fp8_nemo.nemo import generation_worker

    monkeypatch.setattr(fp8, "global_fp8_config", fp8.FP8Config(model_parallel_size=gpus))
    settings = settings_of(precision).to_environment()
    set_for_all = os.environ | settings | {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": executor}
    for ours in (
        generation_worker.Fp8GenerationWorkerImpl,
        generation_worker.Fp8AsyncGenerationWorkerImpl,
    ):
        [stock] = ours.__bases__
        told = []
        monkeypatch.setattr(os, "environ", dict(set_for_all))
        monkeypatch.setattr(
            stock, "_create_engine", lambda *_, told=told: told.append(os.environ.get(ENGINE_FP8))
        )
        ours._create_engine(object.__new__(ours), {})
        [text] = told
        assert json.loads(text or "{}").get("model_parallel_size") == (2 if is_told else None)


def test_a_worker_that_was_told_is_patched_once():
    told = json.dumps({"model_parallel_size": 2, "kv_cache_dtype": "fp8"})
    found = subprocess.run(
        [sys.executable, "-c", REGISTER, told],
        env=os.environ | settings_of("fp8-kv-attn").to_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1].split() == ["fp8", "3"]
