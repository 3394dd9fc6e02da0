"""Check without torch, before a directory is made, what the local backend needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from fp8_nemo.plan.model import position_mistakes
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import damage, known_positions, model_mistakes, model_path
from fp8_nemo.recipe.own.reward import reward_problems
from fp8_nemo.recipe.problems import (
    TRAIN_FILE,
    VALIDATION_FILE,
    DataError,
    load_problems,
    read_numbered,
)
from fp8_nemo.runs.run_dir import checkpoints, run_path

NEEDED_PACKAGES = ("torch", "transformers", "safetensors", "jinja2")
"""What the extra `local` brings."""


def problems_with(plan: Plan) -> list[str]:
    """Return one line for each thing that would stop this plan after it has started."""
    here = plan.recipe.cluster.kind == "here" or "RAY_ADDRESS" in os.environ  # no login node
    lines = _not_installed(NEEDED_PACKAGES) if here else []
    found = [*map(str, model_mistakes(plan.recipe, pads=True))]
    lines += [*found, *_checkpoint_mistakes(run_path(plan))]
    try:
        problems = load_problems(plan.recipe.data, plan.recipe.seed)
        lines += map(str, position_mistakes(plan.settled))
        lines += () if found or lines else _long_prompts(plan)
    except DataError as error:
        return [*lines, str(error)]
    lines += reward_problems(plan.recipe.data, problems.train[0])
    return lines


def _long_prompts(plan: Plan) -> Iterator[str]:
    """Yield each file whose prompts have, with their answers, no place in the model's positions."""
    folder, data = model_path(plan.recipe.model), plan.recipe.data
    most, answer = known_positions(plan.recipe), plan.settled.response_tokens
    if most is None:
        return
    for file in (TRAIN_FILE, VALIDATION_FILE) if not data.is_made else ():
        path = Path(data.path or "") / file
        if lines := _longer_than(path, folder, most - answer):
            more = f", and {len(lines) - 1} lines more" if len(lines) > 1 else ""
            number, tokens = lines[0]
            yield (
                f"{path}:{number}: {tokens:,} tokens, with grpo.max_new_tokens={answer} more than "
                f"the model's {most:,} positions{more}; take it out, or shorten it"
            )


def _longer_than(path: Path, model: Path, room: int) -> list[tuple[int, int]]:
    """Return line and tokens of each problem of a file that has more tokens than there is room.

    A text has at most as many tokens as bytes, so only long ones are given to the tokenizer. The
    chat's own tokens are not counted.
    """
    problems = read_numbered(path).items()
    longer = {n: each.input for n, each in problems if len(each.input.encode()) > room}
    if not longer or not find_spec("tokenizers"):  # a login node may have none
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = {number: len(tokenizer.encode(text).ids) for number, text in longer.items()}
    return [each for each in tokens.items() if each[1] > room]


def require(packages: Collection[str] = NEEDED_PACKAGES) -> None:
    """End the process with one line and exit code 2 if a verb's packages are not installed."""
    if lines := _not_installed(packages):
        print(*lines, file=sys.stderr)
        raise SystemExit(2)


def _not_installed(packages: Iterable[str]) -> list[str]:
    """Return one line if this Python lacks one of the packages; none is imported."""
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        return []
    remedy = "pip install 'fp8-nemo[local]', in a clone '.[local]'"
    return [f"{', '.join(missing)}: not installed for {sys.executable}; {remedy}"]


def _checkpoint_mistakes(path: Path) -> Iterator[str]:
    """Yield what is wrong with the checkpoint that a run would go on from."""
    for saved in checkpoints(path)[-1:]:
        for file in saved.glob("*.safetensors"):
            if found := damage(file):
                yield (
                    f"{saved}: {file.name} {found}; delete this folder and the run goes on from "
                    "the checkpoint before it"
                )
