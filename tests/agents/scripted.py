"""An engine whose policy is a script: for testing agents and the driver without a model."""

from __future__ import annotations

from collections.abc import Callable

from routerl_jax.core.ledger import Ledger
from routerl_jax.generation.engine import Generated, Stream
from tests import tiny


class ScriptedEngine:
    """Has the engine's methods; turn t of (example, sample) is `script(example_id, sample, t)`.

    A turn is cut after the first stop string, as the real engine cuts it, or at its token limit.
    """

    def __init__(self, script: Callable[[str, int, int], str], rows: int = 8, max_length: int = 400) -> None:
        self.script = script
        self.rows = rows
        self.max_length = max_length
        self.tokenizer = tiny.tokenizer()
        self.seed = 0
        self.live: list[Stream] = []
        self.peak = 0
        self.steps = 0
        self._ids: dict[int, str] = {}
        self._wanted: dict[int, tuple] = {}

    def open(self, prompt, example_id="", sample=0):
        stream = Stream(identity=(0, sample), ledger=Ledger())
        stream.ledger.feed(prompt)
        self._ids[id(stream)] = example_id
        self.live.append(stream)
        self.peak = max(self.peak, len(self.live))
        return stream

    def room(self, stream):
        return self.max_length - len(stream.ledger)

    def feed(self, stream, tokens):
        assert len(tokens) <= self.room(stream)
        stream.ledger.feed(tokens)

    def request(self, stream, *, stops=(), max_tokens=None, sampling=None):
        self._wanted[id(stream)] = (stream, stops, min(max_tokens or 10**9, self.room(stream)))

    def close(self, stream):
        self.live.remove(stream)
        self._wanted.pop(id(stream), None)

    @property
    def busy(self):
        return bool(self._wanted)

    def step(self):
        self.steps += 1
        finished = []
        for stream, stops, limit in list(self._wanted.values()):
            text = self.script(self._ids[id(stream)], stream.identity[1], stream.turn)
            found = sorted((text.index(stop) + len(stop), stop) for stop in stops if stop in text)
            reason, stop = ("stop", found[0][1]) if found else ("eos", None)
            ids = self.tokenizer.encode(text[: found[0][0]] if found else text)
            if not found:
                ids.append(min(self.tokenizer.eos_ids))
            if len(ids) > limit:
                ids, reason, stop = ids[:limit], "length", None
            stream.ledger.sample(ids, [-1.0] * len(ids), 0)
            stream.turn += 1
            del self._wanted[id(stream)]
            finished.append((stream, Generated(tokens=ids, stop_reason=reason, stop=stop)))
        return finished
