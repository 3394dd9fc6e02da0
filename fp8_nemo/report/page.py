"""Show people a comparison: a table in the terminal, a Markdown page, an HTML page.

What stands in both pages, and in `notebooks/04-compare-your-runs.ipynb`, is Markdown from here.
"""

from __future__ import annotations

import html
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from fp8_nemo.correction.health import summary
from fp8_nemo.report.against_bf16 import EQUAL, KL_FORMAT, AgainstBaseline, against_baselines
from fp8_nemo.report.compare import COLUMNS, SECTIONS, Cell, Comparison, given, markdown_table
from fp8_nemo.report.runs import FinishedRun, unpacked
from fp8_nemo.report.verdict import choices
from fp8_nemo.runs.metrics import spans, write_whole
from fp8_nemo.runs.run_dir import report_dir
from fp8_nemo.runs.terminal import short_path, table

ABOUT_NUMBERS = (
    "Means over steps, then over seeds; ± is half of the 95% interval over seeds (Student's t), "
    "left out where it rounds to zero. A dash: the run has no such number (yet)."
)
ABOUT_BASELINES = (
    "Differences seed by seed, over the seeds that both cells have and the steps that both runs "
    "have done, with 95% intervals. `equal`: "
    f"the interval of accuracy lies within {EQUAL:g} points of zero. `open`: neither equal "
    "nor different, more seeds would tell. Speed is that of the median step inside NeMo RL, on the "
    "same nodes, hardware and versions. One seed has no interval and gets no word, nor does the "
    "accuracy of a cell of which a seed has not finished."
)


def comparison_table(comparison: Comparison) -> Table:
    """Return the comparison for a terminal; the Markdown page has all columns."""
    columns = [column for column in COLUMNS if column.terminal]
    heads = ["cell", "steps", *(column.name.replace(" ", "\n") for column in columns)]
    rows = [
        [_name(cell), cell.steps, *(cell.show(each, joint="\n") for each in columns)]
        for cell in comparison.cells
    ]
    return table(comparison.title, heads, rows, comparison.notes)


def _name(cell: Cell) -> str:
    """Break a cell's label where names end, with the keys that differ where the names do not."""
    own, *keys = cell.label.split(" ")
    parts = [*re.split(r"(?<=/)", own), *keys]
    return "\n".join(textwrap.fill(part, 19) for part in parts)


