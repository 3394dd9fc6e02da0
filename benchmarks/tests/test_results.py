"""Every results file says where it comes from, stands in the list, and becomes tables."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import render_results

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_every_results_file_has_a_line_in_the_list_and_a_part_of_the_page():
    folder = ROOT / "benchmarks" / "results"
    listed, page = (folder / "README.md").read_text(), render_results.page(folder)
    files = sorted(path.name for path in folder.rglob("*.json*"))
    assert [name for name in files if f"`{name}`" not in listed] == []
    assert [file.name for file in RESULTS if file.name not in page] == []


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_names_its_command_its_machine_and_its_torch(file):
    content = json.loads(file.read_text())
    assert content["command"].startswith(("python ", "make ", "benchmarks/"))
    line = render_results.measured_on(content)
    assert "None" not in line and "{" not in line and re.search(r"torch \d", line), line
    assert not re.findall(r"/(?:work|srv|root|home|tmp)/", file.read_text()), "a machine's path"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"a": 1.23456, "b": {"c": 2000}}], [("x", [{"a": 1.23456, "b c": 2000}])]),
        ({"m": {"k": 1}, "n": {"k": 2}}, [("x", [{"": "m", "k": 1}, {"": "n", "k": 2}])]),
        ({"m": 1.0}, [("x", [{"": "m", "value": 1.0}])]),
        ([{"rounds": [1, 2], "median": 3}], [("x", [{"median": 3}])]),
        (
            [{"rows": 768, "seconds": {"median": 2.0, "repetitions": [2.0]}}],
            [("x", [{"rows": 768, "seconds median": 2.0}])],
        ),
        ({"verl": {"commit": "a", "rows": [{"v": 1}]}}, [("x, verl", [{"v": 1}])]),
        (["one"], [("x", [{"x": "one"}])]),
        ([], []),
    ],
)
def test_whatever_reads_as_a_table_becomes_one(value, expected):
    assert list(render_results.tables("x", value)) == expected


def test_numbers_have_three_digits_and_thousands_apart():
    row = [{"a": 0.000123456, "b": 16060522880, "c": None, "d": "p|q", "e": True}, {"f": 0.9996}]
    assert render_results.table(row).splitlines() == [
        "| a | b | c | d | e | f |",
        "| --- | --- | --- | --- | --- | --- |",
        r"| 0.000123 | 16,060,522,880 |  | p\|q | True |  |",
        "|  |  |  |  |  | 0.9996 |",
    ]


def test_a_run_is_a_row_of_its_means():
    rows = [{"step": 0, "val/accuracy": 0.5}, {"step": 1, "mismatch/kl": 0.2, "val/accuracy": 0.75}]
    found = render_results.of_run({"cell": "c", "rows": rows})
    assert found["mismatch/kl"] == 0.2 and found["last val/accuracy"] == 0.75 and found["rows"] == 2
    assert found["reward/mean"] is None
