"""A policy with its searches behind the OpenAI protocol: it answers a chat's last message and names its sources."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.extras.policy_server.generator import Admission
from routerl_jax.extras.policy_server.live import LiveAgent
from routerl_jax.extras.policy_server.policy import new_head, no_usage, usage
from routerl_jax.extras.policy_server.protocol import (
    ApiError,
    ChatRequest,
    GenerationSettings,
    invalid,
    parts,
    read_chat,
    too_long,
)
from routerl_jax.models.images import check_image, image_bytes, is_url
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import build_recipe, evaluated_agent, open_knowledge

# --- A run's agent with its knowledge bases on an engine of its own, which answers questions as they come. ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searcher:
    """An agent that answers questions on an engine's thread; `tools` are its knowledge bases by name."""

    loop: EngineLoop
    live: LiveAgent
    tools: Mapping[str, SearchTool]

    @property
    def engine(self) -> Engine:
        """Its policy."""
        return self.loop.engine


def open_searcher(
    config: TrainConfig, engine: Engine, workdir: pathlib.Path | None, *, progress: bool = True
) -> Searcher:
    """The agent that a run's evaluations show, with the run's knowledge bases, on this engine.

    Args:
      workdir: of the run, with its snapshot of the web.

    Raises:
      ValueError: the recipe can't be built, or a knowledge base can't be opened.
    """
    agent = evaluated_agent(config, build_recipe(config))
    tools = open_knowledge(config, workdir, progress=progress)
    loop = EngineLoop(engine)
    return Searcher(loop=loop, live=LiveAgent(agent, loop, tools, config.rollout.tool_timeout), tools=tools)


def warm_up(engine: Engine) -> None:
    """Writes a little, so that nobody waits for compilers later."""
    engine.generate([[engine.tokenizer.pad_id] * 8], max_tokens=2)


# --- A policy with its searches behind the OpenAI protocol: it answers a chat's last message and names its sources. ---


