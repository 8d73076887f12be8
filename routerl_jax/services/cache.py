"""Caches for expensive replies: in memory, in SQLite, in Redis, and in layers of these.

A cache maps strings to bytes. It may drop any entry at any time, so callers must not rely on one. All caches are safe to use
from several threads; SqliteCache and RedisCache also from several processes.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import hashlib
import json
import math
import os
import pathlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging
from filelock import FileLock

from routerl_jax.core.files import cache_directory
from routerl_jax.core.packages import needs

_BATCH = 500  # keys per statement; SQLite takes 32,766 variables, older builds 999


class Entry(NamedTuple):
    """A value in a cache, and the time when it expires (seconds since the epoch; None: never)."""

    value: bytes
    expires: float | None


def cache_key(*parts: Any) -> str:
    """A key of fixed length for anything that is JSON-serialisable. Equal parts give equal keys, in every process."""
    text = json.dumps(parts, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Cache(abc.ABC):
    """A map from strings to bytes that may drop entries."""

    name: str

    @abc.abstractmethod
    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of these keys that exist and have not expired."""

    @abc.abstractmethod
    def set_many(self, items: Mapping[str, bytes], ttl: float | None = None) -> None:
        """Stores items, for `ttl` seconds if given. Replaces older values of their keys."""

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of these keys. Keys that are absent or expired are left out."""
        return {key: entry.value for key, entry in self.entries(keys).items()}

    def get(self, key: str) -> bytes | None:
        """The value of one key; None if it is absent or expired."""
        return self.get_many([key]).get(key)

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        """Stores one value."""
        self.set_many({key: value}, ttl)

    def close(self) -> None:  # noqa: B027 - a cache in memory has nothing to close
        """Releases files and connections."""


class MemoryCache(Cache):
    """The most recently used entries, in this process.

    Args:
      entries, max_bytes: bounds. Above either, the least recently used entries are dropped.
    """

    name = "memory"

    def __init__(self, entries: int = 65_536, *, max_bytes: int = 256 << 20) -> None:
        self._limit, self._max_bytes, self._bytes = entries, max_bytes, 0
        self._entries: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of these keys that exist and have not expired."""
        entries, now = {}, time.time()
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                if entry.expires is not None and entry.expires <= now:
                    self._remove(key)
                    continue
                self._entries.move_to_end(key)
                entries[key] = entry
        return entries

    def set_many(self, items: Mapping[str, bytes], ttl: float | None = None) -> None:
        """Stores items, for `ttl` seconds if given."""
        expires = _expiry(ttl)
        with self._lock:
            for key, value in items.items():
                self._remove(key)
                if len(value) > self._max_bytes:  # it would displace all others, and then itself
                    continue
                self._entries[key] = Entry(bytes(value), expires)
                self._bytes += len(value)
            while self._entries and (len(self._entries) > self._limit or self._bytes > self._max_bytes):
                self._remove(next(iter(self._entries)))

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.value)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, size INTEGER NOT NULL, expires REAL, used REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_used ON entries (used, size);
CREATE TABLE IF NOT EXISTS total (size INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN UPDATE total SET size = size + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entries BEGIN UPDATE total SET size = size - OLD.size; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON entries
  BEGIN UPDATE total SET size = size - OLD.size + NEW.size; END;
"""
_PUT = """
INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE
SET value = excluded.value, size = excluded.size, expires = excluded.expires, used = excluded.used
"""
_EVICT = """
DELETE FROM entries WHERE key IN (
  SELECT key FROM (SELECT key, size, SUM(size) OVER (ORDER BY used, key) AS upto FROM entries) WHERE upto - size < ?)
"""
_PATIENCE = 10.0  # seconds to wait while another process writes
_TOUCH_AFTER = 60.0  # seconds between updates of a row's time of use, so that reading seldom writes
_ROW_BYTES = 128  # estimated size of a row without its value


class SqliteCache(Cache):
    """Entries in one SQLite file (WAL). Any number of processes on one machine may share it.

    If the file is no database, it is moved aside (`.damaged-*`, with a warning), and a new one is created. With max_bytes=None
    it is a ValueError instead.

    Args:
      path: default: `cache.sqlite` in $ROUTERL_CACHE (~/.cache/routerl_jax).
      max_bytes: bound on the size of all entries. Above it, the least recently used ones are deleted until a tenth is free.
        None: nothing is deleted, for answers that are too expensive to ask for twice.
    """

    name = "SQLite"

    def __init__(self, path: str | os.PathLike[str] = "", *, max_bytes: int | None = 4 << 30) -> None:
        self.path = pathlib.Path(path).expanduser() if path else cache_directory() / "cache.sqlite"
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):  # several processes may try to create the file
            try:
                self._connection()
            except sqlite3.OperationalError:  # locked, read-only or no space: the file itself is fine
                raise
            except sqlite3.DatabaseError as error:
                if max_bytes is None:
                    raise ValueError(f"{self.path} is no cache ({error}): move it away, or name another") from error
                self._put_aside(error)
                self._connection()

    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of these keys that exist and have not expired."""
        database, now = self._connection(), time.time()
        entries: dict[str, Entry] = {}
        stale: list[tuple[float, str]] = []
        for batch in _batches(list(dict.fromkeys(keys))):
            marks = ",".join("?" * len(batch))
            rows = database.execute(f"SELECT key, value, expires, used FROM entries WHERE key IN ({marks})", batch)
            for key, value, expires, used in rows:
                if expires is not None and expires <= now:
                    continue
                entries[key] = Entry(value, expires)
                if now - used > _TOUCH_AFTER:
                    stale.append((now, key))
        if stale:
            with contextlib.suppress(sqlite3.OperationalError), database:  # the time of use may go unrecorded
                database.executemany("UPDATE entries SET used = ? WHERE key = ?", stale)
        return entries

    def set_many(self, items: Mapping[str, bytes], ttl: float | None = None) -> None:
        """Stores items, for `ttl` seconds if given. Raises sqlite3.Error if the file can't be written."""
        database, now, expires = self._connection(), time.time(), _expiry(ttl)
        rows = [(key, bytes(value), len(value) + _ROW_BYTES, expires, now) for key, value in items.items()]
        rows = [row for row in rows if row[2] <= self._max_bytes]
        with database:
            database.executemany(_PUT, rows)
            total = database.execute("SELECT size FROM total").fetchone()[0]
            if total > self._max_bytes:
                database.execute("DELETE FROM entries WHERE expires <= ?", (now,))
                total = database.execute("SELECT size FROM total").fetchone()[0]
            if total > self._max_bytes:
                database.execute(_EVICT, (total - int(0.9 * self._max_bytes),))

    def close(self) -> None:
        """Closes the connections of all threads. No thread may use the cache meanwhile."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._local = threading.local()

    def _connection(self) -> sqlite3.Connection:
        """The connection of this thread. A forked process opens its own."""
        connection, owner = getattr(self._local, "opened", (None, 0))
        if connection is not None and owner == os.getpid():
            return connection
        connection = sqlite3.connect(self.path, timeout=_PATIENCE, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'changed'").fetchone():
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except sqlite3.Error:
            connection.close()
            raise
        self._local.opened = (connection, os.getpid())
        with self._lock:
            self._connections.append(connection)
        return connection

    def _put_aside(self, error: sqlite3.Error) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{int(time.time())}")
        logging.warning("cache %s can't be read (%s): moved to %s, starting a new one", self.path, error, aside.name)
        self.path.rename(aside)
        for suffix in ("-wal", "-shm"):
            pathlib.Path(f"{self.path}{suffix}").unlink(missing_ok=True)


class RedisCache(Cache):
    """Entries in a Redis server, which several machines may share. The server's `maxmemory` and `maxmemory-policy allkeys-lru`
    bound its size.

    Args:
      url: `redis://[:password@]host:port/db`, `rediss://` or `unix://`.
      timeout: seconds for one command. If the server is gone or hangs, `redis.RedisError` is raised after this time; a
        LayeredCache then goes on without it.
    """

    _prefix = "routerl:cache:"  # prefix of its keys

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        self._redis = connect_redis(url, timeout)
        self.name = f"Redis at {redis_address(url)}"

    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of these keys that exist and have not expired."""
        entries: dict[str, Entry] = {}
        for batch in _batches(list(dict.fromkeys(keys))):
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.mget([self._prefix + key for key in batch])
            for key in batch:
                pipeline.pttl(self._prefix + key)
            values, *lifetimes = pipeline.execute()
            now = time.time()
            for key, value, milliseconds in zip(batch, values, lifetimes):
                if value is not None and milliseconds != -2:  # -2: expired between the two commands, -1: never expires
                    entries[key] = Entry(value, None if milliseconds == -1 else now + milliseconds / 1000)
        return entries

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of these keys that exist."""
        values_by_key: dict[str, bytes] = {}
        for batch in _batches(list(dict.fromkeys(keys))):
            values: Any = self._redis.mget([self._prefix + key for key in batch])
            values_by_key |= {key: value for key, value in zip(batch, values) if value is not None}
        return values_by_key

    def set_many(self, items: Mapping[str, bytes], ttl: float | None = None) -> None:
        """Stores items, for `ttl` seconds if given."""
        if ttl is not None and ttl <= 0:
            return
        for batch in _batches(list(items)):
            pipeline = self._redis.pipeline(transaction=False)
            for key in batch:
                pipeline.set(self._prefix + key, items[key], px=None if ttl is None else max(1, int(ttl * 1000)))
            pipeline.execute()

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()


class LayeredCache(Cache):
    """Several caches, the fastest first. Entries found in a slower one are copied into the faster ones.

    If a layer raises, that is logged once, and the layer is left out for `retry_after` seconds, then tried again. Nothing is
    raised here.
    """

    def __init__(self, layers: Sequence[Cache], *, retry_after: float = 15.0) -> None:
        self.layers = tuple(layers)
        self.name = " + ".join(layer.name for layer in self.layers)
        self._retry_after = retry_after
        self._down: dict[int, float] = {}  # layer -> when to try it again
        self._lock = threading.Lock()

    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of these keys that any layer has and that have not expired."""
        entries: dict[str, Entry] = {}
        missing = list(dict.fromkeys(keys))
        for number, layer in enumerate(self.layers):
            if not missing:
                break
            layer_entries: dict[str, Entry] = {}
            with self._using(number) as usable:
                if usable:
                    layer_entries = layer.entries(missing)
            if layer_entries:
                entries |= layer_entries
                missing = [key for key in missing if key not in layer_entries]
                self._fill(number, layer_entries)
        return entries

    def set_many(self, items: Mapping[str, bytes], ttl: float | None = None) -> None:
        """Stores items in every layer that works."""
        for number, layer in enumerate(self.layers):
            with self._using(number) as usable:
                if usable:
                    layer.set_many(items, ttl)

    def close(self) -> None:
        """Closes all layers."""
        for layer in self.layers:
            with contextlib.suppress(Exception):
                layer.close()

    def _fill(self, below: int, entries: Mapping[str, Entry]) -> None:
        """Copies entries of layer `below` into the layers above it, with the same time of expiry."""
        if not below:
            return
        now = time.time()
        by_expiry: dict[float | None, dict[str, bytes]] = {}
        for key, entry in entries.items():
            by_expiry.setdefault(entry.expires, {})[key] = entry.value
        for number in range(below):
            for expires, items in by_expiry.items():
                with self._using(number) as usable:
                    if usable:
                        self.layers[number].set_many(items, None if expires is None else expires - now)

    @contextlib.contextmanager
    def _using(self, number: int) -> Iterator[bool]:
        """Yields True if the layer may be used. An exception in the block marks the layer as down."""
        with self._lock:
            usable = time.monotonic() >= self._down.get(number, 0.0)
        try:
            yield usable
        except Exception as error:
            with self._lock:
                was_down = number in self._down
                self._down[number] = time.monotonic() + self._retry_after
            if not was_down:
                logging.warning(
                    "the cache in %s does not work (%s: %s): going on without it, trying again every %g s",
                    self.layers[number].name,
                    type(error).__name__,
                    error,
                    self._retry_after,
                )
            return
        if usable and number in self._down:
            with self._lock:
                self._down.pop(number, None)
            logging.info("the cache in %s works again", self.layers[number].name)


def open_cache(path: str | os.PathLike[str] | None = "", redis: str = "") -> LayeredCache:
    """The standard cache: memory, then SQLite, then Redis if there is a URL.

    Args:
      path: path of the SQLite file; "": the default path; None: no SQLite.
      redis: URL of a Redis server; "": no Redis.
    """
    layers: list[Cache] = [MemoryCache()]
    if path is not None:
        try:
            layers.append(SqliteCache(path))
        except (sqlite3.Error, OSError) as error:
            logging.warning(
                "no cache on disk at %s (%s): results are kept in memory alone", path or "the default", error
            )
    if redis:
        layers.append(RedisCache(redis))
    return LayeredCache(layers)


def connect_redis(url: str, timeout: float) -> Any:
    """A Redis client that gives up after `timeout` seconds and does not retry. It connects with its first command.

    Raises:
      ValueError: the URL is not one of Redis, or the package is not installed.
    """
    with needs("Redis", "web"):
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=30,
    )


def redis_address(url: str) -> str:
    """The URL without user and password, for messages."""
    scheme, _, address = url.partition("://")
    return f"{scheme}://{address.rpartition('@')[2]}"


def _expiry(ttl: float | None) -> float | None:
    return None if ttl is None else time.time() + ttl


def _batches(keys: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), _BATCH):
        yield keys[start : start + _BATCH]
