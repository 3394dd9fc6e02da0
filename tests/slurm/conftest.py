"""A real Slurm on this machine: munge, slurmctld and four slurmd, started for the session.

Runs with `--slurm` alone (`make test-slurm`): it starts daemons and needs root.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8_nemo.runs import metrics
from tests.conftest import SMALL

ROOT = Path(__file__).parent.parent.parent
PARTITIONS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=batch Nodes=node1,node2 Default=YES State=UP
PartitionName=graceful Nodes=node1,node2 GraceTime=60 State=UP
PartitionName=urgent Nodes=node1,node2 PriorityTier=9 State=UP
PartitionName=wide Nodes=node1,node2,node4 State=UP
PartitionName=long Nodes=node3 State=UP
PartitionName=paid Nodes=node1,node2 AllowAccounts=research State=UP
"""
WITHOUT_ARRAYS = """
MaxArraySize=0
GresTypes=gpu
PartitionName=batch Nodes=node1,node2 Default=YES State=UP
"""
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=10
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
EnforcePartLimits=ALL
{nodes}
{partitions}
"""


class Slurm:
    """The daemons, and what a user types.

    Args:
        folder: for their state; its path must be short, sockets lie in it.
        port: of the controller; its nodes have the next ones.
        nodes: how many; those of a second Slurm on this machine may have the same names.
        partitions: the lines of its configuration that differ from another's.
        gpus: of each node, as Slurm counts them.
    """

    def __init__(self, folder: Path, port: int, nodes: int, partitions: str, gpus: int = 0) -> None:
        self.folder = folder
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.environment |= {"OMP_NUM_THREADS": "1"}
        host = os.uname().nodename
        line = "NodeName={0} NodeAddr=127.0.0.1 NodeHostname={1} Port={2} CPUs=2 RealMemory=1000"
        line += " Feature={0}s" + (f" Gres=gpu:{gpus}" if gpus else "")
        lines = [line.format(name, host, port + 4 + n) for n, name in enumerate(self.nodes)]
        words = {"port": port, "nodes": "\n".join(lines), "partitions": partitions}
        text = CONFIG.format(host=host, folder=folder, **words)
        folder.chmod(0o755)  # other users read the configuration, and reach munge
        (folder / "slurm.conf").write_text(text)
        devices = [folder / f"gpu{number}" for number in range(gpus)]
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={each}\n" for each in devices))
        for each in devices:
            each.touch()  # Slurm counts them, and looks no further
        self.stopped = threading.Event()

    def start(self) -> None:
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self.call("munged", "--force", f"--key-file={key}", f"--socket={socket}", *files)
        (self.folder / "state").mkdir()
        self.call("slurmctld", "-c")
        for node in self.nodes:
            self.start_node(node)
        for _ in range(60):
            if self.call("sinfo", "-h", "-t", "idle", "-o", "%D", "-p", "batch").strip() == "2":
                threading.Thread(target=self.hurry, daemon=True).start()
                return
            time.sleep(0.5)
        raise RuntimeError(self.call("sinfo", "-N", "-l"))

    def hurry(self) -> None:
        """Start requeued jobs after three seconds, which Slurm would let wait for two minutes.

        Not at once: the nodes have just been told to refuse what is left of the attempt before.
        """
        seen: dict[str, float] = {}
        while not self.stopped.wait(1):
            lines = self.call("squeue", "-h", "-t", "pending", "-o", "%i %r").splitlines()
            waiting = {line.split()[0] for line in lines if line.endswith(" BeginTime")}
            seen = {number: seen.get(number, time.monotonic()) for number in waiting}
            for number in waiting:
                if time.monotonic() - seen[number] > 3:
                    self.call("scontrol", "update", f"JobId={number}", "StartTime=now")

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self.call("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd alone: what it had started lives on, as behind a broken network."""
        os.kill(int((self.folder / f"{node}.pid").read_text()), 9)

    def stop(self) -> None:
        self.stopped.set()
        subprocess.run(["scancel", "--user=root,nobody"], env=self.environment, capture_output=True)
        deadline = time.monotonic() + 20
        while self.call("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.5)
        for name in ("slurmctld", *self.nodes, "munge"):
            pid = self.folder / f"{name}.pid"
            if pid.exists():
                subprocess.run(["kill", pid.read_text().strip()], capture_output=True)

    def call(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def verb(self, verb: str, *arguments: str, cwd: Path = ROOT, umask=-1, **variables):
        command = [sys.executable, "-m", f"recipes.{verb}", *map(str, arguments)]
        return subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, env=self.environment | variables,
            umask=umask,
        )  # fmt: skip

    def verb_of_nobody(self, verb: str, *arguments: str, home: Path):
        """Another user's line: by this interpreter, or by the system's where this one is closed."""
        # The system's reads the packages of this environment, what is installed editable included.
        folders = [path for path in sys.path if path.endswith("-packages")]
        (home / "sitecustomize.py").write_text(
            f"import site\nfor folder in {folders}: site.addsitedir(folder)\n"
        )
        own = {"HOME": str(home), "PYTHONPATH": str(home)}
        alone = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": ROOT}
        for python in (sys.executable, "/usr/bin/python3"):
            command = [python, "-m", f"recipes.{verb}", *map(str, arguments)]
            try:
                return subprocess.run(
                    command, capture_output=True, text=True, env=self.environment | own, **alone
                )
            except PermissionError:
                continue
        pytest.skip("no Python that another user may run")

    def submit(self, *arguments: str, **options) -> list["Job"]:
        done = self.verb("grpo", *arguments, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        words = [line.split() for line in done.stdout.splitlines() if line.startswith("job ")]
        return [Job(self, word[1].rstrip(":"), Path(word[2].rstrip(";"))) for word in words]

    def queue(self) -> list[str]:
        return self.call("squeue", "--array", "-h", "-o", "%i").split()


@dataclass
class Job:
    """One job, by its number and the run directory that it was queued for."""

    slurm: Slurm
    id: str
    path: Path

    @property
    def log(self) -> str:
        file = self.path / "log" / f"slurm-{self.id}.out"
        return file.read_text() if file.exists() else ""

    @property
    def state(self) -> dict[str, str]:
        words = self.slurm.call("scontrol", "show", "job", "-o", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, seconds: float, until: Callable[["Job"], bool] | None = None) -> "Job":
        """Until the job has left the queue, or `until` holds."""
        deadline = time.monotonic() + seconds
        while self.id in self.slurm.queue():
            if until and until(self):
                return self
            assert time.monotonic() < deadline, f"job {self.id} is still there:\n{self.log}"
            time.sleep(0.5)
        assert until is None, f"job {self.id} has ended:\n{self.log}"
        return self

    def finished(self, seconds: float = 120) -> "Job":
        """Wait, and see that it is done."""
        self.wait(seconds)
        assert self.state["ExitCode"] == "0:0" and self.state["JobState"] == "COMPLETED", self.log
        return self

    @property
    def curve(self) -> list[dict]:
        rows = metrics.read_metrics(self.path)
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name) is None]
    assert not missing, f"{missing} not installed: make test-slurm installs them"
    with started(port=26817, nodes=4, partitions=PARTITIONS) as found:
        yield found


