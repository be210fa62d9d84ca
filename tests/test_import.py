"""``import meshwright`` is light, and rooms import only what stands before them."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.testing import run_in_fresh_process

ROOMS = Path(meshwright.__file__).parent
PURE = [
    "errors",
    *(f"_compat/{path.stem}" for path in sorted((ROOMS / "_compat").glob("*.py"))),
    "topology",
    "backend",
    "layouts/mesh",
    "layouts/layout",
    "layouts/layout_map",
    "layouts/placement",
]
HEAVY = {
    "numpy",
    "jax",
    "jaxlib",
    "keras",
    "rich",
    "jinja2",
    "click",
    "scipy",
    "optax",
    "tensorflow",
}


def test_importing_it_loads_nothing_heavy():
    out = run_in_fresh_process("import meshwright, sys; print(*sys.modules)")
    loaded = {name.split(".")[0] for name in out.split()}
    assert "meshwright" in loaded
    assert not loaded & HEAVY


def test_importing_it_starts_no_devices_where_jax_is_loaded_already():
    out = run_in_fresh_process(
        """
        import jax, meshwright
        from meshwright._compat import jax_is_running
        print(jax_is_running())
        """
    )
    assert out == "False\n"


def test_jax_users_never_load_keras():
    out = run_in_fresh_process(
        """
        import sys
        import meshwright as mw
        mw.virtual_devices(2)
        layout = mw.Layout(["x"], mw.create_mesh())
        mw.unpack(mw.relayout([1.0, 2.0], layout))
        mw.jax_program, mw.Program, mw.LayoutMap
        print("keras" in sys.modules)
        """
    )
    assert out == "False\n"


@pytest.mark.parametrize("room", PURE)
def test_the_pure_rooms_import_nothing_heavy_as_they_load(room):
    assert not imported_on_loading(ast.parse((ROOMS / f"{room}.py").read_text())) & HEAVY


def test_private_parts_of_jax_and_keras_are_imported_in_compat_alone():
    users = {
        path.relative_to(ROOMS).parts[0]
        for path in ROOMS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if any({"src", "_src"} & set(name.split(".")) for name in modules_named(node))
    }
    assert users == {"_compat"}


def modules_named(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_the_check_of_loading_sees_what_it_looks_for():
    code = (
        "import os\nif os:\n    import numpy as np\ndef f():\n    import jax\nfrom keras import ops"
    )
    assert imported_on_loading(ast.parse(code)) == {"os", "numpy", "keras"}


def imported_on_loading(node: ast.AST) -> set[str]:
    """Top-level packages that are imported when the code is loaded, not when it is called."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return set()
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return set() if node.level else {str(node.module).split(".")[0]}
    return set().union(*(imported_on_loading(child) for child in ast.iter_child_nodes(node)))


def test_rooms_import_only_what_stands_before_them():
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert program, "import-linter is not installed: pip install -e '.[dev]'"
    project = Path(__file__).parent.parent
    result = subprocess.run(
        [program, "--no-cache", "--config", str(project / "pyproject.toml")],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "KEPT" in result.stdout
