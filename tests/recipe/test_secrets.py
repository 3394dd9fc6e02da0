"""No secret is printed or written: refused by its key's name, its form, or where it comes from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.recipe import secrets
from fp8_nemo.recipe.compose import ComposeError, compose

ROOT = Path(__file__).parents[2]
VALUE = "hf_SEKRETsekretSEKRETsekret"
VLLM = "nemo.policy.generation.vllm_cfg"
REFUSED = [
    ("cluster.setup='echo ${oc.env:HF_TOKEN}'", "cluster.setup: oc.env gives it a variable"),
    ("data.path=${oc.env:HF_TOKEN}", "data.path: oc.env"),
    ("correction.name=${oc.env:HF_TOKEN}", "correction.name: oc.env"),
    ("outputs=x/${oc.env:HF_TOKEN}", "outputs: oc.env"),
    (f"cluster.setup='export HF_TOKEN={VALUE}'", "cluster.setup: gives HF_TOKEN a value"),
    (f"cluster.setup='export HF_TOKEN=\"{VALUE}\"'", "cluster.setup: gives HF_TOKEN a value"),
    ("cluster.setup='WANDB_API_KEY=abc srun x'", "cluster.setup: gives WANDB_API_KEY a value"),
    (f"cluster.setup='huggingface-cli login {VALUE}'", "cluster.setup: holds what looks like"),
    (f"+{VLLM}.env_vars.HF_TOKEN={VALUE}", f"{VLLM}.env_vars.HF_TOKEN: looks like a secret"),
    (f"+{VLLM}.env_vars.AWS_ACCESS_KEY_ID=x", f"{VLLM}.env_vars.AWS_ACCESS_KEY_ID: looks like"),
    ("+nemo.logger.wandb.api_key=x", "nemo.logger.wandb.api_key: looks like a secret"),
    ("+nemo.env.judge.password=x", "nemo.env.judge.password: looks like a secret"),
    (f"+nemo.grpo.x={VALUE}", "nemo.grpo.x: holds what looks like a secret"),
    ("+nemo.grpo.x=ghp_0123456789abcdefghij", "nemo.grpo.x: holds what looks like a secret"),
]
TAKEN = [
    "cluster.setup='export HF_TOKEN=$MY_TOKEN'",
    "cluster.setup='export HF_TOKEN=\"$(cat ~/.token)\"'",
    "cluster.setup='export TOKENIZERS_PARALLELISM=false MAX_TOKENS=5'",
    f"+{VLLM}.env_vars.VLLM_MAX_TOKENS=3",
    "+nemo.policy.tokenizer.pad_token=x",
    "grpo.max_new_tokens=64",
]


@pytest.mark.parametrize(("word", "line"), REFUSED, ids=lambda each: each[:40])
def test_what_holds_a_secret_is_refused_by_its_key_and_its_value_is_not_said(
    word, line, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", VALUE)
    with pytest.raises(ComposeError) as error:
        compose(["model=llama31-8b", word])
    assert str(error.value).startswith(line) and str(error.value).count("\n") == 0
    assert "SEKRET" not in str(error.value) and "abcdefghij" not in str(error.value)
    assert "cluster.setup may name it as $NAME" in str(error.value)


@pytest.mark.parametrize("word", TAKEN)
def test_what_only_names_one_is_taken(word):
    assert compose(["model=llama31-8b", word])


def test_what_a_sites_own_file_says_is_looked_at_before_it_is_read():
    values = {"cluster.setup": "export HF_TOKEN=${oc.env:HF_TOKEN}", "cluster.name": "ours"}
    [line] = secrets.secrets_of(values)
    assert line.startswith("cluster.setup: oc.env")


def test_no_key_of_nemo_rls_own_is_taken_for_a_secret():
    for file in (ROOT / "tests" / "nemo_config" / "data").glob("*.json"):
        for base in json.loads(file.read_text())["configs"].values():
            assert list(secrets.secrets_of(base)) == []


def test_nothing_in_a_run_directory_holds_what_lay_in_the_environment(tmp_path):
    words = ["model=tiny-llama", "precision=fp8-linear", "correction=tis", "grpo.steps=1"]
    words += ["grpo.validate_first=false", f"outputs={tmp_path}"]
    marks = {"HF_TOKEN": VALUE, "WANDB_API_KEY": "SEKRET-of-wandb", "MY_PASSWORD": "SEKRET-word"}
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo", *words], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | marks, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    for path in files:
        assert b"SEKRET" not in path.read_bytes(), path
