"""How every program here starts and how its errors look."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from absl import app, logging


def start(main: Callable[[Sequence[str]], None], define_flags: Callable[[], None], *, arguments: bool = False) -> None:
    """Defines the program's flags and runs it. Flags are not defined at import, so that programs can import each other.

    A ValueError is bad input: its message goes to standard error in one line and the exit status is 1. Set
    ROUTERL_TRACEBACK=1 to see where it was raised. `arguments` lets the program take words besides its flags.
    """
    define_flags()

    def guarded(argv: Sequence[str]) -> None:
        if not any(argument.lstrip("-").startswith(("verbosity", "v=")) for argument in sys.argv):
            logging.set_verbosity(logging.WARNING)  # orbax tells of every rename at INFO
        program = os.path.splitext(os.path.basename(argv[0]))[0]
        if len(argv) > 1 and not arguments:
            sys.exit(f"launch.{program}: unexpected argument {argv[1]!r}; options start with --")
        if os.environ.get("ROUTERL_TRACEBACK"):
            main(argv)
            return
        try:
            main(argv)
        except ValueError as error:
            sys.exit(f"launch.{program}: {error}")
        except KeyboardInterrupt:
            sys.exit(130)

    app.run(guarded)
