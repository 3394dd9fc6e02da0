"""NeMo RL's environment around a user's own reward: one turn, and the number that it gives.

The driver registers it under the name that `nemo_config/own/environments.py` writes. Its workers
import the user's file, each in a process of its own.
"""

# pyright: reportMissingImports=false
# NeMo RL stands on the path of a run, not of a type check.
from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.math_environment import BaseMathEnvironment
from nemo_rl.environments.utils import chunk_list_to_workers

from fp8_nemo.recipe.own.reward import load_reward


@ray.remote
class RewardWorker:
    """Hold a user's function in a process."""

    def __init__(self, file: str) -> None:
        self.reward = load_reward(Path(file))

    def rewards(self, answers: list[str], outputs: list[str]) -> list[float]:
        """Return the rewards of some answers."""
        return [self.reward(*pair) for pair in zip(answers, outputs, strict=True)]


# As NeMo RL's own. Ray's stubs know fewer numbers than Ray takes.
@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=1000)  # pyright: ignore
class RewardEnvironment(BaseMathEnvironment):
    """Reward a batch of answers; metrics and shutdown are those of NeMo RL's math environment."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg = cfg
        how = {"runtime_env": {"py_executable": PY_EXECUTABLES.SYSTEM}}
        self.workers = [
            RewardWorker.options(**how).remote(cfg["file"]) for _ in range(cfg["num_workers"])
        ]

    def step(
        self,
        message_log_batch: list[list[dict[str, Any]]],
        metadata: list[dict[str, Any]],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[Any]:
        """Reward each conversation's answer, and end it.

        Raises:
            RewardError: the user's function raised, or gave no finite number; the run stops.
        """
        answers = [
            "".join(str(each["content"]) for each in log if each["role"] == "assistant")
            for log in message_log_batch
        ]
        outputs = [each["ground_truth"] for each in metadata]
        shares = (chunk_list_to_workers(each, len(self.workers)) for each in (answers, outputs))
        futures = [
            worker.rewards.remote(*share)
            for worker, *share in zip(self.workers, *shares, strict=False)
        ]
        rewards = torch.tensor([value for part in ray.get(futures) for value in part])
        said = [{"role": "environment", "content": "Environment: done"} for _ in answers]
        return EnvironmentReturn(
            observations=said,
            metadata=metadata,
            next_stop_strings=[None] * len(answers),
            rewards=rewards,
            terminateds=torch.ones_like(rewards),
            answers=list(answers) if return_extracted_answer else None,
        )
