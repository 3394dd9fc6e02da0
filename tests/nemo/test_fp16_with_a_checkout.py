"""FP16's loss scale, and how weights move, with Megatron's buffers, optimizers, scalers on a CPU.

Set NEMO_RL_ROOT to a checkout, in an environment that holds NeMo RL's packages (docs/install.md).
Megatron asks for memory on `cuda`; here it gets the host's, and its norms are those it has without
TransformerEngine. The rest is its own: buffers, sharded masters, unscaling, skipping.
"""

# pyright: reportMissingImports=false
import importlib.util
import os

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.nemo_config.host import MAIN
from fp8_nemo.nemo_config.own.fp16 import OPTIMIZER, REDUCED
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.settled import GROWTH_INTERVAL

pytestmark = pytest.mark.skipif(
    not os.environ.get("NEMO_RL_ROOT") or importlib.util.find_spec("megatron") is None,
    reason="NEMO_RL_ROOT: no checkout of NeMo RL, or not its packages",
)
LINE = (
    *("model=qwen3-30b-a3b", "precision=fp16", "model.layout=null"),
    "grpo.learning_rate=0.01",
)
SCALE = 65536.0


class OnTheHost(TorchFunctionMode):
    """Give host memory where `cuda` is asked for, and its FP16 tensors the names of a GPU's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """Megatron's groups, of one process."""
    from megatron.core import parallel_state

    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def host(monkeypatch):
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", True)
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None)
    with OnTheHost():
        yield


def set_up(worker, words):
    """Give a worker what NeMo RL's set-up leaves: a model in Megatron's buffers, its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import MegatronModule, TransformerConfig

    made = plan(*words).nemo
    assert made
    keys = made.overrides
    at = f"{OPTIMIZER}."
    given = {key.removeprefix(at): value for key, value in keys.items() if key.startswith(at)}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    module = MegatronModule(config)
    for name in ("dense", "experts"):
        weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.float16))
        setattr(weight, "allreduce", name == "dense")  # noqa: B010  false: an expert's weight
        setattr(module, name, weight)
    ddp = DistributedDataParallelConfig(
        check_for_nan_in_grad=True,  # as NeMo RL has it
        grad_reduce_in_fp32=keys[REDUCED],
        use_distributed_optimizer=True,
    )
    worker.model = DistributedDataParallel(config, ddp, module)
    worker.optimizer = get_megatron_optimizer(
        OptimizerConfig(**given, use_distributed_optimizer=True), [worker.model]
    )


@pytest.fixture
def made(monkeypatch):
    """Our worker, or NeMo RL's own, after its set-up."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl

    monkeypatch.setattr(MegatronPolicyWorkerImpl, "__init__", set_up)

    def make(*words, ours=True):
        words = (*LINE, *words)
        settings = WorkerSettings.of(plan(*words).recipe, loss_corrects=True)
        for name, text in settings.to_environment().items():
            monkeypatch.setenv(name, text)
        return (Fp8PolicyWorkerImpl if ours else MegatronPolicyWorkerImpl)(words)

    return make


def plan(*words):
    [found] = compose_plans(words, lambda recipe: MAIN)
    return found


def update(worker, dense, experts):
    """One update with these gradients: its loss is scaled, differentiated, reduced, as a step's."""
    worker.model.zero_grad_buffer()
    worker.optimizer.zero_grad()
    module = worker.model.module
    loss = dense * module.dense.float().sum() + experts * module.experts.float().sum()
    worker.optimizer.scale_loss(loss).backward()
    worker.model.finish_grad_sync()
    return worker.optimizer.step()


def scales(worker):
    return [each.get_loss_scale().item() for each in worker.optimizer.chained_optimizers]


def weights(worker):
    module = worker.model.module
    return torch.stack([module.dense, module.experts]).detach().clone()


def test_stocks_worker_ends_at_the_first_overflow_or_parts_the_scalers(made):
    stock = made(ours=False)
    with pytest.raises(RuntimeError, match="found Inf in local grad norm"):
        update(stock, 0.5, 2.0)
    stock.model.ddp_config.check_for_nan_in_grad = False
    assert update(stock, 0.5, 2.0) == (False, None, None)
    assert scales(stock) == [SCALE, SCALE / 2]


@pytest.mark.parametrize("overflowing", [(2.0, 0.5), (0.5, 2.0), (2.0, 2.0)])
def test_an_overflow_of_dense_or_expert_weights_skips_the_update_and_halves_both_scales(
    made, overflowing
):
    worker = made()
    before = weights(worker)
    landed, norm, _ = update(worker, *overflowing)
    assert (landed, norm) == (False, 0.0) and torch.tensor([norm]).item() == 0
    assert scales(worker) == [SCALE / 2] * 2 and weights(worker).equal(before)
    assert worker.fp8_nemo_take_loss_scale() == (SCALE / 2, 1)
    landed, norm, _ = update(worker, 0.5, 0.25)
    assert landed and norm == pytest.approx(8 * (0.5**2 + 0.25**2) ** 0.5)
    assert worker.fp8_nemo_take_loss_scale() == (SCALE / 2, 0)
    assert not weights(worker).isclose(before).any()


def test_a_gradient_that_fp16_would_lose_arrives(made):
    worker = made()
    landed, norm, _ = update(worker, 1e-9, 1e-9)
    assert torch.tensor(1e-9).half() == 0
    assert landed and norm == pytest.approx(8 * 2**0.5 * 1e-9, rel=1e-3)


def test_a_scale_of_two_to_the_32_recovers_by_skipping(made):
    worker = made("precision.loss_scale=4294967296")
    while not update(worker, 1.0, 1.0)[0]:
        pass
    assert worker.fp8_nemo_take_loss_scale() == (2.0**15, 17)


def test_updates_without_an_overflow_double_the_scale_once(made):
    worker = made("precision.loss_scale=8")
    for _ in range(GROWTH_INTERVAL - 1):
        assert update(worker, 0.5, 0.5)[0]
    assert scales(worker) == [8, 8]
    update(worker, 0.5, 0.5)
    assert scales(worker) == [16, 16]


def test_weights_go_to_memory_page_locked_at_their_size_once_and_come_back(made, monkeypatch):
    locked = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(at, size, flags):
            locked.append((at, size))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    worker = made()
    before = weights(worker)
    buffers = [*worker.model.buffers, *worker.model.expert_parallel_buffers]
    worker.move_model(worker.model, "cpu", move_params=False)
    assert not locked, "GPUs that train alone move gradients, and no weights"
    for _ in range(2):
        worker.move_model(worker.model, "cpu")
        assert not any(each.param_data.untyped_storage().size() for each in buffers)
        places = [each.param_data_cpu for each in buffers]
        assert locked == [(each.data_ptr(), each.nbytes) for each in places]
        worker.move_model(worker.model, "cuda")
        assert weights(worker).equal(before)
