"""Knowledge bases as MCP tools and MCP tools as search tools, with true servers over stdio and streamable HTTP."""

import asyncio
import concurrent.futures
import re
import sys
import time
import types
from typing import Any

import httpx
import pytest
from mcp import Client, StdioServerParameters
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from routerl_jax.core.time_limit import time_limit
from routerl_jax.core.types import TextAndImage
from routerl_jax.extras.kb_server.app import ServerSettings
from routerl_jax.extras.kb_server.mcp import http_app
from routerl_jax.extras.kb_server.requests import Limits
from routerl_jax.extras.mcp_tools import McpTool, _passages
from routerl_jax.knowledge.client.transport import Unavailable
from tests.extras.kb_server.servers import EchoKB, running, search, serving
from tests.knowledge.mcp_servers import PNG
from tests.programs import ROOT

URI = f"data:image/png;base64,{PNG}"


def command(kind: str) -> list[str]:
    """A server of `mcp_servers` that finds the tests whatever directory it starts in."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.knowledge.mcp_servers import main; main({kind!r})"
    )
    return [sys.executable, "-c", code]


async def ask(server: Any, *calls: tuple[str, dict]) -> tuple[list[Any], list[Any]]:
    """The tools of a server, and what its tools answer."""
    async with Client(server) as client:
        return (await client.list_tools()).tools, [await client.call_tool(*call) for call in calls]


@pytest.mark.slow
def test_our_tools_over_stdio() -> None:
    words = command("ours")
    server = StdioServerParameters(command=words[0], args=words[1:], env={"JAX_PLATFORMS": "cpu"})
    calls = [
        ("search_wiki", {"query": "who", "k": 2}),
        ("search_wiki", {"query": "who", "mode": "graph"}),
        ("search_wiki", {"query": "who", "mode": "web"}),
        ("search_wiki", {"query": "boom"}),
    ]
    tools, (plain, graph, web, boom) = asyncio.run(ask(server, *calls))
    assert [tool.name for tool in tools] == ["search_wiki"]
    assert set(tools[0].input_schema["properties"]) == {"query", "k", "mode"}
    assert tools[0].input_schema["required"] == ["query"]
    assert [passage["text"] for passage in plain.structured_content["passages"]] == ["who (0)", "who (1)"]
    assert plain.content[0].text == "Doc 1(Title: Title 0) who (0)\nDoc 2(Title: Title 1) who (1)"
    assert len(graph.structured_content["passages"]) == 5
    assert (web.is_error, boom.is_error) == (True, True)
    assert "no mode 'web'; it has: passage, graph" in web.content[0].text
    assert "the disk is gone" in boom.content[0].text


@pytest.fixture(scope="module")
def url():
    kbs = [EchoKB("wiki"), EchoKB("pictures", reads=frozenset({"text", "image"}), image=URI)]
    with serving(*kbs, mcp=http_app) as url:
        yield url


def test_our_tools_over_http_beside_the_native_endpoint(url: str) -> None:
    calls = [
        ("search_pictures", {"image": URI, "k": 1}),
        ("search_pictures", {"image": "/etc/passwd"}),
        ("search_wiki", {"q": "who"}),
    ]
    tools, (found, wrong, unknown) = asyncio.run(ask(f"{url}/mcp", *calls))
    assert [tool.name for tool in tools] == ["search_wiki", "search_pictures"]
    assert [block.type for block in found.content] == ["text", "image"]
    assert found.content[1].data == PNG
    assert wrong.is_error
    assert unknown.content[0].text == "unknown argument 'q'; known: query, k"
    assert search(url, {"queries": ["x"]}).status_code == 200


def test_a_search_tool_over_http_is_the_knowledge_base(url: str) -> None:
    tool = McpTool(f"{url}/mcp", "search_pictures")
    queries = ["who", "  ", TextAndImage(text="this", image=URI), TextAndImage(image=URI)]
    here = EchoKB(reads=frozenset({"text", "image"}), image=URI)
    assert tool.search(queries, k=2) == here.search(queries, k=2)
    with pytest.raises(ValueError, match="several tools; give one of: search_wiki, search_pictures"):
        McpTool(f"{url}/mcp")
    with pytest.raises(ValueError, match="no tool 'find'"):
        McpTool(f"{url}/mcp", "find")
    tool.close()
    assert tool.search(["again"], k=1)[0][0].text == "again (0)"


def test_many_threads_share_a_connection(url: str) -> None:
    tool = McpTool(f"{url}/mcp", "search_wiki")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: tool.search([f"a{i}", f"b{i}"], k=1), range(16)))
    assert [[found[0].text for found in one] for one in results] == [[f"a{i} (0)", f"b{i} (0)"] for i in range(16)]


def test_the_token_guards_mcp_too() -> None:
    kb = EchoKB("wiki")
    with serving(kb, token="s3cret", mcp=http_app) as url:
        assert McpTool(f"{url}/mcp", token="s3cret").search(["x"], k=1)[0][0].text == "x (0)"
        with pytest.raises(Unavailable):
            McpTool(f"{url}/mcp", token="wrong", timeout=60)


def test_foreign_tools_over_stdio() -> None:
    server = command("foreign")
    rows = McpTool(server, "rows", query_key="question", k_key="limit")
    assert (rows.schema.name, rows.schema.query) == ("rows", "question")
    shown = rows.schema.json["function"]["parameters"]
    assert (shown["required"], list(shown["properties"])) == (["question"], ["question"])  # `limit` is the run's to set
    assert shown["properties"]["question"]["type"] == "string"
    assert [(p.id, p.title, p.text) for p in rows.search(["who"], k=2)[0]] == [
        ("http://x/0", "t0", "who 0"),
        ("http://x/1", "t1", "who 1"),
    ]
    rows.close()
    tool = McpTool(server, "plain")
    assert [p.text for p in tool.search(["who"], k=3)[0]] == ["all about who"]
    tool.close()
    mixed = McpTool(server, "mixed")
    found = mixed.search(["who"], k=9)[0]
    assert [(p.text, p.image) for p in found] == [("seen: who", ""), ("", URI), ("in a resource", ""), ("", URI)]
    mixed.close()
    with pytest.raises(ValueError, match="takes no 'q'; give query_key=: one of query"):
        McpTool(server, "plain", query_key="q")


@pytest.mark.parametrize(
    ("structured", "expected"),
    [
        ({"errors": [], "results": [{"text": "found"}]}, ["found"]),
        ({"query": "x", "results": []}, []),
        ({"answer": 42}, ["said"]),
        ([{"id": 1, "title": "", "text": "a", "score": 1, "image": "/etc/hostname"}], ["a"]),
    ],
)
def test_structured_results(structured: object, expected: list[str]) -> None:
    """The list that holds something is the answer; pictures are only taken as they come, never from a path."""
    block = types.SimpleNamespace(type="text", text="said")
    result = types.SimpleNamespace(content=[block], is_error=False, structured_content=structured)
    found = _passages(result, "search")
    assert [p.text for p in found] == expected
    assert not any(p.image for p in found)


def test_a_tool_that_says_it_failed() -> None:
    tool = McpTool(command("foreign"), "fails")
    with pytest.raises(RuntimeError, match=r"tool 'fails'.*can't do it"):
        tool.search(["it"], k=1)
    tool.close()


def test_a_server_that_hangs_is_an_error_and_then_asked_anew() -> None:
    """Within the time that its caller waits."""
    tool = McpTool(command("foreign"), "hangs")
    with time_limit(1.0), pytest.raises(Unavailable, match=r"gave no answer within (1|0\.9\d*) s"):
        tool.search(["hang"], k=1)
    assert tool.search(["fine"], k=1)[0][0].text == "fine"
    tool.close()


def test_a_server_that_crashes_is_an_error_and_then_started_anew() -> None:
    tool = McpTool(command("foreign"), "crashes", timeout=60.0)
    first = tool.search(["a"], k=1)[0][0].text
    with pytest.raises(Unavailable, match=r"went away|failed"):
        tool.search(["crash"], k=1)
    second = tool.search(["a"], k=1)[0][0].text
    assert first.split()[0] == second.split()[0] == "a"
    assert first != second  # another process
    tool.close()


def test_a_command_that_is_none() -> None:
    with pytest.raises(Unavailable, match="did not start"):
        McpTool(["/nowhere/server"], timeout=60)
    with pytest.raises(Unavailable):
        McpTool([sys.executable, "-c", "print('hello')"], timeout=10)


def test_one_callers_time_limit_is_its_own() -> None:
    """Who waits longer gets the answer on the connection that another has given up on."""
    tool = McpTool(command("foreign"), "hangs", timeout=60.0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(tool.search, ["slow"], 1)
        with time_limit(1.0), pytest.raises(Unavailable, match="gave no answer"):
            tool.search(["hang"], k=1)
        assert tool.search(["next"], k=1)[0][0].text == "next"
        assert slow.result()[0][0].text == "slow"
    tool.close()


def test_both_doors_lead_to_the_same_queue() -> None:
    """A call over MCP counts among the server's searches; without a number it finds no more than may be asked for."""
    with serving(EchoKB("wiki"), settings=ServerSettings(limits=Limits(k=2)), mcp=http_app) as url:
        _, (found,) = asyncio.run(ask(f"{url}/mcp", ("search_wiki", {"query": "who"})))
        assert len(found.structured_content["passages"]) == 2
        counted = httpx.get(f"{url}/metrics").text
        assert re.search(r'^[a-z_]*batch[a-z_]*count\{.*kb="wiki".*\} 1\.0$', counted, re.MULTILINE), counted
        assert len(httpx.post(f"{url}/v1/search", json={"queries": ["x"]}).json()["results"][0]) == 2
        assert len(httpx.post(f"{url}/retrieve", json={"queries": ["x"]}).json()["result"][0]) == 2
        assert len(httpx.get(f"{url}/search?queries=x").json()[0]) == 2


