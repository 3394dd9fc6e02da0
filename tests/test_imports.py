"""The import law, by room: a room imports the rooms to its left, never one beside it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAW = (
    "recipe < glue, correction < nemo, nemo_config < plan < runs < local, launch, report < export"
    " < recipes"
)
FLOORS = [floor.split(", ") for floor in LAW.split(" < ")]
ROOMS = [room for floor in FLOORS for room in floor]
FOLDER = {room: ROOT / "fp8_nemo" / room for room in ROOMS} | {"recipes": ROOT / "recipes"}
LEFT_OF = {
    room: {left for floor in FLOORS[:n] for left in floor}
    for n, rooms in enumerate(FLOORS)
    for room in rooms
}
HOST = {"nemo_rl", "vllm", "ray", "megatron"}
MOST_FILES = 9
TORCHLESS_ROOMS = ("recipe", "nemo_config", "plan", "runs", "launch", "report")
TORCHLESS_FILES = ("glue/wire.py", "correction/quantiles.py", "correction/health.py")


def sources(room: str) -> list[Path]:
    return sorted(FOLDER[room].rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_folder_with_code_is_a_room_of_the_law():
    folders = {path.parent.name for path in (ROOT / "fp8_nemo").glob("*/__init__.py")}
    assert folders == set(ROOMS) - {"recipes"}
    assert [path.name for path in (ROOT / "fp8_nemo").glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_to_its_left(room):
    for path in sources(room):
        rooms = {name.split(".")[1] for name in imported(path) if name.startswith("fp8_nemo.")}
        assert rooms & {*ROOMS} <= LEFT_OF[room] | {room}, path


@pytest.mark.parametrize("room", sorted({*ROOMS} - {"nemo", "launch"}))
def test_only_nemo_and_launch_import_the_host(room):
    for path in sources(room):
        assert not {name.split(".")[0] for name in imported(path)} & HOST, path


@pytest.mark.parametrize("room", sorted({*ROOMS} - {"recipes"}))
def test_a_room_holds_nine_files_at_most(room):
    folders = {path.parent for path in sources(room)}
    for folder in folders:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, folder


def test_login_nodes_need_no_torch():
    files = [path for room in TORCHLESS_ROOMS for path in sources(room)]
    files += [ROOT / "fp8_nemo" / name for name in TORCHLESS_FILES]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    modules += ["fp8_nemo.recipes.plan", "fp8_nemo.recipes.grpo"]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("False\n", "")
