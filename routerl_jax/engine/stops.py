"""Stop strings matched on the device: an Aho-Corasick automaton over bytes, lifted to whole tokens."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int32, UInt32

from routerl_jax.core.types import StopReason

MAX_STOPS = 31
EOS_BIT = np.uint32(1 << 31)
STATE_BUCKET = 64  # automata are padded to multiples of this, so that new stop strings rarely change a compiled shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopAutomaton:
    """Reads sampled tokens and reports which stop strings have just been completed, wherever token borders fall.

    Attributes:
      stops: the stop strings, in the order of their bits.
      transition: next state after reading a token, [Q, V]. State 0 is the start.
      hits: bit i is set if stop i is completed inside the token; the highest bit marks end-of-sequence tokens, [Q, V].
    """

    stops: tuple[str, ...]
    transition: Int32[np.ndarray, "Q V"]
    hits: UInt32[np.ndarray, "Q V"]

    def mask(self, stops: Sequence[str]) -> np.uint32:
        """The bits of some of the stop strings, end-of-sequence included."""
        bits = int(EOS_BIT)
        for stop in stops:
            bits |= 1 << self.stops.index(stop)
        return np.uint32(bits)

    def ending(self, stopped: int) -> tuple[StopReason, str | None]:
        """Why a turn ended that completed these bits, and the stop string, if it was one."""
        for i, name in enumerate(self.stops):
            if stopped >> i & 1:
                return "stop", name
        return ("eos" if stopped & int(EOS_BIT) else "length"), None

    def after(self, tokens: Sequence[int]) -> int:
        """The state after reading these tokens from the start."""
        state = 0
        for token in tokens:
            state = int(self.transition[state, token])
        return state


class StopTables:
    """The automaton of all stop strings requested so far, on the devices. It grows when new ones are added.

    Old stop strings keep their bits and states, so running turns can continue.

    Args:
      token_bytes: the bytes behind each id.
      eos_ids: ids that always end a turn.
      size: vocabulary size of the model.
      sharding: sharding of the tables.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], eos_ids: Sequence[int], size: int, sharding: jax.sharding.Sharding
    ) -> None:
        self._token_bytes, self._eos_ids, self._size, self._sharding = token_bytes, eos_ids, size, sharding
        self._stops: tuple[str, ...] = ()
        self._built: tuple[StopAutomaton, jax.Array, jax.Array] | None = None

    def add(self, stops: Sequence[str]) -> None:
        """Makes sure that the automaton knows these stop strings.

        Raises:
          ValueError: a stop string is empty, or there would be more than `MAX_STOPS` different ones; nothing is added then.
        """
        new = tuple(dict.fromkeys(stop for stop in stops if stop not in self._stops))
        if new:
            if len(self._stops) + len(new) > MAX_STOPS:
                raise ValueError(
                    f"an engine knows at most {MAX_STOPS} different stop strings, and this one has been given "
                    f"{len(self._stops)} before {', '.join(map(repr, new))}: use the same ones again, or another engine"
                )
            _check(self._stops + new)
            self._stops += new

    def current(self) -> tuple[StopAutomaton, jax.Array, jax.Array]:
        """The automaton, and its transition and hit tables on the devices.

        Agents may add stop strings while a segment decodes; the next automaton has them.
        """
        stops, built = self._stops, self._built
        if built is None or built[0].stops != stops:
            automaton = build_automaton(stops, self._token_bytes, self._eos_ids, self._size)
            tables = jax.device_put((automaton.transition, automaton.hits), self._sharding)
            built = self._built = (automaton, *tables)
        return built


def build_automaton(
    stops: Sequence[str], token_bytes: Sequence[bytes], eos_ids: Sequence[int], size: int
) -> StopAutomaton:
    """Builds the automaton for a vocabulary.

    Args:
      stops: distinct non-empty strings, at most 31.
      token_bytes: the bytes behind each id.
      eos_ids: ids that always end a turn.
      size: vocabulary size of the model (may exceed the tokenizer's; the rest match nothing).
    """
    stops = tuple(stops)
    _check(stops)
    byte_next, byte_hits = _aho_corasick([stop.encode() for stop in stops])
    states = len(byte_next)
    padded = -(-states // STATE_BUCKET) * STATE_BUCKET
    transition = np.zeros((padded, size), np.int32)
    hits = np.zeros((padded, size), np.uint32)
    transition[:states] = np.arange(states)[:, None]
    by_position: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for token, text in enumerate(token_bytes[:size]):
        for position, byte in enumerate(text):
            by_position[position].append((token, byte))
    for position in sorted(by_position):
        tokens, byte_values = np.asarray(by_position[position]).T
        current = transition[:states, tokens]
        reached = byte_next[current, byte_values]
        transition[:states, tokens] = reached
        hits[:states, tokens] |= byte_hits[reached]
    for token in eos_ids:
        if token < size:
            hits[:, token] |= EOS_BIT
    return StopAutomaton(stops=stops, transition=transition, hits=hits)


def _check(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS or any(not stop for stop in stops) or len(set(stops)) != len(stops):
        raise ValueError(f"stop strings must be distinct, not empty and at most {MAX_STOPS}; got {stops}")


def _aho_corasick(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Byte transitions [Q, 256] and, per state, the bit set of patterns that end there [Q]."""
    children: list[dict[int, int]] = [{}]
    ends: list[int] = [0]
    for bit, pattern in enumerate(patterns):
        state = 0
        for byte in pattern:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(0)
            state = children[state][byte]
        ends[state] |= 1 << bit
    table = np.zeros((len(children), 256), np.int32)
    fallback = [0] * len(children)
    queue = collections.deque([0])
    while queue:
        state = queue.popleft()
        if state:
            table[state] = table[fallback[state]]
            ends[state] |= ends[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = int(table[state, byte]) if state else 0
            table[state, byte] = child
            queue.append(child)
    return table, np.asarray(ends, np.uint32)
