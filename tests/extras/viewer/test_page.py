"""The page in a real browser: load, filter, open, compare, keys, live update, and scripts that stay text."""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the web page needs the extra `serve`")

import uvicorn

from routerl_jax.evaluation.records import write_records
from routerl_jax.extras.viewer.app import create_app
from routerl_jax.extras.viewer.runs import find_runs
from routerl_jax.services.asgi import listen
from tests.browser import browser, fresh_page
from tests.extras.viewer.made_run import SCRIPT, episode, make_run, write_metrics

_SECONDS = 60_000  # ms that anything may take on a busy machine


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_run(tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module")
def url(run: pathlib.Path) -> Iterator[str]:
    with served(run) as url:
        yield url


@contextlib.contextmanager
def served(*runs: pathlib.Path) -> Iterator[str]:
    """The address of a page over these runs."""
    server = uvicorn.Server(
        uvicorn.Config(create_app(find_runs(runs)), log_level="warning", timeout_graceful_shutdown=2)
    )
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def page(chromium: Any, url: str) -> Iterator[Any]:
    """A fresh page; whatever goes wrong in its scripts fails the test."""
    with fresh_page(chromium, width=1400, timeout=_SECONDS) as page:
        yield page


def rows(page: Any) -> list[str]:
    return page.locator(".row .question").all_inner_texts()


def shows(page: Any, expression: str) -> None:
    """Waits until it is true; asked from here, as the page itself may not evaluate a text (its content security policy)."""
    ends = time.monotonic() + _SECONDS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < ends, f"never true: {expression}"
        page.wait_for_timeout(100)


def total(page: Any, count: int) -> None:
    shows(page, f"document.querySelector('#total')?.textContent.endsWith('of {count}')")


def test_overview(page: Any, url: str) -> None:
    page.goto(url)
    page.locator("figure canvas").first.wait_for()
    titles = page.locator("figcaption").all_inner_texts()
    assert {"Reward", "Exact match", "Use of knowledge bases", "Gradient norm"} <= set(titles)
    assert "1 alarm" in page.locator(".health summary").inner_text()
    assert "actor/grad_norm is 30" in page.locator(".alarm").inner_text()
    assert "step 3 of 5" in page.locator(".card").inner_text()
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    page.get_by_label("another metric").fill("actor/loss")
    page.get_by_label("another metric").press("Enter")
    page.get_by_role("figure", name="actor/loss").wait_for()


def test_charts_of_several_runs_can_be_read(page: Any, tmp_path: pathlib.Path) -> None:
    """A line has its run's colour, and its metric's dashes; more metrics than there are dashes have charts of their own."""
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        values = {f"rollout/searches/{kind}": 1.0 for kind in ("near", "far", "mixed", "none")}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": 3, "stage": "main", "rollout/em": 0.1, "validation/em": 0.2, **values}) + "\n"
            )
    with served(*runs) as url:
        page.goto(url)
        page.get_by_role("figure", name="Searches by kind of question: near").wait_for()
        titles = page.locator("figcaption").all_inner_texts()
        assert sum(title.startswith("Searches by kind of question: ") for title in titles) == 4
        key = page.locator("figure", has_text="Exact match").locator(".key i")
        styles = key.evaluate_all("all => all.map((one) => getComputedStyle(one).borderTopStyle)")
        assert styles == ["solid", "dashed"] * 2
        page.goto(f"{url}#/episodes?kb=nowhere")
        shows(page, "document.querySelector('.list .empty') !== null")
        page.get_by_role("checkbox", name="nowhere").click()  # it takes the box away
        total(page, 14)


def test_the_share_of_a_single_knowledge_base_is_no_chart(page: Any, tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "run")
    row = {"step": 0, "stage": "main", "rollout/kb/pages": 1.0, "rollout/searches_per_question": 1.4}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with served(run) as url:
        page.goto(url)
        page.get_by_role("figure", name="Searches per question").wait_for()
        assert "Use of knowledge bases" not in page.locator("figcaption").all_inner_texts()


def test_filter_and_open(page: Any, url: str) -> None:
    page.goto(f"{url}#/episodes")
    total(page, 7)
    page.locator("label", has_text="truncated").locator("input").check()
    total(page, 1)
    assert "failure=truncated" in page.url
    page.keyboard.press("Escape")
    total(page, 7)
    page.locator("input[name=reward_min]").fill("0.5")
    page.locator("input[name=reward_min]").press("Enter")
    total(page, 4)
    page.keyboard.press("Escape")  # leaves the field
    page.keyboard.press("Escape")  # clears
    total(page, 7)
    page.keyboard.press("/")
    page.keyboard.type("forked?")
    page.keyboard.press("Enter")
    total(page, 2)
    page.locator(".row").first.click()
    talk = page.locator(".pane .talk")
    talk.wait_for()
    shows(page, "document.querySelector('.pane .asked')?.textContent.includes('forked')")
    assert "I look." in talk.inner_text()
    assert "What lives there, forked" in talk.inner_text()
    page.keyboard.press("r")  # as written
    assert "<think>I look.</think>" in page.locator(".pane .policy pre").first.inner_text()
    page.get_by_role("button", name="Forks 2").click()
    shows(page, "document.querySelectorAll('.tree .leaf').length === 2")
    tree = page.locator(".tree").inner_text()
    assert "table 0.25" in tree
    assert "text 0.75" in tree


