"""How every program in launch/ starts, and how its errors look."""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import functools
import logging as std_logging
import os
import pathlib
import re
import signal
import sys
import sysconfig
import tempfile
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar, cast

from absl import app, flags, logging
from ml_collections import ConfigDict

from routerl_jax.core.buckets import in_bucket, named
from routerl_jax.core.progress import be_quiet
from routerl_jax.core.secrets import masked
from routerl_jax.core.stopping import keep_interrupts
from routerl_jax.parallel.platform import keep_compilations

if TYPE_CHECKING:
    from routerl_jax.training.config import TrainConfig

FLAGS = flags.FLAGS
T = TypeVar("T")


Schemas = Callable[[], Mapping[str, type]]
_BESIDE = pathlib.Path(__file__).resolve().parents[1]
_MISSING = re.compile(r"flag --(\w+)=None: Flag --\w+ must have a value other than None\.")
_HELP = ("help", "helpshort", "h", "?")


def define_amount(name: str, default: int | None, about: str) -> None:
    """A flag for how many of what there is; -1 stands for all (`core.config.Amount`)."""
    flags.DEFINE_integer(name, default, about)
    flags.register_validator(name, lambda n: n is None or n == -1 or n > 0, f"--{name}=-1 is all, and 0 would be none")


def start(
    main: Callable[[Sequence[str]], None],
    define_flags: Callable[[], None],
    schemas: Schemas | None = None,
    *,
    arguments: bool = False,
) -> None:
    """Defines the program's flags and runs it. Flags are not defined at import, so that programs can import each other.

    A ValueError means bad input. An OSError means a file, directory or service that can't be used. Both are printed to
    standard error as one line, and the exit status is 1. Set ROUTERL_TRACEBACK=1 to see where the error was raised.

    Args:
      schemas: gives the classes that --config may hold, by heading; --help lists their fields.
      arguments: True lets the program take words besides its flags.
    """
    keep_compilations()  # before a configuration imports JAX
    keep_interrupts()
    define_flags()
    flags.DEFINE_bool("quiet", False, "Show no progress; results and warnings are shown all the same.")

    def guarded(argv: Sequence[str]) -> None:
        program = os.path.splitext(os.path.basename(argv[0]))[0]
        if not any(argument.lstrip("-").startswith(("verbosity", "v=")) for argument in sys.argv):
            logging.set_verbosity(logging.WARNING)  # orbax logs every rename at INFO
            # A user reads what happened. Who wants the time and the place in the code asks with --verbosity.
            logging.get_absl_handler().setFormatter(std_logging.Formatter(f"launch.{program}: %(message)s"))
        mask_log(logging.get_absl_handler().python_handler)
        sys.excepthook = _show_error
        be_quiet(bool(FLAGS["quiet"].value))
        if FLAGS["quiet"].value:
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if len(argv) > 1 and not arguments:
            sys.exit(masked(f"launch.{program}: unexpected argument {argv[1]!r}; options start with --"))
        try:
            with contextlib.ExitStack() as stack:
                for name in sorted({"workdir", "output"} & set(FLAGS)):
                    if (path := FLAGS[name].value) == "":  # as from a variable of the shell that is not set
                        raise ValueError(f"--{name}= is empty: give a path")
                    if path:
                        FLAGS[name].value = str(stack.enter_context(_local_path(f"--{name}", path)))
                main(argv)
        except BrokenPipeError:  # the reader of the output (such as `head`) closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except (ValueError, OSError) as error:
            if os.environ.get("ROUTERL_TRACEBACK"):
                raise
            sys.exit(masked(f"launch.{program}: {_error_text(error)}{_own_line(error)}"))
        except KeyboardInterrupt:
            # another one while Python ends would arise anywhere
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
            sys.exit(130)

    app.run(guarded, flags_parser=functools.partial(_parse, schemas))


def mask_log(handler: std_logging.Handler) -> None:
    """Makes a handler of logs write its lines, tracebacks included, without secrets."""
    written = handler.format
    handler.format = lambda record: masked(written(record))


