r"""Serves a policy over HTTP with the OpenAI protocol, alone or with its searches.

    python -m launch.serve_policy --workdir=runs/quickstart                    # the policy of a run
    python -m launch.serve_policy --path=Qwen/Qwen2.5-1.5B-Instruct --port=8001 --rows=128 --max_length=8192
    python -m launch.serve_policy --workdir=runs/quickstart --with_searches    # answers with sources

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.chat.completions.create(model="quickstart", messages=[{"role": "user", "content": "..."}])

SIGTERM or Ctrl-C ends it: running requests are finished, and new ones are refused. docs/serving.md#serving-a-policy
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.command import start

if TYPE_CHECKING:
    from routerl_jax.extras.policy_server.app import Served, ServePolicyConfig

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a run of launch.train, whose policy is served.")
    flags.DEFINE_integer(
        "step", None, "Step of one of its checkpoints; default: the finished policy, or the newest checkpoint."
    )
    flags.DEFINE_string("path", None, "A model instead: a directory, a hub id or a packaged model.")
    flags.DEFINE_string("name", None, "The model's name for clients; default: the name of its directory.")
    flags.DEFINE_bool(
        "with_searches", None, "Answer with the run's agent and knowledge bases; replies name their sources."
    )
    flags.DEFINE_multi_string("knowledge", None, "NAME=PLACE: another knowledge base in the place of the run's NAME.")
    flags.DEFINE_integer("rows", None, "Conversations that are decoded at once; default: the run's, or 64.")
    flags.DEFINE_integer("max_length", None, "Most tokens of a conversation; default: the run's, or at most 4096.")
    flags.DEFINE_integer("max_queue", None, "Conversations that may wait for a row; more are refused (1024).")
    flags.DEFINE_string("dtype", None, "Type of the weights of a model without a run (bfloat16).")
    flags.DEFINE_string("host", None, "Interface to listen at (127.0.0.1).")
    flags.DEFINE_integer("port", None, "Port (8000); 0 takes a free one.")
    flags.DEFINE_string("token_file", None, "File with the token that clients must give as their API key.")
    flags.DEFINE_integer("body_bytes", None, "Most bytes of a request (32 MiB).")
    flags.DEFINE_bool("warm_up", None, "Compile before the first client comes (true).")
    flags.DEFINE_integer("shutdown_seconds", None, "Seconds that requests may still take after SIGTERM (30).")


def main(_: Sequence[str]) -> None:
    from routerl_jax.extras.policy_server.app import ServePolicyConfig, create_app, open_policy
    from routerl_jax.services.asgi import bound_hosts, check_port, read_token, run_server

    names = [field.name for field in dataclasses.fields(ServePolicyConfig)]
    fields: dict[str, Any] = {name: FLAGS[name].value for name in names if FLAGS[name].value is not None}
    if "knowledge" in fields:
        fields["knowledge"] = tuple(fields["knowledge"])
    config = ServePolicyConfig(**fields)
    token = read_token(config.token_file)
    check_port(config.host, config.port)
    served = open_policy(config)
    app = create_app(served, token=token, hosts=bound_hosts(config.host))
    run_server(app, config, lambda url: _greeting(served, config, url))


def _greeting(served: Served, config: ServePolicyConfig, url: str) -> str:
    name = config.model_name
    about = served.models[name].about
    summary = f"{about['max_model_len']:,} tokens, {'sees pictures' if about['pictures'] else 'text alone'}"
    if "knowledge_bases" in about:
        summary += f", searches {', '.join(about['knowledge_bases'])}"
    key = "the token" if config.token_file else "none"
    return f"serving {name} at {url}/v1 ({summary}); OpenAI(base_url='{url}/v1', api_key='{key}')"


if __name__ == "__main__":
    start(main, define_flags)
