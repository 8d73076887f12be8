"""Reads data sets by name: `python -m tests.data.hub_reader NAME ..` prints ids and answers of each, or its error, as JSON."""

import json
import sys

from routerl_jax.data.readers import open_dataset


def read(name: str) -> dict[str, object]:
    try:
        source = open_dataset(name)
    except ValueError as error:
        return {"error": str(error)}
    return {
        "ids": [source[i].id for i in range(len(source))],
        "answers": [source[i].answers for i in range(len(source))],
    }


if __name__ == "__main__":
    print(json.dumps([read(name) for name in sys.argv[1:]]))
