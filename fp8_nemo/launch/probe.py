"""Print what one interpreter has installed, as JSON: `PYTHON -P probe.py`.

It imports the standard library alone, because it runs under the interpreters of NeMo RL's workers,
where this package need not be installed.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata

PACKAGES = (
    *("torch", "vllm", "ray", "nemo-rl", "megatron-core", "transformers"),
    *("transformer-engine", "transformer-engine-torch", "fp8-nemo"),
)


def main() -> None:
    """Print the Python version, the versions of `PACKAGES`, and vLLM's plugins."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    plugins = [each.name for each in metadata.entry_points(group="vllm.general_plugins")]
    content = {"python": platform.python_version(), "versions": versions, "plugins": plugins}
    json.dump(content, sys.stdout)


if __name__ == "__main__":
    main()
