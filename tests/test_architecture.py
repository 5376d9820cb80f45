"""The shape of the house, read from the source: who imports whom, and what no file may hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("bench", "decode", "engine", "gateway", "kernels", "prefill", "transfer")
MAY_IMPORT = {
    "kernels": set(),
    "transfer": {"kernels"},
    "engine": {"kernels", "transfer"},
    "prefill": {"engine", "transfer"},
    "decode": {"engine", "transfer"},
    "gateway": {"engine", "transfer"},
    "bench": {"kernels", "engine", "transfer"},
}
# The two ends of a link live in `transfer` and `decode`; a copy of them here would measure something else.
MAY_ALSO_IMPORT = {
    "bench/transfer.py": {"transfer"},
    "bench/transfer_ends.py": {"transfer", "decode"},
    "bench/checkpoint.py": {"transfer"},  # the exceptions that `engine` raises
}
MAX_LINES = 450
TORCH_FREE = ("prefill/scheduler.py", "decode/scheduler.py", "engine/block_pool.py", "engine/config.py")
HEAVY = {"torch", "transformers", "numpy", "safetensors", "accelerate"}

FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]


def module_name(path: Path) -> str:
    """`engine/block_pool.py` as `engine.block_pool`, `engine/__init__.py` as `engine`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def import_nodes(path: Path, *, functions: bool) -> list[ast.Import | ast.ImportFrom]:
    """Import statements of a file, but for those under `if TYPE_CHECKING` (which never run)."""
    found: list[ast.Import | ast.ImportFrom] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not functions:
            return
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree(path))
    return found


def imported(path: Path, *, functions: bool = True) -> set[str]:
    """Dotted names a file imports: ours without the `pdserve.` in front; of others the top level, with a `/` behind."""
    package = path.relative_to(ROOT).parts[:-1]
    names: set[str] = set()
    for node in import_nodes(path, functions=functions):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        else:
            base = ["pdserve", *package][: len(package) + 2 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            full = [f"{stem}.{alias.name}" for alias in node.names]
        for name in full:
            if name.startswith("pdserve."):
                ours = name.removeprefix("pdserve.")
                names.add(ours if ours in MODULES else ours.rpartition(".")[0] or ours)
            else:
                names.add(name.partition(".")[0] + "/")
    return names


def reachable(start: str) -> set[str]:
    """Every one of our modules that importing `start` runs, and the top level of everything else, by `/`."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            todo.extend(imported(MODULES[name], functions=False))
            todo.append(name.partition(".")[0])  # the package's __init__.py
    return seen


def test_the_reader_of_imports_sees_relative_and_absolute_ones() -> None:
    assert "transfer.messages" in imported(ROOT / "transfer/channel.py")
    assert "zmq/" in imported(ROOT / "transfer/channel.py")
    assert "transfer.errors" in imported(ROOT / "engine/config.py")
    assert "gateway.supervisor" in imported(ROOT / "gateway/launch.py")


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_run_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    rooms = {name.partition(".")[0] for name in imported(path) if not name.endswith("/")}
    assert rooms - {room} <= MAY_IMPORT[room] | MAY_ALSO_IMPORT.get(str(path.relative_to(ROOT)), set())


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_inside_the_package_imports_are_relative(path: Path) -> None:
    names = [
        name
        for node in import_nodes(path, functions=True)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if isinstance(node, ast.Import) or not node.level
    ]
    assert [name for name in names if name.partition(".")[0] in ("pdserve", *ROOMS)] == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_is_imported_exists(path: Path) -> None:
    ours = {name for name in imported(path) if not name.endswith("/")}
    assert ours - MODULES.keys() - set(ROOMS) == set()


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: (imported(path) & MODULES.keys()) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("name", TORCH_FREE)
def test_schedulers_and_the_block_pool_never_import_torch(name: str) -> None:
    found = reachable(module_name(ROOT / name))
    assert found & {f"{library}/" for library in HEAVY} == set()


def test_the_gateway_reaches_neither_torch_nor_a_pool() -> None:
    for name in MODULES:
        if name.partition(".")[0] == "gateway":
            found = reachable(name)
            assert "torch/" not in found, name
            assert {part.partition(".")[0] for part in found} & {"prefill", "decode", "kernels"} == set(), name


@pytest.mark.parametrize("module", ["app", "cli", "up", "config"])
def test_importing_the_gateway_loads_neither_torch_nor_a_pool(module: str, tmp_path: Path) -> None:
    code = f"import sys, pdserve.gateway.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = {".".join(name.removeprefix("pdserve.").split(".")[:2]) for name in done.stdout.split()}
    rooms = {name.partition(".")[0] for name in loaded}
    assert rooms & {"torch", "prefill", "decode", "kernels"} == set()
    assert loaded & {"engine.model", "engine.runner", "engine.kv_cache", "engine.sampler"} == set()


def test_the_folders_do_not_pose_as_packages_of_their_own() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_transformers_sees_no_kernels_package_even_from_the_root_of_the_tree() -> None:
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"


def test_our_way_onto_the_path_offers_no_kernels_package(tmp_path: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('pdserve.kernels') is not None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout == "None True\n", done.stderr


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "kernels"])
def test_an_init_file_is_one_docstring(room: str) -> None:
    module = tree(ROOT / room / "__init__.py")
    assert ast.get_docstring(module)
    assert len(module.body) == 1


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_error_is_swallowed_and_no_one_sleeps_to_poll(path: Path) -> None:
    offences = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            silent = all(isinstance(line, ast.Pass) for line in node.body)
            if not caught or (caught in ("Exception", "BaseException") and silent):
                offences.append(f"line {node.lineno}: except {caught}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep":
            offences.append(f"line {node.lineno}: time.sleep")
    assert offences == []
