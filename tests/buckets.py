"""Buckets for tests: servers on this machine that speak Google Cloud Storage's and S3's protocols."""

from __future__ import annotations

import http
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

_count = itertools.count()
_STARTED: dict[str, str] = {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(scheme: str) -> dict[str, str]:
    """What clients of the server of a scheme need; the server is started at the first call and lives as long as the process.

    The place `SCHEME://bucket` is there. Skips the test if the server is not installed.
    """
    if scheme not in _STARTED:
        _STARTED[scheme] = (_start_gs if scheme == "gs" else _start_s3)()
    url = _STARTED[scheme]
    if scheme == "gs":
        return {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_CLOUD_PROJECT": "test",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",  # tensorstore does not look for credentials
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _start(make: Callable[[], Any]) -> None:
    """Starts a server whose threads don't keep the process alive: they are daemons, as the thread that makes them is."""
    starting = threading.Thread(target=lambda: make().start(), daemon=True)
    starting.start()
    starting.join()


def _start_gs() -> str:
    pytest.importorskip("gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server")
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    _with_generations(server)
    port = free_port()
    _start(lambda: server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"))
    return f"http://127.0.0.1:{port}"


def _with_generations(server: Any) -> None:
    """Adds what the emulator leaves out and tensorstore needs: downloads say their generation, and uploads may depend on it."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    download, insert, lock = objects.download, objects.insert, threading.Lock()

    def generation(storage: Any, bucket: str, name: str) -> str:
        try:
            return storage.get_file_obj(bucket, name)["generation"]
        except NotFound:
            return "0"

    def read(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        response["X-Goog-Generation"] = generation(storage, request.params["bucket_name"], request.params["object_id"])
        download(request, response, storage, *args, **kwargs)

    def write(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            wanted, name = (request.query.get(key, [""])[0] for key in ("ifGenerationMatch", "name"))
            if wanted and generation(storage, request.params["bucket_name"], name) != wanted:
                response.status = http.HTTPStatus.PRECONDITION_FAILED
                return
            insert(request, response, storage, *args, **kwargs)

    objects.download = read
    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            handlers[method] = {download: read, insert: write}.get(handler, handler)


def _start_s3() -> str:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    port = free_port()
    _start(lambda: moto.ThreadedMotoServer("127.0.0.1", port))
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys).create_bucket(Bucket="bucket")
    return f"http://127.0.0.1:{port}"


@pytest.fixture(params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path) -> str:
    """An empty place in a bucket of each kind; the cache is empty, too."""
    for name, value in environment(request.param).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    return f"{request.param}://bucket/{os.getpid()}-{next(_count)}"
