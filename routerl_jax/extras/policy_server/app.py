"""The server of policies by the OpenAI protocol (`launch.serve_policy`): models, chats, texts, each whole or in chunks; its
settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from routerl_jax.core.config import Count, Size, checked
from routerl_jax.core.packages import needs
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.extras.policy_server.answerer import AnswererModel, AnswerReply, open_searcher, warm_up
from routerl_jax.extras.policy_server.generator import Admission
from routerl_jax.extras.policy_server.policy import PolicyModel, PolicyReply
from routerl_jax.extras.policy_server.protocol import ApiError, error_body
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.lora import merged
from routerl_jax.parallel.platform import split_cpu
from routerl_jax.services.asgi import (
    LOOPBACK,
    Address,
    Refusal,
    application,
    each_while_connected,
    json_bytes,
    json_reply,
    read_json,
    refusing,
)
from routerl_jax.training.knowledge import with_knowledge
from routerl_jax.training.load import load_config, load_policy
from routerl_jax.training.setup import build_recipe, make_engine

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_ROWS, _MAX_LENGTH = 64, 4096  # of a policy that no run has settings for

# A policy under a name, alone or with its searches. Its `about` has fields for the list of models; `chat` and `text` give the
# reply to a request. The server always runs a reply's `chunks` to their end, and may then call `whole`.
Model = PolicyModel | AnswererModel
Reply = PolicyReply | AnswerReply


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The policies of a server.

    Attributes:
      models: the policies by name.
      busy: gives the reason why no further request should be sent here; "" if there is none.
      body_bytes: the most bytes that a request may have.
      close: called when the server ends.
    """

    models: Mapping[str, Model]
    busy: Callable[[], str]
    body_bytes: int
    close: Callable[[], None]
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def named(self, name: Any) -> Model:
        """The model of that name. Raises ApiError."""
        if not isinstance(name, str) or not name:
            raise ApiError(400, "missing_required_parameter", "model must be a string", "model")
        if name not in self.models:
            names = ", ".join(self.models)
            raise ApiError(404, "model_not_found", f"there is no model {name!r} here; there is: {names}", "model")
        return self.models[name]

    def describe(self, name: str) -> dict[str, Any]:
        """The entry of a model in /v1/models."""
        head = {"id": name, "object": "model", "created": self.started, "owned_by": "routerl_jax"}
        return {**head, **self.named(name).about}


