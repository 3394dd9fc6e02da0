"""A fifth format of weights is five files: a copy of the code gets one, trains and proves it.

Its pages are beyond them: rows of docs/options.md and docs/precision.md, and docs/keys.md, which is
rendered.
"""

import json
import os
import subprocess
import sys

import pytest

from fp8_nemo.runs.frozen_code import freeze_code

MOST_FILES = 5
NAME = "int8-w8a16"
BEFORE = {
    "recipe/options/precision.py": (
        '        Format("nvfp4", ',
        '        Format("int8", "uint8", 1, group=64),\n',
    ),
    "glue/wire.py": (
        '    "nvfp4": lambda O, I: {\n',
        """    "int8": lambda O, I: {
        "": WireSpec("uint8", (O, I)),
        "_scale": WireSpec("float32", (O, I // 64)),
    },
""",
    ),
    "glue/quantize.py": (
        "QUANTIZERS = {",
        """def quantize_int8_list(weights, *, pow2, nonfinite_N, together):
    found = []
    for weight, nonfinite in zip(weights, nonfinite_N, strict=True):
        groups = weight.bfloat16().float().unflatten(-1, (-1, 64))
        amax = groups.abs().amax(-1)
        nonfinite.logical_or_(~torch.isfinite(amax).all())
        scale = torch.where(amax == 0, 1.0, amax / 127)
        found.append(((groups / scale[..., None]).round().flatten(-2).add(128).byte(), scale))
    return found


QUANTIZERS = {"int8": quantize_int8_list} | {""",
    ),
    "local/modules/linears.py": (
        "PRODUCTS = {\n",
        """def int8_operand(held):
    codes, scale = held
    return ((codes.float() - 128).unflatten(-1, (-1, 64)) * scale[..., None]).flatten(-2)


PRODUCTS = {
    "int8": Product(int8_operand, lambda x, weight, _: (x.float() @ weight.mT).to(x.dtype)),
""",
    ),
    "conf/precision/int8-w8a16.yaml": (
        "",
        f"defaults: [bf16, _self_]\n\nname: {NAME}\nrollout_linear: int8\n",
    ),
}
"""By file of the package: words that stand there once, and what comes before or around them."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = freeze_code(tmp_path_factory.mktemp("code"))
    for name, (anchor, text) in BEFORE.items():
        path = folder / "fp8_nemo" / name
        if not anchor:
            path.write_text(text)
            continue
        source = path.read_text()
        assert source.count(anchor) == 1, f"{name}: a format stands beside another here"
        whole = text if anchor in text else text + anchor
        path.write_text(source.replace(anchor, whole))
    return folder


def verb(copy, name, *words):
    command = [sys.executable, "-P", "-m", f"fp8_nemo.recipes.{name}", f"precision={NAME}", *words]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def test_a_format_of_weights_is_five_files():
    assert len(BEFORE) <= MOST_FILES


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_the_fifth_format_trains_under_the_proof(copy, tmp_path, model):
    words = [f"model={model}", "grpo.steps=1", "grpo.validate_first=false", f"outputs={tmp_path}"]
    done = verb(copy, "grpo", *words, "grpo.max_new_tokens=4")
    assert done.returncode == 0, done.stderr
    [run] = tmp_path.glob(f"{model}/{NAME}-*/*")
    _, step = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert step["refit/verified_weights"] > 0 and 0 < step["mismatch/kl"] < 1e-3
    assert 0.05 < step["refit/changed_bytes"] < 0.5


def test_inside_nemo_rl_it_is_refused_by_name(copy):
    done = verb(copy, "plan", "model=llama31-8b")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "precision.rollout_linear=int8: " in line
    assert "run it with backend=local" in line
