"""The session behind `launch.chat`: a policy, the agent of a run and its knowledge bases."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple

from routerl_jax.agents.conversation import Request
from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.types import Call, Episode, Example
from routerl_jax.engine.sampling import Sampling
from routerl_jax.extras.policy_server.answerer import Searcher, open_searcher, warm_up
from routerl_jax.extras.policy_server.live import OnProgress
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.images import ImageSource
from routerl_jax.parallel.platform import split_cpu
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.load import load_policy
from routerl_jax.training.setup import build_mesh, make_engine

# --- Puts earlier exchanges of a conversation before a question, as text. ---


class Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def with_history(question: str, earlier: Sequence[Exchange], tokens: Callable[[str], int], most: int) -> str:
    """The question with the latest exchanges before it, as a text; the question alone if there are none.

    An agent is asked one question at a time. The text repeats earlier questions and answers, so that
    "and its capital?" can be understood.

    Args:
      tokens: number of tokens of a text.
      most: tokens that the exchanges may take. The oldest that have no room are left out.
    """
    shown: list[str] = []
    for exchange in reversed(earlier):
        text = f"Q: {exchange.question}\nA: {exchange.answer}\n"
        if tokens("".join([text, *shown])) > most:
            break
        shown.insert(0, text)
    if not shown:
        return question
    return f"Earlier in this conversation:\n{''.join(shown)}\nThe question now: {question}"


# --- The session behind `launch.chat`: a policy, the agent of a run and its knowledge bases. ---


_EARLIER = 8  # questions with their answers that a chat model is reminded of


class KnowledgeBaseInfo(NamedTuple):
    """A knowledge base: its kind, and its number of passages if that is known."""

    name: str
    kind: str
    passages: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A searcher that is talked with.

    Attributes:
      name: the policy's name.
      kinds: the kind of every knowledge base, by name.
      pictures: directory for the pictures that it was shown (evaluation.records.PictureFiles).
      sampling: of its turns.
      seed: of the sampling. A question that is asked again is drawn anew.
      earlier: questions with their answers, at most, that stand before a new question.
    """

    searcher: Searcher
    name: str
    kinds: dict[str, str]
    pictures: pathlib.Path
    sampling: Sampling
    seed: int
    earlier: int
    _count: itertools.count[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def sees(self) -> bool:
        """Whether the policy sees pictures."""
        return self.searcher.engine.images is not None

    @property
    def knowledge_bases(self) -> list[KnowledgeBaseInfo]:
        """The knowledge bases that the agent searches."""
        return [
            KnowledgeBaseInfo(name, self.kinds.get(name, ""), len(tool) if isinstance(tool, Sized) else None)
            for name, tool in self.searcher.tools.items()
        ]

    def ask(
        self,
        question: str,
        images: Sequence[ImageSource] = (),
        earlier: Sequence[Exchange] = (),
        on_progress: OnProgress | None = None,
    ) -> concurrent.futures.Future[Episode]:
        """Begins a reply. To cancel the future is to stop it.

        Args:
          images: pictures that the question is about.
          earlier: earlier exchanges; the last `Chat.earlier` of them are shown, as far as a quarter of the context holds them.
          on_progress: see `LiveAgent.attempt`; called on the engine's thread.
        """
        engine = self.searcher.engine
        shown = earlier[-self.earlier :] if self.earlier else ()
        question = replace_surrogates(question)  # of a terminal with another encoding, or of a page
        text = with_history(question, shown, lambda text: len(engine.tokenizer.encode(text)), engine.max_length // 4)
        example = Example(id=f"chat {self.seed}, {next(self._count)}", question=text, answers=(), images=tuple(images))
        return self.searcher.loop.submit(self.searcher.live.attempt(example, 0, self.sampling, on_progress))

    def search(self, name: str, words: str, k: int = 3) -> concurrent.futures.Future[Call]:
        """Searches a knowledge base, without the policy."""
        return self.searcher.loop.submit(self.searcher.live.search(Request(name, words, k)))

    def close(self) -> None:
        """Ends the engine's thread, after the work that has begun."""
        self.searcher.loop.close()


def open_chat(
    config: TrainConfig,
    workdir: pathlib.Path | None,
    pictures: pathlib.Path,
    *,
    policy: str = "",
    step: int | None = None,
    rows: int = 1,
    earlier: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    progress: bool = True,
) -> Chat:
    """Loads the policy, its agent and its knowledge bases, and compiles.

    Args:
      config: of the run, or of an agent and knowledge bases without a run.
      workdir: of the run; None where there is only a configuration.
      pictures: directory for pictures that the policy is shown.
      policy: a model in the place of the run's: a directory, a hub id or a packaged model.
      step: of the run's checkpoints; default: the finished policy, or the newest checkpoint.
      rows: replies that are written at once.
      earlier: see `Chat`; None: 8 for a model with a chat template. Others were trained on single questions: none.

    Raises:
      ValueError: something is missing or can't be opened; says what.
    """
    split_cpu(config.mesh.cpu_devices)
    if policy:
        model = load_pretrained(
            policy,
            build_mesh(config.mesh),
            config.model.dtype,
            compute_dtype=config.model.compute_dtype or config.model.dtype,
            layout=config.mesh.layout,
        )
        if not isinstance(model, Decoder):
            raise ValueError(f"--policy={policy} is no decoder, so it writes nothing")
    else:
        assert workdir is not None, "a configuration alone needs a policy"
        model = load_policy(workdir, config, step=step)
    engine = make_engine(config, model, rows=rows)
    engine.seed = seed
    searcher = open_searcher(config, engine, workdir, progress=progress)
    warm_up(engine)
    return Chat(
        searcher=searcher,
        name=policy or str(workdir),
        kinds={name: spec.kind for name, spec in config.knowledge.items()},
        pictures=pictures,
        sampling=Sampling(temperature=temperature),
        seed=seed,
        earlier=(_EARLIER if engine.tokenizer.has_chat_template else 0) if earlier is None else earlier,
    )
