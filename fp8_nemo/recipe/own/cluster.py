"""Check what a site says of its cluster: limits, GPUs, containers, and words of sbatch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.options.cluster import SBATCH_KEYS, Cluster

WEEK = 7 * 86400
LAST_SECONDS = 45
"""Before a job's limit, in which it saves nothing more: `last_seconds` of slurm/grpo.sbatch."""
FOUND_BY = "is what a job is found by, in the queue and in its log"
OURS_OF_SBATCH = {
    ("-J", "--job-name"): (FOUND_BY, "leave it out; a job is named as its cell"),
    ("-o", "--output"): (FOUND_BY, "leave it out; see RUN_DIR/log"),
    ("--parsable",): (FOUND_BY, "leave it out"),
    ("-a", "--array"): (
        "would run one directory several times",
        "leave it out; -m makes an array of a sweep's cells, cluster.max_running=N of them at once",
    ),
}
"""Options of sbatch that are not the user's: what is wrong, and what to do."""


def _ours(option: str) -> tuple[str, str] | None:
    """Return what is wrong with an option if sbatch reads one of ours in it, `--out=x` too."""
    name = option.partition("=")[0]
    for (*short, long), said in OURS_OF_SBATCH.items():
        cut = len(name) > len("--") and long.startswith(name)  # getopt_long takes it for the whole
        if cut or (not option.startswith("--") and option.startswith(tuple(short))):
            return said
    return None


def with_interpreter(cluster: Cluster, environment: Mapping[str, str]) -> Cluster:
    """Return a cluster whose `interpreter` is chosen.

    Args:
        cluster: as typed.
        environment: NeMo RL's image sets `NEMO_RL_VENV_DIR` there, its workers' environments.
    """
    if cluster.interpreter != "auto":
        return cluster
    apart = cluster.kind == "slurm" or "NEMO_RL_VENV_DIR" in environment
    return replace(cluster, interpreter="container" if apart else "system")


def cluster_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield what is wrong with the keys of `cluster`, beyond the limits of each alone."""
    for wrong in (_enters, _ends, _queues, _adds_to_the_job, _leaves_trainers, _mounts):
        yield from wrong(cluster)


def _enters(cluster: Cluster) -> Iterator[Mistake]:
    if cluster.enter and "{image}" not in " ".join(cluster.enter):
        yield Mistake(
            "cluster.enter",
            str(list(cluster.enter)),
            "must name {image}, where cluster.container goes",
            'as cluster.enter=[apptainer,exec,"--bind={mounts}","{image}"]',
        )


def _ends(cluster: Cluster) -> Iterator[Mistake]:
    limit = seconds(cluster.time)
    if limit is None:
        yield Mistake(
            "cluster.time",
            cluster.time,
            "must be a limit as Slurm reads it: minutes, hours:minutes:seconds, days-hours",
            "such as 240 or 04:00:00",
        )
    elif cluster.time.isdigit() and limit > WEEK:
        yield Mistake(
            "cluster.time",
            cluster.time,
            "is more than a week of minutes",
            'a YAML file reads 12:00:00 as a number: quote it, "12:00:00"; or write days, 8-00',
        )
    elif cluster.kind == "slurm" and not LAST_SECONDS < cluster.save_before_end < limit:
        text = (
            f"must be less than the {limit} seconds of cluster.time={cluster.time}, and more than "
            f"the {LAST_SECONDS} that ending a job takes"
        )
        yield Mistake("cluster.save_before_end", cluster.save_before_end, text)


def _queues(cluster: Cluster) -> Iterator[Mistake]:
    for key in SBATCH_KEYS:
        # `cluster=here` at the end of a job's line is this machine on purpose.
        if cluster.kind == "here" != cluster.name and (value := getattr(cluster, key)):
            text = f"is Slurm's, and cluster={cluster.name} is kind: here, this machine"
            remedy = "begin the site's file with `defaults: [slurm, _self_]`"
            yield Mistake(f"cluster.{key}", value, text, remedy)


def _adds_to_the_job(cluster: Cluster) -> Iterator[Mistake]:
    for option in cluster.extra:
        if not isinstance(option, str) or not option.startswith("-"):
            yield Mistake("cluster.extra", option, "must be options of sbatch, as --mem=0")
        elif said := _ours(option):
            yield Mistake("cluster.extra", option, *said)
    for word in cluster.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", str(word).partition("=")[0]):
            text = "must be NAME=value, or NAME alone"
            yield Mistake("cluster.env", word, text, "as cluster.env=[WANDB_API_KEY]")


def _leaves_trainers(cluster: Cluster) -> Iterator[Mistake]:
    every = cluster.nodes * cluster.gpus_per_node
    if 0 < every <= cluster.rollout_gpus:
        text = f"leaves none of {every} to train on"
        yield Mistake("cluster.rollout_gpus", cluster.rollout_gpus, text, "lower it, or set 0")


def _mounts(cluster: Cluster) -> Iterator[Mistake]:
    for mount in cluster.mounts:
        if not isinstance(mount, str) or not mount.startswith("/") or "," in mount:
            yield Mistake("cluster.mounts", mount, "must be an absolute folder, or /from:/to")


def seconds(time: str) -> int | None:
    """Read a limit as Slurm does: `30`, `30:00`, `4:00:00`, `1-12`, `1-12:30:00`; else None."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    first = 3600 if days is not None or len(numbers) == 3 else 60  # without days, minutes lead
    return int(days or 0) * 86400 + sum(
        number * first // 60**place for place, number in enumerate(numbers)
    )
