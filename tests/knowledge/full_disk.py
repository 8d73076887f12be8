"""A build that may write no file beyond so many bytes: python -m tests.knowledge.full_disk DIR BYTES COUNT DIM.

Prints how many passages it embedded and, where it failed, why.
"""

import json
import pathlib
import resource
import sys

from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from tests.knowledge.helpers import HashEncoder, make_passages


def main() -> None:
    directory, limit, count, dim = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
    encoder = HashEncoder(dim)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    error = ""
    try:
        config = BuildConfig(name="kb", shard_size=count // 2)
        build_from_passages(make_passages(count), config, directory, progress=False, encoder=encoder)
    except ValueError as raised:
        error = str(raised)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps({"embedded": len(encoder.seen) - encoder.seen.count("width"), "error": error}))


if __name__ == "__main__":
    main()
