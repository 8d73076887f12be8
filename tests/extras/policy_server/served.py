"""Policies behind HTTP for tests: a server in a thread, and the `openai` package's own client."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import openai

from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.extras.policy_server.app import Served, create_app
from routerl_jax.extras.policy_server.generator import Admission
from routerl_jax.extras.policy_server.policy import PolicyModel
from tests.extras.kb_server.servers import running

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A running server: its address, the engine behind it, and how much it has to do."""

    url: str
    engine: Engine
    admission: Admission

    def client(self, **options: Any) -> openai.OpenAI:
        """A client that does not try again."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 300, **options}
        )

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for coroutines."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)


@contextlib.contextmanager
def serving(engine: Engine, *, most: int = 256, token: str = "", tags: tuple[str, ...] = ()) -> Iterator[Server]:
    """A server of one policy, called tiny."""
    loop, admission = EngineLoop(engine), Admission(most)
    served = Served(
        models={"tiny": PolicyModel(loop, admission, tags)}, busy=lambda: "", body_bytes=1 << 20, close=loop.close
    )
    with running(create_app(served, token=token)) as url:
        yield Server(url=url, engine=engine, admission=admission)
