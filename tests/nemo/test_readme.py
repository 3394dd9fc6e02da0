"""The example of nemo README.md, run as a reader would run it."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "fp8_nemo" / "nemo" / "README.md"


def test_the_example_runs():
    [example] = re.findall(r"^```python\n(.+?)^```", README.read_text(), re.M | re.S)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
