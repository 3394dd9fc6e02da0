"""Declare where a run is started, and what logs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8_nemo.recipe.options.fields import number, one_of, short_name


@dataclass
class Logging:
    """Turn on NeMo RL's own loggers; `metrics.jsonl` is always written."""

    tensorboard: bool = True
    """Write TensorBoard's files."""
    wandb: bool = False
    """Log to Weights & Biases."""


@dataclass
class Cluster:
    """Say where a run is started."""

    name: str = short_name("here")
    """Part of the run directory's name."""
    kind: str = one_of("here", "slurm")
    """This machine, or Slurm's queue."""
    nodes: int = number(1, least=1)
    """Nodes of the run."""
    gpus_per_node: int = number(8, least=1)
    """GPUs that it takes on each."""
    rollout_gpus: int = number(0, least=0)
    """GPUs that only sample, of several nodes whole ones; 0: each trains and samples in turn."""
    gpu: str = one_of("h100", "h200", "b200")
    """Which GPU; its memory and architecture follow."""
    time: str = "04:00:00"
    """Slurm's limit for one job; a run goes on in the next one."""
    account: str | None = None
    """`sbatch --account`."""
    partition: str | None = None
    """`sbatch --partition`."""
    qos: str | None = None
    """`sbatch --qos`."""
    reservation: str | None = None
    """`sbatch --reservation`."""
    constraint: str | None = None
    """`sbatch --constraint`."""
    nodelist: str | None = None
    """`sbatch --nodelist`."""
    exclude: str | None = None
    """`sbatch --exclude`."""
    mem: str | None = None
    """`sbatch --mem`."""
    gres: str | None = None
    """`sbatch --gres`, and no `--gpus-per-node` beside it."""
    comment: str | None = None
    """`sbatch --comment`; null is `fp8-nemo`, or the sweep's name."""
    mail: str | None = None
    """Address that Slurm writes to when a job begins, ends, fails or is requeued."""
    dependency: str | None = None
    """Start when this has ended well: a run's directory, a job's number, or as sbatch has it."""
    max_running: int | None = number(None, least=1)
    """Cells of a sweep that run at once; null: as many as Slurm starts."""
    env: list[str] = field(default_factory=list)
    """The job's environment: `NAME=value`, or `NAME` alone, a secret of who submits."""
    extra: list[str] = field(default_factory=list)
    """More options of `sbatch`, one word each; those of a line come after the site's."""
    container: str | None = None
    """Image, or root folder, that a job's part on each node runs in; None runs on the bare node."""
    enter: list[str] = field(default_factory=list)
    """Command that enters it, of `{image}`, `{mounts}` and `{folder}`; empty: pyxis does."""
    mounts: list[str] = field(default_factory=list)
    """Folders that the container sees, `/from:/to` or `/both`, besides those of the run itself."""
    setup: str | None = None
    """Shell commands that every node runs before anything else: `module load cuda`."""
    python: str | None = None
    """Interpreter of the job; None is the one that submits, and `python3` in a container."""
    nemo_root: str | None = None
    """NeMo RL's checkout; by default `$NEMO_RL_ROOT`."""
    interpreter: str = one_of("auto", "container", "system")
    """`container`: NeMo RL's workers have own environments; `system`: one for all; `auto`:
    `container` for a job, or with `NEMO_RL_VENV_DIR` set; else `system`."""
    requeue: bool = True
    """Queue again until `grpo.steps` are done."""
    save_before_end: int = number(600, least=0)
    """Seconds before the time limit from which on a run saves and stops."""
    join_timeout: int = number(1800, least=1)
    """Seconds that all nodes have to join Ray; pulling a container's image counts."""
    preflight: bool = True
    """Run `recipes.check_cluster` at the head of each job."""
    other_versions: str = one_of("refuse", "allow")
    """Whether a run may go on with other versions, weights or problems than it began with."""

    @property
    def has_hopper(self) -> bool:
        """Return whether its GPUs are Hopper's, for which some kernels alone are made."""
        return self.gpu in ("h100", "h200")


SBATCH_OPTIONS = (
    *("account", "partition", "qos", "reservation", "constraint", "nodelist", "exclude", "mem"),
    "gres",
)
"""Keys of `cluster` that are sbatch's under the same name."""
SBATCH_KEYS = (*SBATCH_OPTIONS, "comment", "mail", "dependency", "max_running", "env", "extra")
"""Keys of `cluster` that are sbatch's alone."""