def test_keys_tokens_and_groups(page: Any, url: str) -> None:
    page.goto(f"{url}#/episodes?question=a")
    total(page, 3)
    page.locator(".pane .walk", has_text="lion | lives in | savannah").wait_for()
    chosen = "document.querySelector('.row.chosen')?.dataset.key"
    first = page.evaluate(chosen)
    page.keyboard.press("j")
    assert page.evaluate(chosen) != first
    page.keyboard.press("k")
    assert page.evaluate(chosen) == first
    page.get_by_role("button", name="Tokens").click()
    sampled = page.locator(".stream .sampled")
    assert sampled.all_inner_texts() == ["I ", "look. ", "a? "]
    shade = "getComputedStyle(document.querySelectorAll('.stream .sampled')[{}]).backgroundColor"
    likely, unlikely = (page.evaluate(shade.format(i)) for i in (0, 2))
    assert likely != unlikely
    page.get_by_role("button", name="advantage").click()
    assert page.evaluate(shade.format(0)) != page.evaluate(shade.format(1))  # one sign and the other
    sampled.nth(1).hover()
    assert "log-prob   -1.1" in page.locator("#tip").inner_text()
    page.get_by_role("button", name="Group 2").click()
    shows(page, "document.querySelectorAll('.columns .talk').length === 2")
    page.get_by_role("button", name="Same question 1").click()
    assert "evaluation/trained" in page.locator("table.elsewhere").inner_text()
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("c")
    shows(page, "document.querySelectorAll('.compare .columns .talk').length === 2")
    assert page.locator(".compare > .asked").inner_text() == "Which animal is a?"


def test_escape_closes_the_help_and_nothing_else(page: Any, url: str) -> None:
    page.goto(f"{url}#/episodes?question=a")
    total(page, 3)
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.locator("#help").wait_for(state="hidden")
    assert "question=a" in page.url


def test_a_tip_goes_with_what_it_is_of(page: Any, url: str) -> None:
    page.goto(f"{url}#/episodes?question=a&tab=tokens&source=training&order=old")
    page.locator(".stream .sampled").first.hover()
    page.locator("#tip").wait_for(state="visible")
    page.keyboard.press("j")
    page.locator("#tip").wait_for(state="hidden")


def test_pages_with_boxes(page: Any, url: str) -> None:
    page.goto(f"{url}#/episodes?question=page&tab=pictures")
    box = page.locator(".look .box")
    box.wait_for()
    place, whole = box.bounding_box(), page.locator(".look .page img").bounding_box()
    shares = [
        (place["x"] - whole["x"]) / whole["width"],
        place["width"] / whole["width"],
        place["height"] / whole["height"],
    ]
    assert shares == pytest.approx(
        [0.2, 0.4, 0.375], abs=0.02
    )  # of a page of 100 x 80, from 20 to 60 and from 10 to 40


def test_scripts_in_records_stay_text(page: Any, url: str) -> None:
    page.goto(f"{url}#/episodes?question=b")
    total(page, 1)
    for key in ("", "r"):
        if key:
            page.keyboard.press(key)
        shows(page, "document.querySelector('.pane .talk')?.textContent.includes('<script>')")
        assert SCRIPT in page.locator(".pane .talk").inner_text()
    assert SCRIPT in page.locator(".row .answer").inner_text()
    assert SCRIPT in page.locator(".row .question").inner_text()
    assert page.locator("main script, main img[onerror]").count() == 0
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None


def test_what_is_new_appears(page: Any, url: str, run: pathlib.Path) -> None:
    page.goto(f"{url}#/episodes?source=training")
    total(page, 6)
    page.locator(".row").nth(2).click()
    key = page.evaluate("document.querySelector('.row.chosen').dataset.key")
    write_records(run / "episodes" / "step-000004.jsonl", [episode("fresh")], step=4)
    total(page, 7)
    assert rows(page)[0] == "Which animal is fresh?"
    assert page.evaluate("document.querySelector('.row.chosen').dataset.key") == key  # the reader's place
    page.goto(f"{url}#/overview")
    page.locator(".card", has_text="step 3 of 5").wait_for()
    write_metrics(run, 3, 1.0)
    page.locator(".card", has_text="step 4 of 5").wait_for()