@pytest.fixture
def slurm_without_arrays(slurm) -> Iterator[Slurm]:
    """A second one, which has no arrays and counts GPUs; its nodes are the same machine."""
    with started(port=26837, nodes=2, partitions=WITHOUT_ARRAYS, gpus=8) as found:
        yield found


@contextmanager
def started(**options) -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(
        prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        found = Slurm(Path(folder), **options)
        try:
            found.start()
            yield found
        finally:
            found.stop()


def eight_problems(folder: Path) -> None:
    """Write a folder for `data=jsonl`, of which a validation is short."""
    rows = [{"input": f"{n}+1=", "output": str(n + 1)} for n in range(8)]
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def waiting(folder: Path, seconds: float) -> list[str]:
    """Words for a reward that waits for each answer, so that a run lasts and takes no processor."""
    eight_problems(folder)
    (folder / "reward.py").write_text(
        "import time\n\n\ndef reward(answer, output):\n"
        f"    time.sleep({seconds})\n    return float(answer == output)\n"
    )
    kind = ["data=jsonl", "data.difficulty=null"]
    return [*kind, f"data.path={folder}", f"data.reward={folder / 'reward.py'}"]


@pytest.fixture
def lasting(tmp_path) -> list[str]:
    """Words for steps of half a second, most of which no processor works."""
    return waiting(tmp_path, 0.02)


@pytest.fixture
def small(tmp_path) -> list[str]:
    """A run of seconds on one node."""
    return [*SMALL, "cluster=slurm", "cluster.nodes=1", "cluster.time=30", f"outputs={tmp_path}/o"]
