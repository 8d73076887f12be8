"""Snapshots: what was seen of the web is replayed to the bit without it."""

from __future__ import annotations

import errno
import json
import os

import pytest

from routerl_jax.knowledge.web.snapshot import NotRecorded, Record, Snapshot, WebError
from tests.web_servers import http_error

QUERIES = ["one", "two", "bad pages", "nothing"]


@pytest.fixture
def recorded(world, tmp_path):
    world.found = {"bad pages": ["/gone", "/page/7", "/loop", "/page/8"], "nothing": []}
    kb = world.kb(snapshot__directory=str(tmp_path / "web"), snapshot__mode="record")
    results = kb.search(QUERIES, k=3)
    assert [len(result) for result in results] == [3, 3, 2, 0]
    world.searches.storm = [http_error(500) for _ in range(3)]
    with pytest.raises(WebError, match="HTTP 500"):
        kb.search(["down"], k=3)
    kb.close()
    world._open.clear()
    return tmp_path / "web", results


def replay(world, directory, **changes):
    changes = {"snapshot__directory": str(directory), "snapshot__mode": "replay", **changes}
    return world.kb(**changes)


def test_replay_is_equal_to_the_bit_and_asks_nobody(world, recorded, monkeypatch):
    directory, results = recorded
    before = world.requests
    monkeypatch.delenv("TEST_KEY")  # no key is needed
    kb = replay(world, directory)
    again = kb.search(list(reversed(QUERIES)), k=3)
    assert list(reversed(again)) == results
    assert [repr(p) for r in reversed(again) for p in r] == [repr(p) for r in results for p in r]
    with pytest.raises(WebError, match="HTTP 500"):
        kb.search(["down"], k=3)
    assert len(kb) == 5
    assert kb.search(["one"], k=2)[0] == results[0][:2]  # another k: from its searches, pages and summaries
    assert world.requests == before


def test_what_is_missing_is_an_error_or_empty(world, recorded):
    directory, _ = recorded
    with pytest.raises(NotRecorded, match=r"no record in searches of 'unknown'.*mode='auto'"):
        replay(world, directory).search(["unknown"])
    with pytest.raises(WebError, match="1 of 2 queries failed"):
        replay(world, directory).search(["one", "unknown"], k=3)
    found = replay(world, directory, snapshot__missing="empty").search(["unknown", "one"], k=3)
    assert [len(result) for result in found] == [0, 3]
    with pytest.raises(NotRecorded, match="pages"):  # more than was read
        replay(world, directory).search(["one"], k=5)


def test_auto_goes_on(world, recorded):
    directory, results = recorded
    kb = world.kb(snapshot__directory=str(directory), snapshot__mode="auto", cache__disk=False)
    before = world.requests
    assert kb.search(["one"], k=3)[0] == results[0]
    assert world.requests == before
    assert len(kb.search(["three"], k=3)[0]) == 3
    assert world.requests == (before[0] + 1, before[1], before[2] + 3)
    assert len(replay(world, directory).search(["three"], k=3)[0]) == 3


def test_failures_can_be_tried_again(world, recorded):
    directory, _ = recorded
    kb = world.kb(snapshot__directory=str(directory), snapshot__mode="auto")
    with pytest.raises(WebError, match="HTTP 500"):
        kb.search(["down"], k=3)
    world.found["bad pages"] = ["/page/6", "/page/7", "/page/3"]
    assert kb.drop_failures() > 0
    assert len(kb.search(["down"], k=3)[0]) == 3
    assert len(replay(world, directory).search(["down"], k=3)[0]) == 3
    with pytest.raises(ValueError, match="not changed"):
        replay(world, directory).drop_failures()