def to_markdown(comparison: Comparison, figures: Mapping[str, Iterable[Path]], command: str) -> str:
    """Write the whole comparison as one page.

    Args:
        comparison: what `compare` returned.
        figures: section -> what `figures.save_figures` wrote for it, beside the page.
        command: the line that makes this page again.
    """
    blocks = [f"# {comparison.title}", f"Made by `{command}`."]
    blocks += [choice(comparison), notes(comparison), "## Cells", cells(comparison)]
    blocks += ["## Against BF16", verdicts(comparison)]
    for section in SECTIONS:
        blocks += [f"## {section}", numbers(comparison, section)]
        blocks += [f"![{path.stem}]({path.name})" for path in figures.get(section, ())]
        blocks.append(meanings(section))
    blocks += [ABOUT_NUMBERS, "## Runs", run_table(comparison), "## Health", health(comparison)]
    blocks += ["## Environment", common_environment(comparison)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def write_pages(
    comparison: Comparison, paths: Collection[Path], command: str, *, with_html: bool
) -> Iterator[Path]:
    """Write the pages of a comparison into the folder `report` above its runs; yield each page.

    Args:
        comparison: what `compare` returned for the runs.
        paths: of run directories, or folders of them.
        command: the line that makes the pages again.
        with_html: whether to add the HTML page.

    Raises:
        OSError: there is nowhere to write.
        ModuleNotFoundError: matplotlib, an extra that the table does not need.
    """
    from fp8_nemo.report.figures import save_figures

    above = Path(os.path.commonpath([unpacked(path).resolve() for path in paths]))
    folder = report_dir(short_path(above) if above != Path(above.anchor) else Path())
    figures = save_figures(comparison, folder)
    write_whole(folder / "report.md", to_markdown(comparison, figures, command))
    yield folder / "report.md"
    if with_html:
        from fp8_nemo.report.html.render import to_html

        write_whole(folder / "report.html", to_html(comparison, command))
        yield folder / "report.html"


def choice(comparison: Comparison) -> str:
    """Say what to take for each model, and the lines that would settle what is not settled."""
    blocks = []
    for each in choices(comparison):
        why = " ".join([f"{each.why}.", *each.caveats, each.remedy]).rstrip()
        blocks.append(f"**{escape_markdown(each.headline)}:** {escape_markdown(why)}")
        blocks += ["\n".join(["```bash", *each.commands, "```"])] if each.commands else []
    return "\n\n".join(blocks)


def notes(comparison: Comparison) -> str:
    """Say what a reader must know first, as quotes in Markdown."""
    return "\n\n".join(f"> {escape_markdown(note)}" for note in comparison.notes)


def escape_markdown(text: object) -> str:
    """Return a label, setting or path as text in Markdown, and in the HTML that is made of it.

    A page is made to be sent to others: a tag in somebody's `data.path` must not run there.
    """
    marked = re.sub(r"([*`$\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", str(text))
    return html.escape(marked, quote=False)


def verdicts(comparison: Comparison) -> str:
    """Tell of every cell against its BF16 baseline, of the rule, and of what is not matched."""
    found = against_baselines(comparison)
    if not found:
        return "No FP8 cell here has a BF16 run of the same model beside it."
    heading = ("cell", "baseline", "seeds", "accuracy, points", "accuracy is", "KL",
               "baseline's KL", "health", "step, times as fast", "rollout", "speed is")  # fmt: skip
    blocks = [markdown_table([heading, *map(_against_row, found)]), ABOUT_BASELINES]
    blocks += [
        f"- **{escape_markdown(each.cell)}** is not matched: {escape_markdown(key)}"
        for each in found
        for key in each.unmatched
    ]
    return "\n\n".join(blocks)


def _against_row(found: AgainstBaseline) -> tuple[Any, ...]:
    styles = {
        "accuracy": "+.1f",
        "kl": KL_FORMAT,
        "baseline_kl": KL_FORMAT,
        "step": ".2f",
        "rollout": ".2f",
    }
    texts = {
        name: "-" if getattr(found, name) is None else getattr(found, name).text(style)
        for name, style in styles.items()
    }
    return (
        escape_markdown(found.cell), escape_markdown(found.baseline), found.seeds,
        texts["accuracy"], found.accuracy_word, texts["kl"], texts["baseline_kl"], found.health,
        texts["step"], texts["rollout"], found.speed_word,
    )  # fmt: skip


def cells(comparison: Comparison) -> str:
    """List each cell's precision and correction: its name does not say what a line has changed."""
    lines = []
    for cell in comparison.cells:
        recipe = cell.runs[0].recipe
        parts = given(recipe.precision) or "BF16", given(recipe.correction) or "no correction"
        lines.append(f"- **{escape_markdown(cell.label)}**: {escape_markdown('; '.join(parts))}")
    return "\n".join(lines)


def numbers(comparison: Comparison, section: str) -> str:
    """Return a section's columns of every cell, as a table in Markdown."""
    columns = SECTIONS[section]
    heading = ("cell", "seeds", "steps", *(column.name for column in columns))
    rows = [
        (escape_markdown(cell.label), cell.seeds, cell.steps, *map(cell.show, columns))
        for cell in comparison.cells
    ]
    return markdown_table([heading, *rows])


def meanings(section: str) -> str:
    """Explain a section's columns."""
    return "\n".join(f"- **{column.name}**: {column.meaning}" for column in SECTIONS[section])


def run_table(comparison: Comparison) -> str:
    """List every run and how far it came."""
    runs = [
        (escape_markdown(run.path), run.steps, run.recipe.grpo.steps, _state(run))
        for run in comparison.runs
    ]
    return markdown_table([("run", "steps", "of", "state"), *runs])


def _state(run: FinishedRun) -> str:
    return f"{run.state}, without step {spans(run.holes)}" if run.holes else run.state


def health(comparison: Comparison) -> str:
    """Sum up the health of each run that was not always healthy."""
    lines = [
        f"- {escape_markdown(run.path)}: {escape_markdown(found)}"
        for run in comparison.runs
        if (found := summary(run.rows, run.recipe.glue.verify))
    ]
    if not any(run.steps for run in comparison.runs):
        return "No step was done."
    return "\n".join(lines) or "No step was other than healthy."


def common_environment(comparison: Comparison) -> str:
    """List what all runs that recorded it ran on; what differs is in the notes."""
    recorded = [run.environment.items() for run in comparison.runs if run.environment]
    common = [pair for pair in (recorded or [()])[0] if all(pair in other for other in recorded)]
    lines = [f"- {key}: {escape_markdown(value)}" for key, value in common]
    return "\n".join(lines) or "Not recorded."
