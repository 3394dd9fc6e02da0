"""Write the packages of NeMo RL's environments that a registry has: `requirements.py CLONE FOLDER`.

FOLDER gets driver.txt, vllm.txt, policy.txt and overrides.txt, in the words of CLONE's
pyproject.toml, and constraints.txt, of its uv.lock. What NeMo RL builds from git or from its
submodules is left out.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

BRIDGE = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
PYPI = "pypi.org"
NOT_ON_LINUX = "; sys_platform != 'linux'"
"""What a version is for where NeMo RL has no wheel of its own; a registry has that version."""


def main(clone: Path, folder: Path) -> None:
    """Write the five files."""
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
        "constraints": _locked(tomllib.loads((clone / "uv.lock").read_text())["package"]),
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


def _locked(packages: Iterable[dict]) -> Iterator[str]:
    """Yield the version of each package of a registry; of several, for several extras, the last."""
    found = {}
    for package in packages:
        of_pypi = PYPI in package["source"].get("registry", "")
        found.setdefault(package["name"], []).append(package["version"] if of_pypi else None)
    for name, versions in found.items():
        if None in versions:
            continue
        last = max(versions, key=lambda version: [*map(int, re.findall(r"\d+", version))])
        yield f"{name}{'==' if len(versions) == 1 else '<='}{last}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
