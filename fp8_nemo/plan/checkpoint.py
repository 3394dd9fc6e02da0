"""Hold the tensors of a checkpoint against those that a plan counts, sends and proves.

A `config.json` may say less than the weights: a bias elsewhere, a layer more. Their headers are
read before anything is queued, since a refit would stop at the first name that is not the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8_nemo.glue.wire import named_shapes
from fp8_nemo.recipe.checks import Mistake
from fp8_nemo.recipe.model_dir import tensor_shapes
from fp8_nemo.recipe.options import Model, Shape

HEAD = "lm_head.weight"


def checkpoint_mistakes(model: Model) -> Iterator[Mistake]:
    """Yield what the weights of a model with `shape_from=config` have otherwise than its shape."""
    if model.shape_from is None:
        return
    key, where = ("model.path", model.path) if model.path else ("model.hf_id", model.hf_id)
    try:
        found = tensor_shapes(model)
    except ValueError as error:
        yield Mistake(key, where, str(error))
        return
    if differences := list(tensor_differences(model.shape, found)):
        more = f"; and {len(differences) - 1} more" if len(differences) > 1 else ""
        kind = f"no {model.shape.family} of its config.json's numbers, as driven here"
        yield Mistake(key, where, f"is {kind}: {differences[0]}{more}")


def tensor_differences(shape: Shape, found: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield each tensor that a model of this shape lacks, has too many, or has in another shape.

    Args:
        shape: that the plan counts with.
        found: the checkpoint's tensors. One that ties its embedding may hold the head too.
    """
    wanted = named_shapes(shape)
    for name, size in wanted.items():
        if name not in found:
            yield f"it lacks {name}"
        elif found[name] != size:
            yield f"{name} is {list(found[name])}, not {list(size)}"
    for name in found.keys() - wanted.keys() - ({HEAD} if shape.tied else set()):
        yield f"it holds {name}"
