"""The HTML page of a comparison: everything inside, readable in a real browser, small or wide."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fp8_nemo.recipes.compare import main

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "runs.jsonl.gz"
CHROMIUM = shutil.which("chromium")
PROBE = """<script>document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth, window: innerWidth,
  figures: [...document.images].map(each => [each.naturalWidth, each.width, each.alt]),
  tables: [...document.querySelectorAll("table")].map(each => each.getBoundingClientRect().right),
  text: Math.min(...[...document.querySelectorAll("p, td, li")].map(
    each => parseFloat(getComputedStyle(each).fontSize))),
})</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Made once, of the runs that the repository keeps."""
    folder = tmp_path_factory.mktemp("compared")
    shutil.copy(RUNS, folder / "runs.jsonl.gz")
    assert main([str(folder / "runs"), "--html"]) == 0
    return folder / "runs" / "report" / "report.html"


def test_the_page_has_everything_inside_and_no_code(page):
    text = page.read_text()
    assert text.count('src="data:image/png;base64,') == text.count("<img") == 3
    assert not re.findall(r"<script|https?://|<link[^>]*(?!href=\"data:)stylesheet", text)
    assert "Against BF16" in text and "accuracy is" in text and "find_runs(" not in text
    assert "<title>tiny-llama, local backend</title>" in text


def test_the_notebook_beside_it_was_executed_for_these_runs(page):
    content = json.loads((page.parent / "report.ipynb").read_text())
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert any(str(page.parents[1]) in "".join(cell["source"]) for cell in code)


def test_a_cell_that_fails_is_one_line(page, tmp_path, monkeypatch, capsys):
    broken = json.loads((page.parent / "report.ipynb").read_text())
    next(c for c in broken["cells"] if c["cell_type"] == "code")["source"] = ["1 / 0"]
    (tmp_path / "broken.ipynb").write_text(json.dumps(broken))
    monkeypatch.setattr("fp8_nemo.report.page.NOTEBOOK", tmp_path / "broken.ipynb")
    shutil.copy(RUNS, tmp_path / "runs.jsonl.gz")
    assert main([str(tmp_path / "runs"), "--html"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the report cannot be written: " in said and "ZeroDivisionError: division by" in said


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_it_without_an_error_at_any_width(page, width, tmp_path):
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    assert CHROMIUM
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path}/c", f"--window-size={width},2000", "--dump-dom"]
    command = [CHROMIUM, *options, f"file://{probed}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert found
    seen = json.loads(found[1].replace("&amp;", "&").replace("&quot;", '"'))
    assert seen["wide"] <= seen["window"], "the page itself scrolls sideways"
    assert all(right <= seen["window"] for right in seen["tables"]), "a table is cut off"
    assert len(seen["figures"]) == 3 and seen["text"] >= 13
    for natural, shown, alternative in seen["figures"]:
        assert natural > 1100 and shown >= 500 and "at every step" in alternative
