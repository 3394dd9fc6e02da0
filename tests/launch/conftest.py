"""Fixtures that start a real Ray, or leave NeMo RL's checkout out."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def answers_with_ray(tmp_path):
    """Run code in a process of its own; return its list `answers`, and what it printed.

    Answers come by a file: Ray's thread prints between a program's lines, and into them.
    """
    pytest.importorskip("ray")

    def run(code):
        file = tmp_path / "answers.json"
        whole = f"import json\nanswers = []\n{code}\njson.dump(answers, open({str(file)!r}, 'w'))"
        words = [sys.executable, "-c", whole]
        for _ in range(2):  # Ray gives itself 30 s to start, which a busy machine may need
            done = subprocess.run(words, capture_output=True, text=True, timeout=180)
            if "The current node timed out during startup" not in done.stderr:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(file.read_text()), done.stdout

    return run


@pytest.fixture
def no_checkout(monkeypatch):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
