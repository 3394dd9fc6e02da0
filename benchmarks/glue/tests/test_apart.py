"""Runs side by side on one machine meet neither each other's ports nor files."""

import subprocess
from pathlib import Path

import pytest

APART = Path(__file__).parents[1] / "apart.sh"
LISTENS = """
import pathlib, socket, sys
server = socket.create_server(("127.0.0.1", 7000))
assert not list(pathlib.Path("/tmp").iterdir())
pathlib.Path("/tmp/mine").touch()
print("up", flush=True)
sys.stdin.readline()
"""


def test_two_runs_listen_on_one_port_and_see_an_empty_tmp():
    allowed = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"])
    if allowed.returncode:
        pytest.skip("namespaces need root")
    line = [APART, "python3", "-c", LISTENS]
    both = [
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
        for _ in range(2)
    ]
    said = [run.stdout.readline().strip() for run in both if run.stdout]
    codes = [run.communicate("\n", timeout=60) and run.returncode for run in both]
    assert said == ["up", "up"]
    assert codes == [0, 0]