class AnswererModel:
    """A model of the server: an agent with its knowledge bases.

    It answers the last message, which must be the user's; it does not see the messages before. The agent has its own limits of
    length, so `max_tokens` changes nothing. Without a `temperature` decoding is greedy.
    """

    def __init__(
        self, loop: EngineLoop, admission: Admission, live: LiveAgent, tools: Mapping[str, SearchTool]
    ) -> None:
        self._loop, self._admission, self._live, self._tools = loop, admission, live, tools

    @property
    def about(self) -> Mapping[str, Any]:
        """The model's fields in the list of models."""
        engine = self._loop.engine
        return {
            "max_model_len": engine.max_length,
            "pictures": engine.images is not None,
            "knowledge_bases": list(self._tools),
        }

    def chat(self, body: Any) -> AnswerReply:
        """The answers to a chat's last question. Raises ApiError."""
        request = read_chat(body, temperature=0.0)
        unusable = {  # by an agent with its own protocol
            "tools": request.tools,
            "stop": request.generation.stops,
            "logprobs": request.generation.logprobs,
            "return_token_ids": request.generation.token_ids,
            "continue_final_message": request.continue_final,
            "chat_template_kwargs": request.template,
        }
        if name := next((name for name, value in unusable.items() if value), None):
            message = f"{name}: this model answers with its own searches, and takes none"
            raise invalid(message, name, "unsupported_parameter")
        return AnswerReply(
            loop=self._loop,
            admission=self._admission,
            live=self._live,
            generation=request.generation,
            example=self._example(request),
            head=new_head("chatcmpl", request.generation.model),
        )

    def text(self, body: Any) -> AnswerReply:
        """Raises ApiError."""
        raise ApiError(
            400,
            "unsupported_endpoint",
            "this model answers questions with its searches: ask /v1/chat/completions",
            "model",
        )

    def _example(self, request: ChatRequest) -> Example:
        message, field = request.messages[-1], f"messages[{len(request.messages) - 1}]"
        if message.get("role") != "user":
            raise invalid(f"{field}.role must be user: the last message is the question", f"{field}.role")
        texts, images = [], []
        for part in parts(message.get("content"), f"{field}.content"):
            if isinstance(part, str):
                texts.append(part)
                continue
            if self._loop.engine.images is None:
                raise invalid(f"{part.field}: the model sees no pictures", part.field)
            try:
                content = image_bytes(part.uri, part.field)
                check_image(content, name=part.field)
                images.append(content)
            except ValueError as error:
                raise invalid(str(error), part.field) from error
        question = replace_surrogates("".join(texts)).strip()
        if not question:
            raise invalid(f"{field}.content holds no question", f"{field}.content")
        engine = self._loop.engine
        if engine.tokenizer.exceeds(question, engine.max_length):
            raise too_long(engine.max_length, f"{len(question)} letters", f"{field}.content")
        seed = request.generation.seed
        name = f"seed {seed}" if seed is not None else uuid.uuid4().hex
        return Example(id=name, question=question, answers=(), images=tuple(images))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerReply:
    """A reply of the server: one attempt at the question for each choice."""

    loop: EngineLoop
    admission: Admission
    live: LiveAgent
    generation: GenerationSettings
    example: Example
    head: dict[str, Any]
    episodes: dict[int, Episode] = dataclasses.field(default_factory=dict)

    @property
    def stream(self) -> bool:
        """Whether it is wanted in chunks."""
        return self.generation.stream

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks: first the beginning of every choice, then each whole answer when its attempt ends."""
        with self.admission.admit(self.generation.n):
            attempts = [
                self.live.attempt(self.example, sample, self.generation.sampling) for sample in range(self.generation.n)
            ]
            tasks = {asyncio.wrap_future(self.loop.submit(attempt)): index for index, attempt in enumerate(attempts)}
            try:
                if self.stream:
                    for index in range(self.generation.n):
                        yield self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}}])
                pending = set(tasks)
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        index = tasks[task]
                        self.episodes[index] = _checked(task)
                        if self.stream:
                            delta = _message(self.episodes[index])
                            yield self._chunk([{"index": index, "delta": delta, "finish_reason": self._finish(index)}])
            finally:
                for task in tasks:
                    task.cancel()
        if self.stream and self.generation.usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The reply, after all attempts."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **_message(self.episodes[index])},
                "logprobs": None,
                "finish_reason": self._finish(index),
            }
            for index in sorted(self.episodes)
        ]
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk", "choices": choices, **no_usage(self.generation)}

    def _finish(self, index: int) -> str:
        episode = self.episodes[index]
        return "length" if episode.answer is None and episode.truncated else "stop"

    def _usage(self) -> dict[str, int]:
        """Tokens of all conversations of all attempts. Passages that were fed count as prompt tokens."""
        sequences = [sequence for episode in self.episodes.values() for sequence in episode.sequences]
        written = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        return usage(sum(map(len, sequences)) - written, written)


def _checked(task: asyncio.Future[Episode]) -> Episode:
    """An attempt's episode. Raises ApiError."""
    if (error := task.exception()) is not None:
        raise ApiError(500, "attempt_failed", f"{type(error).__name__}: {error}") from error
    episode = task.result()
    if episode.truncated and not episode.turns:
        message = "the question is longer than this model's maximum context length"
        raise ApiError(400, "context_length_exceeded", message, "messages")
    return episode


def _message(episode: Episode) -> dict[str, Any]:
    """An answer with its sources.

    `searches` has each query, its knowledge base and the ids of the passages found. `sources` has these passages, each once.
    `annotations` has them as the protocol's citations, which span the whole answer.
    """
    answer = episode.answer or ""
    listed = sources(episode)
    searches = [
        {
            "knowledge_base": call.tool,
            "query": call.query,
            "passages": [passage.id for passage in call.passages],
            "error": call.error,
        }
        for call in episode.calls
    ]
    citations = [
        {"url": one["url"], "title": one["title"], "start_index": 0, "end_index": len(answer)} for one in listed
    ]
    return {
        "content": answer,
        "annotations": [{"type": "url_citation", "url_citation": one} for one in citations],
        "sources": listed,
        "searches": searches,
    }


def sources(episode: Episode) -> list[dict[str, Any]]:
    """The passages that an episode's searches found, each once: `knowledge_base`, `id`, `title`, `text`, `score`, `url`."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for call in episode.calls:
        for passage in call.passages:
            entries.setdefault((call.tool, passage.id), _source(call.tool, passage))
    return list(entries.values())


def _source(tool: str, passage: Passage) -> dict[str, Any]:
    """A passage as a source. Its `url` is its id where that is one, else a URN of its knowledge base and id."""
    quoted = (urllib.parse.quote(name, safe="") for name in (tool, passage.id))
    url = passage.id if is_url(passage.id) else ":".join(("urn:routerl", *quoted))
    return {
        "knowledge_base": tool,
        "id": passage.id,
        "title": passage.title,
        "text": passage.text,
        "score": float(passage.score),
        "url": url,
    }
