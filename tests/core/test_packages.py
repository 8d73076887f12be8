"""Commands that error messages advise work from a checkout."""

import importlib.util
import pathlib
import re
import sys

import pytest

from routerl_jax.core import packages
from routerl_jax.core.packages import install_hint
from tests.packaging import declared

ROOT = pathlib.Path(__file__).parents[2]


def test_it_installs_the_checkout_into_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_hint("web") == f'`{sys.executable} -m pip install -e "{ROOT}[web]"`'
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # an environment that uv made
    assert install_hint("web") == f'`uv pip install --python {sys.executable} -e "{ROOT}[web]"`'


def test_a_copy_without_a_checkout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "site-packages" / "routerl_jax" / "core" / "packages.py"))
    assert '-e "CHECKOUT[web]"`' in install_hint("web")


def test_every_extra_that_is_advised_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the code's hints, and those of commands in the docs."""
    monkeypatch.chdir(ROOT)
    told = declared()
    assert told["packages"] == ["routerl_jax*", "launch", "configs*"]
    code = "".join(path.read_text("utf-8") for path in (ROOT / "routerl_jax").rglob("*.py"))
    asked = set(re.findall(r"install_hint\([\"'](\w+)[\"']\)", code))
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.py"), ROOT / "Makefile"]
    for text in [path.read_text("utf-8") for path in texts]:
        assert "install routerl_jax" not in text.replace('"', "").replace("'", "")  # it is on no index
        for names in re.findall(r"\.\[([\w,]+)\]", text):
            asked |= set(names.split(","))
    assert {"scann", "web", "pages"} <= asked
    assert asked <= set(told["extras_require"])


def test_make_check_names_tests_that_exist() -> None:
    listed = re.search(
        r"^CORE := \$\(addprefix tests/,(.+?)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL
    )
    assert listed is not None
    assert [name for name in listed[1].replace("\\", " ").split() if not (ROOT / "tests" / name).exists()] == []
