"""`model=auto`: a folder's or the hub's numbers, and everything else refused by what it is."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fp8_nemo.export.make_model import make_chat, make_config, new_model, save_model
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.memory import HEADROOM, memory_per_gpu
from fp8_nemo.plan.model import count
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.own.model import KINDS, shape_of

CONF = Path(__file__).parents[2] / "conf" / "model"
SMALL = {"layers": 2, "hidden": 128, "ffn": 128, "heads": 2, "kv_heads": 1, "head_dim": 64}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 128}
SHAPES = {
    "llama": Shape(**SMALL, vocab=128, tied=True),
    "qwen2": Shape(**SMALL, vocab=128, tied=True, qkv_bias=True),
    "qwen3": Shape(**SMALL, vocab=128, qk_norm=True),
    "qwen3_moe": Shape(**SMALL, vocab=128, qk_norm=True, **EXPERTS),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small random model of each family in Hugging Face format: `made("qwen2")`."""
    folders = {}

    def make(family):
        if family not in folders:
            chat = make_chat()
            folders[family] = tmp_path_factory.mktemp("models") / f"my-{family}"
            save_model(new_model(SHAPES[family], chat, seed=0), chat, folders[family])
            change(folders[family], max_position_embeddings=8192)  # for NeMo RL's 4,096
        return folders[family]

    return make


@pytest.fixture
def copy(made, tmp_path):
    """A copy of one that a test may break: `copy("llama")`."""

    def copied(family):
        return Path(shutil.copytree(made(family), tmp_path / f"broken-{family}"))

    return copied


def change(folder, **config):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def refused(*words):
    with pytest.raises(ComposeError) as error:
        compose_plans(["model=auto", "precision=bf16", *words])
    [line] = error.value.lines
    return line


@pytest.mark.parametrize("family", SHAPES)
def test_a_folder_gives_its_numbers_and_its_name(made, family):
    folder = made(family)
    [plan] = compose_plans(["model=auto", f"model.path={folder}", "precision=bf16"])
    assert plan.recipe.model.shape == SHAPES[family]
    assert plan.recipe.model.shape.family == family
    assert plan.recipe.model.name == f"my-{family}" and plan.nemo.layout
    [named] = compose(["model=auto", f"model.path={folder}", "model.name=mine"])
    assert named.model.name == "mine"


def test_every_family_has_a_kind_and_the_shipped_models_are_read():
    assert SHAPES.keys() == KINDS.keys()
    for name in ("tiny-llama", "tiny-qwen3-moe"):
        [auto] = compose(["model=auto", f"model.path={SHIPPED / name}"])
        [option] = compose([f"model={name}"])
        assert auto.model.shape == option.model.shape


def test_a_line_alone_has_neither_folder_nor_name():
    assert refused() == (
        "model.path=null: the model is read from a folder or from the hub; give model.path=FOLDER"
    )


def test_what_is_read_cannot_be_typed_too(made):
    line = refused(f"model.path={made('llama')}", "model.shape.layers=1")
    assert line.startswith("model.shape.layers=1: model.shape_from=config reads the shape from")


