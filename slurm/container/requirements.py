"""Write the packages of NeMo RL's environments that a registry has: `requirements.py CLONE FOLDER`.

FOLDER gets driver.txt, vllm.txt, policy.txt and overrides.txt, in the words of CLONE's
pyproject.toml. What NeMo RL builds from git or from its submodules is left out.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

BRIDGE = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
NOT_ON_LINUX = "; sys_platform != 'linux'"
"""What a version is for where NeMo RL has no wheel of its own; a registry has that version."""


def main(clone: Path, folder: Path) -> None:
    """Write the four files."""
    nemo, bridge = _project(clone), _project(clone / BRIDGE)
    project, uv = nemo["project"], nemo["tool"]["uv"]
    extras = project["optional-dependencies"]
    built = {*uv["no-build-isolation-package"], *uv["sources"], "megatron-core"}
    left = built - {"torch", "torchvision", "triton", "nvidia-modelopt"}  # a registry has these
    base = [*_kept(project["dependencies"], left)]
    policy = [*extras["mcore"], *extras["modelopt"], *bridge["project"]["dependencies"]]
    files = {
        "driver": base,
        "vllm": [*base, *_kept(extras["vllm"], left)],
        "policy": [*base, *_kept(policy, left)],
        "overrides": _kept(uv["override-dependencies"], left),
    }
    for name, lines in files.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def _project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def _kept(requirements: Iterable[str], left: set[str]) -> Iterator[str]:
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0] not in left and " @ " not in requirement:
            yield requirement.partition(NOT_ON_LINUX)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
