"""No secret is printed or written: refused by its key's name, its form, or where it comes from."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from fp8_nemo.recipes import compare, measure_mismatch

from fp8_nemo.recipe import secrets
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import leaves
from fp8_nemo.runs.frozen_code import freeze_code
from tests.search.children import Child, trained

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
    ("cluster.setup='huggingface-cli login --token SEKRET'", "cluster.setup: holds what"),
    ("cluster.setup='wandb login SEKRET'", "cluster.setup: holds what looks like"),
    ("cluster.setup='curl -H \"A: Bearer SEKRET\" x'", "cluster.setup: holds what looks like"),
    ("cluster.setup='export http_proxy=http://me:SEKRET@proxy'", "cluster.setup: holds what"),
    ("cluster.setup='export MYTOKEN=SEKRET'", "cluster.setup: gives MYTOKEN a value"),
    ("cluster.setup='DB_PASS=SEKRET x'", "cluster.setup: gives DB_PASS a value"),
    ("cluster.setup='GITHUB_PAT=SEKRET x'", "cluster.setup: gives GITHUB_PAT a value"),
    (f"+{VLLM}.env_vars.HF_TOKEN={VALUE}", f"{VLLM}.env_vars.HF_TOKEN: looks like a secret"),
    (f"+{VLLM}.env_vars.AWS_ACCESS_KEY_ID=x", f"{VLLM}.env_vars.AWS_ACCESS_KEY_ID: looks like"),
    ("+nemo.logger.wandb.api_key=x", "nemo.logger.wandb.api_key: looks like a secret"),
    ("+nemo.env.judge.password=x", "nemo.env.judge.password: looks like a secret"),
    (f"+nemo.grpo.x={VALUE}", "nemo.grpo.x: holds what looks like a secret"),
    ("+nemo.grpo.x=ghp_0123456789abcdefghij", "nemo.grpo.x: holds what looks like a secret"),
    ("cluster.setup='export OPENAI_KEY=SEKRET'", "cluster.setup: gives OPENAI_KEY a value"),
    ("cluster.setup='export HF_AUTH=SEKRET'", "cluster.setup: gives HF_AUTH a value"),
    ("cluster.setup='HF_TOKEN+=SEKRET x'", "cluster.setup: gives HF_TOKEN a value"),
    ("cluster.setup='setenv HF_TOKEN SEKRET'", "cluster.setup: holds what looks like"),
    ("cluster.setup='curl -u me:SEKRET x'", "cluster.setup: holds what looks like"),
    ("cluster.setup='curl -s --user=me:SEKRET x'", "cluster.setup: holds what looks like"),
    ("cluster.setup='mysql -h x -pSEKRET'", "cluster.setup: holds what looks like"),
    ("cluster.setup='aws configure set aws_secret_access_key SEKRET'", "cluster.setup: holds what"),
    ("cluster.setup='sbatch --export=ALL,MY_KEY=SEKRET x'", "cluster.setup: gives MY_KEY a value"),
    (f"+{VLLM}.env_vars.OPENAI_KEY=SEKRET", f"{VLLM}.env_vars.OPENAI_KEY: looks like a secret"),
    ("data.path=https://me:SEKRET@host/x", "data.path: holds what looks like a secret"),
    ("+nemo.env.judge.base_url=https://me:SEKRET@host", "nemo.env.judge.base_url: holds what"),
    ("+nemo.grpo.x=nvapi-SEKRETsekretSEKRET", "nemo.grpo.x: holds what looks like a secret"),
    ("+nemo.grpo.x=eyJhbGciSEKRET.eyJzdWIiSEKRET", "nemo.grpo.x: holds what looks like a secret"),
]
UNPARSED = [
    ("cluster.setup='export HF_TOKEN=SEKRET x", "cluster.setup: gives HF_TOKEN a value"),
    ("cluster.env=[HF_TOKEN=SEKRET", "cluster.env: gives HF_TOKEN a value"),
    ("+nemo.logger={wandb:{api_key:SEKRET", "+nemo.logger: cannot be read, and is not shown"),
    ("+nemo.logger={password: 'SEKRET SEKRET", "+nemo.logger: cannot be read, and is not shown"),
    ("+nemo.x=[{access_key:SEKRET}}", "+nemo.x: cannot be read, and is not shown"),
    (f"outputs=a{{{VALUE}", "outputs: holds what looks like a secret"),
    (f"grpo.steps={VALUE}", "grpo.steps: holds what looks like a secret"),
    (f"precision={VALUE}", "precision: holds what looks like a secret"),
    ("MY_TOKEN=SEKRET", "MY_TOKEN: looks like a secret"),
    ("+model.huggingface_token=SEKRET", "model.huggingface_token: looks like a secret"),
    ("+data.hf_read_token=SEKRET", "data.hf_read_token: looks like a secret"),
    ("+data.github_token=SEKRET", "data.github_token: looks like a secret"),
    ("model.hftoken=SEKRET", "model.hftoken: looks like a secret"),
    ("++cluster.token=SEKRET", "cluster.token: looks like a secret"),
    ("--hf-token=SEKRET", "hf-token: looks like a secret"),
    (VALUE, "a word: holds what looks like a secret"),
    (f"{VALUE}=3", "a word before =: holds what looks like a secret"),
]
"""Of which Hydra, or an unknown key, would have its word in the message."""
TAKEN = [
    "cluster.setup='export HF_TOKEN=$MY_TOKEN'",
    "cluster.setup='export HF_TOKEN=\"$(cat ~/.token)\"'",
    "cluster.setup='export TOKENIZERS_PARALLELISM=false MAX_TOKENS=5'",
    "cluster.setup='huggingface-cli login --token $HF_TOKEN && wandb login \"$WANDB_API_KEY\"'",
    "cluster.setup='export http_proxy=http://proxy:3128 CUDA_PATH=/usr/cuda && module load token'",
    f"+{VLLM}.env_vars.VLLM_MAX_TOKENS=3",
    "+nemo.policy.tokenizer.pad_token=x",
    "grpo.max_new_tokens=64",
    "+nemo.logger.wandb.api_key=null",
    "cluster.setup='export OPENAI_KEY=$KEPT_KEY && setenv HF_TOKEN $MINE'",
    "cluster.setup='curl -u $ME:$PASS https://host && mysql -p && ssh -p 22 x'",
    "cluster.setup='docker run -u 1000:1000 x && rsync -u host:data . && mysql --port 1 -P2'",
    "cluster.setup='export KEYBOARD=us AUTHOR=me && set -eu'",
    "data.path=https://host:8080/x",
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


@pytest.mark.parametrize(("word", "line"), UNPARSED, ids=lambda each: each[:40])
def test_what_cannot_be_parsed_or_is_unknown_is_not_repeated_with_its_secret(word, line):
    for words in ([word], ["-m", "seed=1,2", word], ["grpo.steps=0", word]):
        with pytest.raises(ComposeError) as error:
            compose(words)
        assert str(error.value).startswith(line) and str(error.value).count("\n") == 0
        assert "SEKRET" not in str(error.value)


@pytest.mark.parametrize("words", [["--token", "SEKRET"], ["--token=SEKRET"], [f"--{VALUE}"]])
def test_a_verbs_own_parser_does_not_repeat_a_secret(words, capsys):
    with pytest.raises(SystemExit):
        compare.main(["outputs", *words])
    said = capsys.readouterr().err
    assert "***: no such flag or argument" in said and "SEKRET" not in said


@pytest.mark.parametrize("word", TAKEN)
def test_what_only_names_one_is_taken(word):
    assert compose(["model=llama31-8b", word])


def test_what_a_sites_own_file_says_is_looked_at_before_it_is_read():
    values = {"cluster.setup": "export HF_TOKEN=${oc.env:HF_TOKEN}", "cluster.name": "ours"}
    [line] = secrets.secrets_of(values)
    assert line.startswith("cluster.setup: oc.env")


def test_no_key_of_ours_is_taken_for_a_secret():
    keys = leaves(asdict(Recipe()))
    assert "model.shape.experts_per_token" in keys
    assert list(secrets.secrets_of_line(f"{key}=1" for key in keys)) == []


def test_no_key_of_nemo_rls_own_is_taken_for_a_secret():
    for file in (ROOT / "tests" / "nemo_config" / "data").glob("*.json"):
        for base in json.loads(file.read_text())["configs"].values():
            assert list(secrets.secrets_of(base)) == []


def with_secrets(secrets, *words):
    """Train with these in the environment; in a process of its own."""
    os.environ.update(secrets)
    return trained(*words)


def test_nothing_in_a_run_directory_or_beside_it_holds_what_lay_in_the_environment(
    tmp_path, monkeypatch
):
    """Of a run that ends, of one that fails, and of what is made of them; code and logs too."""
    words = ["model=tiny-llama", "precision=fp8-linear", "correction=tis", "grpo.steps=1"]
    words += ["grpo.validate_first=false", f"outputs={tmp_path}/outputs"]
    words += ["cluster.setup='export HF_TOKEN=$MY_TOKEN'", "cluster.env=[MY_PASSWORD]"]
    marks = {"HF_TOKEN": VALUE, "WANDB_API_KEY": "SEKRET-of-wandb", "MY_PASSWORD": "SEKRET-word"}
    for name, value in marks.items():
        monkeypatch.setenv(name, value)
    fails = ["correction.high=1e-9", "correction.mask=token", "grpo.stop_when_unstable=true"]
    for more, code in (([], 0), (fails, 1)):
        child = Child(tmp_path / "output", with_secrets, marks, *words, *more)
        assert child.end() == code, child.error
        assert "SEKRET" not in child.said + child.error
    assert compare.main([f"{tmp_path}/outputs", "--html"]) == 0
    assert measure_mismatch.main([str(next(tmp_path.glob("outputs/*/*/*")))]) == 0
    freeze_code(tmp_path / "outputs")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {
        "attempt-1.log",
        "plan.json",
        "environment.json",
        "mismatch.json",
        "report.html",
    } <= names
    assert list(tmp_path.glob("outputs/.code/*/fp8_nemo/recipe/secrets.py"))
    for path in files:
        assert b"SEKRET" not in path.read_bytes(), path
