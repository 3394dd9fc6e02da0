"""Render a comparison as one HTML page: verdict, a card a cell, one figure; the rest folded.

It has no script and no link to anything outside: one file that can be sent and opened anywhere. Its
style is `style.css`, whose variables color the figures too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from fp8_nemo.report import page
from fp8_nemo.report.against_bf16 import EQUAL, KL_FORMAT, health_of, is_bf16
from fp8_nemo.report.compare import COLUMNS, EMULATION, SECTIONS, Cell, Comparison
from fp8_nemo.report.figures import CURVES, Curve, draw, finding, to_svg
from fp8_nemo.report.verdict import ONE_SEED, OPEN, OUT, PROVEN, UNKNOWN, Choice, Standing, choices

STYLE = Path(__file__).with_name("style.css")
WIDE, NARROW = 6.4, 3.3
"""Inches of a figure's two drawings; the style shows the one whose text is legible."""
LOOKS = {
    PROVEN: ("good", "✓ keeps up"),
    OPEN: ("unsure", "? not decided"),
    ONE_SEED: ("unsure", "? one seed"),
    UNKNOWN: ("unsure", "? cannot be judged"),
    OUT: ("bad", "✗ out"),
}
"""Class and badge of a cell, by its standing."""
HEALTH = {"healthy": ("good", "●"), "watch": ("warn", "▲"), "unstable": ("bad", "✗"), "-": ("", "")}
STRIP = (
    "Bars: accuracy against BF16 with its 95% interval over seeds. Grey: within "
    f"{EQUAL:g} points, which counts as equal."
)
RULE = (
    f"The rule: of the cells whose accuracy is higher than BF16's or equal to it within {EQUAL:g} "
    "points, that were never unstable and whose step is no slower, the fastest is taken. Without "
    "one, the fastest whose accuracy is not shown to be lower is taken for now. One seed proves "
    "nothing. Where no step was timed, better health decides, then fewer bytes, then the smaller "
    "possible loss."
)


def to_html(comparison: Comparison, command: str) -> str:
    """Write the page.

    Args:
        comparison: what `compare` returned.
        command: the line that makes this page again.
    """
    chosen = choices(comparison)
    parts = [_of_model(comparison, choice.model) for choice in chosen]
    title = "; ".join(choice.headline for choice in chosen)
    body = [
        f'<p class="subject">{escape(_subject(comparison))}</p>',
        *map(_verdict, chosen),
        _notes(comparison),
        *(_board(part, choice) for part, choice in zip(parts, chosen, strict=True)),
        '<div class="more">',
        *_folded(comparison, parts, command),
        "</div>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{STYLE.read_text()}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body))
        + "\n</body>\n</html>\n"
    )


def _of_model(comparison: Comparison, model: str) -> Comparison:
    cells = (cell for cell in comparison.cells if cell.runs[0].recipe.model.name == model)
    return Comparison(tuple(cells), comparison.notes)


def _subject(comparison: Comparison) -> str:
    cells, runs = len(comparison.cells), len(comparison.runs)
    return f"{comparison.title}: {runs} runs in {cells} cells"


def _verdict(choice: Choice) -> str:
    look = LOOKS[choice.standings[0].word if choice.standings else UNKNOWN][0]
    lines = [f"<h1>{escape(choice.headline)}</h1>", f'<p class="why">{escape(choice.why)}.</p>']
    lines += [f"<p>{escape(each)}</p>" for each in choice.caveats]
    if choice.commands:
        opened = "" if choice.take else " open"
        code = "".join(f"<pre>{escape(each)}</pre>" for each in choice.commands)
        summary = f"<summary>{escape(choice.remedy)}</summary>"
        lines.append(f"<details{opened}>{summary}{code}</details>")
    elif choice.remedy:
        lines.append(f"<p>{escape(choice.remedy)}</p>")
    return f'<section class="verdict {look}">{"".join(lines)}</section>'


def _notes(comparison: Comparison) -> str:
    """Write what a reader must know, folded; the verdict says that local runs are an emulation."""
    notes = [f"<li>{escape(each)}</li>" for each in comparison.notes if each != EMULATION]
    if not notes:
        return ""
    many = "1 note" if len(notes) == 1 else f"{len(notes)} notes"
    summary = f'<summary class="warn">▲ {many} on these runs</summary>'
    return f"<details>{summary}<ul>{''.join(notes)}</ul></details>"


def _board(part: Comparison, choice: Choice) -> str:
    """Return the cards of a model beside the figure of its accuracy."""
    cards, drawn = "".join(_cards(part, choice)), figure(CURVES[0], part)
    return f'<div class="board"><div class="cards">{cards}</div>{drawn}</div>'


def _cards(part: Comparison, choice: Choice) -> Iterator[str]:
    """Yield a card a cell: the one to take, the others by standing, BF16 last."""
    points = [each.found.accuracy for each in choice.standings]
    ends = [abs(p.mean) + (p.half or 0.0) for p in points if p and math.isfinite(p.mean)]
    scale = 1.1 * max([2 * EQUAL, *ends])
    for each in choice.standings:
        yield _card(each, taken=each.cell.label == choice.take, scale=scale)
    held = [each.cell for each in choice.standings]
    yield from (_plain_card(cell) for cell in part.cells if cell not in held)
    yield f"<p>{STRIP}</p>" if held else ""


