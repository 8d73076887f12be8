"""Files and directories in buckets (gs://, s3://): local copies to read, and uploads.

Programs work in local directories, because renames, locks and appends behave there as in POSIX. `stand_in` registers a local
directory that stands for a URL. Code that reads or writes the bucket itself (checkpoints, other processes) gets the URL from
`url_of`. Only this file uses fsspec.
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

from routerl_jax.core.files import cache_directory
from routerl_jax.core.packages import needs

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


def in_bucket(url: object) -> bool:
    """Whether a path or URL is gs://... or s3://..."""
    return str(url).partition("://")[0] in _EXTRAS and "://" in str(url)


def resolve_url(url: str, name: str) -> str:
    """The URL of a name relative to a bucket URL. The name may be `../OTHER`. An absolute path is returned unchanged."""
    if name.startswith("/"):
        return name
    scheme, _, path = url.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(path, name))}"


def stand_in(directory: pathlib.Path, url: str) -> None:
    """Registers a local directory as the stand-in of a bucket URL."""
    _STAND_INS[directory.resolve()] = url.rstrip("/")


def forget(directory: pathlib.Path) -> None:
    """Undoes `stand_in`."""
    _STAND_INS.pop(directory.resolve(), None)


def url_of(path: pathlib.Path) -> str:
    """The bucket URL that a local path stands for; the absolute path itself if it stands for none."""
    resolved = path.resolve()
    for parent in (resolved, *resolved.parents):
        if parent in _STAND_INS:
            return resolve_url(_STAND_INS[parent], resolved.relative_to(parent).as_posix())
    return str(path.absolute())


def path_of(url: str) -> pathlib.Path | None:
    """The local path that stands for a bucket URL (`stand_in`); None if there is none."""
    for directory, root in _STAND_INS.items():
        if url == root or url.startswith(f"{root}/"):
            return directory / url[len(root) + 1 :]
    return None


def named(message: str) -> str:
    """A message with bucket URLs instead of the local directories that stand for them."""
    for directory, url in _STAND_INS.items():
        message = message.replace(str(directory), url)
    return message


def fetched(source: str | pathlib.Path) -> pathlib.Path:
    """The local path of a file or directory: `source` itself, or a copy of it if it is a bucket URL.

    Copies are cached by a digest of names, sizes and tags, so a changed object is copied anew. Hidden files are left out.

    Raises:
      ValueError: there is nothing at the URL, it can't be read, or it keeps changing during the copy.
    """
    if not in_bucket(source):
        return pathlib.Path(source).expanduser()
    url = str(source).rstrip("/")
    for _ in range(_ATTEMPTS):
        objects = listing(url)
        if not objects:
            raise ValueError(f"{url}: there is nothing there; check the name (and that it was uploaded whole)")
        content = repr([url, sorted((name, entry.size, entry.tag) for name, entry in objects.items())])
        directory = cache_directory() / "buckets" / hashlib.sha256(content.encode()).hexdigest()[:16]
        target = directory / posixpath.basename(url)
        if not directory.is_dir():
            scratch = directory.with_name(f".{directory.name}-{uuid.uuid4().hex[:8]}")
            try:
                download(url, objects, scratch / target.name)
                if listing(url) != objects:
                    continue
                try:
                    scratch.rename(directory)
                except OSError:
                    if not directory.is_dir():  # else another process was faster
                        raise
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        stand_in(target, url)
        return target
    raise ValueError(f"{url} was replaced while it was copied, {_ATTEMPTS} times; wait until its writer is done")


def listing(url: str) -> dict[str, BucketObject]:
    """The objects below a URL, by their relative names; "" names the URL itself, if it is an object. Hidden ones are left out.

    Raises:
      ValueError: the bucket can't be read.
    """
    files, root = _client(url)
    with _explaining(url, "read"):
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


def download(url: str, names: Iterable[str], target: pathlib.Path) -> None:
    """Copies objects (names as in `listing`) to `target`, several at a time. Raises ValueError if one can't be read."""
    files, root = _client(url)
    pairs = [(f"{root}/{name}" if name else root, target / name) for name in names]
    for path in {path.parent for _, path in pairs}:
        path.mkdir(parents=True, exist_ok=True)
    with _explaining(url, "read"):
        files.get([source for source, _ in pairs], [str(path) for _, path in pairs])


def upload(path: pathlib.Path, url: str) -> None:
    """Copies a file to a URL. An object appears whole or not at all. Raises NotWritten if it can't be written."""
    files, root = _client(url)
    with _explaining(url, "written"):
        files.put_file(str(path), root)


def remove(url: str) -> None:
    """Removes an object, if it is there."""
    files, root = _client(url)
    with _explaining(url, "written"), contextlib.suppress(FileNotFoundError):
        files.rm_file(root)


def read_object(url: str) -> bytes | None:
    """The content of an object; None if there is none."""
    files, root = _client(url)
    with _explaining(url, "read"), contextlib.suppress(FileNotFoundError):
        files.invalidate_cache()
        return files.cat_file(root)
    return None


def write_object(url: str, content: bytes) -> None:
    """Writes an object."""
    files, root = _client(url)
    with _explaining(url, "written"):
        files.pipe_file(root, content)


def _client(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the URL as fsspec writes it: BUCKET/PATH."""
    scheme, _, path = url.partition("://")
    with needs(f"{scheme}://", _EXTRAS[scheme]):
        import fsspec

        with _explaining(url, "opened"):
            return fsspec.filesystem(scheme, use_listings_cache=False), path.rstrip("/")


@contextlib.contextmanager
def _explaining(url: str, action: str) -> Iterator[None]:
    """Turns the many errors of the buckets' clients into one that names the URL."""
    try:
        yield
    except ImportError:  # the client is missing
        raise
    except Exception as error:
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = NotWritten if action == "written" else ValueError
        raise kind(
            f"{url} can't be {action}: {detail}. Check the bucket's name and this machine's credentials (gcloud auth "
            "application-default login; aws configure)"
        ) from error
