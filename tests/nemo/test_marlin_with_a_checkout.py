"""vLLM's own linears of four bits, started as our worker starts them, refitted, and told apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.recipe.compose import compose
from tests.nemo.test_generation_worker import classes  # noqa: F401
from tests.nemo.test_glue_with_a_checkout import (  # noqa: F401
    BACKEND,
    ROOT,
    free_port,
    imports,
    libcuda,
    on_a_cpu,
)

pytestmark = pytest.mark.skipif(not ROOT, reason="NEMO_RL_ROOT: no checkout of NeMo RL")
KERNEL = ["ModelOptNvFp4W4A16LinearMethod", "MarlinNvFp4LinearKernel"]
PLAIN = ["UnquantizedLinearMethod", "NoneType"]
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
Q = "model.layers.1.self_attn.q_proj.weight"


@imports
@pytest.mark.parametrize("name", ["tiny-llama", "qwen25-7b"])
def test_refits_leave_in_vllm_what_its_own_loader_would_and_move_nothing(
    name,
    libcuda,  # noqa: F811
):
    if "_weight_update_lifecycle" not in (Path(ROOT) / BACKEND).read_text():
        pytest.skip("drives a refit by main's own lifecycle; v0.7.0, of vLLM 0.20, has none")
    script = str(Path(__file__).parent / "vllm_in_four_bits.py")
    done = subprocess.run(
        [sys.executable, script, name, str(free_port())],
        capture_output=True, text=True, timeout=500, env=on_a_cpu(libcuda),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    methods = {f"model.layers.0.{each}": PLAIN for each in LINEARS} | {"lm_head": PLAIN}
    methods |= {f"model.layers.{n}.{each}": KERNEL for n in (1, 2) for each in LINEARS}
    assert found["methods"] == methods
    for refit in found["refits"]:
        kept = {name: refit[name] for name in ("differ", "moved", "layout", "left")}
        assert kept == {"differ": [], "moved": False, "layout": [], "left": 0}
    proofs = [refit["proof"] for refit in found["refits"]]
    assert [len(each) > 0 for each in proofs] == [True] * 4 + [False] * 2
    assert all(each["verified_weights"] == 14 for each in proofs[:4])
    assert found["refused"] == {
        "flipped": [f"{Q}: arrived with other bytes than were sent (digest)"],
        "doubled": ["model.layers.1.self_attn.qkv_proj: its weights came with different "
                    "weight_scale_2, of which vLLM's kernel takes one"],
        "lost": [f"{Q}_scale: never arrived"],
    }  # fmt: skip


@imports
@pytest.mark.parametrize("precision", ["nvfp4-w4a16", "fp8-linear"])
def test_our_worker_starts_nemo_rls_engine_in_four_bits_if_the_run_says_so(
    precision,
    classes,  # noqa: F811
    monkeypatch,
):
    stock, ours = classes
    [recipe] = compose([f"precision={precision}"])
    settings = WorkerSettings.of(recipe, loss_corrects=True)
    monkeypatch.setattr(os, "environ", os.environ | settings.to_environment())
    started = []
    monkeypatch.setattr(stock, "_create_engine", lambda self, given: started.append(given))
    given = {"model": "x", "load_format": "dummy", "hf_overrides": {"rope_theta": 1}}
    ours._create_engine(object.__new__(ours), dict(given))
    if precision == "fp8-linear":
        assert started == [given]
        return
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16,
              "ignore": ["lm_head"]}  # fmt: skip
    assert started == [given | {
        "quantization": "modelopt_fp4",
        "hf_overrides": {"quantization_config": config, "rope_theta": 1},
    }]  # fmt: skip