def _card(standing: Standing, *, taken: bool, scale: float) -> str:
    found, (look, badge) = standing.found, LOOKS[standing.word]
    if taken:
        badge = "✓ take" if standing.word == PROVEN else "✓ take for now"
    points = found.accuracy.text("+.1f") if found.accuracy else "-"
    speed = "unknown (CPU)" if standing.cell.runs[0].plan.backend == "local" else "unknown"
    if found.step:
        speed = f"{found.step.text('.2f')} times BF16 ({found.speed_word})"
    return (
        f'<article class="card {look}{" taken" * taken}">{_head(standing.cell, look, badge)}'
        f'<p class="big">{points} <small>points vs BF16</small></p>'
        f"{_strip(standing, look, scale)}<p>{escape(standing.reason)}</p>"
        f"{_list([('Speed', speed), *_measured(standing.cell)])}</article>"
    )


def _plain_card(cell: Cell) -> str:
    """Return the card of a cell that is held against nothing: BF16, or FP8 without it."""
    badge = "BF16" if is_bf16(cell) else "no BF16 beside it"
    accuracy = cell.show(next(column for column in COLUMNS if column.name == "last acc."))
    return (
        f'<article class="card plain">{_head(cell, "plain", badge)}'
        f'<p class="big">{accuracy} <small>accuracy</small></p>{_list(_measured(cell))}</article>'
    )


def _head(cell: Cell, look: str, badge: str) -> str:
    label = escape(cell.label)
    return f'<header><h3>{label}</h3><span class="badge {look}">{badge}</span></header>'


def _measured(cell: Cell) -> list[tuple[str, str]]:
    sent, kl, health = cell.numbers["refit /BF16"], cell.numbers["KL"], health_of(cell)
    color, mark = HEALTH[health]
    return [
        ("Bytes a refit", f"{sent.mean:.2f} times BF16" if sent else "-"),
        ("Mismatch", f"KL {kl.text(KL_FORMAT)}" if kl else "-"),
        ("Health", f'<span class="{color}">{mark} {health}</span>'),
        ("Seeds", cell.seeds),
        ("Steps", cell.steps),
    ]


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{text}</dd>' for name, text in rows)}</dl>"


def _strip(standing: Standing, look: str, scale: float) -> str:
    """Draw the interval of a cell's points, between `-scale` and `scale`."""
    points = standing.found.accuracy
    if points is None or not math.isfinite(points.mean):
        return '<div class="strip"></div>'

    def bar(name: str, low: float, high: float) -> str:
        """Return a stretch of the strip, in points, as an element of a class."""
        left, right = (50 + 50 * end / scale for end in (low, high))
        width = f"width:{right - left:.2f}%" if high > low else ""
        return f'<i class="{name}" style="left:{left:.2f}%;{width}"></i>'

    half = points.half or 0.0
    bars = [bar("equal", -EQUAL, EQUAL), bar("zero", 0, 0)]
    bars += [bar("", points.mean - half, points.mean + half)] if half else []
    bars.append(bar("mean", points.mean, points.mean))
    return f'<div class="strip {look}" aria-hidden="true">{"".join(bars)}</div>'


def figure(curve: Curve, comparison: Comparison) -> str:
    """Return a figure under its finding, drawn wide and narrow; empty if nothing can be drawn."""
    drawn = {width: draw(curve, comparison, width) for width in (WIDE, NARROW)}
    elements = [
        to_svg(each, f"{comparison.title} {curve.name} {w}") for w, each in drawn.items() if each
    ]
    if not elements:
        return ""
    title = escape(finding(curve, comparison))
    svg = "".join(elements).replace("<svg", f'<svg role="img" aria-label="{title}"')
    return f"<figure><h2>{title}</h2>{svg}</figure>"


def _folded(comparison: Comparison, parts: Sequence[Comparison], command: str) -> Iterator[str]:
    """Yield what need not be read first; each figure of a model by itself."""
    yield _details("Every cell against BF16", from_markdown(page.verdicts(comparison)))
    for section in SECTIONS:
        curves = [curve for curve in CURVES[1:] if curve.section == section]
        figures = "".join(figure(curve, part) for curve in curves for part in parts)
        numbers, meanings = page.numbers(comparison, section), page.meanings(section)
        yield _details(section, from_markdown(numbers) + figures + from_markdown(meanings))
    runs = f"{page.run_table(comparison)}\n\n{page.health(comparison)}"
    yield _details("Runs and their health", from_markdown(runs))
    where = from_markdown(page.common_environment(comparison))
    settings = from_markdown(page.cells(comparison))
    yield _details("Settings and environment", f'{settings}<div class="columns">{where}</div>')
    how = f"{RULE}\n\n{page.ABOUT_NUMBERS}"
    again = f"<p>This page again:</p><pre>{escape(command)}</pre>"
    yield _details("How to read this page, and make it again", from_markdown(how) + again)


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def from_markdown(text: str) -> str:
    """Turn Markdown into HTML, in which a tag stays text and a wide table scrolls by itself."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = html.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return html.replace("</table>", "</table></div>")
