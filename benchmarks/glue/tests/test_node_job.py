"""The job of a node without Slurm, as far as a machine without NeMo RL goes."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "node_job.sh"


def test_what_the_script_imports_is_there():
    """The rest starts Ray on a GPU."""
    [program] = re.findall(r"<<'PYTHON'\n(.+?)^PYTHON$", SCRIPT.read_text(), re.M | re.S)
    imports = [line for line in program.splitlines() if re.match(r"from|import", line)]
    command = [sys.executable, "-c", "\n".join(imports)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert len(imports) > 5 and (done.returncode, done.stderr) == (0, "")
