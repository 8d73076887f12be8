"""Registries: names, dotted paths, and errors that tell what to write instead."""

import collections
import itertools
import pathlib

import pytest

from routerl_jax.agents.grammar import GRAMMARS
from routerl_jax.core.registry import Registry, import_extension
from routerl_jax.recipes.recipe import RECIPES
from routerl_jax.rewards.terms import REWARD_TERMS


@pytest.fixture
def registry() -> Registry:
    registry: Registry = Registry("tool")
    registry.register("search")(1)
    registry.register("answer")(2)
    return registry


def test_names(registry: Registry) -> None:
    assert (registry.get("search"), registry.get("answer")) == (1, 2)
    assert list(registry) == ["answer", "search"]
    assert "search" in registry
    assert "collections:OrderedDict" not in registry  # loadable, but not registered


def test_register_is_a_decorator_that_returns_its_object() -> None:
    registry: Registry = Registry("loss")

    @registry.register("clip")
    def clip() -> str:
        return "clipped"

    assert clip() == "clipped"
    assert registry.get("clip") is clip


def test_twice_is_an_error_and_keeps_the_first(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"^tool 'search' is registered twice$"):
        registry.register("search")(3)
    assert registry.get("search") == 1


def test_dotted_paths(registry: Registry) -> None:
    assert registry.get("collections:OrderedDict") is collections.OrderedDict


def test_an_entry_may_be_a_path_that_is_imported_when_it_is_named() -> None:
    registry: Registry = Registry("table", {"ordered": "collections:OrderedDict", "gone": "collections:Nothing"})
    registry.register("plain")(dict)
    assert list(registry) == ["gone", "ordered", "plain"]
    assert "ordered" in registry
    assert registry.get("ordered") is collections.OrderedDict
    with pytest.raises(ValueError, match=r"'gone' is collections:Nothing, which can't be imported: .* no attribute"):
        registry.get("gone")
    with pytest.raises(ValueError, match="'ordered' is registered twice"):
        registry.register("ordered")(list)


@pytest.mark.parametrize("registry", [RECIPES, GRAMMARS, REWARD_TERMS], ids=lambda registry: registry.kind)
def test_every_named_entry_of_the_papers_exists(registry: Registry) -> None:
    assert all(callable(registry.get(name)) for name in registry)


ADVICE = "or give a dotted path 'package.module:attribute'."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("serach", f"unknown tool 'serach'; did you mean 'search'? Known: answer, search; {ADVICE}"),
        ("zzz", f"unknown tool 'zzz'. Known: answer, search; {ADVICE}"),
        ("collections:Nothing", "cannot load tool 'collections:Nothing': module 'collections' has no attribute"),
        ("no.such.package:thing", "cannot load tool 'no.such.package:thing': No module named 'no'"),
    ],
)
def test_errors(registry: Registry, name: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        registry.get(name)
    assert str(error.value).startswith(message)


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(ValueError, match=r"unknown reward 'x'\. Known: none; or give a dotted path"):
        Registry("reward").get("x")


def test_extensions_are_imported_by_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from routerl_jax.models.family import FAMILIES\nFAMILIES.register('mine')(None)\n"
    )
    (tmp_path / "broken_one.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_extension("of_mine", "config.imports")
    from routerl_jax.models.family import FAMILIES

    assert "mine" in FAMILIES
    FAMILIES._entries.pop("mine")
    with pytest.raises(ValueError, match=r"config.imports: cannot import 'of_mien': No module named .*PYTHONPATH"):
        import_extension("of_mien", "config.imports")
    with pytest.raises(
        ValueError, match=r"config.imports: cannot import 'broken_one': No module named 'no_such_module'$"
    ):
        import_extension("broken_one", "config.imports")


def test_an_entry_by_its_path_is_imported_when_it_is_asked_for() -> None:
    registry: Registry[object] = Registry(
        "thing", {"count": "itertools:count", "nested": "pathlib:Path.home", "gone": "routerl_jax.extras.no_such:thing"}
    )
    assert list(registry) == ["count", "gone", "nested"]
    assert "gone" in registry
    assert registry.get("count") is itertools.count
    assert registry.get("nested") == pathlib.Path.home
    with pytest.raises(ValueError, match=r"thing 'gone' is routerl_jax\.extras\.no_such:thing"):
        registry.get("gone")
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("count")(object())
