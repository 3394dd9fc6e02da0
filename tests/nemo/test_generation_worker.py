"""Our vLLM worker gives NeMo RL's own results, tensor for tensor, from vLLM's own containers."""

import asyncio
import importlib.util
import inspect
import os
import random
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not os.environ.get("NEMO_RL_ROOT") or importlib.util.find_spec("vllm") is None,
    reason="NeMo RL's packages are not installed here (docs/install.md)",
)
END, PAD = 2, 0
CFG = {
    "top_k": None, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": 9, "stop_token_ids": [END],
    "_pad_token_id": PAD, "vllm_cfg": {"use_tqdm": False}, "vllm_kwargs": {},
}  # fmt: skip


@pytest.fixture
def classes(monkeypatch):
    """NeMo RL's worker and ours, without Ray."""
    monkeypatch.syspath_prepend(os.environ["NEMO_RL_ROOT"])
    from fp8_nemo.nemo.generation_worker import Fp8GenerationWorkerImpl

    [stock] = Fp8GenerationWorkerImpl.__bases__
    return stock, Fp8GenerationWorkerImpl


class Llm:
    """Answers with drawn tokens, and with logprobs in vLLM's container for the request."""

    llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def generate(self, prompts, parameters, use_tqdm):
        from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
        from vllm.outputs import CompletionOutput, RequestOutput

        self.asked.append(parameters)
        for number, answer in enumerate(self.answers):
            kept = create_sample_logprobs(parameters.flat_logprobs)
            for token, value in answer:
                append_logprobs_for_next_position(kept, [token], [value], [None], 1, 0)
            tokens = [token for token, _ in answer]
            made = CompletionOutput(0, "", tokens, None, kept, finish_reason="stop")
            yield RequestOutput(str(number), None, [1], None, [made], finished=True)


class WholeLlm(Llm):
    def generate(self, *arguments, **options):
        return list(super().generate(*arguments, **options))


def worker_of(kind, answers):
    from vllm import SamplingParams

    worker = object.__new__(kind)
    worker.cfg, worker.llm = CFG, WholeLlm(answers)
    worker.SamplingParams, worker.routed_experts_dtype = SamplingParams, None
    return worker


def drawn_answers(lengths, seed=1):
    """Tokens with logprobs that FP32 holds exactly, as vLLM's are."""
    draw = random.Random(seed)
    value = lambda: float(torch.tensor(-draw.expovariate(1.0), dtype=torch.float32))  # noqa: E731
    return [[(draw.randrange(3, 99), value()) for _ in range(length)] for length in lengths]


def prompts_of(lengths):
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, :length] = 5
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor(lengths)})


@pytest.mark.parametrize("lengths", [(9, 1, 4), (3,), (0, 2)])
def test_results_are_nemo_rls(classes, lengths):
    answers = drawn_answers(lengths)
    data = [prompts_of([4, 2, 7][: len(lengths)]) for _ in classes]
    theirs, ours = (
        worker_of(kind, answers).generate(batch) for kind, batch in zip(classes, data, strict=True)
    )
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), name
    assert ours["logprobs"].count_nonzero() == sum(lengths)


def test_vllm_keeps_logprobs_flat_and_is_left_as_it_was(classes):
    worker = worker_of(classes[1], drawn_answers([2]))
    worker.generate(prompts_of([3]))
    [parameters] = worker.llm.asked
    assert parameters.flat_logprobs
    assert "generate" not in vars(worker.llm)


def test_an_engine_that_fails_is_left_as_it_was(classes):
    worker = worker_of(classes[1], drawn_answers([2]))
    worker.llm.answers = None
    with pytest.raises(TypeError):
        worker.generate(prompts_of([3]))
    assert "generate" not in vars(worker.llm)


def test_an_empty_batch_is_nemo_rls(classes):
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    empty = BatchedDataDict({"input_ids": torch.zeros(0, 0), "input_lengths": torch.zeros(0)})
    assert worker_of(classes[1], []).generate(empty)["logprobs"].shape == (0, 0)


def test_nemo_rl_makes_our_worker_for_its_own_alone(classes):
    from nemo_rl.models.generation.vllm import vllm_generation

    from fp8_nemo.launch.session import our_generation_worker
    from fp8_nemo.nemo.worker_settings import OUR_WORKERS

    stock = vllm_generation.resolve_generation_worker_cls
    both = list(OUR_WORKERS.items())[1:]
    module = classes[1].__module__
    assert [ours for _, ours in both] == [
        f"{module}.Fp8GenerationWorker", f"{module}.Fp8AsyncGenerationWorker",
    ]  # fmt: skip
    with our_generation_worker():
        resolve = vllm_generation.resolve_generation_worker_cls
        assert [resolve(theirs, {}) for theirs, _ in both] == [ours for _, ours in both]
        assert resolve("another.Worker", {}) == "another.Worker"
    assert vllm_generation.resolve_generation_worker_cls is stock


class Core:
    """vLLM's client of an engine in another process, as far as its messages, and that process."""

    def __init__(self, *workers):
        self.workers = workers

    async def collective_rpc_async(self, method, timeout, args, kwargs):
        from vllm.v1.engine import UtilityOutput
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult, run_method

        sent = MsgpackEncoder().encode(("collective_rpc", (method, timeout, args, kwargs)))
        _, (question, _, args, kwargs) = MsgpackDecoder().decode(sent)
        answers = [run_method(each, question, args, kwargs or {}) for each in self.workers]
        said = MsgpackEncoder().encode(UtilityOutput(1, result=UtilityResult(answers)))
        return MsgpackDecoder(UtilityOutput).decode(said).result.result


def asynchronous(*workers):
    """Our asynchronous worker with a real `AsyncLLM` around `Core`; without workers, no engine."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from fp8_nemo.nemo.generation_worker import Fp8AsyncGenerationWorkerImpl

    actor, actor_llm = object.__new__(Fp8AsyncGenerationWorkerImpl), object.__new__(AsyncLLM)
    actor_llm.engine_core = Core(*workers)
    actor.llm = actor_llm if workers else None
    return actor


def test_questions_and_proofs_cross_vllms_own_messages_to_an_asynchronous_engine(
    classes, monkeypatch
):
    from fp8_nemo.launch import engine_checks

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # as NeMo RL's worker does
    proof = {"bytes": 7, "sent_digests": b"\x00\xff" * 9, "verified_weights": 84, "changed": 0}
    ours = SimpleNamespace(fp8_nemo_report=lambda: proof, fp8_nemo_problems=("k: never arrived",))

    def ask(question, *workers):
        return asyncio.run(asynchronous(*workers).fp8_nemo_ask(question))

    assert ask(engine_checks._report, ours, SimpleNamespace()) == [proof, {}]
    assert ask(engine_checks._problems, ours) == [["k: never arrived"]]
    assert ask(engine_checks._report) == []


def test_our_asynchronous_worker_is_nemo_rls_but_for_what_it_tells_and_asks(classes):
    from fp8_nemo.nemo.generation_worker import (
        Fp8AsyncGenerationWorker,
        Fp8AsyncGenerationWorkerImpl,
    )

    own = {name for name in vars(Fp8AsyncGenerationWorkerImpl) if not name.startswith("__")}
    assert own == {"_create_engine", "fp8_nemo_ask"} and hasattr(Fp8AsyncGenerationWorker, "remote")
    assert inspect.iscoroutinefunction(Fp8AsyncGenerationWorkerImpl.fp8_nemo_ask)
