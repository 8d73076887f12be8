"""Places under gs:// and s3://, against servers that speak their protocols."""

import pathlib

import pytest

from routerl_jax.core import buckets
from tests.buckets import bucket  # noqa: F401 (a fixture)


def test_what_is_no_bucket_is_left_as_it_is(tmp_path: pathlib.Path) -> None:
    for place in ("runs/x", "/gs:/x", "http://host/kb", "gs:/x", "az://container/x"):
        assert not buckets.in_bucket(place)
        assert buckets.fetched(place) == pathlib.Path(place)
    assert buckets.url_of(tmp_path / "a") == str(tmp_path / "a")
    assert buckets.resolve_url("gs://b/kbs/all", "../text") == "gs://b/kbs/text"
    buckets.stand_in(tmp_path / "run", "gs://b/run")
    assert buckets.url_of(tmp_path / "run" / "snapshot") == "gs://b/run/snapshot"
    assert buckets.path_of("gs://b/run/snapshot") == tmp_path / "run" / "snapshot"
    assert buckets.path_of("gs://b/run") == tmp_path / "run"
    assert buckets.path_of("gs://b/run2") is None
    buckets.forget(tmp_path / "run")
    assert buckets.path_of("gs://b/run") is None


def test_files_and_directories_are_copied_once_and_when_they_change(bucket: str) -> None:  # noqa: F811
    def write(name: str, content: bytes) -> None:
        buckets.write_object(f"{bucket}/{name}", content)

    write("kb/kb.json", b"{}")
    write("kb/passages/zarr.json", b"1")
    write("kb/.lock", b"held")
    write("kb2/other", b"no part of it")
    here = buckets.fetched(f"{bucket}/kb/")
    assert here.name == "kb"
    assert sorted(p.relative_to(here).as_posix() for p in here.rglob("*")) == [
        "kb.json",
        "passages",
        "passages/zarr.json",
    ]
    (here / "kb.json").touch()
    assert buckets.fetched(f"{bucket}/kb") == here
    assert buckets.url_of(here / "passages") == f"{bucket}/kb/passages"
    assert buckets.named(f"{here}/kb.json is damaged") == f"{bucket}/kb/kb.json is damaged"
    write("kb/passages/zarr.json", b"2")
    again = buckets.fetched(f"{bucket}/kb")
    assert again != here
    assert (again / "passages" / "zarr.json").read_bytes() == b"2"
    file = buckets.fetched(f"{bucket}/kb/kb.json")
    assert (file.name, file.read_bytes()) == ("kb.json", b"{}")


def test_a_copy_that_can_not_be_put_in_its_place_is_an_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Only if no other process has put one there."""

    def full(self: pathlib.Path, target: pathlib.Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    buckets.write_object(f"{bucket}/unmoved/kb.json", b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", full)
        with pytest.raises(OSError, match="No space left"):
            buckets.fetched(f"{bucket}/unmoved")
    assert buckets.fetched(f"{bucket}/unmoved").is_dir()


def test_objects(bucket: str, tmp_path: pathlib.Path) -> None:  # noqa: F811
    assert buckets.read_object(f"{bucket}/a") is None
    assert buckets.listing(bucket) == {}
    (tmp_path / "a").write_bytes(b"x" * 9)
    buckets.upload(tmp_path / "a", f"{bucket}/a")
    assert buckets.read_object(f"{bucket}/a") == b"x" * 9
    assert buckets.listing(bucket)["a"].size == 9
    buckets.remove(f"{bucket}/a")
    buckets.remove(f"{bucket}/a")
    assert buckets.listing(bucket) == {}


def test_what_is_not_there_or_cannot_be_used_is_told(bucket: str, tmp_path: pathlib.Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=f"{bucket}/kb: there is nothing there"):
        buckets.fetched(f"{bucket}/kb")
    missing = bucket.replace("//bucket", "//no-such-bucket")
    (tmp_path / "a").touch()
    with pytest.raises(buckets.NotWritten, match=f"{missing}/a can't be written: .*Check the bucket's name"):
        buckets.upload(tmp_path / "a", f"{missing}/a")
