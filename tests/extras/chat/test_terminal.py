"""A conversation in the terminal: what is shown, what is remembered, commands, pictures, Ctrl-C."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from routerl_jax.core.types import Passage
from routerl_jax.data.atlas import flags
from routerl_jax.extras.chat.session import Exchange, with_history
from routerl_jax.extras.chat.terminal import Terminal
from tests.agents.scripted import ScriptedEngine, SeeingScript, knowledge
from tests.extras.chat.talking import chat_with, script
from tests.programs import refusal


def talk(chat: Any, *lines: str | Callable[[], str], terminal: bool = False) -> str:
    """What the screen shows when these lines are typed."""
    typed: Iterator[Any] = iter(lines)

    def read(prompt: str) -> str:
        console.print(f"|{prompt}|", markup=False)
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line() if callable(line) else line

    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, highlight=False)
    try:
        Terminal(chat, console, read).run()
    finally:
        chat.close()
    return console.file.getvalue()  # type: ignore[attr-defined]


class Remembering(ScriptedEngine):
    """Keeps the prompts of its conversations."""

    def __init__(self) -> None:
        super().__init__(script)
        self.opened: list[str] = []

    def open(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
        self.opened.append(self.tokenizer.decode(list(prompt)))
        return super().open(prompt, *arguments, **options)


def test_a_reply_is_shown_with_its_sources(tmp_path: pathlib.Path) -> None:
    said = talk(chat_with(ScriptedEngine(script), tmp_path), "What is the capital?")
    order = [
        "thinks    hm",
        "searches  [table] capital of Ghana",
        "fact 0 about 16",
        "thinks    so",
        "answers   Accra 0",
    ]
    places = [said.index(one) for one in order]
    assert places == sorted(places)
    assert all(said.count(one) == 1 for one in order)
    assert said.index("source 1: table: table-0") > places[-1]
    assert "source 2: table: table-1" in said


def test_what_is_written_and_searched_shows_while_it_lasts(tmp_path: pathlib.Path) -> None:
    said = talk(chat_with(ScriptedEngine(script), tmp_path), "What is the capital?", terminal=True)
    assert "<sub-question>capital of Ghana</sub-question>" in said  # as it is sampled, before it is read
    assert said.index("<sub-question>") < said.index("fact 0")


def test_earlier_questions_stand_before_a_new_one_until_new(tmp_path: pathlib.Path) -> None:
    engine = Remembering()
    talk(chat_with(engine, tmp_path, earlier=1), "first?", "second?", "third?", "/new", "fourth?")
    first, second, third, fourth = engine.opened
    assert "Q: first?\nA: Accra 0\n\nThe question now: second?" in second
    assert "Q: second?\nA: Accra 1\n\nThe question now: third?" in third
    assert "first?" not in third
    for alone in (first, fourth):
        assert "Earlier" not in alone


def test_earlier_questions_that_have_no_room_are_left_out() -> None:
    exchanges = [Exchange("a" * 50, "b"), Exchange("cc", "d")]
    assert with_history("now?", exchanges, len, 69) == with_history("now?", exchanges[1:], len, 70)
    assert "a" * 50 in with_history("now?", exchanges, len, 70)
    assert with_history("now?", exchanges, len, 5) == "now?"


def test_each_question_is_drawn_anew(tmp_path: pathlib.Path) -> None:
    said = talk(chat_with(ScriptedEngine(script), tmp_path), "again?", "again?")
    assert "Accra 0" in said
    assert "Accra 1" in said


def test_commands(tmp_path: pathlib.Path) -> None:
    tools = knowledge()
    said = talk(
        chat_with(ScriptedEngine(script), tmp_path, tools=tools),
        "/kb",
        "/kb text Ghana in gold",
        "/kb other x",
        "/kb text",
        "/help",
        "/nothing",
        "",
        "/quit",
        "never asked",
    )
    assert "text: scripted" in said
    assert tools["text"].batches == [["Ghana in gold"]]
    assert "fact 2 about 13" in said
    assert "there is no knowledge base 'other'; there are text, table" in said
    assert "/kb text WORDS: say what to search for" in said
    assert "Ctrl-C stops a reply" in said
    assert "there is no command /nothing" in said
    assert "never asked" not in said
    assert "answers" not in said


def test_pictures_stay_until_they_are_put_away(tmp_path: pathlib.Path) -> None:
    (tmp_path / "flag.png").write_bytes(flags.flag("Mali"))
    (tmp_path / "note.png").write_text("no picture")
    engine = SeeingScript(script)
    fed: list[int] = []
    open_stream = engine.open

    def open_and_count(prompt: Any, *names: Any, images: Sequence[Any] = ()) -> Any:
        fed.append(len(images))
        return open_stream(prompt, *names, images=images)

    engine.open = open_and_count  # type: ignore[method-assign]
    image = f"/image {tmp_path / 'flag.png'}"
    lines = [image, "one?", image, "two?", "/image", "three?", f"/image {tmp_path / 'note.png'}", "/image /nowhere.png"]
    said = talk(chat_with(engine, tmp_path), *lines, terminal=True)
    assert fed == [1, 2, 0]
    assert "|you [2 pictures]> |" in said
    assert "note.png" in said
    assert "/nowhere.png: can't be read" in said


def test_a_policy_that_sees_nothing_refuses_pictures(tmp_path: pathlib.Path) -> None:
    (tmp_path / "flag.png").write_bytes(flags.flag("Mali"))
    said = talk(chat_with(ScriptedEngine(script), tmp_path), f"/image {tmp_path / 'flag.png'}", "and now?")
    assert "tiny sees no pictures" in said
    assert "answers   Accra 0" in said


class Interrupting:
    """A knowledge base during whose first search Ctrl-C is pressed; it answers when the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.searches = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.searches += 1
        if self.searches == 1:
            os.kill(os.getpid(), signal.SIGINT)
            self.over.wait(60)
        return [[Passage(id="x", title="", text="found")] for _ in queries]


