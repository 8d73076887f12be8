"""Makes questions about pictures from a list of concepts (MMSearch-R1, arXiv 2506.20670, section 3.1, VQA Collection).

For each concept, a search finds a picture with a page. A language model writes a question about them, and says which kind of
knowledge it asks for. The sample has as many questions of each kind.

WORKDIR/construct.json             settings and data of the job
WORKDIR/concepts.jsonl             a record per finished concept: what was tried, and the question
WORKDIR/questions.jsonl            all questions
WORKDIR/train.jsonl, test.jsonl    the sample; the two files share no concept
WORKDIR/images/                    their pictures
WORKDIR/report.json, report.md     written when the job ends
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.grammar import between
from routerl_jax.core.config import Amount, Count, NonNegative, Seed, Size, checked
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Message, Passage
from routerl_jax.extras.curation.job import (
    Attempt,
    AttemptFailed,
    Job,
    JobSettings,
    ModelUse,
    Record,
    Report,
    Services,
    Work,
    by_frequency,
    listed,
    model_reply,
    sources_of,
)
from routerl_jax.extras.curation.questions import IMAGES, digest, save_picture
from routerl_jax.rewards.metrics import NORMALIZERS
from routerl_jax.services.base import ChatModel, without_thinking
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.sections import KnowledgeConfig

T = TypeVar("T")

# Kinds of knowledge that a question may ask for, each with its description in the prompt.
TAXONOMY = {
    "Arts": "paintings, music, film, books, design",
    "Place": "cities, landmarks, landscapes, buildings",
    "People": "persons, peoples, professions",
    "Industry": "products, vehicles, machines, companies, food",
    "Science": "instruments, substances, theories, medicine",
    "Nature": "animals, plants, minerals, weather",
    "Entities": "organisations, symbols, objects of daily life, whatever is none of the others",
    "Events": "happenings, sports, festivals, wars",
}
QUESTION_WORDS = ("who", "whom", "whose", "what", "which", "where", "when", "how", "why")
_MOST_WORDS = 40  # most words of a question
_SHORTEST = 3  # fewest letters of a word that can give the answer away
_COMMON = frozenset(["and", "for", "from", "with", "into", "its", "his", "her", "this", "that", "was", "are"])
# Words that somebody who only sees the picture would not use.
_SOURCE = re.compile(
    r"\b(web ?page|page|article|website|text|passage|caption|document|according to|mentioned|described above|concept)\b",
    re.I,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionAnswer:
    """A question about a picture, and its answer."""

    question: str
    answer: str


def question_prompt(concept: str, title: str, page: str) -> str:
    """The prompt that asks for a question. The picture stands before it."""
    return (
        f"The picture and the text below were found for: {concept}\n\n"
        f"Title: {title}\nText: {page}\n\n"
        "Write one question about what the picture shows, and its answer.\n"
        f'1. The answer names "{concept}", in as few words as possible.\n'
        f"2. The question begins with one of: {', '.join(word.capitalize() for word in QUESTION_WORDS)}.\n"
        "3. The question gives the answer away in no way: it says neither the name nor a part of it.\n"
        "4. Somebody who sees the picture and nothing else would like to know it. Ask of the picture alone, in one plain "
        "sentence, and never of the text.\n"
        "Write the question inside <question> and </question>, then the answer inside <answer> and </answer>. If picture and "
        f'text do not show "{concept}", write <none/> alone.'
    )


def kind_prompt(question: str, answer: str) -> str:
    """The prompt that asks for the kind of knowledge."""
    kinds = "\n".join(f"{name}: {description}" for name, description in TAXONOMY.items())
    return (
        "Which kind of knowledge does this question about a picture ask for?\n\n"
        f"{kinds}\n\nQuestion: {question}\nAnswer: {answer}\n\nWrite one name inside <kind> and </kind>."
    )


def retry_prompt(why: str) -> str:
    """The prompt after a reply that could not be used."""
    return f"That could not be used: {why}. Write another question and answer in the same form."


def read_question(reply: str, names: tuple[str, ...]) -> QuestionAnswer:
    """The question and answer in a reply.

    Args:
      names: names of the concept. The answer must contain one of them.

    Raises:
      AttemptFailed: the reply breaks a rule, which the message names.
    """
    if "<none/>" in reply:
        raise AttemptFailed("not shown", "the model says that picture and text do not show it")
    question, answer = (between(reply, f"<{tag}>", f"</{tag}>") for tag in ("question", "answer"))
    if not question or not answer:
        raise AttemptFailed("unreadable reply", "there is no question and answer in their tags")
    question, answer = " ".join(question.split()), " ".join(answer.split())
    if not any(_holds(answer, name) for name in names):
        raise AttemptFailed("answer without the concept", f"the answer {answer!r} does not name {names[0]!r}")
    if not re.match(rf"({'|'.join(QUESTION_WORDS)})\b", question, re.IGNORECASE):
        raise AttemptFailed("no question word", f"the question begins with {question.split()[0]!r}")
    if leaked := _given_away(question, (*names, answer)):
        raise AttemptFailed("given away", f"the question says {leaked!r}")
    if not question.endswith("?") or "?" in question[:-1] or len(question.split()) > _MOST_WORDS:
        raise AttemptFailed("not as one would ask", f"it must be one question of at most {_MOST_WORDS} words")
    if match := _SOURCE.search(question):
        raise AttemptFailed("not as one would ask", f"the question speaks of {match.group()!r}, which nobody sees")
    return QuestionAnswer(question=question, answer=answer)


def read_kind(reply: str) -> str:
    """The kind of knowledge in a reply. Raises AttemptFailed if it is not in the taxonomy."""
    reply_kind = (between(reply, "<kind>", "</kind>") or "").strip().lower()
    kind = next((name for name in TAXONOMY if name.lower() == reply_kind), "")
    if not kind:
        raise AttemptFailed("unknown kind", f"{reply_kind or reply[:80]!r} is none of {', '.join(TAXONOMY)}")
    return kind


def _words(text: str) -> list[str]:
    return NORMALIZERS.get("search_r1")(text).split()


def _holds(text: str, name: str) -> bool:
    """Whether a text contains the words of a name, one after the other."""
    words, name_words = _words(text), _words(name)
    return bool(name_words) and any(words[i : i + len(name_words)] == name_words for i in range(len(words)))


def _given_away(question: str, names: tuple[str, ...]) -> str:
    """A name, or a word of a name, that a question contains; "" if there is none."""
    question_words = set(_words(question))
    for name in names:
        for word in _words(name):
            if word in question_words and len(word) >= _SHORTEST and word not in _COMMON:
                return word
    return next((name for name in names if _holds(question, name)), "")


_MADE = ("concepts.jsonl", "questions.jsonl", "train.jsonl", "test.jsonl", "report.json", "report.md", IMAGES)

OpenServices = Callable[[], tuple[ChatModel, SearchTool]]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class VqaConfig(JobSettings):
    """A job that makes questions about pictures of concepts."""

    job: Literal["vqa"] = "vqa"  # the job that this configuration is for
    # a text file with one concept per line, or rows (.jsonl, .json) with `concept` and optionally `aliases`
    concepts: str = ""
    # the model that writes questions; it must read pictures
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)
    # one knowledge base, which takes text queries and finds passages with pictures
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    k: Size = 3  # passages per search; the first with a picture and a text is taken
    max_page: Size = 8000  # most characters of the passage that the model reads
    attempts: Size = 3  # most requests until a reply keeps the rules; the model is told what was wrong
    temperature: NonNegative = 0.7  # temperature of the sampling of replies
    max_tokens: Size = 1024  # most tokens of a reply
    sample: Amount = 6000  # questions of the sample, equally many of each kind if there are enough; -1: all
    test: Count = 600  # number of these that go to test.jsonl
    seed: Seed = 0  # seed of the sample

    def __post_init__(self) -> None:
        if not self.concepts:
            raise ValueError("config.concepts is not set: name a file with a concept a line")
        if len(self.knowledge) != 1:
            raise ValueError(
                "config.knowledge must be one knowledge base, which finds pictures of a concept; it has "
                f"{', '.join(self.knowledge) or 'none'}"
            )
        if self.sample != -1 and self.test >= self.sample:
            raise ValueError(f"config.test={self.test} must be less than config.sample={self.sample}")

    def decisive(self) -> dict[str, Any]:
        """The settings that questions depend on, besides the concepts. Other values make another job."""
        keys = ("job", "k", "max_page", "attempts", "temperature", "max_tokens")
        return {**{key: getattr(self, key) for key in keys}, **sources_of(self.llm, self.knowledge)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Concept:
    """A visible thing, with its other names."""

    name: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *self.aliases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VqaReport(Report):
    """Questions by kind of knowledge, and their cost.

    Attributes:
      concepts, tried, accepted: number of concepts: all, those tried, and those with a question.
      reasons: number of concepts without a question, by the outcome of their attempt.
      replies: number of replies by the rule that they broke; "accepted" counts those that broke none.
      kinds, train, test: number of questions by kind of knowledge: all, and in each file.
    """

    concepts: int
    tried: int
    accepted: int
    reasons: Mapping[str, int]
    replies: Mapping[str, int]
    kinds: Mapping[str, int]
    train: Mapping[str, int]
    test: Mapping[str, int]

    def __str__(self) -> str:
        lines = ["| kind | questions | train | test |", "|---|---|---|---|"]
        for name in TAXONOMY:
            cells = (counts.get(name, 0) for counts in (self.kinds, self.train, self.test))
            lines.append(f"| {name} | {' | '.join(f'{count:,}' for count in cells)} |")
        return "\n".join(
            [
                *lines,
                "",
                f"- {self.concepts:,} concepts, {self.tried:,} tried, {self.accepted:,} with a question",
                f"- none because of: {listed(self.reasons)}",
                f"- replies by the rule that they broke: {listed(self.replies)}",
                f"- {self.model}: {self.use}",
                f"- {self.seconds:,.0f} s in this session",
            ]
        )


def read_concepts(path: str) -> list[Concept]:
    """The concepts of a file. Concepts that differ only in case and spaces count as one.

    Raises:
      ValueError: there is no such file, it has no concept, or a row has none. The message names file, row and key.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"config.concepts={path!r}: there is no such file")
    unique: dict[str, Concept] = {}
    if file.suffix == ".txt":
        concepts = [Concept(name=" ".join(line.split())) for line in file.read_text().splitlines() if line.strip()]
    else:
        concepts = []
        for where, row in read_rows(file):
            name, aliases = row.get("concept"), row.get("aliases") or []
            if not isinstance(name, str) or not name.strip():
                raise where.error("key 'concept' is missing or empty")
            if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias.strip() for alias in aliases):
                raise where.error("key 'aliases' must be a list of strings")
            concepts.append(Concept(name=" ".join(name.split()), aliases=tuple(aliases)))
    for concept in concepts:
        unique.setdefault(concept.name.lower(), concept)
    if not unique:
        raise ValueError(f"config.concepts={path!r} holds no concept")
    return list(unique.values())


