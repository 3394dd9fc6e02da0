"""NeMo RL's logger as it is overheard: one row of our metrics a step."""

from types import SimpleNamespace

from fp8_nemo.nemo import step_metrics
from fp8_nemo.nemo.step_metrics import OPENED, OverheardLogger


def overheard():
    """A logger as NeMo RL drives it through a first validation and one step that validates."""
    logged, rows = [], []
    inner = SimpleNamespace(
        log_metrics=lambda *arguments, **options: logged.append(arguments[2]), log_plot="plot"
    )
    seen = [{"mismatch/kl": 0.25}, {"mismatch/kl": 0.25}, {OPENED: True}]  # first: fresh engine
    logger = OverheardLogger(inner, lambda: seen.pop(0), rows.append)
    logger.log_metrics({"accuracy": 0.5, "avg_length": 3.0}, 0, prefix="validation")
    logger.log_metrics({"total_validation_time": 1.0}, 0, prefix="timing/validation")
    logger.log_metrics({"mean_gen_tokens_per_sample": 3.0}, 1, prefix="train")
    logger.log_metrics({"total_validation_time": 1.0}, 1, prefix="timing/validation")
    logger.log_metrics({"accuracy": 0.75}, 1, prefix="validation")
    logger.log_metrics({"reward": 0.5, "loss": 0.1}, 1, prefix="train")
    logger.log_metrics({"tflops": 9.0}, 1, prefix="performance")
    times = {"generation": 2.0, "policy_training": 3.0, "prepare_for_generation/total": 0.5}
    for step, more in (
        (1, {"checkpointing": 0.5, "total_step_time": 8.5}),
        (2, {"total_step_time": 6.0}),
    ):
        logger.log_metrics(
            times | more | {"other": 1.0}, step, prefix="timing/train", step_finished=True
        )
    return logged, rows, logger


def test_a_step_is_one_row_in_our_words_and_the_first_validation_is_row_0():
    _, rows, _ = overheard()
    assert rows[0] == {"step": 0, "mismatch/kl": 0.25, "val/accuracy": 0.5}
    assert rows[1] == {
        "step": 1,
        "mismatch/kl": 0.25,
        "val/accuracy": 0.75,
        "reward/mean": 0.5,
        "time/rollout": 2.0,
        "time/train": 3.0,
        "time/step": 7.0,  # without the second of validation and the half of saving
    }


def test_of_a_steps_answers_a_part_is_logged_and_of_a_validation_all(monkeypatch):
    logged = {}
    inner = SimpleNamespace(
        log_batched_dict_as_jsonl=lambda data, name: logged.update({name: data})
    )
    logger = OverheardLogger(inner, dict, print)
    monkeypatch.setattr(step_metrics, "LOGGED_TOKENS", 8)
    answers = {"content": list("abcde"), "token_ids": [[1, 2, 3, 4]] * 5}
    logger.log_batched_dict_as_jsonl(answers, "train_data_step1.jsonl")
    logger.log_batched_dict_as_jsonl({"content": list("abcde")}, "val_data_step1.jsonl")
    assert logged["train_data_step1.jsonl"] == {
        "content": ["a", "d"], "token_ids": [[1, 2, 3, 4]] * 2,
    }  # fmt: skip
    assert logged["val_data_step1.jsonl"] == {"content": list("abcde")}


def test_a_refit_is_timed_where_one_opened_the_step():
    _, rows, _ = overheard()
    assert "time/refit" not in rows[1], "the validation before it had refitted"
    assert rows[2] == {
        "step": 2, "time/rollout": 2.0, "time/train": 3.0, "time/refit": 0.5, "time/step": 6.0,
    }  # fmt: skip


def test_what_is_known_of_a_step_when_its_checkpoint_is_saved_is_its_row_so_far():
    _, rows, logger = overheard()
    logger.log_metrics({"accuracy": 0.75}, 3, prefix="validation")
    seen = {"mismatch/kl": 0.25, OPENED: True}
    assert logger.row_so_far(3, seen) == {"step": 3, "mismatch/kl": 0.25, "val/accuracy": 0.75}
    assert OPENED in seen and len(rows) == 3, "nothing is taken"


def test_nemo_rls_own_log_hears_everything_and_keeps_its_other_methods():
    logged, rows, logger = overheard()
    assert len(logged) == 9 and len(rows) == 3 and logger.log_plot == "plot"


def test_an_asynchronous_step_has_its_age_its_wait_and_the_refit_that_ends_it():
    """As `async_grpo_train` logs: the refit after the update, validation's times before it."""
    rows, seen = [], [{OPENED: True}, {"mismatch/kl": 0.25}]
    inner = SimpleNamespace(log_metrics=lambda *arguments, **options: None)
    logger = OverheardLogger(inner, lambda: seen.pop(0), rows.append)
    logger.log_metrics({"accuracy": 0.5}, 0, prefix="validation")
    logger.log_metrics({"total_validation_time": 9.0}, 0, prefix="timing/validation")
    logger.log_metrics({"total_validation_time": 1.0}, 1, prefix="timing/validation")
    logger.log_metrics({"accuracy": 0.75}, 1, prefix="validation")
    metrics = {"reward": 0.5, "avg_trajectory_age": 1.0, "trajectory_duration_s/max": 2.5}
    logger.log_metrics(metrics, 1, prefix="train")
    logger.log_metrics({"efficiency/overall": 0.5}, 1, prefix="")
    times = {
        "exposed_generation": 1.5, "policy_and_reference_logprobs": 1.0, "policy_training": 3.0,
        "weight_sync": 0.25, "checkpointing": 0.5, "idle/validation": 1.25, "total_step_time": 8.5,
    }  # fmt: skip
    logger.log_metrics(times, 1, prefix="timing/train", step_finished=True)
    assert rows == [
        {"step": 0, "val/accuracy": 0.5},
        {
            "step": 1, "mismatch/kl": 0.25, "val/accuracy": 0.75, "reward/mean": 0.5,
            "rollout/age": 1.0, "time/rollout": 2.5, "time/wait": 1.5, "time/logprob": 1.0,
            "time/train": 3.0, "time/refit": 0.25, "time/step": 7.0,
        },
    ]  # fmt: skip
