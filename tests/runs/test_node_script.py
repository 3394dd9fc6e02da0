"""slurm/node.sh by hand: how a node ends when Ray does not.

Ray itself is played by a script that starts a child and hears no TERM: the real one ends, so far as
anybody could bring about here. A job with the real Ray is in tests/slurm.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

NODE = Path(__file__).parents[2] / "slurm" / "node.sh"
PYTHON = """#!/bin/bash
case "$*" in
    *"scripts start"*) trap '' TERM; sleep 600 & echo $! >"$CHILD"; echo $$ >"$RAY"; wait; wait ;;
    *get_node_ip_address*) echo 127.0.0.1 ;;
    *ray_cluster*) sleep "$NODES_SECONDS" ;;
    *recipes.run*) touch "$STARTED"; sleep "$RUN_SECONDS"; exit 3 ;;
    *"import grpc"*) exit 1 ;;
esac
"""


@pytest.fixture
def node(tmp_path):
    """Start node.sh on a run directory; Ray gets two seconds to end."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    run_dir, attempt = tmp_path / "run", tmp_path / "attempt"
    (run_dir / "job").mkdir(parents=True)
    attempt.mkdir()
    (run_dir / ".lock").touch()
    (run_dir / "job" / "attempt").write_text(str(attempt))
    (run_dir / "job" / "setup.sh").touch()
    (run_dir / "job" / "settings").write_text("SEEN=a b\0")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    script = tmp_path / "node.sh"
    script.write_text(NODE.read_text().replace("drain=10 ", "drain=2 "))
    started = []

    def start(run_seconds: float, nodes_seconds: float = 0) -> subprocess.Popen:
        environment = os.environ | {
            "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "1",
            "SLURM_JOB_ID": "7", "FP8_NEMO_CODE": str(tmp_path), "FP8_NEMO_PYTHON": str(python),
            "FP8_NEMO_JOIN_TIMEOUT": "5", "FP8_NEMO_PREFLIGHT": "0",
            "CHILD": str(tmp_path / "child"), "RAY": str(tmp_path / "ray"),
            "RUN_SECONDS": str(run_seconds), "NODES_SECONDS": str(nodes_seconds),
            "STARTED": str(tmp_path / "started"),
        }  # fmt: skip
        command = ["bash", str(script), str(run_dir), str(attempt), "n1"]
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize(("processors", "apart"), [(2, 16), (8, 13), (224, 1), (1000, 1)])
def test_nodes_that_share_a_host_draw_their_workers_ports_from_their_own(processors, apart):
    choice = NODE.read_text().partition("\nstage=")[0] + '\necho "$slot $worker_port $workers"'
    pools = {}
    for job, rank in itertools.product(range(8), range(2)):
        environment = os.environ | {"SLURM_JOB_ID": str(job), "SLURM_NODEID": str(rank)}
        environment |= {"SLURM_CPUS_ON_NODE": str(processors)}
        done = subprocess.run(["bash", "-c", choice], env=environment, capture_output=True)
        slot, first, count = map(int, done.stdout.split())
        pools[slot] = range(first, first + count)
    assert all(pool[0] >= 2000 and pool[-1] <= 2999 for pool in pools.values())
    assert all(len(pool) >= min(processors + 60, 1000) for pool in pools.values())
    # A slot whose ports somebody has on this host moves on, so some slots may be missing.
    drawn = [port for slot in range(apart) for port in pools.get(slot, ())]
    assert len(drawn) == len(set(drawn))


def test_a_node_on_which_every_port_is_taken_says_so_and_starts_nothing(node, tmp_path):
    with contextlib.ExitStack() as open_until_the_end:
        for slot in range(0, 16, 2):  # those of a first node
            taken = open_until_the_end.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # somebody else's: in use as well
                taken.bind(("127.0.0.1", 1200 + 12 * slot + 7))
                taken.listen()
        process = node(0)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and not (tmp_path / "ray").exists()
    assert "looking for free ports (1200 to 1391 are in use, `ss -ltnp` says by whom) failed" in out


def appears(file: Path) -> None:
    until = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} never came"
        time.sleep(0.1)


def ends(number: Path) -> bool:
    """Whether a process is gone within five seconds: a killed one takes a moment to die."""
    stat = Path(f"/proc/{number.read_text().strip()}/stat")
    for _ in range(50):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_run_that_fails_ends_the_node_with_its_code_though_ray_hears_no_term(node, tmp_path):
    process = node(0)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "Ray did not end within 2 seconds, and is killed" in out
    assert "the run failed with code 3" in (tmp_path / "attempt" / "failed-n1").read_text()
    assert ends(tmp_path / "ray") and ends(tmp_path / "child")


def test_what_setup_sets_stays_its_own(node, tmp_path):
    names = "port=1 rank=7 me=x nodes=none cpus=none attempt=/nowhere stage=none"
    (tmp_path / "run" / "job" / "setup.sh").write_text(f"set -euo pipefail\n{names}\n")
    process = node(0)
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert (tmp_path / "attempt" / "code").read_text() == "3\n"
    assert "n1: the run failed with code 3" in (tmp_path / "attempt" / "failed-n1").read_text()
    assert ends(tmp_path / "ray") and ends(tmp_path / "child")


def test_a_term_to_all_as_slurm_and_timeout_send_it_ends_the_node(node, tmp_path):
    process = node(600)
    appears(tmp_path / "started")
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert (tmp_path / "attempt" / "ended").exists()
    assert ends(tmp_path / "ray") and ends(tmp_path / "child")


def test_a_run_does_not_begin_after_slurm_has_ended_the_step(node, tmp_path):
    process = node(600, nodes_seconds=3)
    appears(tmp_path / "ray")
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and not (tmp_path / "started").exists()
    assert not list((tmp_path / "attempt").glob("failed-*"))  # so that the job may go on


def test_a_second_term_while_ray_ends_leaves_nothing_behind(node, tmp_path):
    process = node(0)
    appears(tmp_path / "attempt" / "failed-n1")
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert ends(tmp_path / "ray") and ends(tmp_path / "child")
