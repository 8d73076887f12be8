"""One of two processes that want a directory as one job: python -m tests.parallel.two_in_a_job DIRECTORY"""

import json
import pathlib
import sys

from routerl_jax.parallel import multihost
from routerl_jax.parallel.workdir import job_directory_lock


def main() -> None:
    multihost.initialize()
    found = {}
    for name in ("taken", "free"):
        try:
            with job_directory_lock(pathlib.Path(sys.argv[1]) / name):
                found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
