"""What vLLM's processes load of this package: few modules, and none that they may lack."""

import subprocess
import sys

LOADED = [
    "fp8_nemo",
    "fp8_nemo.glue",
    "fp8_nemo.glue.destination",
    "fp8_nemo.glue.digest",
    "fp8_nemo.glue.ledger",
    "fp8_nemo.glue.manifest",
    "fp8_nemo.glue.quantize",
    "fp8_nemo.glue.recalibrate",
    "fp8_nemo.glue.refit",
    "fp8_nemo.glue.wire",
    "fp8_nemo.nemo",
    "fp8_nemo.nemo.aligned",
    "fp8_nemo.nemo.decode",
    "fp8_nemo.nemo.engine_memory",
    "fp8_nemo.nemo.marlin",
    "fp8_nemo.nemo.marlin.layout",
    "fp8_nemo.nemo.marlin.staging",
    "fp8_nemo.nemo.receiver",
    "fp8_nemo.nemo.worker_settings",
    "fp8_nemo.recipe",
    "fp8_nemo.recipe.options",
    "fp8_nemo.recipe.options.cluster",
    "fp8_nemo.recipe.options.correction",
    "fp8_nemo.recipe.options.fields",
    "fp8_nemo.recipe.options.model",
    "fp8_nemo.recipe.options.precision",
    "fp8_nemo.recipe.options.recipe",
    "fp8_nemo.recipe.options.training",
    "fp8_nemo.recipe.plain",
]
NOT_LOADED = ("hydra", "omegaconf", "rich", "yaml")
PROGRAM = f"""
import sys
import fp8_nemo.nemo.receiver
ours = [name for name in sys.modules if name.split(".")[0] == "fp8_nemo"]
print(*sorted(ours), *(name for name in {NOT_LOADED} if name in sys.modules))
"""


def test_vllms_plugin_loads_these_modules_and_no_library_of_the_command_line():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (found.stdout.split(), found.stderr) == (LOADED, "")
