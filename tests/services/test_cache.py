"""Caches: what is put in comes out, in memory, SQLite and Redis; bounds, expiry, damage, and layers that fail."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from routerl_jax.services import cache as cache_module
from routerl_jax.services.cache import (
    Cache,
    LayeredCache,
    MemoryCache,
    RedisCache,
    SqliteCache,
    cache_key,
    open_cache,
    redis_address,
)
from tests.clock import Clock


@pytest.fixture(params=["memory", "sqlite", "redis", "layers"])
def cache(request, tmp_path):
    if request.param == "memory":
        made = MemoryCache()
    elif request.param == "sqlite":
        made = SqliteCache(tmp_path / "cache.sqlite")
    elif request.param == "redis":
        made = RedisCache(request.getfixturevalue("redis_server").url)
    else:
        made = LayeredCache([MemoryCache(1), SqliteCache(tmp_path / "cache.sqlite")])
    yield made
    made.close()


def test_what_is_put_in_comes_out(cache):
    items = {f"key {i}": bytes([i % 256]) * i for i in range(1200)}  # more than one statement's worth
    cache.set_many(items)
    assert cache.get_many([*items, "unknown"]) == items
    cache.set("key 3", b"new")
    assert cache.get("key 3") == b"new"
    assert cache.get("unknown") is None
    assert cache.get_many([]) == {}


def test_entries_expire(cache):
    cache.set_many({"a": b"1"}, ttl=0.7)
    cache.set_many({"b": b"2"}, ttl=60)
    assert cache.get_many(["a", "b"]) == {"a": b"1", "b": b"2"}
    time.sleep(0.75)
    assert cache.get_many(["a", "b"]) == {"b": b"2"}
    left = cache.entries(["b"])["b"].expires
    assert left is not None
    assert 50 < left - time.time() <= 60


def test_threads_share_a_cache(cache):
    def work(number: int) -> None:
        for i in range(20):
            cache.set(f"{number}/{i}", b"%d" % i)
            assert cache.get(f"{number}/{i}") == b"%d" % i

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache.get_many([f"{n}/{i}" for n in range(4) for i in range(20)])) == 80


def test_memory_forgets_the_least_recently_used():
    cache = MemoryCache(entries=3)
    cache.set_many({"a": b"1", "b": b"2", "c": b"3"})
    assert cache.get("a") == b"1"
    cache.set("d", b"4")
    assert cache.get_many("abcd") == {"a": b"1", "c": b"3", "d": b"4"}
    small = MemoryCache(max_bytes=10)
    small.set_many({"a": b"x" * 6, "b": b"y" * 6})
    assert small.get_many("ab") == {"b": b"y" * 6}
    small.set("c", b"z" * 11)  # does not fit, and pushes nothing out
    assert small.get_many("bc") == {"b": b"y" * 6}


def test_sqlite_keeps_its_bound_and_the_recent(tmp_path, monkeypatch):
    monkeypatch.setattr("routerl_jax.services.cache._TOUCH_AFTER", 0.0)
    cache = SqliteCache(tmp_path / "cache.sqlite", max_bytes=100_000)
    for i in range(60):
        cache.set(f"{i}", b"x" * 5_000)
        cache.get("0")
    kept = [int(key) for key in cache.get_many([str(i) for i in range(60)])]
    assert 10 <= len(kept) <= 20
    assert 0 in kept  # was read all along
    assert sorted(kept)[1:] == list(range(60 - len(kept) + 1, 60))
    cache.set("huge", b"x" * 200_000)  # larger than everything: not kept, and nothing is thrown out for it
    assert cache.get("huge") is None
    assert len(cache.get_many([str(i) for i in kept])) == len(kept)
    total = cache._connection().execute("SELECT (SELECT size FROM total), SUM(size) FROM entries").fetchone()
    assert total[0] == total[1]


def test_sqlite_is_shared_by_processes_and_outlives_them(tmp_path):
    path = tmp_path / "cache.sqlite"
    program = (
        "import sys; from routerl_jax.services.cache import SqliteCache; c = SqliteCache(sys.argv[1])\n"
        "for i in range(100): c.set(f'{sys.argv[2]}/{i}', sys.argv[2].encode()); c.get('a/1')"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "abc"]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    found = SqliteCache(path).get_many([f"{name}/{i}" for name in "abc" for i in range(100)])
    assert len(found) == 300
    assert found["b/7"] == b"b"


def test_a_damaged_file_is_put_aside(tmp_path):
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"this is no database " * 1000)
    cache = SqliteCache(path)
    cache.set("a", b"1")
    assert cache.get("a") == b"1"
    assert len(list(tmp_path.glob("cache.sqlite.damaged-*"))) == 1


def test_what_is_to_be_kept_is_neither_thrown_out_nor_put_aside(tmp_path):
    cache = SqliteCache(tmp_path / "cache.sqlite", max_bytes=None)
    cache.set_many({f"{i}": b"x" * 5_000 for i in range(60)})
    assert len(cache.get_many([str(i) for i in range(60)])) == 60
    (tmp_path / "text.sqlite").write_bytes(b"this is no database " * 1000)
    with pytest.raises(ValueError, match=r"text\.sqlite is no cache .*: move it away"):
        SqliteCache(tmp_path / "text.sqlite", max_bytes=None)


def test_default_place(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "here"))
    cache = open_cache()
    cache.set("a", b"1")
    assert (tmp_path / "here" / "cache.sqlite").is_file()


def test_a_place_that_cannot_be_written_leaves_memory(tmp_path):
    (tmp_path / "file").write_text("")
    cache = open_cache(tmp_path / "file" / "cache.sqlite")
    cache.set("a", b"1")
    assert cache.get("a") == b"1"
    assert cache.name == "memory"


def test_faster_layers_are_filled_until_the_entry_expires(tmp_path):
    memory, disk = MemoryCache(), SqliteCache(tmp_path / "cache.sqlite")
    disk.set_many({"a": b"1", "b": b"2"}, ttl=1.0)
    disk.set("c", b"3")
    layers = LayeredCache([memory, disk])
    assert layers.get_many("abcx") == {"a": b"1", "b": b"2", "c": b"3"}
    assert memory.get_many("abc") == {"a": b"1", "b": b"2", "c": b"3"}
    time.sleep(1.05)
    assert memory.get_many("abc") == {"c": b"3"}


class _Broken(Cache):
    name = "a broken disk"

    def __init__(self):
        self.calls, self.broken = 0, True

    def entries(self, keys):
        self.calls += 1
        if self.broken:
            raise OSError("no space left on device")
        return {}

    def set_many(self, items, ttl=None):
        self.entries(list(items))


def test_a_broken_layer_is_skipped_logged_once_and_tried_again(caplog):
    broken = _Broken()
    layers = LayeredCache([MemoryCache(), broken], retry_after=0.1)
    with caplog.at_level("INFO"):
        for i in range(5):
            layers.set(f"{i}", b"x")
        assert layers.get_many("01234") == {str(i): b"x" for i in range(5)}
        assert broken.calls == 1
        time.sleep(0.12)
        layers.set("5", b"x")
        assert broken.calls == 2
        broken.broken = False
        time.sleep(0.12)
        layers.set("6", b"x")
    said = [record.message for record in caplog.records if "a broken disk" in record.message]
    assert len(said) == 2
    assert "no space left on device" in said[0]
    assert "works again" in said[1]


def test_redis_killed_in_the_middle(redis_server, caplog, monkeypatch):
    """It is asked once and then left alone for 15 s, of a clock that stands still meanwhile."""
    shared, asked = RedisCache(redis_server.url, timeout=0.5), []
    layers = LayeredCache([MemoryCache(), shared], retry_after=15)
    layers.set("a", b"1")
    clock = Clock(monkeypatch, cache_module)
    set_many = shared.set_many
    monkeypatch.setattr(shared, "set_many", lambda *given, **rest: (asked.append(1), set_many(*given, **rest)))
    redis_server.kill()
    with caplog.at_level("INFO"):
        for i in range(200):
            layers.set(f"{i}", b"x")
            assert layers.get(f"{i}") == b"x"
        assert layers.get_many(["a", "unknown"]) == {"a": b"1"}
        assert len(asked) == 1
        redis_server.start()
        clock.now += 15
        layers.set("later", b"2")
    assert RedisCache(redis_server.url).get("later") == b"2"
    warnings = [record.message for record in caplog.records if "does not work" in record.message]
    assert len(warnings) == 1
    assert redis_address(redis_server.url) in warnings[0]


def test_messages_hold_no_password():
    assert redis_address("redis://user:secret@host:6379/0") == "redis://host:6379/0"


def test_keys_depend_on_content_alone():
    assert cache_key("a", {"x": 1, "y": 2}) == cache_key("a", {"y": 2, "x": 1})
    assert cache_key("a", "b") != cache_key("ab")
    assert cache_key("\ud800") != cache_key("?")  # lone surrogates are text too