def _show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Writes what nobody caught, as Python does, without secrets."""
    sys.stderr.write(masked("".join(traceback.format_exception(kind, error, trace))))


@contextlib.contextmanager
def _local_path(flag: str, address: str) -> Iterator[str | pathlib.Path]:
    """The local path for a flag's value: the path itself, or a mirror of a bucket, which is uploaded as it changes.

    Shells leave the ~ of --workdir=~/runs as it is, so it is expanded here.
    """
    if not in_bucket(address):
        _refuse_url(flag, address)
        yield os.path.expanduser(address)
        return
    from routerl_jax.parallel.mirrors import mirrored

    with mirrored(address) as path, contextlib.redirect_stdout(cast(TextIO, _Named(sys.stdout))):
        try:
            yield path
        except (ValueError, OSError) as error:
            if os.environ.get("ROUTERL_TRACEBACK"):
                raise
            raise ValueError(named(_error_text(error))) from error


class _Named:
    """Standard output with URLs of buckets instead of the paths of their mirrors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(named(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _error_text(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror} (ROUTERL_TRACEBACK=1 shows what was tried)"
    return str(error) or type(error).__name__


def _own_line(error: BaseException | None) -> str:
    """The place in a file of the user's (an agent, a reward, a tool, ..) where an error arose, in brackets; "" if in none.

    What the user's line calls may have raised it, but not what this project does further on: that names the setting.
    """
    place = ""
    while error is not None:  # the first to be raised is the last of the chain
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        for frame, called in zip(frames, [*frames[1:], None]):
            if not _is_installed(frame.filename):
                place = f" ({frame.filename}, line {frame.lineno})"
            elif called is not None and _is_ours(frame.filename) and _is_ours(called.filename):
                place = ""
        error = error.__cause__ or error.__context__
    return place


def _is_installed(file: str) -> bool:
    """Whether a file of a traceback belongs to this project, to Python or to an installed package."""
    python = sysconfig.get_paths()
    folders = (python["stdlib"], python["purelib"], python["platlib"])
    return _is_ours(file) or any(pathlib.Path(file).is_relative_to(folder) for folder in folders)


def _is_ours(file: str) -> bool:
    folders = (_BESIDE / name for name in ("routerl_jax", "launch", "configs", "benchmarks"))
    return any(pathlib.Path(file).is_relative_to(folder) for folder in folders)


def check_writable(flag: str, path: str | os.PathLike[str], *, file: bool = False) -> None:
    """Checks that a directory (or, with `file=True`, a file) can be made or written at a path.

    The check writes a temporary file and removes it at once.

    Raises:
      ValueError: nothing can be written there; names the flag, and what is in the way.
    """
    target = pathlib.Path(path).expanduser().absolute()
    if file and target.is_dir():
        raise ValueError(f"{flag}={path} is a directory; give a file")
    nearest = next(parent for parent in (target, *target.parents)[file:] if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{flag}={path}: {nearest} is a file; give a directory")
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(
            f"{flag}={path}: nothing can be written in {nearest} ({error.strerror}); give another place"
        ) from error


def run_schemas() -> dict[str, type]:
    """The classes of configurations, by their description, that --config may name where it describes a run (`start`)."""
    from routerl_jax.training.config import TrainConfig

    return {"A run": TrainConfig}


def read_config() -> TrainConfig:
    """The run that --config and its overrides describe. Raises ValueError that names the file or the key."""
    from routerl_jax.training.config import TrainConfig

    config = read_config_as(TrainConfig)
    for name, knowledge in config.knowledge.items():
        if not in_bucket(knowledge.directory):
            _refuse_url(f"--config.knowledge.{name}.directory", knowledge.directory)
    return config


def read_config_as(schema: type[T]) -> T:
    """Like `read_config`, for a program whose configuration has another class."""
    from routerl_jax.core.config import from_config_dict

    return from_config_dict(schema, read_config_dict())


def read_config_dict() -> ConfigDict:
    """The configuration of --config with its overrides, unchecked. Raises ValueError if there is no such file."""
    flag = cast(Any, FLAGS["config"])
    if not isinstance(flag.value, ConfigDict):  # ml_collections raises its IOError only when the value is used
        raise ValueError(f"--config={flag.config_filename}: there is no such file; configurations lie in configs/")
    return flag.value


def _refuse_url(key: str, path: str | None) -> None:
    """Raises a ValueError for another URL than gs:// and s3://, which as a path would make a directory called `az:`."""
    if path and "://" in path:
        raise ValueError(f"{key}={path}: this must be a path in a file system, or in a bucket (gs://, s3://)")


def _print_help(schemas: Schemas | None) -> None:
    """The program's purpose, its flags, and the fields of its configuration."""
    app.usage(shorthelp=True, writeto_stdout=True)
    if schemas:
        from launch.configuration import print_fields

        print_fields(schemas())


def _parse(schemas: Schemas | None, argv: Sequence[str]) -> list[str]:
    """absl's parser, with each of its errors as one clear line. --help prints the help and exits.

    Three kinds of errors: a value that a flag can't take, an override of a key that the configuration does not have, and
    whatever the configuration file raises.
    """
    program = f"launch.{pathlib.Path(argv[0]).stem}"
    argv = with_installed_configs(argv)
    join_installed_configs()
    if any(argument.startswith("-") and argument.lstrip("-") in _HELP for argument in argv[1:]):
        _print_help(schemas)
        sys.exit(0)
    config_argument = next((word for word in argv if word.lstrip("-").startswith("config=")), "--config")
    path = config_argument.partition("=")[2]
    argv, entries = _split_entries(list(argv), path, schemas)
    typed, sys.argv = sys.argv, argv  # where ml_collections looks for overrides
    try:
        rest = FLAGS(argv)
        _set_entries(entries)
        return rest
    except Exception as error:
        if os.environ.get("ROUTERL_TRACEBACK"):
            raise
        if (complaint := _complaint(error, path)) is not None:
            sys.exit(masked(f"{program}: {config_argument}: {complaint}"))
        if isinstance(error, flags.Error) and not (path and "flag --config=None: " in str(error)):
            # not parsed again by app.parse_flags_with_usage: overrides are defined by now
            sys.exit(masked(f"{program}: {_flag_error_text(error)} (--help lists the options)"))
        if not (path and isinstance(error, AttributeError | KeyError | flags.Error)):
            raise
        config = cast(Any, FLAGS["config"]).parser.parse(path)
        if config is None:
            sys.exit(f"{program}: {config_argument}: its get_config() returns nothing")
        message = _unknown_override(config, argv)
        if not message:
            raise
        sys.exit(masked(f"{program}: {message}"))
    finally:
        sys.argv = typed


class _Entry(NamedTuple):
    """An override of an entry of a mapping, of which ml_collections knows neither new names nor those with dots or colons."""

    keys: tuple[str, ...]
    value: Any


def _split_entries(argv: list[str], path: str, schemas: Schemas | None) -> tuple[list[str], list[_Entry]]:
    """Takes such overrides from the arguments: a new knowledge base or stage, a reward term, a setting of an agent, ..

    Args:
      path: of the configuration file, which says what entries there are.
    """
    if schemas is None or not path or not any(re.match(r"--?config\.\w+\.", argument) for argument in argv):
        return argv, []
    try:
        config = cast(Any, FLAGS["config"]).parser.parse(path)
        schema = next(schema for schema in schemas().values() if set(config) <= set(typing.get_type_hints(schema)))
    except Exception:  # reported where the file is read
        return argv, []
    rest, entries = [], []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        keys = re.match(r"--?config\.(.+)", flag)
        found = keys and _entry(schema, config, keys[1].split("."))
        if not found:
            rest.append(word)
            continue
        entries.append(_Entry(found[0], _parsed(found[1], value if equals else next(words, ""))))
    return rest, entries


def _entry(hint: Any, section: Any, parts: list[str]) -> tuple[tuple[str, ...], Any] | None:
    """The keys of an override that names an entry which is not there, or has no plain name, and the type of its value; None for
    all other overrides."""
    keys: tuple[str, ...] = ()
    new = False
    while parts:
        if dataclasses.is_dataclass(hint):
            name, parts = parts[0], parts[1:]
            hint = typing.get_type_hints(hint).get(name, Any)
        elif typing.get_origin(hint) is Mapping or isinstance(section, ConfigDict):
            item = (*typing.get_args(hint), Any, Any)[1]
            known = [n for n in range(len(parts), 0, -1) if section is not None and ".".join(parts[:n]) in section]
            nested = item is Any or dataclasses.is_dataclass(item)
            count = known[0] if known else 1 if nested else len(parts)
            name, parts = ".".join(parts[:count]), parts[count:]
            new = new or not known or not name.isidentifier()
            hint = item
        elif hint is Any:
            name, parts, new = parts[0], parts[1:], True
        else:
            return None
        keys = (*keys, name)
        section = section[name] if isinstance(section, ConfigDict) and name in section else None
    return (keys, hint) if new else None


def _parsed(hint: Any, text: str) -> Any:
    """The value of an override: a text where the schema has one, else what Python reads, else the text."""
    if hint is str:
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
        value = text
    return (value,) if typing.get_origin(hint) is tuple and not isinstance(value, tuple | list) else value


def _set_entries(entries: Sequence[_Entry]) -> None:
    for keys, value in entries:
        section: Any = FLAGS["config"].value
        with section.unlocked():
            for depth, key in enumerate(keys[:-1], 1):
                if key not in section:
                    if depth == 2:  # a knowledge base, a stage, a control; it might be a slip of the pen
                        there = ", ".join(section) or "none"
                        print(f"config.{'.'.join(keys[:2])} is new, beside: {there}", file=sys.stderr)
                    section[key] = ConfigDict(allow_dotted_keys=True)
                section = section[key]
            section[keys[-1]] = ConfigDict(value, allow_dotted_keys=True) if isinstance(value, dict) else value


def _flag_error_text(error: flags.Error) -> str:
    """absl's message on one line, with "give --config" for a flag that is required and not there."""
    lines = []
    for line in str(error).splitlines():
        missing = _MISSING.match(line)
        lines.append(f"give --{missing[1]}" if missing else re.sub(r"^flags \w+=[^:]*: ", "", line))
    told = "; ".join(filter(None, lines))
    told = re.sub(r"invalid literal for int\(\) with base 10: ('.*?')", r"\1 is no whole number", told)
    told = re.sub(r"could not convert string to float: ('.*?')", r"\1 is no number", told)
    if "Unknown command line flag 'config." in told:
        told += "; settings --config.KEY=VALUE go with --config=FILE"
    return told


def with_installed_configs(argv: Sequence[str]) -> list[str]:
    """The arguments, with an absolute path for a `--config=configs/..` that is not below this directory.

    The file is then beside `launch`: in a checkout elsewhere, or in the installed wheel.
    """
    arguments = list(argv)
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        before = arguments[index - 1].lstrip("-") if index else ""
        path = value if flag.lstrip("-") == "config" else argument if before == "config" else ""
        file = path.partition(":")[0]
        if file.startswith("configs/") and not pathlib.Path(file).exists() and (_BESIDE / file).is_file():
            arguments[index] = f"{flag}{equals}{_BESIDE / path}" if equals else str(_BESIDE / path)
    return arguments


def join_installed_configs() -> None:
    """Lets `configs.NAME` also be found beside `launch` where the user has a directory `configs/`, which comes first."""
    import configs

    folders = list(getattr(configs, "__path__", ()))  # a module configs.py has none
    if folders and str(_BESIDE / "configs") not in folders:
        configs.__path__ = [*folders, str(_BESIDE / "configs")]


def _complaint(error: BaseException | None, config: str) -> str | None:
    """The message of the error that the file of --config raised, with its line in that file if it is no ValueError.

    ml_collections shows such an error as a traceback, or not at all. None if the error is another.

    Args:
      config: FILE or FILE:VARIANT.
    """
    file, _, variant = config.partition(":")
    complaint: tuple[BaseException, str] | None = None
    while error is not None:  # the first to be raised is the last of the chain
        if isinstance(error, SyntaxError) and error.filename not in (None, "<unknown>"):  # that of an override's value
            complaint = error, f"{error.filename}, line {error.lineno}"
        for frame in traceback.extract_tb(error.__traceback__):
            if file and os.path.abspath(frame.filename) == os.path.abspath(file):
                complaint = error, f"{frame.filename}, line {frame.lineno}"
        if str(error).startswith("get_config()"):  # raised where it is called
            return f"it has no variants; leave out :{variant}" if variant else str(error)
        if str(error).endswith("has no attribute 'get_config'"):
            return "it defines no get_config(); a configuration is a Python file that does (configs/quickstart.py)"
        error = error.__cause__ or error.__context__
    if complaint is None:
        return None
    raised, where = complaint
    message = getattr(raised, "msg", None) or str(raised)
    return message if isinstance(raised, ValueError) else f"{type(raised).__name__}: {message} ({where})"


def _unknown_override(config: ConfigDict, argv: Sequence[str]) -> str | None:
    from routerl_jax.core.config import unknown_key

    for argument in argv:
        name = argument.lstrip("-").split("=", 1)[0]
        if not argument.startswith("-") or not name.startswith("config."):
            continue
        section, path = config, "config"
        for key in name.split(".")[1:]:
            if not isinstance(section, ConfigDict) or key not in section:
                keys = section.keys() if isinstance(section, ConfigDict) else ()
                return unknown_key(path, key, keys)
            section, path = section[key], f"{path}.{key}"
    return None
