"""`python -m launch.serve_kb` as a user runs it, with a real knowledge base behind it, and one line for every mistake."""

import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from routerl_jax.core.types import Passage
from routerl_jax.extras.mcp_tools import McpTool
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.load import load_kb
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.services.asgi import listen
from tests.programs import refusal, start

PASSAGES = [
    Passage(id="1", title="Paris", text="The capital of France lies on the Seine."),
    Passage(id="2", title="Rome", text="The capital of Italy lies on the Tiber."),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("kb") / "capitals"
    build_from_passages(PASSAGES, BuildConfig(), path)
    return path


@pytest.fixture(scope="module")
def server(
    directory: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    token = tmp_path_factory.mktemp("token") / "token.txt"
    token.write_text("s3cret\n")
    config = ["--config=configs/serve_kb.py", "--config.warm_up=false"]
    flags = [*config, "--port=0", f"--token-file={token}", "--max-batch=8", "--mcp=http"]
    kbs = [f"--kb=wiki={directory}", f"--kb=wiki:again={directory}"]
    process = start("launch.serve_kb", *kbs, *flags, JAX_NUM_CPU_DEVICES="1")
    assert process.stdout is not None
    try:
        said = ""
        while "MCP: " not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        yield said, process
    finally:
        process.kill()


def test_what_it_says_works(server: tuple[str, subprocess.Popen[str]], directory: pathlib.Path) -> None:
    said, process = server
    url = re.findall(r"rj\.load_kb\('(.+)'\)", said)[0]
    assert "  wiki (modes default, again), 2 passages " in said
    queries = ["Which city is on the Tiber?", "France", ""]
    here = load_kb(directory, mesh=single_device_mesh())
    there = load_kb(url, token="s3cret")
    assert there.search(queries, k=5) == here.search(queries, k=5)
    assert load_kb(f"{url}?mode=again", token="s3cret").search(["Rome"], k=1)[0][0].title == "Rome"
    tool = McpTool(re.findall(r"MCP: (\S+)", said)[0], token="s3cret")
    assert tool.name == "search_wiki"
    assert tool.search(["the Seine"], k=1)[0][0].title == "Paris"
    tool.close()
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "there is nothing to serve: give --kb=NAME=DIRECTORY"),
        (("--kb=wiki",), "--kb=wiki: write --kb=NAME=DIRECTORY"),
        (("--kb=wiki=/nowhere",), "/nowhere"),
        (("--kb=wiki={kb}", "--kb=wiki=/nowhere"), "there is another --kb=wiki=.."),
        (("--kb=wiki={kb}", "--kb=wiki:default={kb}"), "'wiki' has two modes 'default'"),
        (("--kb=a/b={kb}",), "can't be called 'a/b'"),
        (("--kb=wiki={kb}", "--token_file=/nowhere"), "token_file=/nowhere: can't be read"),
        (("--kb=wiki={kb}", "--max_batch=0"), "max_batch=0"),
        (("--kb=wiki={kb}", "--host=256.0.0.1"), "can't listen at 256.0.0.1:0"),
        (("--config=configs/serve_kb.py:wiki=/nowhere", "--config.limits.k=0"), "config.limits.k=0 must be at least 1"),
    ],
)
def test_mistakes_are_one_line(directory: pathlib.Path, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refusal("serve_kb", "--port=0", *(argument.format(kb=directory) for argument in arguments))


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        refused = refusal("serve_kb", "--kb=wiki=/nowhere", f"--port={port}")
    assert f"can't listen at 127.0.0.1:{port} (Address already in use); give another --port or --host" in refused
