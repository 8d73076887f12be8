"""Data sets on the Hugging Face hub. `hf://datasets/ORG/NAME/FILE` names a file, which is fetched to this machine.

    hf://datasets/ORG/NAME/FILE           a file of the repository; FILE may have * and ?, and is then all such files
    hf://datasets/ORG/NAME                its .parquet files, if they are of one split
    hf://datasets/ORG/NAME/FOLDER         the .parquet files of a folder
    hf://datasets/ORG/NAME@REVISION/..    files of a branch, tag or commit; `@~parquet` has the files that the hub converted

Files are fetched once into the hub's own cache (HF_HOME), by the hub's own client (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
Later they are read from there, without a network.
"""

from __future__ import annotations

import pathlib
import re
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple

from routerl_jax.data.formats.tables import is_pattern

PREFIX = "hf://datasets/"
_NAME = re.compile(rf"{PREFIX}[^\[\],|]+")
_CONVERTED = {"~parquet": "refs/convert/parquet"}
_SPLIT = re.compile(r"[A-Za-z_]*")  # the start of a shard's name, such as train-00000-of-00003.parquet
_SHARD = re.compile(r"(.*-)(\d+)-of-(\d+)(\..*)")


class _Address(NamedTuple):
    """The parts of a name."""

    name: str
    repo: str
    revision: str
    file: str

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.name}: {problem}")


def on_this_machine(name: str) -> str:
    """The name of the local copy of files on the hub; fetches the files that are missing. Other names are returned unchanged.

    Raises:
      ValueError: a file does not exist on the hub, or can't be fetched; names it, and says what to do.
    """
    return _NAME.sub(lambda match: _fetched(match[0]), name)


def _fetched(name: str) -> str:
    """The path of a file, or a pattern for several files."""
    organisation, _, rest = name.removeprefix(PREFIX).partition("/")
    repo, _, file = rest.partition("/")
    repo, _, revision = repo.partition("@")
    if not organisation or not repo:
        raise ValueError(f"{name!r} is no data set of the hub: write {PREFIX}ORGANISATION/NAME/FILE")
    revision = urllib.parse.unquote(revision)
    revision = _CONVERTED.get(revision, revision) or "main"
    address = _Address(name, f"{organisation}/{repo}", revision, file.strip("/"))
    if "." in address.file.rpartition("/")[2] and not is_pattern(address.file):
        return str(_download(address, address.file))
    pattern, names = _chosen(address, _listing(address))
    for name in names:  # a cache may hold only some of the shards whose names have a total
        if (shard := _SHARD.fullmatch(name)) is None:
            continue
        digits = len(shard[2])
        for number in range(int(shard[3])):
            shard_name = f"{shard[1]}{number:0{digits}}-of-{shard[3]}{shard[4]}"
            if shard_name not in names:
                raise address.error(
                    f"{shard_name} is missing; fetch it with a network, or name the shards that are meant"
                )
    paths = [_download(address, name) for name in names]
    roots = {str(path)[: -len(name)] for path, name in zip(paths, names)}
    if len(roots) > 1:
        raise address.error(f"{address.repo} changed while it was fetched; run the same again")
    return roots.pop() + pattern if len(paths) > 1 else str(paths[0])


def _chosen(address: _Address, available: Sequence[str]) -> tuple[str, list[str]]:
    """The pattern of the named files, and their names, sorted."""
    if is_pattern(address.file):  # like a shell: * and ? don't match a slash
        letters = {"*": "[^/]*", "?": "[^/]"}
        pattern = re.compile("".join(letters.get(letter, re.escape(letter)) for letter in address.file))
        names = sorted(filter(pattern.fullmatch, available))
        if not names:
            raise address.error(f"no file of {address.repo} is called so; there are {_first_names(available)}")
        return address.file, names
    folder = f"{address.file}/" if address.file else ""
    tables = sorted(name for name in available if name.startswith(folder) and name.endswith(".parquet"))
    if not tables:
        raise address.error(f"there are no .parquet files; name a file: {_first_names(available)}")
    splits: set[str] = set()  # the patterns of all shards of each
    for table in tables:
        above, slash, last = table.rpartition("/")
        begins = _SPLIT.match(last)
        splits.add(f"{above}{slash}{begins[0] if begins else ''}*.parquet")
    if len(splits) > 1:
        names = ", ".join(f"{address.name.rstrip('/')}/{split.removeprefix(folder)}" for split in sorted(splits)[:8])
        raise address.error(f"there are several splits; name one: {names}")
    return splits.pop(), tables


def _first_names(names: Sequence[str]) -> str:
    listed = [name for name in names if not name.startswith(".")][:8]
    return f"{', '.join(listed)}{', ..' if len(names) > len(listed) else ''}" if listed else "none"


def _listing(address: _Address) -> list[str]:
    """Names of the repository's files; without a network, names of its files in the cache."""
    from huggingface_hub import HfApi, errors

    try:
        return sorted(HfApi().list_repo_files(address.repo, repo_type="dataset", revision=address.revision))
    except errors.HfHubHTTPError as error:
        raise _unfetched(address, error) from error
    except (errors.HTTPError, OSError) as error:
        if cached := _cached(address):
            return cached
        raise _unfetched(address, error) from error


def _cached(address: _Address) -> list[str]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    for repository in repositories:
        if (repository.repo_type, repository.repo_id) != ("dataset", address.repo):
            continue
        for revision in repository.revisions:
            if address.revision in (revision.commit_hash, *revision.refs):
                return sorted(file.file_path.relative_to(revision.snapshot_path).as_posix() for file in revision.files)
    return []


def _download(address: _Address, file: str) -> pathlib.Path:
    from huggingface_hub import errors, hf_hub_download

    try:
        return pathlib.Path(hf_hub_download(address.repo, file, repo_type="dataset", revision=address.revision))
    except (errors.HTTPError, errors.EntryNotFoundError, errors.HFValidationError, OSError) as error:
        raise _unfetched(address, error) from error


def _unfetched(address: _Address, error: Exception) -> ValueError:
    why = " ".join(str(error).split()).removesuffix(".")
    return address.error(
        f"could not be fetched ({why}). Check the name; of a gated data set accept its terms and set HF_TOKEN; without a "
        "network, fetch the file elsewhere and give its path"
    )
