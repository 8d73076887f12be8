"""The notebooks run from top to bottom, in their short form."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys
import types

import nbformat
import pytest
from nbclient import NotebookClient

import routerl_jax
from tests.programs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_of(path: pathlib.Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTERL_QUICK", "1")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)  # their own number, as for users
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[-1].outputs, "the last cell shows nothing"
    for cell in code:
        kinds = {kind for output in cell.outputs for kind in output.get("data", ())}
        assert "plt.show()" not in cell.source or "image/png" in kinds, f"no picture of:\n{cell.source}"


def test_there_are_seven() -> None:
    """In order, and the page about them names each."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number}_" for number in range(1, 8)]
    assert [path.name for path in NOTEBOOKS if f"(../notebooks/{path.name})" not in page] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_names_exists(path: pathlib.Path) -> None:
    """What it imports from this checkout, the attributes of these modules that it uses, and the pages that it points to."""
    cells = nbformat.read(path, as_version=4).cells
    nodes = [node for cell in code_of(path) for node in ast.walk(ast.parse(cell.source))]
    modules: dict[str, types.ModuleType] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("configs", "routerl_jax", "tests"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                imported = getattr(module, name.name, None) or importlib.import_module(f"{node.module}.{name.name}")
                if isinstance(imported, types.ModuleType):
                    modules[name.asname or name.name] = imported
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "rj":
                assert node.attr in routerl_jax.__all__
            elif node.value.id in modules:
                assert hasattr(modules[node.value.id], node.attr), f"{node.value.id}.{node.attr}"
    named = re.findall(r"`((?:docs|routerl_jax|configs|launch)/[\w/.]+\w)`", "\n".join(cell.source for cell in cells))
    assert [place for place in named if not (ROOT / place).exists()] == []


def test_all_begin_alike() -> None:
    """With the cell that finds and installs the package."""
    assert len({code_of(path)[0].source for path in NOTEBOOKS}) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(path: pathlib.Path) -> None:
    assert not [cell.outputs for cell in code_of(path) if cell.outputs]
    assert path.stat().st_size < 200_000


def test_the_first_cell_finds_the_checkout(tmp_path: pathlib.Path) -> None:
    """From where Jupyter opens it, and from above a clone, as in Colab; elsewhere it says what to do."""
    program = f"{code_of(NOTEBOOKS[0])[0].source}\nimport configs.quickstart, os\nprint(os.getcwd())"
    above, elsewhere = tmp_path / "above", tmp_path / "elsewhere"
    above.mkdir()
    elsewhere.mkdir()
    (above / "routerl_jax").symlink_to(ROOT)
    inside, cloned, lost = (
        subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True, timeout=300)
        for place in (NOTEBOOKS[0].parent, above, elsewhere)
    )
    assert inside.stdout.strip() == str(ROOT), inside.stderr
    assert pathlib.Path(cloned.stdout.strip()).resolve() == ROOT, cloned.stderr
    assert lost.returncode
    assert "is in no checkout of routerl_jax. Clone the repository and open this notebook there" in lost.stderr
