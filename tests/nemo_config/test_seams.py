"""Every line of NeMo RL, vLLM and Megatron that the package names stands where it says."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from fp8_nemo.nemo_config.seams import BRIDGE, MAIN, MEGATRON, SEAMS, V0_7_0, VLLM
from fp8_nemo.nemo_config.versions import Source

PACKAGE = Path(__file__).parents[2]
NUMBERED = re.compile(r"\w\.(?:py|cuh|cu):\d")


def folder_of(project, file):
    """Where a project's file lies here; skips where it does not, or in another version."""
    if project in (MAIN, V0_7_0):
        root = os.environ.get("NEMO_RL_ROOT")
        if root is None:
            pytest.skip("NEMO_RL_ROOT: no checkout of NeMo RL")
        version = Source(Path(root)).vllm
        if (version == "0.25.1") != (project == MAIN):
            pytest.skip(f"{root} is another version than {project}")
        return Path(root)
    name = {VLLM: "vllm", MEGATRON: "megatron", BRIDGE: "megatron"}[project]
    spec = importlib.util.find_spec(name)  # `megatron` may be two projects' folders
    folders = [Path(each).parent for each in (spec and spec.submodule_search_locations) or ()]
    here = next((folder for folder in folders if (folder / file).is_file()), None)
    return here or pytest.skip(f"{project} is not here")


@pytest.mark.parametrize("key", SEAMS)
def test_a_seam_is_on_the_line_that_is_named(key):
    seam = SEAMS[key]
    lines = (folder_of(seam.of, seam.file) / seam.file).read_text().splitlines()
    for number in seam.lines:
        assert seam.text and seam.text in lines[number - 1], (key, number)


def test_no_other_file_of_the_package_names_a_line_upstream():
    files = [*PACKAGE.glob("fp8_nemo/**/*.py"), *PACKAGE.glob("recipes/*.py")]
    named = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if NUMBERED.search(line) and path.name != "seams.py"
    ]
    assert named == []


def test_a_seam_reads_as_file_and_lines():
    assert str(SEAMS["gpus-per-copy"]) == "lm_policy.py:226,235"
    assert SEAMS["one-stage"].path == "nemo_rl/algorithms/grpo.py:1338"