def test_control_c_stops_a_reply_and_not_the_program(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job that was started with & ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    engine, tool = ScriptedEngine(script), Interrupting()

    def second() -> str:
        tool.over.set()
        return "second?"

    said = talk(chat_with(engine, tmp_path, tools=knowledge(table=tool)), "first?", second)
    assert "stopped" in said
    assert "answers   Accra 0" not in said
    assert "answers   Accra 1" in said
    assert engine.live == []  # the stopped reply gave back its row


def test_control_c_at_the_prompt_says_how_to_end(tmp_path: pathlib.Path) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    said = talk(chat_with(ScriptedEngine(script), tmp_path), interrupt, "and now?")
    assert "/quit or Ctrl-D ends" in said
    assert "answers   Accra 0" in said


def test_what_fails_ends_a_reply_and_not_the_program(tmp_path: pathlib.Path) -> None:
    def failing(name: str, sample: int, turn: int) -> str:
        if name.endswith(" 0"):
            raise RuntimeError("the device is gone")
        return script(name, sample, turn)

    said = talk(chat_with(ScriptedEngine(failing), tmp_path), "first?", "second?", "Why " * 2000)
    assert "the reply failed: RuntimeError: the device is gone" in said
    assert "answers   Accra 1" in said
    assert "do not fit the policy's context: /new forgets that" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give either --workdir"),
        (("--workdir=/nowhere",), "/nowhere holds no run"),
        (("--workdir=/nowhere", "--config=configs/quickstart.py"), "give either --workdir"),
        (("--config=configs/quickstart.py",), "give --policy, too"),
        (("--workdir=/nowhere", "--policy=atlas-warm-start", "--step=3"), "--step is of the run's checkpoints"),
        (("--workdir=/nowhere", "--port=80"), "--port is of the page: add --page"),
        (("--config=configs/quickstart.py", "--policy=atlas-warm-start", "--knowledge=x=y"), "is not NAME=PLACE"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refusal("chat", *arguments)
