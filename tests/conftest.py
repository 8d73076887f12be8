"""Eight virtual CPU devices for every test, and the one place that says where the optional real data lies."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import pytest

# Real datasets, where the machine has them; everything that needs them skips visibly elsewhere.
DATA = pathlib.Path(os.environ.get("ROUTERL_TEST_DATA", pathlib.Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data():
    """`shared_data("hotpotqa/corpus.jsonl.gz")` is that file's path; skips the test where it is absent."""

    def find(name: str) -> pathlib.Path:
        path = DATA / name
        if not path.exists():
            pytest.skip(f"{path} is absent (set ROUTERL_TEST_DATA to the directory of real datasets)")
        return path

    return find
