"""SIGKILL at random moments: the same line again ends as if nothing had been, and leaves nothing.

Runs from the making of their directory on, conversions, and comparisons with their pages. In
`make test` twenty kills, in `make test-long` a hundred of each.
"""

import random
import shutil
from pathlib import Path

import pytest

from fp8_nemo.recipe.model_dir import SHIPPED
from tests.conftest import SMALL
from tests.search.children import Child, trained, tree, undisturbed, verb

RUN = [
    *SMALL,
    *("precision=fp8-kv-attn", "grpo.steps=8", "grpo.checkpoint_every=2"),
    *("grpo.validate_every=3", "grpo.max_new_tokens=3", "grpo.prompts_per_step=2"),
]
OF_AN_ATTEMPT = ("log/", "environment.json", ".lock")


def killed(kills: int, seed: int, output: Path, target: Path, call, *arguments) -> None:
    """Start a call again and again, kill it `kills` times, and let it come to its end at last.

    Every fourth dies at any time, the others before a change of a file or folder, drawn from as many
    parts of all changes. Where it came to its end before its last kill, what it made is deleted.

    Args:
        kills: SIGKILLs that met a living process.
        seed: of the moments.
        output: file of what it prints.
        target: what it makes.
        call: with its arguments, as for `Child`.
    """
    draw, done = random.Random(seed), 0
    seconds, changes = undisturbed(output, call, *arguments)
    shutil.rmtree(target)
    while done < kills:
        part = draw.uniform(done, done + 1) / kills
        at = max(1, round(part * changes)) if done % 4 else None
        child = Child(output, call, *arguments, dies_at=at)
        if child.kill(600 if at else draw.uniform(0, seconds)):
            done += 1
            continue
        assert child.end() == 0, child.said
        shutil.rmtree(target)
    for _ in range(2):  # a kill may have come after all was done, and left something
        undisturbed(output, call, *arguments)


def runs(tmp_path: Path, kills: int, seed: int) -> None:
    outputs, words = tmp_path / "outputs", [*RUN, f"seed={seed}", f"outputs={tmp_path}/outputs"]
    undisturbed(tmp_path / "output", trained, *words)
    whole = tree(outputs, OF_AN_ATTEMPT)
    killed(kills, seed, tmp_path / "output", outputs, trained, *words)
    assert tree(outputs, OF_AN_ATTEMPT) == whole


def conversions(tmp_path: Path, kills: int, seed: int) -> None:
    target = tmp_path / "fp8"
    words = ["quantize_checkpoint", str(SHIPPED / "tiny-qwen3-moe"), str(target)]
    undisturbed(tmp_path / "output", verb, *words)
    whole = tree(target)
    killed(kills, seed, tmp_path / "output", target, verb, *words)
    assert tree(target) == whole
    assert {path.name for path in tmp_path.iterdir()} == {"fp8", "output", "output.changes"}


def comparisons(tmp_path: Path, kills: int, seed: int) -> None:
    outputs, words = tmp_path / "outputs", ["compare", f"{tmp_path}/outputs", "--html"]
    for precision in ("bf16", "fp8-linear"):
        line = [*RUN, f"precision={precision}", f"outputs={outputs}"]
        undisturbed(tmp_path / "output", trained, *line)
    undisturbed(tmp_path / "output", verb, *words)
    whole = tree(outputs)
    killed(kills, seed, tmp_path / "output", outputs / "report", verb, *words)
    assert tree(outputs) == whole


KILLED = {"runs": runs, "conversions": conversions, "comparisons": comparisons}


@pytest.mark.parametrize(("what", "kills"), [("runs", 8), ("conversions", 8), ("comparisons", 4)])
def test_after_twenty_kills_everything_is_as_without_any(what, kills, tmp_path):
    KILLED[what](tmp_path, kills, seed=kills)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("what", KILLED)
def test_after_a_hundred_kills_of_each_everything_is_as_without_any(what, part, tmp_path):
    KILLED[what](tmp_path, 10, seed=100 + part)
