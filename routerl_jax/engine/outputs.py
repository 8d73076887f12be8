"""Records the outputs of a decode call in a conversation."""

from __future__ import annotations

from routerl_jax.engine.programs import DecodeOutputs
from routerl_jax.engine.stops import StopAutomaton
from routerl_jax.engine.streams import Generated, Stream


def record(
    stream: Stream, outputs: DecodeOutputs, slot: tuple[int, int], automaton: StopAutomaton, version: int
) -> Generated | None:
    """Records the new tokens of one row; returns the turn if it is finished.

    Args:
      slot: the row's index in the outputs.
      version: of the weights that sampled the tokens.
    """
    request = stream.turn_request
    count = int(outputs.counts[slot])
    new, logprobs = outputs.tokens[slot][:count].tolist(), outputs.logprobs[slot][:count].tolist()
    if request.scored:  # the policy did not choose them, so they are never trained on
        stream.ledger.feed(new)
        request.logprobs += logprobs
    else:
        stream.ledger.sample(new, logprobs, version)
    if outputs.chosen is not None:
        stream.ledger.route(stream.cached, list(outputs.chosen[slot][:count].copy()))
    stream.cached += count
    request.sampled += count
    request.tops += outputs.tops(slot, count, request.top)
    request.given = request.given[count:]
    request.remaining -= count
    request.automaton_state = int(outputs.states[slot])
    stopped = int(outputs.stopped[slot])
    if not stopped and request.remaining > 0:
        return None
    reason, stop = automaton.ending(stopped)
    stream.request = None
    stream.turn += 1
    tokens = stream.ledger.tokens[-request.sampled :]
    return Generated(tokens=tokens, stop_reason=reason, stop=stop, tops=request.tops, logprobs=request.logprobs)
