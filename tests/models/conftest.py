"""Models are made once for all the tests of this folder."""

import functools
import pathlib
from collections.abc import Callable

import pytest

from tests.models.families import Saved, random_decoder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """`saved("qwen3")`: the transformers model of that family and its directory (do not write there)."""

    @functools.cache
    def make(family: str) -> Saved:
        directory: pathlib.Path = tmp_path_factory.mktemp(family)
        return random_decoder(family, directory)

    return make
