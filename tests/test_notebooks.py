"""Notebooks run from scratch on what the repository holds, and say what their stored outputs say.

Text must be equal, and numbers within the tolerance that the notebook's metadata states
(`fp8_nemo: {relative, absolute}`); of a figure, that it is there.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
USUAL = {"relative": 0.02, "absolute": 1e-6}  # three digits printed: the last may round elsewhere


def read(path: Path):
    return nbformat.read(path, as_version=4)


def code_of(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell) -> list[tuple[str, str]]:
    """What a cell shows, in order: the kind of each output, and its text."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append((output.name, output.text))
        elif output.output_type == "error":
            found.append(("error", output.evalue))
        else:
            kinds = [kind for kind in output.data if kind != "text/plain"] or ["text/plain"]
            found += [(k, "" if k.startswith("image/") else output.data[k]) for k in sorted(kinds)]
    return found


def differences(stored: str, found: str, relative: float, absolute: float) -> list[str]:
    """The words or numbers of a text that are not the stored ones."""
    if NUMBER.sub("#", stored) != NUMBER.sub("#", found):
        return [f"text: {stored!r} became {found!r}"]
    pairs = zip(NUMBER.findall(stored), NUMBER.findall(found), strict=True)
    numbers = [tuple(float(text.replace(",", "")) for text in pair) for pair in pairs]
    return [
        f"{was} became {now}"
        for was, now in numbers
        if abs(was - now) > max(relative * abs(was), absolute)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_what_this_machine_computes(path):
    stored, fresh = read(path), read(path)
    for cell in code_of(fresh):
        cell.outputs, cell.execution_count = [], None
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(fresh, timeout=240, kernel_name="python3", resources=where).execute()
    tolerance = stored.metadata.get("fp8_nemo", USUAL)
    for old, new in zip(code_of(stored), code_of(fresh), strict=True):
        kinds = [[kind for kind, _ in said(cell)] for cell in (old, new)]
        assert kinds[0] == kinds[1], new.source
        for (_, was), (_, now) in zip(said(old), said(new), strict=True):
            assert not differences(was, now, **tolerance), new.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_defines_nothing_and_stores_no_machine(path):
    notebook = read(path)
    for cell in code_of(notebook):
        lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
        tree = ast.parse("\n".join(lines))
        made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(tree) if isinstance(node, made)], cell.source
        assert cell.metadata.keys() <= {"tags", "jupyter"}, (
            "run `make notebooks`: it stores no time"
        )
        assert {kind for kind, _ in said(cell)} <= {"text/markdown", "image/png"}, cell.source
    assert any("image/png" in dict(said(cell)) for cell in code_of(notebook)), "no picture"
    assert not re.findall(r"/(?:work|srv|root|home|tmp)/", path.read_text()), "a machine's path"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_table_is_empty(path):
    """One that runs out in its heading says nothing, and says it the same whenever it is made."""
    texts = [text for cell in code_of(read(path)) for kind, text in said(cell) if "text" in kind]
    assert not [text for text in texts if re.search(r"\|\s*---\s*\|\s*$", text)]


def test_numbers_are_held_to_the_tolerance_and_words_to_the_letter():
    text = "| fp8-linear | 1,234 | 6.0e-03 ±0.1 | equal |"
    assert not differences(text, text.replace("1,234", "1,240"), 0.01, 0)
    assert differences(text, text.replace("1,234", "1,250"), 0.01, 0) == ["1234.0 became 1250.0"]
    assert differences(text, text.replace("6.0e-03", "6.2e-03"), 0.01, 0)
    assert not differences(text, text.replace("6.0e-03", "6.2e-03"), 0.01, 1e-3)
    assert differences(text, text.replace("equal", "lower"), 0.01, 0)
    assert differences(text, text.replace("| equal |", "|"), 0.01, 0)
