"""An engine whose policy is a script, for testing agents and the driver without a model; and what both tests use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.engine.policy import Generated, PromptTooLong, Stream
from routerl_jax.recipes.r1_searcher import R1SearcherGrammar, R1SearcherOpenedAnswer
from tests import seeing, tiny

AGENT = SearchAgent(grammar=tiny.GRAMMAR, max_searches=3, k=2, max_turn_tokens=100, answer_tokens=12)
AGENTS = {
    "r1_router": AGENT,
    "r1_searcher": dataclasses.replace(
        AGENT, grammar=R1SearcherGrammar(tools=("text",)), prompt_suffix="<think>", answer_tokens=30
    ),
    "r1_searcher_answer": dataclasses.replace(
        AGENT, grammar=R1SearcherOpenedAnswer(tools=("text",)), prompt_suffix="<think>"
    ),
}
SEARCH = "<think>hm</think><sub-question>capital of Ghana</sub-question><ret>{} retriever</ret>"
ANSWER = "<think>so</think><answer>Accra</answer>"


def knowledge(**changes):
    """Scripted knowledge bases by name."""
    return {"text": tiny.ScriptedKB("text"), "table": tiny.ScriptedKB("table"), **changes}


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text as a policy may well sample it: letter by letter, tags whole. Encoding the text gives other ids."""
    return [i for piece in re.findall(r"<[^<>]+>|.", text, re.DOTALL) for i in tokenizer.encode(piece)]


class ScriptedEngine:
    """Has the engine's methods; turn t of (example, sample) is `script(example_id, sample, t)`.

    A turn is cut after the first stop string, as the real engine cuts it, or at its token limit. Its ids are `spelled`, or
    the tokenizer's own if `canonical`; `said` keeps those of each turn by (example id, sample).
    """

    def __init__(
        self,
        script: Callable[[str, int, int], str],
        rows: int = 8,
        max_length: int = 1000,
        canonical: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.script = script
        self.rows = rows
        self.max_length = max_length
        self.canonical = canonical
        self.tokenizer = tokenizer or tiny.tokenizer()
        self.seed = 0
        self.live: list[Stream] = []
        self.said: dict[tuple[str, int], list[list[int]]] = {}
        self.peak = 0
        self.steps = 0
        self.shared: list[tuple[str, int]] = []
        self._ids: dict[int, str] = {}
        self._wanted: dict[int, tuple] = {}

    images = None  # it sees none

    def open(self, prompt, example_id="", sample=0, images=()):
        assert not images
        if len(prompt) >= self.max_length:
            raise PromptTooLong(f"the prompt of example {example_id!r}")
        stream = Stream(identity=(0, sample), ledger=Ledger())
        stream.ledger.feed(prompt)
        self._ids[id(stream)] = example_id
        self.live.append(stream)
        self.peak = max(self.peak, len(self.live))
        return stream

    def room(self, stream):
        return self.max_length - len(stream.ledger)

    def feed(self, stream, tokens, images=()):
        assert not images
        assert len(tokens) <= self.room(stream)
        stream.ledger.feed(tokens)

    def request(self, stream, *, stops=(), max_tokens=None, sampling=None, given=(), begun=(), scored=False):
        self._wanted[id(stream)] = (stream, stops, min(max_tokens or 10**9, self.room(stream)), list(given))

    def share(self, pairs):
        for source, target in pairs:
            assert source.ledger.tokens == target.ledger.tokens
            self.shared.append((self._ids[id(target)], len(target.ledger)))

    def close(self, stream):
        self.live.remove(stream)
        self._wanted.pop(id(stream), None)

    @property
    def busy(self):
        return bool(self._wanted)

    def step(self):
        self.steps += 1
        finished = []
        for stream, stops, limit, given in list(self._wanted.values()):
            who = (self._ids[id(stream)], stream.identity[1])
            text = self.script(*who, stream.turn)
            found = sorted((text.index(stop) + len(stop), stop) for stop in stops if stop in text)
            reason, stop = ("stop", found[0][1]) if found else ("eos", None)
            text = text[: found[0][0]] if found else text
            ids = self.tokenizer.encode(text) if self.canonical else spelled(self.tokenizer, text)
            if given:
                assert text.startswith(self.tokenizer.decode(given)), (text, self.tokenizer.decode(given))
                ids = given + spelled(self.tokenizer, text.removeprefix(self.tokenizer.decode(given)))
            if not found and (not ids or ids[-1] not in self.tokenizer.eos_ids):
                ids.append(min(self.tokenizer.eos_ids))
            if len(ids) > limit:
                ids, reason, stop = ids[:limit], "length", None
            self.said.setdefault(who, []).append(ids)
            stream.ledger.sample(ids, [-1.0] * len(ids), 0)
            stream.turn += 1
            del self._wanted[id(stream)]
            finished.append((stream, Generated(tokens=ids, stop_reason=reason, stop=stop)))
        return finished


class SeeingScript(ScriptedEngine):
    """One whose policy sees, as tests.seeing's."""

    def __init__(self, script: Callable[[str, int, int], str], **settings) -> None:
        super().__init__(script, **settings)
        self.tokenizer = seeing.tokenizer()
        self.images = seeing.image_tokens(1024)

    def open(self, prompt, example_id="", sample=0, images=()):
        stream = super().open([0], example_id, sample)
        stream.ledger = Ledger()
        self.feed(stream, prompt, images)
        return stream

    def feed(self, stream, tokens, images=()):
        fed = self.images.fed(tokens, images, stream.ledger.next_position) if images else {"tokens": tokens}
        assert len(fed["tokens"]) <= self.room(stream)
        stream.ledger.feed(**fed)
