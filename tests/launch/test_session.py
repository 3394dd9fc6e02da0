"""The parts of a session that need no NeMo RL: why a run failed, one conversion at a time."""

import fcntl
import os
import threading
from types import SimpleNamespace

import pytest

from fp8_nemo.glue.wire import RefitError
from fp8_nemo.launch import session
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.compose import compose


def fallen(ask, raised):
    """What comes out of a block that raises, where the receivers answer `ask`."""
    with pytest.raises(Exception) as caught, session.failed_tensors_named(ask):
        raise raised
    return caught.value


def test_what_the_receivers_kept_of_a_refit_is_the_reason_of_a_run_that_fell():
    reason = fallen(lambda: ["k_proj: never arrived"], ValueError("false"))
    assert isinstance(reason, RefitError) and reason.problems == ["k_proj: never arrived"]
    assert isinstance(reason.__cause__, ValueError)


def test_the_senders_own_reason_is_kept():
    own = RefitError(["q_proj: holds NaN in the trainer"])
    assert fallen(lambda: ["the manifest never arrived"], own) is own


def test_an_error_that_no_receiver_knows_of_stays_what_it_is():
    own = ValueError("out of memory")
    assert fallen(list, own) is own
    assert fallen(lambda: 1 / 0, own) is own, "an engine that cannot be asked hides nothing"
    stopped = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), session.failed_tensors_named(lambda: ["asked"]):
        raise stopped


@pytest.mark.parametrize("engine_first", [True, False])
def test_another_run_starts_its_engine_when_this_ones_is_up(engine_first, tmp_path, monkeypatch):
    """Where both start at once, a policy that is asked for says nothing of an engine."""
    path = tmp_path / "lock"
    monkeypatch.setattr(session, "open_for_anyone", lambda _: os.open(path, os.O_RDWR | os.O_CREAT))

    def may_start():
        with path.open() as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with session.one_engine_start(engine_first=engine_first) as policy_is_asked_for:
        assert not may_start()
        policy_is_asked_for()
        assert may_start() is engine_first
    assert may_start()


def test_a_conversion_under_way_is_waited_for_and_a_finished_one_is_not(tmp_path):
    started, entered = threading.Event(), threading.Event()

    def other_run():
        started.set()
        with session.one_conversion(tmp_path):
            entered.set()

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=other_run)
        thread.start()
        assert started.wait(5) and not entered.wait(0.3)
    thread.join(5)
    assert entered.is_set()
    assert (tmp_path / ".whole").exists()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with session.one_conversion(tmp_path):
            pass


def test_what_a_killed_conversion_has_left_is_not_taken_for_a_model(tmp_path):
    left = tmp_path / "org" / "model" / "iter_0000000"
    left.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), session.one_conversion(tmp_path):
        assert not left.exists()
        left.mkdir()
        raise KeyboardInterrupt
    with session.one_conversion(tmp_path):
        assert not left.exists()
        left.mkdir()
    with session.one_conversion(tmp_path):
        assert left.exists()


def test_a_model_that_was_made_again_is_converted_again(tmp_path, monkeypatch):
    monkeypatch.delenv(session.CONVERSIONS, raising=False)
    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"one")

    def folder(*words, model="tiny-llama"):
        line = ["backend=nemo", f"model={model}", f"model.path={source}", *words]
        return session.conversion_dir(compose([*line, f"outputs={tmp_path}/outputs"])[0])

    first = folder()
    assert folder("precision=bf16") == first and first.is_dir()
    assert first.parent == tmp_path / "outputs" / ".megatron"
    assert folder("+nemo.policy.hf_config_overrides.rope_theta=1e4") != first
    (source / "model.safetensors").write_bytes(b"another")
    assert folder() != first
    hub = folder("model.path=null", model="llama31-8b")
    assert hub.name.startswith("meta-llama--Llama-3.1-8B-Instruct-")
    monkeypatch.setenv(session.CONVERSIONS, str(tmp_path / "own"))
    assert folder().parent == tmp_path / "own"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["glue=ours"], ["types", "plan", "receivers", "layouts"]),
        (["glue=stock"], ["types", "plan"]),
    ],
)
def test_an_engine_is_asked_for_its_types_and_layout_before_the_first_step(
    words, asked, monkeypatch, tmp_path
):
    [plan] = compose_plans(["model=small-llama", "backend=nemo", "precision=fp8-linear", *words])
    seen = []
    told = {"engine_dtypes": "types", "check_engine": "plan", "check_receivers": "receivers",
            "check_layouts": "layouts"}  # fmt: skip
    for name, what in told.items():
        monkeypatch.setattr(session, name, lambda *_, what=what: seen.append(what) or {})
    parts = SimpleNamespace(generation=None, policy=SimpleNamespace())
    session._prove_engine(parts, plan, tmp_path / "engine.json")
    assert seen == asked and (tmp_path / "engine.json").read_text() == "{}\n"
