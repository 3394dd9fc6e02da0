"""Context parallelism and chunked logits for answers of 16k and 32k tokens, as NeMo RL has them."""

from dataclasses import replace

import pytest

from fp8_nemo.nemo_config.keys import command_line
from fp8_nemo.plan.layout import RANKS
from fp8_nemo.plan.memory import CHUNK_LOGIT, HEADROOM, WHOLE_LOGIT, memory_per_gpu
from fp8_nemo.plan.plan import PlanError
from tests.nemo_config.test_plans import GIVEN, overrides, plan

LLAMA = ("model=llama31-8b", "precision=fp8-kv-attn", *GIVEN, "grpo=long-32k")
MULTIPLE = "policy.make_sequence_length_divisible_by"
VOCAB = 128_256


@pytest.mark.parametrize("context", RANKS["context"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("longest", [16384, 32768])
def test_sequences_are_cut_evenly_and_a_full_one_fills_its_micro_batch(context, tensor, longest):
    words = (f"model.parallel.context={context}", f"model.parallel.tensor={tensor}")
    words += ("cluster.nodes=2",)
    keys = overrides(*LLAMA, f"grpo.max_new_tokens={longest}", *words)
    cut = (2 * context if context > 1 else 1) * tensor
    assert keys[MULTIPLE] % cut == 0
    assert keys["policy.max_total_sequence_length"] == longest + 1024
    assert keys["policy.max_total_sequence_length"] % keys[MULTIPLE] == 0
    assert keys["policy.sequence_packing.enabled"] is True
    assert keys["policy.sequence_packing.fuse_loss"] is True
    assert keys["policy.generation.vllm_cfg.max_model_len"] == longest + 1024


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([f"+nemo.{MULTIPLE}=2"], f"nemo.{MULTIPLE}=2: must be a multiple of 4, which context"),
        ([f"+nemo.{MULTIPLE}=4096"], f"nemo.{MULTIPLE}=4096: must be a multiple of 4, which"),
        (
            [f"+nemo.{MULTIPLE}=4", "model.parallel.tensor=2",
             "+nemo.policy.megatron_cfg.sequence_parallel=true"],
            f"nemo.{MULTIPLE}=4: must be a multiple of 8",
        ),
        (["+nemo.policy.sequence_packing.enabled=false"], "nemo.policy.sequence_packing.enabled="),
        (["+nemo.policy.megatron_cfg.defer_fp32_logits=false",
          "+nemo.policy.logprob_chunk_size=1024"], "nemo.policy.logprob_chunk_size=1024: needs"),
        (["model.parallel.context=3"], "cluster.nodes x cluster.gpus_per_node=8: must be a multip"),
        (["model.memory.kv_cache_gib=1"], "model.memory.kv_cache_gib=1.0: holds 16,384 tokens"),
    ],
)  # fmt: skip
def test_what_nemo_rl_would_stop_at_is_one_line(words, line):
    given = [word for word in words if word.startswith("model.parallel.context")]
    with pytest.raises(PlanError) as refused:
        plan(*LLAMA, *(given or ["model.parallel.context=2"]), *words)
    assert any(each.startswith(line) for each in str(refused.value).splitlines())


def test_a_multiple_that_fits_is_taken():
    assert overrides(*LLAMA, "model.parallel.context=2", f"+nemo.{MULTIPLE}=64")[MULTIPLE] == 64


def test_a_chunk_of_logits_is_of_a_ranks_own_tokens_and_the_rest_is_shared_out():
    """NeMo RL walks over its local logits in chunks, so that ranks do not share a chunk."""
    settled = plan(*LLAMA, "+nemo.policy.logprob_chunk_size=1024").settled
    tokens = 33_792
    for ranks in (1, 2, 4, 8):
        at = replace(settled, layout=settled.layout._replace(context=ranks))
        logits = memory_per_gpu(at).phases["train"]["logits"]
        assert logits == VOCAB * (4 * tokens / ranks + CHUNK_LOGIT * 1024)
        whole = replace(at, layout=at.layout._replace(logits_chunk=0))
        assert (
            memory_per_gpu(whole).phases["train"]["logits"] == VOCAB * WHOLE_LOGIT * tokens / ranks
        )


@pytest.mark.parametrize(
    ("model", "gpu", "longest", "nodes"),
    [
        ("llama31-8b", "h100", 16384, 1), ("llama31-8b", "h200", 16384, 1),
        ("llama31-8b", "h100", 32768, 1), ("llama31-8b", "h200", 32768, 1),
        ("qwen3-30b-a3b", "h100", 16384, 1), ("qwen3-30b-a3b", "h200", 16384, 1),
    ],
)  # fmt: skip
def test_the_layouts_of_the_page_fit_and_are_what_a_stock_command_would_set(
    model, gpu, longest, nodes
):
    words = (f"model={model}", f"cluster.gpu={gpu}", f"grpo.max_new_tokens={longest}")
    found = plan(*words, "precision=fp8-kv-attn", f"cluster.nodes={nodes}")
    memory = memory_per_gpu(found.settled)
    assert memory.headroom(memory.worst) >= HEADROOM
    keys = found.nemo.overrides
    assert keys["policy.logprob_chunk_size"] == (found.settled.layout.logits_chunk or None)
    line = command_line(found.nemo.base_config, keys)
    context = found.settled.layout.context
    assert f"policy.megatron_cfg.context_parallel_size={context}" in line
