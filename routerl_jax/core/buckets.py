"""Places in buckets (gs://, s3://): local copies to read, and uploads.

Programs work in local directories, on which renames, locks and appended files are what they say. A directory that stands for a
place in a bucket is known here (`stand_in`), so that what reads or writes the place itself (checkpoints, other processes) can
ask for it (`place_of`). Only this file uses fsspec.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import posixpath
import shutil
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from routerl_jax.core.cache_directory import cache_directory
from routerl_jax.core.extras import needs

_EXTRAS = {"gs": "gcs", "s3": "s3"}  # scheme -> the extra of setup.py with its client
_ATTEMPTS = 3  # at copying something that is being replaced
_STAND_INS: dict[pathlib.Path, str] = {}


class NotWritten(ValueError):
    """Something could not be written into a bucket; the message says why."""


@dataclasses.dataclass(frozen=True)
class BucketObject:
    """An object in a bucket: its size in bytes, and a tag that changes with its content."""

    size: int
    tag: str


def in_bucket(place: object) -> bool:
    """Whether a place is gs://... or s3://..."""
    return str(place).partition("://")[0] in _EXTRAS and "://" in str(place)


def resolve_place(place: str, name: str) -> str:
    """The place of a name, which may be `../OTHER`, seen from a place in a bucket; an absolute path is left as it is."""
    if name.startswith("/"):
        return name
    scheme, _, path = place.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(path, name))}"


def stand_in(directory: pathlib.Path, place: str) -> None:
    """Makes it known that a local directory stands for a place in a bucket."""
    _STAND_INS[directory.resolve()] = place.rstrip("/")


def forget(directory: pathlib.Path) -> None:
    """Ends `stand_in`."""
    _STAND_INS.pop(directory.resolve(), None)


def place_of(path: pathlib.Path) -> str:
    """The place in a bucket that a local path stands for; the absolute path itself if it stands for none."""
    whole = path.resolve()
    for parent in (whole, *whole.parents):
        if parent in _STAND_INS:
            return resolve_place(_STAND_INS[parent], whole.relative_to(parent).as_posix())
    return str(path.absolute())


def path_of(place: str) -> pathlib.Path | None:
    """The path here that stands for a place in a bucket (`stand_in`); None if there is none."""
    for directory, known in _STAND_INS.items():
        if place == known or place.startswith(f"{known}/"):
            return directory / place[len(known) + 1 :]
    return None


def named(message: str) -> str:
    """A message with the places in buckets instead of the local directories that stand for them."""
    for directory, place in _STAND_INS.items():
        message = message.replace(str(directory), place)
    return message


def fetched(place: str | pathlib.Path) -> pathlib.Path:
    """What lies at a place, on this machine: the path itself, or a copy of a file or directory in a bucket.

    Copies are kept in the cache, by a digest of names, sizes and tags: what has changed is copied anew. Hidden files are left
    out.

    Raises:
      ValueError: there is nothing at the place, it can't be read, or it is replaced all the time.
    """
    if not in_bucket(place):
        return pathlib.Path(place).expanduser()
    place = str(place).rstrip("/")
    for _ in range(_ATTEMPTS):
        objects = listing(place)
        if not objects:
            raise ValueError(f"{place}: there is nothing there; check the name (and that it was uploaded whole)")
        content = repr([place, sorted((name, entry.size, entry.tag) for name, entry in objects.items())])
        directory = cache_directory() / "buckets" / hashlib.sha256(content.encode()).hexdigest()[:16]
        target = directory / posixpath.basename(place)
        if not directory.is_dir():
            scratch = directory.with_name(f".{directory.name}-{uuid.uuid4().hex[:8]}")
            try:
                download(place, objects, scratch / target.name)
                if listing(place) != objects:
                    continue
                try:
                    scratch.rename(directory)
                except OSError:
                    if not directory.is_dir():  # else another process was faster
                        raise
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        stand_in(target, place)
        return target
    raise ValueError(f"{place} was replaced while it was copied, {_ATTEMPTS} times; wait until its writer is done")


def listing(place: str) -> dict[str, BucketObject]:
    """The objects below a place, by name relative to it; "" is the place itself, if it is one object. Hidden ones are left out.

    Raises:
      ValueError: the bucket can't be read.
    """
    files, root = _client(place)
    with _telling(place, "read"):
        files.invalidate_cache()
        objects = files.find(root, detail=True)
    result = {}
    for path, entry in objects.items():
        if path.endswith("/"):  # a directory that somebody made
            continue
        name = posixpath.relpath(path, root)
        if not any(part.startswith(".") for part in name.split("/") if name != "."):
            tag = next((str(entry[key]) for key in ("ETag", "etag", "generation", "md5Hash") if entry.get(key)), "")
            result["" if name == "." else name] = BucketObject(entry["size"], tag)
    return result


def download(place: str, names: Iterable[str], target: pathlib.Path) -> None:
    """Copies objects (names as in `listing`) to `target`, several at a time. Raises ValueError if one can't be read."""
    files, root = _client(place)
    pairs = [(f"{root}/{name}" if name else root, target / name) for name in names]
    for path in {path.parent for _, path in pairs}:
        path.mkdir(parents=True, exist_ok=True)
    with _telling(place, "read"):
        files.get([source for source, _ in pairs], [str(path) for _, path in pairs])


def upload(path: pathlib.Path, place: str) -> None:
    """Copies a file to a place. An object appears whole or not at all. Raises NotWritten if it can't be written."""
    files, root = _client(place)
    with _telling(place, "written"):
        files.put_file(str(path), root)


def remove(place: str) -> None:
    """Removes an object, if it is there."""
    files, root = _client(place)
    with _telling(place, "written"), contextlib.suppress(FileNotFoundError):
        files.rm_file(root)


def read_object(place: str) -> bytes | None:
    """The content of an object; None if there is none."""
    files, root = _client(place)
    with _telling(place, "read"), contextlib.suppress(FileNotFoundError):
        files.invalidate_cache()
        return files.cat_file(root)
    return None


def write_object(place: str, content: bytes) -> None:
    """Writes an object."""
    files, root = _client(place)
    with _telling(place, "written"):
        files.pipe_file(root, content)


def _client(place: str) -> tuple[Any, str]:
    """fsspec's file system for a place, and the place as it says it: BUCKET/PATH."""
    scheme, _, path = place.partition("://")
    with needs(f"{scheme}://", _EXTRAS[scheme]):
        import fsspec

        with _telling(place, "opened"):
            return fsspec.filesystem(scheme, use_listings_cache=False), path.rstrip("/")


@contextlib.contextmanager
def _telling(place: str, what: str) -> Iterator[None]:
    """Turns the many errors of the buckets' clients into one that names the place."""
    try:
        yield
    except ImportError:  # the client is missing
        raise
    except Exception as error:
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = NotWritten if what == "written" else ValueError
        raise kind(
            f"{place} can't be {what}: {detail}. Check the bucket's name and this machine's credentials (gcloud auth "
            "application-default login; aws configure)"
        ) from error
