"""The notebooks run from top to bottom."""

import pathlib
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.programs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[-1].outputs, "the last cell shows nothing"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_finds_the_checkout(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From where Jupyter opens it, and elsewhere it says what to do."""
    first = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code").source
    program = f"{first}\nimport configs.quickstart, os\nprint(os.getcwd())"
    found, lost = (
        subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True, timeout=120)
        for place in (path.parent, tmp_path)
    )
    assert found.stdout.strip() == str(ROOT), found.stderr
    assert lost.returncode
    assert "is in no checkout of routerl_jax. Clone the repository and open this notebook there" in lost.stderr