FOREIGN = {
    "DeepSeek": (
        {"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": 256},
        "model_type=deepseek_v3, multi-head latent attention (MLA)",
    ),
    "Nemotron-H": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
        "model_type=nemotron_h, a hybrid with Mamba layers",
    ),
    "Qwen3-Next": (
        {"model_type": "qwen3_next", "full_attention_interval": 4, "num_experts": 512},
        "model_type=qwen3_next, a hybrid with linear attention",
    ),
    "Qwen2.5-VL": (
        {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}},
        "model_type=qwen2_5_vl, a model of images and text",
    ),
    "Mixtral": (
        {"model_type": "mixtral", "num_local_experts": 8},
        "model_type=mixtral, experts of another kind",
    ),
    "Gemma": ({"model_type": "gemma"}, "model_type=gemma"),
    "nothing": ({"model_type": None}, "model_type=None"),
    "o_proj's bias": (
        {"attention_bias": True},
        "model_type=llama with attention with biases elsewhere than in Q, K and V",
    ),
    "an MLP's bias": ({"mlp_bias": True}, "model_type=llama with an MLP with biases"),
    "GELU": ({"hidden_act": "gelu"}, "model_type=llama with an MLP of hidden_act=gelu"),
    "LongRoPE": (
        {"rope_parameters": {"rope_type": "longrope"}},
        "model_type=llama with a rotary embedding of rope_type=longrope",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_driven_is_refused_by_what_it_is(copy, name):
    folder, (config, what) = copy("llama"), FOREIGN[name]
    change(folder, **config)
    line = refused(f"model.path={folder}")
    assert (
        line
        == f"model.path={folder}: is {what}; must be of llama, qwen2, qwen3, qwen3_moe: "
        + ("Llama, Qwen2.5, Qwen3 or Qwen3-MoE")
    )


@pytest.mark.parametrize(
    ("family", "config", "what"),
    [
        ("qwen2", {"use_sliding_window": True}, "attention over a sliding window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "over a sliding"),
        ("qwen3", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type=llama3"),
        ("llama", {"rope_parameters": "longrope"}, "rope_type=longrope"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers with experts among layers without"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "layers with experts among layers without"),
    ],
)
def test_a_known_family_with_another_block_is_refused(copy, family, config, what):
    folder = copy(family)
    change(folder, **config)
    assert f"is model_type={family} with " in refused(f"model.path={folder}")
    assert what in refused(f"model.path={folder}")


def test_a_quantized_model_and_a_missing_number_are_told(copy):
    folder = copy("llama")
    change(folder, quantization_config={"quant_method": "fp8"})
    assert "is quantized already; training starts from BF16" in refused(f"model.path={folder}")
    other = copy("qwen3")
    change(other, num_hidden_layers=None)
    assert refused(f"model.path={other}") == (
        f"model.path={other}: its config.json has num_hidden_layers=null"
    )


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_config_that_is_none_is_one_line(copy, content):
    folder = copy("llama")
    (folder / "config.json").unlink()
    if content:
        (folder / "config.json").write_text(content)
    assert refused(f"model.path={folder}").startswith(f"model.path={folder}: its config.json")


def rewrite(folder, change_of):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change_of(tensors)
    save_file(tensors, file)


BIAS, WEIGHT = "model.layers.1.self_attn.{}_proj.bias", "model.layers.1.mlp.up_proj.weight"
DAMAGE = {
    "a bias elsewhere": (
        "qwen2", lambda t: t.update({BIAS.format("o"): torch.zeros(128)}),
        f"it holds {BIAS.format('o')}",
    ),
    "a bias that is not there": (
        "qwen2", lambda t: t.pop(BIAS.format("k")), f"it lacks {BIAS.format('k')}"
    ),
    "another width": (
        "llama", lambda t: t.update({WEIGHT: torch.zeros(64, 128)}),
        f"{WEIGHT} is [64, 128], not [128, 128]",
    ),
    "a layer more": (
        "llama", lambda t: t.update({WEIGHT.replace("1", "2"): torch.zeros(128, 128)}),
        f"it holds {WEIGHT.replace('1', '2')}",
    ),
    "a head of its own": (
        "qwen3", lambda t: t.pop("lm_head.weight"), "it lacks lm_head.weight"
    ),
    "an expert less": (
        "qwen3_moe", lambda t: t.pop("model.layers.0.mlp.experts.3.up_proj.weight"),
        "it lacks model.layers.0.mlp.experts.3.up_proj.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_weights_that_their_config_does_not_describe_are_refused_by_name(copy, name):
    family, change_of, said = DAMAGE[name]
    folder = copy(family)
    rewrite(folder, change_of)
    line = refused(f"model.path={folder}")
    assert line == (
        f"model.path={folder}: is no {family} of its config.json's numbers, as driven here: {said}"
    )


def test_a_tied_model_may_hold_its_head_twice_and_a_cut_file_is_told(copy):
    folder = copy("llama")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    [plan] = compose_plans(["model=auto", f"model.path={folder}", "precision=bf16"])
    assert plan.recipe.model.shape.tied
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors is cut short by 10 bytes" in refused(f"model.path={folder}")


class Hub(SimpleHTTPRequestHandler):
    """A hub with one model, which answers ranges as the real one does."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        _, _, name = self.path.partition("/org/model/resolve/main/")
        file = Path(self.directory) / name
        if not name or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            return
        body = file.read_bytes()
        self.send_response(206 if "Range" in self.headers else 200)
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            body = body[int(first) : int(last) + 1]
        for key, value in {
            "Content-Length": str(len(body)), "ETag": '"abc"', "X-Repo-Commit": "a" * 40,
        }.items():  # fmt: skip
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format, *arguments):
        """Say nothing."""


def plan_of_hub(tmp_path, *words, **environment):
    """What a process with a cache of its own says to `model.hf_id=org/model`."""
    code = (
        "import sys; from fp8_nemo.plan.cells import compose_plans\n"
        "from fp8_nemo.recipe.compose import ComposeError\n"
        "try: [plan] = compose_plans(['model=auto', 'precision=bf16', *sys.argv[1:]])\n"
        "except ComposeError as error: print(error)\n"
        "else: print(plan.recipe.model.name, plan.recipe.model.shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), **environment},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_the_hub_gives_numbers_and_headers_and_offline_its_cache_does(made, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(made("qwen2"))))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    hub = {"HF_ENDPOINT": here, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    try:
        line = "model.hf_id=org/model"
        assert plan_of_hub(tmp_path, line, **hub) == f"model {SHAPES['qwen2']}"
        assert "config.json cannot be had" in plan_of_hub(tmp_path, "model.hf_id=org/no", **hub)
    finally:
        server.shutdown()
    said = plan_of_hub(tmp_path, line, HF_HUB_OFFLINE="1")  # the configuration is in the cache
    assert said.startswith("model.hf_id=org/model: the hub does not tell its tensors (")
    [config] = (tmp_path / "hf" / "hub").glob("models--org--model/snapshots/*/config.json")
    shutil.copy(made("qwen2") / "model.safetensors", config.parent)
    assert plan_of_hub(tmp_path, line, HF_HUB_OFFLINE="1") == f"model {SHAPES['qwen2']}"


PUBLISHED = {
    "llama31-8b": 8_030_261_248,
    "llama32-1b": 1_235_814_400,
    "llama32-3b": 3_212_749_824,
    "qwen25-1_5b": 1_543_714_304,
    "qwen25-7b": 7_615_616_512,
    "qwen25-math-7b": 7_615_616_512,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}
"""Parameters that the hub's model pages count in the safetensors files."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_shape_has_as_many_parameters_as_the_hub_counts(name):
    shape = Shape(**yaml.safe_load((CONF / f"{name}.yaml").read_text())["shape"])
    assert count(shape, Precision()).parameters == PUBLISHED[name]


@pytest.mark.parametrize("family", SHAPES)
def test_a_shape_survives_transformers_own_configuration(family):
    config = make_config(SHAPES[family]).to_dict()
    assert shape_of(config) == SHAPES[family]


ONE, NODE, TWO = (1, 1), (1, 8), (2, 8)
GPUS = {
    "llama32-1b": (ONE, ONE),
    "llama32-3b": (ONE, ONE),
    "qwen25-1_5b": (ONE, ONE),
    "qwen25-7b": (NODE, NODE),
    "qwen25-math-7b": (NODE, NODE),
    "qwen3-4b": (NODE, NODE),
    "llama31-8b": (NODE, NODE),
    "qwen3-8b": (NODE, NODE),
    "qwen3-14b": (NODE, NODE),
    "qwen3-30b-a3b": (TWO, NODE),
    "qwen3-32b": (TWO, NODE),
}
"""Nodes and GPUs of each on which every precision fits, H100 and H200."""


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("precision", ["bf16", "fp8-linear", "fp8-e2e-kv-attn"])
def test_each_model_fits_the_gpus_that_the_pages_name(name, precision):
    for gpu, (nodes, gpus) in zip(("h100", "h200"), GPUS[name], strict=True):
        words = [f"cluster.gpu={gpu}", f"cluster.nodes={nodes}", f"cluster.gpus_per_node={gpus}"]
        [plan] = compose_plans([f"model={name}", f"precision={precision}", *words])
        memory = memory_per_gpu(plan.settled)
        assert memory.headroom(memory.worst) >= HEADROOM, gpu
        assert not [note for note in plan.notes if note.startswith("memory")]


def test_what_does_not_fit_says_why():
    [plan] = compose_plans(["model=qwen3-32b", "precision=fp8-e2e", "cluster.gpu=h100"])
    [note] = [note for note in plan.notes if note.startswith("memory")]
    assert "train needs 90 of an h100's 79.6 GiB" in note and "use more GPUs" in note


def test_a_bias_that_is_null_or_false_makes_no_other_run(tmp_path):
    [plan], [false] = (
        compose_plans(["model=llama31-8b", "precision=bf16", *words])
        for words in ([], ["model.shape.qkv_bias=false"])
    )
    [true] = compose_plans(["model=llama31-8b", "precision=bf16", "model.shape.qkv_bias=true"])
    assert plan.run_name == false.run_name != true.run_name
    assert dataclasses.replace(plan.recipe.model.shape, qkv_bias=True) == true.recipe.model.shape
