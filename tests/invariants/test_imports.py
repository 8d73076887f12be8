"""Imports run downhill: over the levels of docs/architecture.md, and in no circle of files."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "routerl_jax"


def modules() -> dict[str, pathlib.Path]:
    """Dotted name -> file of everything in the package."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files))


def imports(source: str, known: set[str]) -> set[str]:
    """Modules of `known` that a text imports, anywhere in it: in functions and for type checkers, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (parts & known) or {node.module}
    return found & known


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Some circle, from a node back to it; empty if there is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for other in sorted(arrows.get(path[-1], ())):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in done and (found := search([*path, other])):
                return found
        done.add(path[-1])
        return []

    return next((found for node in sorted(arrows) if node not in done and (found := search([node]))), [])


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    files = modules()
    return {name: imports(file.read_text(), set(files)) - {name} for name, file in files.items()}


def test_no_file_imports_itself_through_others(arrows: dict[str, set[str]]) -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert " -> ".join(circle(arrows)) == ""


def test_imports_run_downhill(arrows: dict[str, set[str]]) -> None:
    """The table of docs/architecture.md says on which floor a folder is, and it names them all."""
    table = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    floors = {name: int(floor) for floor, names in table for name in re.findall(r"`(\w+)`", names)}
    folders = {name.split(".")[1] for name in arrows if name.count(".") > 1}
    assert folders <= floors.keys()
    uphill = [
        f"{name} (floor {floors[here]}) imports {other} (floor {floors[there]})"
        for name, others in arrows.items()
        for other in others
        if (here := name.split(".")[1] if "." in name else "") in floors
        and (there := other.split(".")[1] if "." in other else "") in floors
        and floors[there] > floors[here]
    ]
    assert uphill == []
