"""The settings of `launch.serve_policy`, and the server that they describe."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

from routerl_jax.core.config import Count, Range, Size, checked
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.extras.policy_server.answerer import AnswererModel, open_searcher, warm_up
from routerl_jax.extras.policy_server.app import Model, Served
from routerl_jax.extras.policy_server.generator import Admission
from routerl_jax.extras.policy_server.policy import PolicyModel
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.lora import merged
from routerl_jax.parallel.platform import split_cpu
from routerl_jax.training.knowledge import with_knowledge
from routerl_jax.training.load import load_config, load_policy
from routerl_jax.training.setup import build_recipe, make_engine

_ROWS, _MAX_LENGTH = 64, 4096  # of a policy that no run has settings for


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ServePolicyConfig:
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
      host, port: where to listen. 0.0.0.0 means all interfaces; set a token then.
      token_file: file with the token that clients must give as their API key; "" for none.
      body_bytes: most bytes of a request. Pictures are in it, in base64.
      warm_up: generate a little at the start, so that the first client does not wait for compilation.
      shutdown_seconds: seconds that requests may still take after SIGTERM.
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
    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65_535)] = 8000
    token_file: str = ""
    body_bytes: Size = 32 << 20
    warm_up: bool = True
    shutdown_seconds: Count = 30

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