def make_vqa(
    config: VqaConfig,
    workdir: pathlib.Path,
    open_services: OpenServices,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> VqaReport:
    """Makes a question for each concept and draws the sample.

    After a kill, the same call goes on where the job was. No finished concept is asked for again.

    Args:
      open_services: opens the language model and the knowledge base. It is not called if nothing is left to do.
      overwrite: delete what a job with other settings has made in `workdir`.

    Raises:
      ValueError: `workdir` holds a job with other settings, another process uses it, the concepts can't be used, or too many
        concepts failed in a row.
    """
    concepts = read_concepts(config.concepts)

    @contextlib.contextmanager
    def making() -> Iterator[Work[Concept]]:
        model, tool = open_services()
        services = Services(model, {"pictures": tool}, config.search_timeout)
        yield _Maker(config, services, workdir / IMAGES).record

    return Job(
        items=concepts,
        name=lambda concept: concept.name,
        unit="concept",
        workdir=workdir,
        identity={**config.decisive(), "prompts": digest([question_prompt("", "", ""), kind_prompt("", "")])},
        outputs=_MADE,
        doing="asking",
        settings=config,
    ).run(making, functools.partial(_write, config, workdir, concepts), overwrite=overwrite, progress=progress)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes the records of concepts."""

    config: VqaConfig
    services: Services
    images: pathlib.Path

    async def record(self, concept: Concept) -> dict[str, Any]:
        attempt, broken = Attempt(), []
        row = None
        try:
            page = await self._page(concept)
            prompt = question_prompt(concept.name, page.title, page.text[: self.config.max_page])
            chat = [Message(role="user", content=prompt, images=(page.image,))]
            question = await self._first(
                lambda reply: read_question(reply, concept.names), chat, attempt, broken, explain=True
            )
            chat = [Message(role="user", content=kind_prompt(question.question, question.answer))]
            row = self._row(concept, page, question, await self._first(read_kind, chat, attempt, broken))
            broken.append("accepted")
        except AttemptFailed as reason:
            attempt.outcome, attempt.detail = reason.outcome, str(reason)
        return {
            "id": concept.name,
            "outcome": attempt.outcome,
            "detail": attempt.detail,
            "broken": broken,
            "made": attempt.record(),
            "row": row,
        }

    async def _page(self, concept: Concept) -> Passage:
        """The first passage that has a picture and a text."""
        call = await self.services.search("pictures", concept.name, self.config.k)
        if call.error is not None:
            raise AttemptFailed("search failed", call.error)
        page = next((passage for passage in call.passages if passage.image and passage.text.strip()), None)
        if page is None:
            raise AttemptFailed("no picture", f"{len(call.passages)} passages, none with a picture and a text")
        return page

    async def _first(
        self,
        read: Callable[[str], T],
        chat: list[Message],
        attempt: Attempt,
        broken: list[str],
        *,
        explain: bool = False,
    ) -> T:
        """What is read in the first reply that keeps the rules. With `explain`, the model is told which one a reply broke."""
        config = self.config
        options: dict[str, Any] = {"max_tokens": config.max_tokens, "temperature": config.temperature}
        for number in range(config.attempts):
            reply = without_thinking(await model_reply(self.services, chat, attempt, **options, sample=number))
            try:
                return read(reply)
            except AttemptFailed as reason:
                broken.append(reason.outcome)
                if number + 1 == config.attempts or reason.outcome == "not shown":
                    raise
                told = Message(role="user", content=retry_prompt(str(reason)))
            chat = [*chat, Message(role="assistant", content=reply), told] if explain else chat
        raise AssertionError("the last reply is read or raises")

    def _row(self, concept: Concept, page: Passage, question_answer: QuestionAnswer, kind: str) -> dict[str, Any]:
        """The question as a row in FlashRAG's form."""
        try:
            picture = save_picture(page.image, self.images)
        except ValueError as error:
            raise AttemptFailed("no picture", str(error)) from error
        return {
            "id": digest([concept.name]),
            "question": question_answer.question,
            "golden_answers": list(dict.fromkeys((question_answer.answer, *concept.names))),
            "images": [picture],
            "metadata": {"type": kind, "concept": concept.name, "page": page.id, "page_title": page.title},
        }


def _write(
    config: VqaConfig,
    workdir: pathlib.Path,
    concepts: Sequence[Concept],
    records: Sequence[Record],
    seconds: float,
) -> VqaReport:
    """Writes all questions, the sample, and the report."""
    last_records = {record["id"]: record for record in records}
    tried = [last_records[concept.name] for concept in concepts if concept.name in last_records]
    rows = [record["row"] for record in tried if record["row"] is not None]
    train, test = balanced(rows, config.sample, config.test, config.seed)
    for name, part_rows in (("questions", rows), ("train", train), ("test", test)):
        write_json_lines(workdir / f"{name}.jsonl", part_rows)
    report = VqaReport(
        model=config.llm.model,
        concepts=len(concepts),
        tried=len(tried),
        accepted=len(rows),
        reasons=by_frequency(record["outcome"] for record in tried if record["row"] is None),
        replies=by_frequency(rule for record in records for rule in record["broken"]),
        kinds=_kinds(rows),
        train=_kinds(train),
        test=_kinds(test),
        use=ModelUse.counted((record["made"] for record in records), config),
        seconds=round(seconds, 1),
    )
    report.write(workdir)
    return report


def balanced(
    rows: Sequence[dict[str, Any]], sample: int, test: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draws (training, test) with equally many questions of each kind, if there are enough. Rows keep their order.

    Each row belongs to one concept, so no concept is in both.

    Args:
      sample: size of both together; -1: all.
      test: size of the test part, also with equally many of each kind; at most half of the sample.
    """
    rng = np.random.default_rng(seed)
    by_kind: dict[str, list[int]] = {name: [] for name in TAXONOMY}
    for number in rng.permutation(len(rows)).tolist():
        by_kind[rows[number]["metadata"]["type"]].append(number)
    sampled = equal_shares({name: len(items) for name, items in by_kind.items()}, len(rows) if sample == -1 else sample)
    held_out = equal_shares(sampled, min(test, sum(sampled.values()) // 2))
    tested = {number for name, items in by_kind.items() for number in items[: held_out[name]]}
    drawn = {number for name, items in by_kind.items() for number in items[: sampled[name]]}
    return [rows[i] for i in sorted(drawn - tested)], [rows[i] for i in sorted(tested)]


def equal_shares(available: Mapping[str, int], total: int) -> dict[str, int]:
    """How many of each kind to take to get `total` in all: equally many, as far as there are enough. The first kinds get the
    remainder."""
    counts = dict.fromkeys(available, 0)
    remaining = min(total, sum(available.values()))
    while remaining:
        for name in [name for name in available if counts[name] < available[name]]:
            if remaining:
                counts[name] += 1
                remaining -= 1
    return counts


def _kinds(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts = collections.Counter(row["metadata"]["type"] for row in rows)
    return {name: counts[name] for name in TAXONOMY if counts[name]}
