"""What a run learns from: digests of its starting weights and problems, held against its first.

A run that goes on with another model in the same folder, or other lines in the same file, would
show one curve of two experiments; and runs are compared by precision only where these are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8_nemo.recipe.model_dir import model_path, weights_digest
from fp8_nemo.recipe.options import Recipe
from fp8_nemo.recipe.problems import problems_digest
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.run_dir import began_with


def starting_point(recipe: Recipe, path: Path) -> dict[str, str]:
    """Digests for `environment.json`: as the run began, where it goes on.

    Args:
        recipe: of the run.
        path: its directory.

    Raises:
        RunDirError: they are others now, and `cluster.other_versions` is not `allow`.
        OSError: a file of the model's or of the problems' cannot be read.
    """
    now, began = dict(_now(recipe)), began_with(path)
    for name, digest in now.items():
        if began.get(name, digest) != digest and recipe.cluster.other_versions == "refuse":
            raise RunDirError(
                f"{path}: began with {name} {began[name]}, here are {digest}; put back what was "
                "there, give the run other outputs, or set cluster.other_versions=allow"
            )
    return now | {name: began[name] for name in now if name in began}


def _now(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Of what lies in files: a hub's model or data may not be here before NeMo RL fetches it."""
    if not recipe.model.hub_id:
        yield "weights", weights_digest(model_path(recipe.model))
    if not recipe.data.is_on_hub:
        yield "problems", problems_digest(recipe.data, recipe.seed)
