"""The table of metrics is what runs write, and what docs/metrics.md says."""

import ast
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.correction.metrics import METRICS

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_tables_rendering():
    command = [sys.executable, "-m", "fp8_nemo.correction.metrics"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (ROOT / "docs" / "metrics.md").read_text() == made.stdout


@pytest.mark.parametrize("archive", ["runs", "study/nemo"])
def test_every_key_that_real_runs_wrote_is_in_the_table_with_its_unit(archive):
    packed = (ROOT / "benchmarks" / "results" / f"{archive}.jsonl.gz").read_bytes()
    runs = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    written = {key for run in runs for row in run["rows"] for key in row}
    assert {"mismatch/kl", "time/step", "refit/bytes"} <= written <= METRICS.keys()
    assert all(metric.unit and metric.meaning for metric in METRICS.values())


KINDS = sorted({key.partition("/")[0] for key in METRICS if "/" in key})
KEY = re.compile(rf"({'|'.join(KINDS)})/[a-z][a-z0-9_]*")


def test_every_key_in_the_code_is_in_the_table():
    """A key that is written or read under a name of its own would be lost in silence."""
    found = {
        (node.value, str(path.relative_to(ROOT)))
        for path in (ROOT / "fp8_nemo").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if KEY.fullmatch(node.value)
    }
    assert len(found) > 50
    assert [each for each in sorted(found) if each[0] not in METRICS] == []