def test_a_row_without_a_text_is_left_out() -> None:
    """Null is no text, and one odd row does not turn the others into one long text. Ids don't depend on the rank."""
    rows = [{"id": "a", "title": "t", "text": None, "score": 1.0}, {"snippet": None, "text": "b"}, 5, None]
    rows.append({"document": {"docid": 7, "contents": '"T"\nc'}, "similarity": 0.5})
    result = types.SimpleNamespace(content=[], is_error=False, structured_content={"rows": rows})
    first, second = _passages(result, "tool")
    assert (first.title, first.text) == ("", "b")
    assert (second.id, second.title, second.text, second.score) == ("7", "T", "c", 0.5)
    result.structured_content = {"rows": [rows[1]]}
    assert _passages(result, "tool")[0].id == first.id not in ("", "1")


ABOUT = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "s", "version": "1"},
}
TOOL = {"name": "find", "inputSchema": {"type": "object", "properties": {"query": {"type": "string"}}}}
FOUND = {"content": [{"type": "text", "text": "hello"}]}


class Sessions:
    """A server with sessions, over streamable HTTP. `known`: those that it knows; `lost`: its reply to others; `storm`: replies
    to searches that come first. Replies: (status, content type, body); {id} in a body is that of the request."""

    def __init__(self, lost: tuple[int, str, str] = (404, "text/plain", "")) -> None:
        self.known: set[str] = set()
        self.lost, self.calls = lost, 0
        self.storm: list[tuple[int, str, str]] = []

    async def answer(self, request: Request) -> Response:
        if request.method != "POST":
            return Response(status_code=405)
        message = await request.json()
        if message["method"] == "initialize":
            name = f"session{time.monotonic_ns()}"
            self.known.add(name)
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": ABOUT}
            return JSONResponse(reply, headers={"mcp-session-id": name})
        if request.headers.get("mcp-session-id") not in self.known:
            return self.reply(self.lost, message)
        if "id" not in message:
            return Response(status_code=202)
        if message["method"] == "tools/call":
            self.calls += 1
            if self.storm:
                return self.reply(self.storm.pop(0), message)
        result = {"tools": [TOOL]} if message["method"] == "tools/list" else FOUND
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})

    def reply(self, reply: tuple[int, str, str], message: dict) -> Response:
        status, kind, body = reply
        return Response(body.replace("{id}", str(message.get("id"))), status, media_type=kind)

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/mcp", self.answer, methods=["GET", "POST", "DELETE"])])


