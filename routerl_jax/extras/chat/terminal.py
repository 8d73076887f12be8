"""A conversation in the terminal."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from routerl_jax.core.types import Episode
from routerl_jax.evaluation.records import PictureFiles, episode_record, turn_record
from routerl_jax.evaluation.trajectory import ending_parts, findings, searching, turn_parts, write_sheet
from routerl_jax.extras.chat.session import Chat, Exchange
from routerl_jax.extras.policy_server.answerer import sources
from routerl_jax.extras.policy_server.live import Progress
from routerl_jax.knowledge.base import query_text
from routerl_jax.models.images import decode_image

T = TypeVar("T")
_LINES = 8  # lines that are shown of the text under way
_COMMANDS = {
    "/image PATH": "the next questions are about this picture; again for one more, without PATH for none",
    "/kb": "the knowledge bases; /kb NAME WORDS searches one",
    "/new": "forget what was said, and the pictures",
    "/quit": "end (or Ctrl-D)",
    "/help": "these commands; Ctrl-C stops a reply",
}


class Terminal:
    """Reads questions and commands, and shows replies while they are written.

    Args:
      read: asks for a line, with a prompt; raises EOFError at the end.
    """

    def __init__(self, chat: Chat, console: Console, read: Callable[[str], str] = input) -> None:
        self._chat, self._console, self._read = chat, console, read
        self._files = PictureFiles(chat.pictures)
        self._earlier: list[Exchange] = []
        self._images: list[pathlib.Path] = []

    def run(self) -> None:
        """Talks until /quit or the end of the input."""
        self._greet()
        while True:
            try:
                line = self._read(self._prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("\n/quit or Ctrl-D ends")
                continue
            if line == "/quit":
                return
            try:
                if line.startswith("/"):
                    self._command(*line[1:].partition(" ")[::2])
                elif line:
                    self._reply(line)
            except ValueError as error:  # of a picture or a command; the conversation goes on
                self._complain(str(error))
            except KeyboardInterrupt:
                self._say("stopped")

    @property
    def _prompt(self) -> str:
        shown = f" [{len(self._images)} picture{'s' if len(self._images) > 1 else ''}]" if self._images else ""
        return f"you{shown}> " if self._console.is_terminal else ""

    def _greet(self) -> None:
        chat = self._chat
        modality = "sees pictures" if chat.sees else "text alone"
        self._say(f"{chat.name} ({modality}) searches {', '.join(chat.searcher.tools)}. /help lists commands.")
        remembered = (
            f"the last {chat.earlier} questions stand before a new one"
            if chat.earlier
            else ("every question stands by itself (--earlier=N shows the policy the last N)")
        )
        self._say(remembered)

    def _say(self, text: str) -> None:
        self._console.print(Text(text, "dim"))

    def _complain(self, text: str) -> None:
        self._console.print(Text(text, "red"))

    # --- commands ---

    def _command(self, name: str, rest: str) -> None:
        rest = rest.strip()
        if name == "new":
            self._earlier, self._images = [], []
            self._say("a new conversation")
        elif name == "image":
            self._image(rest)
        elif name == "kb":
            self._kb(*rest.partition(" ")[::2])
        elif name == "help":
            for usage, meaning in _COMMANDS.items():
                self._console.print(f"  [bold]{escape(usage):12}[/]  [dim]{escape(meaning)}[/]", highlight=False)
        else:
            raise ValueError(f"there is no command /{name}; there are {', '.join(_COMMANDS)}")

    def _image(self, path: str) -> None:
        if not path:
            self._images = []
            self._say("no pictures")
            return
        if not self._chat.sees:
            raise ValueError(f"{self._chat.name} sees no pictures")
        file = pathlib.Path(path.strip("\"'")).expanduser()
        width, height = decode_image(file).size  # an error names the file
        self._images.append(file)
        self._say(f"{file}: {width} x {height} pixels")

    def _kb(self, name: str, words: str) -> None:
        tools = self._chat.searcher.tools
        if not name:
            for kb in self._chat.knowledge_bases:
                self._say(f"  {kb.name}: {kb.kind}" + ("" if kb.passages is None else f", {kb.passages:,} passages"))
            return
        if name not in tools:
            raise ValueError(f"there is no knowledge base {name!r}; there are {', '.join(tools)}")
        if not words.strip():
            raise ValueError(f"/kb {name} WORDS: say what to search for")
        with _cancelled_on_exit(self._chat.search(name, words.strip())) as future:
            call = future.result()
        self._console.print(
            findings({"tool": name, "error": call.error, "passages": [vars(passage) for passage in call.passages]})
        )

    # --- replies ---

    def _reply(self, question: str) -> None:
        """Asks, shows the reply turn by turn, and remembers it."""
        moments: queue.SimpleQueue[Progress | None] = queue.SimpleQueue()
        asked = self._chat.ask(question, self._images, self._earlier, moments.put)
        asked.add_done_callback(lambda _: moments.put(None))
        shown = 0
        with (
            _cancelled_on_exit(asked) as future,
            Live(console=self._console, transient=True, auto_refresh=False) as live,
        ):
            while (moment := moments.get()) is not None:
                for turn in moment.turns[shown:]:
                    self._print(turn_parts(turn_record(turn, self._files.name)))
                shown = len(moment.turns)
                if self._console.is_terminal:
                    live.update(_present_step(moment), refresh=True)
            live.update("", refresh=True)
        self._end(question, _episode(future), shown)

    def _end(self, question: str, episode: Episode, shown: int) -> None:
        record = episode_record(episode, self._files)
        last = len(episode.turns) - 1
        for index, turn in enumerate(record["turns"][shown:], shown):
            self._print(turn_parts(turn, last=index == last))
        self._print(ending_parts(record, write_sheet(record, self._chat.pictures, self._chat.pictures / "asked")))
        for number, source in enumerate(sources(episode), 1):
            address = source["url"] if not source["url"].startswith("urn:") else source["id"]
            title = f"{source['title']}, " if source["title"] else ""
            self._say(f"  source {number}: {source['knowledge_base']}: {title}{address}")
        if episode.truncated and not episode.turns:
            self._complain(
                "the question and what was said before it do not fit the policy's context: /new forgets that"
            )
        elif episode.truncated:
            self._say("the context was full before the policy was done")
        if episode.answer is not None:
            self._earlier.append(Exchange(question, episode.answer))

    def _print(self, parts: Sequence[RenderableType]) -> None:
        for part in parts:
            self._console.print(part)


@contextlib.contextmanager
def _cancelled_on_exit(future: concurrent.futures.Future[T]) -> Iterator[concurrent.futures.Future[T]]:
    """Cancels the attempt if the block is left before its end, as by Ctrl-C."""
    try:
        yield future
    finally:
        future.cancel()


def _episode(future: concurrent.futures.Future[Episode]) -> Episode:
    """Raises ValueError with the message of the attempt's exception."""
    error = future.exception()
    if error is not None and not isinstance(error, ValueError):
        raise ValueError(f"the reply failed: {type(error).__name__}: {error}") from error
    return future.result()


def _present_step(moment: Progress) -> Text:
    """A text about the present step: a search, or the last lines that were written."""
    request = moment.searching
    if request is not None:
        return searching(request.tool, query_text(request.query) or "(the picture)")
    lines = moment.writing.strip("\n").splitlines()[-_LINES:]
    return Text.assemble(("writes    ", "cyan"), ("\n".join(lines), "dim"))
