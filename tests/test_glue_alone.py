"""The glue's tests pass with torch, NumPy and pytest alone: no other package of ours is needed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import OF_ALL_PACKAGES

ROOT = Path(__file__).parents[1]
ABSENT = ("hydra", "omegaconf", "yaml", "rich", "transformers", "safetensors", "nemo_rl", "vllm")
PROGRAM = f"""
import sys
sys.modules |= dict.fromkeys({ABSENT})
import pytest
options = ["-q", "-p", "no:cacheprovider", "--rootdir", "tests/glue", "--confcutdir", "tests/glue"]
options += [f"--ignore=tests/glue/{{name}}" for name in {OF_ALL_PACKAGES}]
sys.exit(pytest.main([*options, "tests/glue"]))
"""


def test_the_tests_of_the_glue_pass_where_nothing_but_torch_numpy_and_pytest_can_be_imported():
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, env=alone
    )
    assert done.returncode == 0, done.stdout[-3000:]