UNKNOWN = '{"jsonrpc": "2.0", "id": {id}, "error": {"code": -32001, "message": "Session not found"}}'


@pytest.mark.parametrize(
    "lost",
    [
        (404, "text/plain", ""),
        (404, "application/json", UNKNOWN),
        (400, "text/plain", "Bad Request: No valid session ID provided"),
        (400, "application/json", UNKNOWN.replace("{id}", "null")),
        (
            400,
            "application/json",
            UNKNOWN.replace("-32001", "-32000").replace("Session not found", "Bad Request: No valid session ID"),
        ),
        (200, "application/json", UNKNOWN),
        (200, "text/event-stream", f"event: message\ndata: {UNKNOWN}\n\n"),
        (400, "text/event-stream", f"event: message\ndata: {UNKNOWN.replace('not found', 'expired')}\n\n"),
    ],
)
def test_a_session_that_a_server_forgot_is_begun_anew(lost: tuple[int, str, str]) -> None:
    server = Sessions(lost)
    with running(server.app) as url:
        tool = McpTool(f"{url}/mcp", timeout=30)
        for _ in range(2):
            assert [found[0].text for found in tool.search(["a", "b"])] == ["hello", "hello"]
            server.known.clear()  # it restarts
        assert [found[0].text for found in tool.search(["a"])] == ["hello"]
        tool.close()


def test_a_busy_server_is_asked_again_and_named_with_its_status() -> None:
    server = Sessions()
    with running(server.app) as url:
        tool = McpTool(f"{url}/mcp", timeout=30)
        server.storm = [(429, "text/plain", "slow down"), (503, "application/json", '{"error": {"message": "busy"}}')]
        assert tool.search(["a"])[0][0].text == "hello"
        assert server.calls == 3
        server.storm = [(503, "text/plain", "still starting")] * 20
        with pytest.raises(Unavailable, match="HTTP 503: still starting"):
            tool.search(["a"])
        assert server.calls < 20
        server.storm = [(401, "text/plain", "who are you")]
        with pytest.raises(Unavailable, match="HTTP 401: who are you"):
            tool.search(["a"])
        server.storm = [
            (200, "application/json", '{"jsonrpc": "2.0", "id": {id}, "error": {"code": -32602, "message": "no"}}')
        ]
        with pytest.raises(RuntimeError, match=r"mcp: no$"):
            tool.search(["a"])
        server.storm.clear()
        assert tool.search(["a"])[0][0].text == "hello"
        tool.close()


def test_a_server_that_forgets_each_session_is_an_error() -> None:
    server = Sessions((404, "text/plain", "Session not found"))
    with running(server.app) as url:
        tool = McpTool(f"{url}/mcp", timeout=30)
        server.storm = [server.lost] * 20
        with pytest.raises(Unavailable, match="Session not found"):
            tool.search(["a"])
        assert server.calls == 2
        tool.close()