def create_app(served: Served, *, token: str = "", hosts: Collection[str] = LOOPBACK) -> Starlette:
    """The application.

    Args:
      token: every client must give it. With "", which asks for none, pages of other sites are refused
        (`services.asgi.SameSite`).
      hosts: names under which the server may be asked without a token; "*" for any.
    """
    with needs("serving", "serve"):
        from starlette.responses import StreamingResponse
        from starlette.routing import Route

    async def models(request: Request) -> Response:
        return json_reply({"object": "list", "data": [served.describe(name) for name in served.models]})

    async def model(request: Request) -> Response:
        return json_reply(served.describe(request.path_params["model"]))

    async def generated(request: Request) -> Response:
        body = await read_json(request, served.body_bytes)
        asked = served.named(body.get("model") if isinstance(body, dict) else None)
        chat = request.url.path.endswith("/chat/completions")
        reply: Reply = await asyncio.to_thread(asked.chat if chat else asked.text, body)
        chunks = each_while_connected(reply.chunks(), request)
        if not reply.stream:
            async for _ in chunks:
                pass
            return json_reply(reply.whole())
        # The first chunk shows that the request is valid. An error before it is a reply of its own, and no event of the stream.
        events = _events(await anext(chunks, None), chunks)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def route(path: str, method: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
        async def respond(request: Request) -> Response:
            """The response; for a stream, its beginning."""
            with refusing(request):
                return await endpoint(request)

        return Route(path, respond, methods=[method])

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(served.close)

    routes = [
        route("/v1/models", "GET", models),
        route("/v1/models/{model:path}", "GET", model),
        route("/v1/chat/completions", "POST", generated),
        route("/v1/completions", "POST", generated),
    ]
    hint = "POST /v1/chat/completions, /v1/completions, GET /v1/models"
    return application(routes, lifespan, token=token, hosts=hosts, busy=served.busy, hint=hint, write=error_body)


async def _events(first: dict[str, Any] | None, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        if first is not None:
            yield _event(first)
        async for chunk in chunks:
            yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except Refusal as error:
        if error.status != 499:
            yield _event(error_body(error))
    except Exception as error:  # a bug here
        logging.exception("a reply failed while it was sent")
        yield _event(error_body(Refusal(500, "internal", f"{type(error).__name__}: {error}")))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


# --- a server by its settings ---


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ServePolicyConfig(Address):
    """A server of one policy.

    Attributes:
      workdir: directory of a run of launch.train, whose policy is served.
      step: step of one of its checkpoints; default: the finished policy.
      path: a model instead of a run: a directory, a hub id or a packaged model.
      name: the model's name for clients; default: that of its directory.
      with_searches: answer questions with the run's agent and knowledge bases.
      knowledge: NAME=PLACE as in launch.ask: replaces knowledge bases of the run.
      rows: conversations that are decoded at once; 0: the run's config.engine.rows, or 64 without a run.
      max_length: most tokens of a conversation; 0: the run's config.engine.max_length. Without a run it is 4,096, or the
        model's context if that is shorter.
      max_queue: conversations that may wait for a row; more are refused with 503 and Retry-After.
      dtype: type of the weights of a model without a run.
      body_bytes: most bytes of a request. Pictures are in it, in base64.
      warm_up: generate a little at the start, so that the first client does not wait for compilation.
    """

    workdir: str = ""
    step: int | None = None
    path: str = ""
    name: str = ""
    with_searches: bool = False
    knowledge: tuple[str, ...] = ()
    rows: Count = 0
    max_length: Count = 0
    max_queue: Count = 1024
    dtype: str = "bfloat16"
    body_bytes: Size = 32 << 20
    warm_up: bool = True

    def __post_init__(self) -> None:
        if bool(self.workdir) == bool(self.path):
            raise ValueError("give either --workdir, the directory of a run, or --path, a model")
        if self.path and (self.with_searches or self.knowledge or self.step is not None):
            flag = "--with_searches" if self.with_searches else "--knowledge" if self.knowledge else "--step"
            raise ValueError(f"{flag} needs --workdir: a model alone has no agent, knowledge bases or checkpoints")
        if self.knowledge and not self.with_searches:
            raise ValueError("--knowledge needs --with_searches: a policy by itself searches nothing")

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.name or pathlib.Path(self.workdir or self.path).expanduser().name or "policy"


def open_policy(config: ServePolicyConfig) -> Served:
    """Loads the policy and, if it is to search, its agent and knowledge bases. Raises ValueError that names what is missing."""
    searcher, tags = None, ()
    if config.path:
        engine = _engine_of_path(config)
    else:
        workdir = pathlib.Path(config.workdir)
        run = with_knowledge(load_config(workdir), config.knowledge)
        split_cpu(run.mesh.cpu_devices)
        if config.max_length:
            run = dataclasses.replace(
                run,
                engine=dataclasses.replace(run.engine, max_length=config.max_length),
                learner=dataclasses.replace(
                    run.learner, length_buckets=()
                ),  # of what is learnt; here it would be a bound
            )
        tags = build_recipe(run).agent.special_tokens
        engine = make_engine(run, load_policy(workdir, run, step=config.step), rows=config.rows or None)
        if config.with_searches:
            searcher = open_searcher(run, engine, workdir)
    loop = EngineLoop(engine) if searcher is None else searcher.loop
    admission = Admission(engine.rows + config.max_queue)
    model: Model = PolicyModel(loop, admission, tags)
    if searcher is not None:
        model = AnswererModel(loop, admission, searcher.live, searcher.tools)
    if config.warm_up:
        warm_up(engine)

    def busy() -> str:
        return f"{admission.open} conversations are under way or wait" if admission.open >= admission.most else ""

    models = {config.model_name: model}
    return Served(models=models, busy=busy, body_bytes=config.body_bytes, close=loop.close)


def _engine_of_path(config: ServePolicyConfig) -> Engine:
    model = load_pretrained(config.path, dtype=config.dtype)
    if not isinstance(model, Decoder):
        raise ValueError(f"--path={config.path} is no decoder, so it writes nothing")
    model = merged(model)
    length = config.max_length or min(_MAX_LENGTH, model.config.max_length)
    return Engine(model, rows=config.rows or _ROWS, max_length=length)
