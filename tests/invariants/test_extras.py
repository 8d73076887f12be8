"""What no run needs stands in routerl_jax/extras: the core does without it, and each of its folders does without the others."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from routerl_jax.moved import MOVED

ROOT = pathlib.Path(__file__).parents[2]
EXTRAS = ROOT / "routerl_jax" / "extras"


def core_modules() -> list[str]:
    files = sorted((ROOT / "routerl_jax").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return [name for name in names if not name.startswith("routerl_jax.extras")]


def test_the_core_can_be_imported_without_any_extra() -> None:
    """In a fresh process in which importing an extra raises. Names in functions are read by test_imports.py."""
    code = (
        "import importlib, sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('routerl_jax.extras'):\n"
        "            raise ImportError(f'the core imports {name}')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        f"for name in {core_modules()!r}:\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_loop_imports_only_what_it_uses() -> None:
    """Recipes, and packages that take long, come when a configuration names or a run needs them."""
    code = (
        "import sys\n"
        "import routerl_jax.training.rl\n"
        "loaded = [name for name in sys.modules if name.startswith('routerl_jax')]\n"
        "assert len(loaded) < 200, f'{len(loaded)} modules: {sorted(loaded)}'\n"
        "recipes = {name for name in loaded if name.startswith('routerl_jax.recipes.')}\n"
        "assert recipes <= {'routerl_jax.recipes.recipe', 'routerl_jax.recipes.search'}, recipes\n"
        "slow = {'orbax.checkpoint', 'grain', 'qwix', 'jax.experimental.pallas'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_file_of_the_core_names_an_extra_in_an_import() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in (ROOT / "routerl_jax").rglob("*.py")
        if EXTRAS not in file.parents
        for line in file.read_text().splitlines()
        if line.lstrip().startswith(("import routerl_jax.extras", "from routerl_jax.extras"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("generation.engine", "engine"),
        ("llms.judge", "services"),
        ("remote.http", "services"),
        ("core.extras", "core.packages"),
        ("knowledge.serving.schema", "knowledge.client.schema"),
        ("knowledge.light_rag", "extras.graph_packages.light_rag"),
        ("comparison.benchmarks.benchmark", "extras.comparison"),
        ("training.trials", "extras.analysis.trials"),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=rf"is routerl_jax\.{new}[,:]"):
        importlib.import_module(f"routerl_jax.{old}")


def test_every_new_name_exists() -> None:
    for new in MOVED.values():
        path = ROOT / "routerl_jax" / new.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), new
