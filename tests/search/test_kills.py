"""SIGKILL at random moments: the same line again ends as if nothing had been, and leaves nothing.

Runs from the making of their directory on, conversions, of runs too, comparisons with their pages.
`make test` twenty kills, in `make test-long` a hundred of each.
"""

import random
import shutil
from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.export.shards import in_shards
from tests.search.children import Child, Dies, frozen, served, trained, tree, undisturbed, verb

RUN = [
    *SMALL,
    *("precision=fp8-kv-attn", "grpo.steps=5", "grpo.checkpoint_every=1"),
    *("grpo.validate_every=3", "grpo.max_new_tokens=3", "grpo.prompts_per_step=2"),
]
OF_AN_ATTEMPT = ("log/", "environment.json", ".lock")


def killed(
    kills: int, seed: int, output: Path, target: Path, call, *arguments, but=OF_AN_ATTEMPT
) -> tuple[dict, list[dict]]:
    """Start a call again and again and kill it `kills` times; return what it makes, and each end.

    Every fourth dies at any time, the others before a change of a file or folder, drawn from as
    many parts of all changes. Once it has come to its end in spite of it, it begins anew.

    Args:
        kills: SIGKILLs that met a living process.
        seed: of the moments.
        output: file of what it prints.
        target: what it makes.
        call: with its arguments, as for `Child`.
        but: as for `tree`.
    """
    draw, done = random.Random(seed), 0
    seconds, changes = undisturbed(output, call, *arguments)
    whole = tree(target, but)

    def ended() -> None:
        """Keep what is there, and see that nothing lies beside it; a kill may have come late."""
        undisturbed(output, call, *arguments)
        ends.append(tree(target, but))
        assert {path.name for path in target.parent.iterdir()} == around
        shutil.rmtree(target)

    around, ends = {path.name for path in target.parent.iterdir()}, list[dict]()
    shutil.rmtree(target)
    while done < kills:
        part = draw.uniform(done, done + 1) / kills
        at = max(1, round(part * changes)) if done % 4 < 3 else None
        child = Child(output, call, *arguments, before=Dies(at))
        if child.kill(600 if at else draw.uniform(0, seconds)):
            done += 1
        else:
            assert child.end() == 0, child.said + child.error
            ended()
    undisturbed(output, call, *arguments)
    ended()
    return whole, ends


def test_a_sweep_killed_before_any_change_that_makes_its_directories_leaves_nothing(tmp_path):
    output, outputs = tmp_path / "output", tmp_path / "outputs"
    words = ["-m", *SMALL, "precision=bf16,fp8-linear", f"outputs={outputs}"]
    _, changes = undisturbed(output, frozen, *words)
    whole = tree(outputs, OF_AN_ATTEMPT)
    assert changes > 12
    for at in range(1, changes + 1, 3):
        shutil.rmtree(outputs)
        assert Child(output, frozen, *words, before=Dies(at)).kill(60)
        undisturbed(output, frozen, *words)
        assert tree(outputs, OF_AN_ATTEMPT) == whole, at


def runs(tmp_path: Path, kills: int, seed: int) -> tuple[dict, list[dict]]:
    words = [*RUN, f"seed={seed}", f"outputs={tmp_path}/outputs"]
    return killed(kills, seed, tmp_path / "output", tmp_path / "outputs", trained, *words)


def conversions(tmp_path: Path, kills: int, seed: int) -> tuple[dict, list[dict]]:
    source = in_shards("tiny-qwen3-moe", tmp_path / "source")
    words = ["quantize_checkpoint", str(source), f"{tmp_path}/fp8"]
    return killed(kills, seed, tmp_path / "output", tmp_path / "fp8", verb, *words)


def comparisons(tmp_path: Path, kills: int, seed: int) -> tuple[dict, list[dict]]:
    for precision in ("bf16", "fp8-linear"):
        line = [word for word in RUN if not word.startswith("precision=")]
        line += [f"precision={precision}", f"outputs={tmp_path}/outputs"]
        undisturbed(tmp_path / "output", trained, *line)
    words, report = ["compare", f"{tmp_path}/outputs"], tmp_path / "outputs" / "report"
    return killed(kills, seed, tmp_path / "output", report, verb, *words)


def exports(tmp_path: Path, kills: int, seed: int) -> tuple[dict, list[dict]]:
    """A run's model is written as a folder in its directory first, and that one converted."""
    line = [word for word in RUN if not word.startswith("precision=")]
    line += ["precision=fp8-linear", f"outputs={tmp_path}/outputs"]
    undisturbed(tmp_path / "output", trained, *line)
    [run] = (tmp_path / "outputs").glob("*/*/*")
    words, but = [str(run), f"{tmp_path}/copy"], (*OF_AN_ATTEMPT, "fp8/quantization.json")
    return killed(kills, seed, tmp_path / "output", tmp_path / "copy", served, *words, but=but)


KILLED = {"runs": runs, "conversions": conversions, "comparisons": comparisons, "exports": exports}


@pytest.mark.parametrize(
    ("what", "kills"), [("runs", 6), ("conversions", 10), ("comparisons", 2), ("exports", 2)]
)
def test_after_twenty_kills_everything_is_as_without_any(what, kills, tmp_path):
    whole, ends = KILLED[what](tmp_path, kills, seed=5)
    assert ends == [whole] * len(ends)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("what", KILLED)
def test_after_a_hundred_kills_of_each_everything_is_as_without_any(what, part, tmp_path):
    whole, ends = KILLED[what](tmp_path, 10, seed=100 + part)
    assert ends == [whole] * len(ends)
