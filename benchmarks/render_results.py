"""Render benchmarks/results as one page: every number with its command, machine and versions.

python -m benchmarks.render_results > docs/results.md

The page is not kept. Repetitions stay in the files; so do rows beyond `MOST`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fp8_nemo.report.compare import markdown_table

HERE = Path(__file__).parent / "results"
MOST = 40
ASIDE = ("command", "commit", "environment", "versions", "hardware", "notes", "what", "colocated")
RAW = (
    "rounds",
    "clocked rounds",
    "repetitions",
    "seconds",
    "seeds",
    "scales",
    "settings",
    "recipe",
    "source",
)
"""Keys whose numbers a table of medians stands for."""
HEAD = """# Measured

Made by `python -m benchmarks.render_results > docs/results.md` from `benchmarks/results/`. Each
section names the command, the machine and the versions; repetitions are in the file. What the
numbers mean is said in [measured.md](research/measured.md)."""


def page(folder: Path) -> str:
    """Return the whole page."""
    files = sorted(folder.glob("*.json"))
    sections = ("\n\n".join(section(file, json.loads(file.read_text()))) for file in files)
    return "\n\n".join([HEAD, *sections]) + "\n"


def section(file: Path, content: dict[str, Any]) -> Iterator[str]:
    """Yield one file: where it comes from, and a table for whatever in it is one."""
    yield f"## {file.stem}"
    yield f"[{file.name}](../benchmarks/results/{file.name}), by `{content['command']}`"
    yield measured_on(content)
    for note in content.get("notes", []):
        yield f"> {note}"
    numbers = {key: value for key, value in content.items() if key not in ASIDE}
    loose = {key: value for key, value in numbers.items() if not isinstance(value, dict | list)}
    if loose:
        yield table([loose])
    for key, value in numbers.items():
        for title, rows in tables(key, value):
            yield f"**{title}**"
            yield table(rows[:MOST])
            if len(rows) > MOST:
                yield f"{len(rows) - MOST} more rows are in the file."


def measured_on(content: Mapping[str, Any]) -> str:
    """Return machine, versions and commit in a line, of the file or of its first run."""
    found = content.get("environment")
    if found is None:
        runs = content.get("runs", content)
        first = next(iter(runs.values() if isinstance(runs, dict) else runs), {})
        found = first.get("environment", content) if isinstance(first, dict) else content
    if isinstance(found.get("hardware"), str):
        hardware, versions = found["hardware"], found["versions"]
    else:
        known = flat(found)  # a run's environment has dotted names
        known = {key.replace(".", " ").removesuffix(" 0"): value for key, value in known.items()}
        cores = f"{known.get('hardware cores')} cores, {known.get('hardware processor')}"
        hardware = str(known.get("hardware gpus") or cores).strip("[]").replace("'", "")
        versions = {name.removeprefix("versions "): value for name, value in known.items()}
    named = [f"{name} {versions[name]}" for name in ("torch", "vllm", "ray") if versions.get(name)]
    commit = content.get("commit") or found.get("commit")
    known_commit = commit not in (None, "null")
    parts = [hardware, *named, f"commit {commit}" if known_commit else "commit not recorded"]
    return "Measured on " + ", ".join(part for part in parts if part) + "."


def tables(title: str, value: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield titles and rows of everything in a value that reads as a table."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        yield (
            title,
            [of_run(each) if isinstance(each.get("rows"), list) else flat(each) for each in value],
        )
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        yield title, [{title: each} for each in value]
    elif isinstance(value, dict) and any(has_tables(each) for each in value.values()):
        if all("rows" in each and isinstance(each["rows"], list) for each in value.values()):
            for name, each in value.items():
                is_run = each["rows"] and "step" in each["rows"][0]
                rows = [{"run": name} | of_run(each)] if is_run else list(map(flat, each["rows"]))
                yield f"{title}, {name}", rows
            return
        for name, each in value.items():
            yield from tables(f"{title}, {name}", each)
    elif isinstance(value, dict) and all(isinstance(each, dict) for each in value.values()):
        yield title, [{"": name} | flat(each) for name, each in value.items()]
    elif isinstance(value, dict):
        yield title, [{"": name} | flat({"value": each}) for name, each in value.items()]


def has_tables(value: Any) -> bool:
    """Return whether a value holds lists of rows of its own, raw repetitions aside."""
    if not isinstance(value, dict):
        return False
    return any(
        isinstance(each, list) and each and isinstance(each[0], dict)
        for key, each in value.items()
        if key not in RAW
    )


def of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's row: what it was, and its means over steps."""
    rows = [row.get("metrics", row) for row in run["rows"]]
    found = {key: run[key] for key in ("cell", "seed", "state") if key in run}
    found["rows"] = len(rows)
    for key in ("mismatch/kl", "mismatch/token_mult_prob_error", "reward/mean"):
        values = [row[key] for row in rows if row.get(key) is not None]
        found[key] = fmean(values) if values else None
    accuracy = [row["val/accuracy"] for row in rows if row.get("val/accuracy") is not None]
    return found | {"last val/accuracy": accuracy[-1] if accuracy else None}


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of plain values: nested ones get a dotted name, raw ones are left out."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key in RAW and not (isinstance(value, dict) and "median" in value):
            continue
        if isinstance(value, dict):
            found |= {f"{key} {name}": each for name, each in flat(value).items()}
        elif isinstance(value, list):
            found |= {f"{key} {number}": each for number, each in enumerate(value)}
        else:
            found[key] = value
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown; a number that a row lacks is empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return markdown_table([columns, *([shown(row.get(key)) for key in columns] for row in rows)])


def shown(value: Any) -> str:
    """Return three digits of a number, thousands apart; what is not quite 1 does not become 1."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("\n", " ")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.7g}" if value != 1 and f"{value:.3g}" == "1" else f"{value:.3g}"


if __name__ == "__main__":
    print(page(HERE), end="")
