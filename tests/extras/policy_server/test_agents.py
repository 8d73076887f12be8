"""What a served policy is good for: our own agents run with it, and one that sees is shown pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

import PIL.Image
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.engine.engine import Engine
from routerl_jax.services.cache import MemoryCache
from routerl_jax.services.policy import ChatModel
from tests import seeing, tiny
from tests.agents.scripted import AGENT, knowledge
from tests.extras.policy_server.served import TEMPLATE, serving


@pytest.mark.slow
@pytest.mark.parametrize("form", ["turns", "continue"])
def test_any_agent_runs_with_a_served_policy(form: Any) -> None:
    engine = Engine(tiny.model(layers=1, max_length=1024), rows=4, max_length=1024, segment=16)
    engine.tokenizer = tiny.with_template(engine.tokenizer, TEMPLATE)
    examples = [Example(id=f"q{i}", question=f"What is {i}?", answers=()) for i in range(6)]
    with serving(engine) as server:

        def episodes() -> list[Any]:
            model = ChatModel("tiny", base_url=f"{server.url}/v1", form=form, max_length=400, cache=MemoryCache())
            found = run(AGENT, examples, model, knowledge(), seed=3)
            model.end()
            return found

        first, again = episodes(), episodes()
    failed = [one.failure.kind for one in first if one.failure is not None]
    assert failed == ["empty"] * len(failed)  # a random policy may write nothing
    assert len(failed) < 3
    assert [[turn.text for turn in one.turns] for one in first] == [[turn.text for turn in one.turns] for one in again]
    begun = [one.turns[0].text for one in first if one.turns]
    assert len(set(begun)) == len(begun) > 3
    assert all(one.usage is not None and one.usage.tokens > 0 for one in first)


def test_a_policy_that_sees_is_shown_pictures_at_their_places() -> None:
    """The prompt that it is given is the engine's own to the same pictures, and two pictures are not one."""
    engine = Engine(seeing.model(), rows=2, max_length=128)
    engine.tokenizer = tiny.with_template(engine.tokenizer, TEMPLATE)

    def part(seed: int) -> dict[str, Any]:
        file = io.BytesIO()
        PIL.Image.fromarray(seeing.picture(seed)).save(file, "png")
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
        }

    with serving(engine) as server:

        def reply(*parts: Any) -> Any:
            return server.client().chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": list(parts)}],
                max_tokens=6,
                temperature=0,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )

        words = {"type": "text", "text": f"or {seeing.MARKER} this"}
        first = reply(part(0), words, part(1))
        other = reply(part(0), words, part(2))
        with pytest.raises(Exception, match="image"):
            reply({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    text = f"user: {seeing.MARKER}{engine.tokenizer.plain(words['text'])}{seeing.MARKER}\nassistant:"
    stream = engine.open(engine.tokenizer.encode(text), images=[seeing.picture(0), seeing.picture(1)])
    assert first.model_extra["prompt_token_ids"] == stream.ledger.tokens
    assert first.usage.prompt_tokens == len(stream.ledger)
    engine.request(stream, max_tokens=6)
    while not (finished := engine.step()):
        pass
    assert first.choices[0].model_extra["token_ids"] == finished[0][1].tokens
    assert [one.logprob for one in first.choices[0].logprobs.content] != [
        one.logprob for one in other.choices[0].logprobs.content
    ]
