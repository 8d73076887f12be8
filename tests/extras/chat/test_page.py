"""Talking on the page in a real browser, and what the server behind it refuses."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest

pytest.importorskip("uvicorn", reason="the web page needs the extra `serve`")

from routerl_jax.core.types import Passage
from routerl_jax.data.atlas import flags
from routerl_jax.extras.chat.page import create_app
from tests.agents.scripted import SEARCH, ScriptedEngine, SeeingScript, knowledge
from tests.browser import browser, fresh_page
from tests.extras.chat.talking import chat_with, script
from tests.extras.kb_server.servers import running

SCRIPT = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"


class Waiting:
    """A knowledge base that answers when it may, with a passage that holds a script."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()
        self.asked = threading.Event()

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.asked.set()
        self.may.wait(60)
        found = [
            Passage(id="https://example.org/x", title="Ghana", text=SCRIPT),
            Passage(id="b", title="", text="gold"),
        ]
        return [found[:k] for _ in queries]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A fresh page; whatever goes wrong in its scripts fails the test."""
    with fresh_page(chromium, width=1100, timeout=60_000) as page:
        yield page


def test_a_conversation(page: Any, tmp_path: pathlib.Path) -> None:
    """A reply while it is written, its sources, the next question with it before, one that is stopped, and a new one."""
    engine, tool = ScriptedEngine(script), Waiting()
    prompts: list[str] = []
    open_stream = engine.open

    def open_and_keep(prompt: Any, *names: Any, images: Sequence[Any] = ()) -> Any:
        prompts.append(engine.tokenizer.decode(list(prompt)))
        return open_stream(prompt, *names, images=images)

    engine.open = open_and_keep  # type: ignore[method-assign]
    with running(create_app(chat_with(engine, tmp_path, tools=knowledge(table=tool), earlier=4))) as url:
        page.goto(url)
        page.locator("#top .label", has_text="table").wait_for()
        tool.may.clear()
        page.get_by_label("question").fill("What is the capital?")
        page.get_by_label("question").press("Enter")
        page.locator("article .search.writing", has_text="capital of Ghana").wait_for()  # what it waits for
        assert page.locator("#stop").is_visible()
        tool.may.set()
        page.locator("article .answer", has_text="Accra 0").wait_for()
        article = page.locator("article").first
        assert "hm" in article.locator(".thought").first.inner_text()
        assert SCRIPT in article.locator(".passage").first.inner_text()
        assert page.evaluate("window.stolen === undefined")
        assert article.locator(".sources a").get_attribute("href") == "https://example.org/x"
        assert article.locator(".sources li").count() == 2
        assert not page.locator("#stop").is_visible()

        tool.may.clear()
        tool.asked.clear()
        page.get_by_label("question").fill("stopped?")
        page.get_by_role("button", name="Ask").click()
        assert tool.asked.wait(60)
        page.get_by_role("button", name="Stop").click()
        page.locator("article", has_text="stopped?").get_by_text("stopped", exact=True).wait_for()
        tool.may.set()

        page.get_by_label("question").fill("and now?")
        page.get_by_role("button", name="Ask").click()
        page.locator("article .answer", has_text="Accra 2").wait_for()
        assert "Q: What is the capital?\nA: Accra 0\n\nThe question now: and now?" in prompts[-1]
        assert engine.live == []  # the stopped one gave back its row

        page.get_by_role("button", name="New conversation").click()
        assert page.locator("article").count() == 0
        page.get_by_label("question").fill("alone?")
        page.get_by_label("question").press("Enter")
        page.locator("article .answer", has_text="Accra 3").wait_for()
        assert "Earlier" not in prompts[-1]


def test_pictures(page: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "flag.png").write_bytes(flags.flag("Mali"))
    with running(create_app(chat_with(SeeingScript(script), tmp_path / "chat"))) as url:
        page.goto(url)
        page.locator("#add").wait_for()
        page.locator("#file").set_input_files(str(tmp_path / "flag.png"))
        page.locator("#pictures img").wait_for()
        page.get_by_label("question").fill("Whose flag?")
        page.get_by_label("question").press("Enter")
        page.locator("article .answer", has_text="Accra 0").wait_for()
        page.wait_for_function("() => document.querySelector('article .thumb')?.naturalWidth > 0")


def test_a_failure_is_said(page: Any, tmp_path: pathlib.Path) -> None:
    def failing(name: str, sample: int, turn: int) -> str:
        if turn == 0:
            return SEARCH.format("table")
        raise RuntimeError("the device is gone")

    with running(create_app(chat_with(ScriptedEngine(failing), tmp_path))) as url:
        page.goto(url)
        page.get_by_label("question").fill("what?")
        page.get_by_label("question").press("Enter")
        page.locator("article .bad", has_text="RuntimeError: the device is gone").wait_for()


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    with running(create_app(chat_with(ScriptedEngine(script), tmp_path))) as url:

        def refused(body: Any, **headers: str) -> tuple[int, str]:
            reply = httpx2.post(f"{url}/api/ask", json=body, headers=headers)
            return reply.status_code, reply.json()["error"]["message"]

        assert refused({"question": "  "}) == (400, "question must be a text that is not empty")
        assert refused({"question": "a", "images": ["/etc/passwd"]})[1] == "images must be a list of data: URIs"
        assert refused({"question": "a", "images": ["data:image/png;base64,AA"]})[1].endswith("sees no pictures")
        assert refused({"question": "a", "earlier": [["b"]]})[1] == "earlier must be a list of [question, answer]"
        assert refused({"question": "a"}, origin="http://evil.example")[0] == 403
        assert httpx2.get(f"{url}/api/about", headers={"host": "evil.example"}).status_code == 403
        assert httpx2.get(f"{url}/api/picture?key=0&n=0").status_code == 404
        assert "script-src 'self'" in httpx2.get(url).headers["content-security-policy"]
