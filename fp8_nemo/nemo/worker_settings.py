"""What the glue inside NeMo RL's workers is told, by environment variables.

The driver sets one before Ray starts, and every worker process inherits it; a process without it
leaves NeMo RL as it is. The actor that starts an engine sets another (`ENGINE_FP8`).
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import fp8_nemo
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Glue, Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import Grpo, Noise
from fp8_nemo.recipe.plain import from_plain, to_json

VARIABLE = "FP8_NEMO_WORKERS"
ENGINE_FP8 = "FP8_NEMO_ENGINE_FP8"
"""NeMo RL's FP8 settings of an engine, as JSON, for vLLM's workers under Ray executor V2."""
PLUGIN = "fp8_nemo"
"""Our entry point of the group `PLUGINS`, by which vLLM finds our receiver."""
PLUGINS = "vllm.general_plugins"
WORKER = "fp8_nemo.nemo.policy_worker.Fp8PolicyWorker"
OUR_WORKERS = {
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": WORKER,
    "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker":
        "fp8_nemo.nemo.generation_worker.Fp8GenerationWorker",
    "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker":
        "fp8_nemo.nemo.generation_worker.Fp8AsyncGenerationWorker",
}  # fmt: skip
"""Ray actors of ours by NeMo RL's, in whose Python environment each runs: policy, vLLM, and vLLM's
asynchronous engine."""


@dataclass(frozen=True)
class WorkerSettings:
    """Hold what the glue needs of a recipe: `WorkerSettings.of(recipe, loss_corrects=True)`."""

    precision: Precision
    shape: Shape
    glue: Glue
    correction: Correction
    loss_corrects: bool
    """Whether NeMo RL's own loss applies the correction; else ours multiplies the advantages."""
    replays: bool = False
    """Whether the policy's workers count the routes that they would have chosen otherwise."""
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    grpo: Grpo = field(default_factory=Grpo)
    resent: list[str] = field(default_factory=list)
    """Projections with adapters, whose weights refits after the first send alone; empty: all."""

    @classmethod
    def of(cls, recipe: Recipe, *, loss_corrects: bool) -> WorkerSettings:
        """Take the settings out of a recipe."""
        return cls(
            recipe.precision,
            recipe.model.shape,
            recipe.glue,
            recipe.correction,
            loss_corrects,
            recipe.replay.is_on,
            recipe.seed,
            recipe.noise,
            recipe.grpo,
            list(recipe.resent),
        )

    @classmethod
    def from_environment(cls) -> WorkerSettings | None:
        """Read the settings of the run that this process works for; None outside one.

        Raises:
            TypeError: another version of this package wrote them.
        """
        text = os.environ.get(VARIABLE)
        return None if text is None else _read(text)

    def to_environment(self) -> dict[str, str]:
        """Return the workers' environment variable; empty if no worker runs code of ours."""
        return {VARIABLE: to_json(asdict(self))} if self.needs_plugin else {}

    @property
    def observes(self) -> bool:
        """Return whether the policy's workers watch Q, K and V in the logprob forward."""
        return self.glue.observes(self.precision)

    @property
    def needs_plugin(self) -> bool:
        """Return whether workers must be ours."""
        return self.glue.needs_plugin(self.precision)

    @property
    def wire_precision(self) -> Precision:
        """Return the precision sent: FP8 that we quantized, or BF16 for the receiver's rule."""
        if self.glue.sends_fp8:
            return self.precision
        return replace(self.precision, rollout_linear=self.precision.plain.name)

    def adapted(self, number: int) -> tuple[str, ...]:
        """Return the projections with adapters, if the refit of a number sends these alone."""
        return tuple(self.resent) if number > 1 else ()


@functools.cache  # a worker asks in every step and every refit
def _read(text: str) -> WorkerSettings:
    return from_plain(WorkerSettings, json.loads(text))


def own_folder() -> Path | None:
    """Return the folder that a worker's path needs for this package; None in `site-packages`.

    It is a clone, or a job's frozen copy. A driver's whole `site-packages` would bring packages of
    another Python into the workers.
    """
    folder = Path(fp8_nemo.__file__).parents[1]
    return None if folder.name in ("site-packages", "dist-packages") else folder