def test_a_torn_line_is_no_harm(world, recorded):
    directory, results = recorded
    with (directory / "pages.jsonl").open("ab") as file:
        file.write(b'{"key": "half a li')
    assert replay(world, directory).search(QUERIES, k=3) == results
    kb = world.kb(snapshot__directory=str(directory), snapshot__mode="auto")
    kb.search(["three"], k=3)
    for line in (directory / "pages.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_line_that_another_process_left_half(world, recorded):
    """It was killed while this one had the snapshot open already."""
    directory, _ = recorded
    kb = world.kb(snapshot__directory=str(directory), snapshot__mode="auto", cache__disk=False)
    for table in ("searches", "pages", "answers"):
        with (directory / f"{table}.jsonl").open("ab") as file:
            file.write(b'{"key": "half a line' + b"." * 200_000)
    results = kb.search(["another"], k=3)
    assert replay(world, directory).search(["another"], k=3) == results


def test_a_full_disk_loses_nothing(world, recorded, monkeypatch):
    directory, results = recorded
    kb = world.kb(snapshot__directory=str(directory), snapshot__mode="auto", cache__disk=False)

    def full(file, data):
        os.write(file, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("routerl_jax.knowledge.web.snapshot._write_all", full)
        with pytest.raises(OSError, match=r"can't be added to: No space left on device.*searches.jsonl"):
            kb.search(["another"], k=3)
    assert len(kb.search(["another"], k=3)[0]) == 3
    assert len(replay(world, directory).search(["another"], k=3)[0]) == 3
    assert replay(world, directory).search(QUERIES, k=3) == results


def test_a_table_that_is_not_there(world, recorded):
    directory, _ = recorded
    (directory / "pages.jsonl").unlink()
    with pytest.raises(ValueError, match=r"pages.jsonl does not exist: the snapshot is not whole"):
        replay(world, directory)


def test_what_does_not_fit_is_refused(world, recorded, tmp_path):
    directory, _ = recorded
    with pytest.raises(ValueError, match=r"recorded with summary.sentences=5, the configuration says 3"):
        replay(world, directory, summary__sentences=3)
    with pytest.raises(ValueError, match="holds a snapshot"):
        world.kb(snapshot__directory=str(directory), snapshot__mode="record")
    with pytest.raises(ValueError, match="nothing to replay"):
        replay(world, tmp_path / "elsewhere")
    with (directory / "answers.jsonl").open("ab") as file:
        file.write(b"not json\n")
    with pytest.raises(ValueError, match=r"answers.jsonl, line 6"):
        replay(world, directory)


def test_two_knowledge_bases_record_into_one(world, tmp_path):
    directory = str(tmp_path / "web")
    both = [world.kb(snapshot__directory=directory, snapshot__mode="auto", cache__disk=False) for _ in range(2)]
    for i in range(6):
        both[i % 2].search([f"q{i}"], k=2)
    kb = replay(world, directory)
    assert all(len(kb.search([f"q{i}"], k=2)[0]) == 2 for i in range(6))


def test_of_two_processes_the_first_record_counts_for_both(tmp_path):
    """What a replay will give is what both go on with."""
    one, other = (Snapshot(tmp_path / "web", "auto", {}) for _ in range(2))
    assert one.put("pages", "k", "about", Record("mine")) == Record("mine")
    assert other.get("pages", "k", "about") is None  # it has not looked since
    assert other.put("pages", "k", "about", Record("ours")) == Record("mine")
    assert other.get("pages", "k", "about") == Record("mine")
    assert other.put("pages", "l", "about", Record(error="gone")) == Record(error="gone")
    assert one.put("pages", "l", "about", Record("there")) == Record(error="gone")
    assert one.put("pages", "m", "about", Record("é\u2028")) == Record("é\u2028")
    for snapshot in (one, other):
        snapshot.close()
    replayed = Snapshot(tmp_path / "web", "replay", {})
    found = [replayed.get("pages", key, "about") for key in "klm"]
    assert found == [Record("mine"), Record(error="gone"), Record("é\u2028")]
    assert len((tmp_path / "web" / "pages.jsonl").read_text().splitlines()) == 3


def test_a_line_of_another_process_that_is_no_record_is_named(tmp_path):
    snapshot = Snapshot(tmp_path / "web", "auto", {})
    snapshot.put("pages", "k", "about", Record("mine"))
    with (tmp_path / "web" / "pages.jsonl").open("a") as other:
        other.write("{}\n")
    with pytest.raises(ValueError, match=r"pages\.jsonl, byte \d+: not a record .*\. Record anew"):
        snapshot.put("pages", "l", "about", Record("there"))
    snapshot.close()


def test_the_snapshot_holds_no_key(world, recorded):
    directory, _ = recorded
    assert all("key-123" not in path.read_text() for path in directory.glob("*.json*"))
