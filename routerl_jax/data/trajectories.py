"""Golden trajectories of R1-Router (arXiv 2505.22095, appendix A.2): read, written, counted, and cut into their steps.

A row is `{"images": [..], "steps": [{"step_type": "ret" | "ans", "system", "problem", "answer"}]}`, as released in
grpo_dataset_{train,valid}_new.jsonl. The answer of a "ret" step is `{"query", "retriever": [..]}`, of an intermediate
"ans" step a string, of the final one a list of strings.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from routerl_jax.core.files import write_json_lines
from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.text import one_line
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.pictures import picture_beside

NONE = "none"  # the query and the retriever of a step that stops: nothing more is needed
RETRIEVERS = {
    "ter": "text retriever",
    "tir": "text image retriever",
    "tar": "table retriever",
}  # by their marks in problems

_QUESTION = re.compile(r"Origin question: ([^\n]*)")
_MARK = re.compile(rf"(?:^|(?<=:))({'|'.join(RETRIEVERS)})-(\d+): ", re.MULTILINE)
_REQUEST = "Give me the answer(with the format"  # what follows the documents in a problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of evidence, and the name of the retriever that found it, as files have it ("text retriever")."""

    retriever: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteStep:
    """The next sub-question, and the retrievers that answer it. Both are `none` if nothing more is needed.

    `system` and `problem` are the prompt with which the step was generated.
    """

    query: str
    retrievers: tuple[str, ...]
    system: str = ""
    problem: str = ""

    @property
    def stops(self) -> bool:
        """True if nothing more is needed."""
        return self.query.strip().lower() == NONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerStep:
    """The answer to the sub-question of the step before, from these documents."""

    answer: str
    documents: tuple[Document, ...] = ()
    system: str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalStep:
    """The accepted answers to the question."""

    answers: tuple[str, ...]
    system: str = ""
    problem: str = ""


Step = RouteStep | AnswerStep | FinalStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A question, the paths of its images, and the steps to its answer.

    Raises:
      ValueError: an answer follows no sub-question, a sub-question has no answer, the last step is not final, or an earlier
        step is.
    """

    id: str
    question: str
    steps: tuple[Step, ...]
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for number, (before, step) in enumerate(zip((None, *self.steps), self.steps), 1):
            was_asked = isinstance(before, RouteStep) and not before.stops
            if was_asked != isinstance(step, AnswerStep):
                problem = "no answer, one string, for its sub-question" if was_asked else "no sub-question to answer"
                raise ValueError(f"step {number}: the step before has {problem}")
            if isinstance(step, FinalStep) != (number == len(self.steps)):
                raise ValueError(f"step {number}: the last step, and no other, has a list of final answers")
        if not self.steps:
            raise ValueError("there are no steps")

    @property
    def pattern(self) -> str:
        """R for every route and A for every answer, such as RARARA."""
        return "".join("R" if isinstance(step, RouteStep) else "A" for step in self.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenStep:
    """A step, with all that the policy is told before it (equation 11). Step-GRPO samples a group of attempts at it.

    Attributes:
      kind: what the policy must write: a route, the answer to `query`, or the final answer.
      history: the sub-questions before this step and their answers, from the gold trajectory.
      query: route: the gold sub-question (`none` at the end); answer: its sub-question; final answer: "".
      retrievers: route: the gold retrievers.
      documents: answer: the gold documents.
      answers: the accepted answers; one for an intermediate answer.
    """

    kind: Literal["route", "answer", "final"]
    history: tuple[tuple[str, str], ...]
    query: str = ""
    retrievers: tuple[str, ...] = ()
    documents: tuple[Document, ...] = ()
    answers: tuple[str, ...] = ()


def golden_steps(trajectory: Trajectory) -> Iterator[GoldenStep]:
    """The steps of a trajectory. Each has the gold steps before it as history. Texts are stripped, retrievers lower-cased."""
    history: tuple[tuple[str, str], ...] = ()
    query = ""
    for step in trajectory.steps:
        if isinstance(step, RouteStep):
            query, names = step.query.strip(), tuple(name.strip().lower() for name in step.retrievers)
            yield GoldenStep(kind="route", history=history, query=query, retrievers=names)
        elif isinstance(step, AnswerStep):
            answer = step.answer.strip()
            yield GoldenStep(kind="answer", history=history, query=query, documents=step.documents, answers=(answer,))
            history = (*history, (query, answer))
        else:
            yield GoldenStep(kind="final", history=history, answers=step.answers)


def label_of(tool: str) -> str:
    """A knowledge base's name as trajectories write it: `text_image` becomes "text image retriever"; `none` stays."""
    return tool if tool == NONE else f"{tool.replace('_', ' ').lower()} retriever"


def tool_of(label: str, tools: Sequence[str]) -> str:
    """The knowledge base (or `none`) that a written name means. An unknown name is returned in lower case."""
    name = " ".join(label.lower().split())
    return {label_of(tool): tool for tool in (*tools, NONE)}.get(name, name)


def document_of(tool: str, passage: Passage, most: int = 0) -> Document:
    """A retrieved passage as evidence. `most`: how many of its first characters are kept; 0: all."""
    return Document(retriever=label_of(tool), text=one_line(passage)[: most or None])


# --- files -------------------------------------------------------------------------------------------------------------


def read_trajectories(path: str | pathlib.Path) -> Iterator[tuple[RowLocation, Trajectory]]:
    """Trajectories of a file, with their locations. Rows have the released schema, and optionally `id`, `question` and
    `image_names`.

    Texts are not changed. If a row has no `question`, it is the text after `Origin question:` in the first problem. If it has
    no `id`, the id is the row's number. If a step has no `documents`, they are those that its problem shows.

    Raises:
      ValueError: while reading: names file, row, step and key.
    """
    for location, row in read_rows(path):
        yield location, trajectory_of(row, location)


def trajectory_of(row: Mapping[str, Any], location: RowLocation) -> Trajectory:
    """The trajectory of a row; for its keys see `read_trajectories`. Raises ValueError that names row, step and key."""
    steps = row.get("steps")
    if not isinstance(steps, list) or not steps:
        raise location.error("key 'steps' must be a list of steps, each {step_type, system, problem, answer}")
    read = tuple(_step(step, location, number) for number, step in enumerate(steps, 1))
    question = row.get("question")
    if question is None and (match := _QUESTION.search(read[0].problem)):
        question = match[1].strip()
    if not isinstance(question, str) or not question.strip():
        raise location.error("key 'question' is missing or empty, and the first problem names no 'Origin question: '")
    key = "images" if "images" in row else "image_names"
    images = row.get(key) or []
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        raise location.error(f"key {key!r} must be a list of paths")
    try:
        return Trajectory(id=str(row.get("id", location.number)), question=question, steps=read, images=tuple(images))
    except ValueError as error:
        raise location.error(str(error)) from error


def write_trajectories(path: str | pathlib.Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes the released schema, with `id` and `question`. The file is written atomically.

    Documents that a step's problem doesn't show are written under the step's `documents`. So reading gives equal trajectories.
    """
    write_json_lines(pathlib.Path(path).expanduser(), map(trajectory_row, trajectories))


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as `write_trajectories` writes it."""
    return {
        "id": trajectory.id,
        "question": trajectory.question,
        "images": list(trajectory.images),
        "steps": [_step_row(step) for step in trajectory.steps],
    }


def documents_of(problem: str) -> tuple[Document, ...]:
    """The documents in a released problem, before its request: `ter-0: ..`, `tir-0: ..`, `tar-0: ..` and so on."""
    end = problem.rfind(_REQUEST)
    context = problem[: end if end >= 0 else len(problem)]
    counts: collections.Counter[str] = collections.Counter()
    marks = []
    for mark in _MARK.finditer(context):
        if int(mark[2]) == counts[mark[1]]:  # otherwise the mark is part of a passage's text
            counts[mark[1]] += 1
            marks.append(mark)
    ends = [*(mark.start() for mark in marks[1:]), len(context)]
    return tuple(
        Document(retriever=RETRIEVERS[mark[1]], text=context[mark.end() : stop].strip())
        for mark, stop in zip(marks, ends)
    )


def _step_row(step: Step) -> dict[str, Any]:
    head: dict[str, Any] = {
        "step_type": "ret" if isinstance(step, RouteStep) else "ans",
        "system": step.system,
        "problem": step.problem,
    }
    if isinstance(step, RouteStep):
        return {**head, "answer": {"query": step.query, "retriever": list(step.retrievers)}}
    if isinstance(step, FinalStep):
        return {**head, "answer": list(step.answers)}
    row = {**head, "answer": step.answer}
    if step.documents != documents_of(step.problem):
        row["documents"] = [dataclasses.asdict(document) for document in step.documents]
    return row


def _step(row: Any, location: RowLocation, number: int) -> Step:
    if not isinstance(row, dict):
        raise location.error(f"step {number} must be an object, found {type(row).__name__}")
    kind, answer = row.get("step_type"), row.get("answer")
    texts = {}
    for key in ("system", "problem"):
        if not isinstance(row.get(key), str):
            raise location.error(f"step {number}: key {key!r} must be a string")
        texts[key] = row[key]
    if kind == "ret":
        return _route_step(answer, texts, location, number)
    if kind != "ans":
        raise location.error(f"step {number}: key 'step_type' must be 'ret' or 'ans', found {kind!r}")
    if isinstance(answer, str):  # one released answer is empty: the model that generated it wrote nothing
        return AnswerStep(answer=answer, documents=_documents(row, location, number), **texts)
    if isinstance(answer, list) and answer and all(isinstance(item, str) and item.strip() for item in answer):
        return FinalStep(answers=tuple(answer), **texts)
    raise location.error(
        f"step {number}: key 'answer' must be a string (intermediate) or a list of strings (final), found {answer!r}"
    )


def _route_step(answer: Any, texts: Mapping[str, str], location: RowLocation, number: int) -> RouteStep:
    query = answer.get("query") if isinstance(answer, dict) else None
    retrievers = answer.get("retriever") if isinstance(answer, dict) else None
    named = isinstance(retrievers, list) and retrievers and all(isinstance(r, str) and r.strip() for r in retrievers)
    if not isinstance(query, str) or not query.strip() or not named:
        raise location.error(
            f"step {number}: key 'answer' must be {{'query': a string, 'retriever': a list of names}}, found {answer!r}"
        )
    names = [name.strip().lower() for name in retrievers or ()]
    if (query.strip().lower() == NONE) != (NONE in names) or (NONE in names and len(names) > 1):
        raise location.error(
            f"step {number}: the query is {query!r} and the retrievers are {retrievers!r}; 'none' must be both or neither"
        )
    return RouteStep(query=query, retrievers=tuple(retrievers or ()), **texts)


def _documents(row: Mapping[str, Any], location: RowLocation, number: int) -> tuple[Document, ...]:
    items = row.get("documents")
    if items is None:
        return documents_of(row["problem"])
    try:
        return tuple(Document(retriever=item["retriever"], text=item["text"]) for item in items)
    except (TypeError, KeyError) as error:
        raise location.error(
            f"step {number}: key 'documents' must be a list of {{'retriever': .., 'text': ..}}, found {items!r}"
        ) from error


# --- counts ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrajectorySummary:
    """Counts: trajectories, trajectories with images, images, steps by kind, patterns, gold retrievers."""

    trajectories: int
    with_images: int
    images: int
    steps: Mapping[str, int]
    patterns: Mapping[str, int]
    retrievers: Mapping[str, int]


def summarize_trajectories(trajectories: Sequence[Trajectory]) -> TrajectorySummary:
    """Counts, the most frequent first."""
    steps = [step for trajectory in trajectories for step in golden_steps(trajectory)]
    retrievers = [name for step in steps for name in step.retrievers]
    return TrajectorySummary(
        trajectories=len(trajectories),
        with_images=sum(bool(trajectory.images) for trajectory in trajectories),
        images=sum(len(trajectory.images) for trajectory in trajectories),
        steps=_counted(step.kind for step in steps),
        patterns=_counted(trajectory.pattern for trajectory in trajectories),
        retrievers=_counted(retrievers),
    )


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(collections.Counter(names).most_common())


# --- a source of examples ----------------------------------------------------------------------------------------------


class StepExamples(list[Example]):
    """The steps of a file's trajectories, in order, each as one example.

    An example's id is `TRAJECTORY/NUMBER`, and `metadata["step"]` is the `GoldenStep`. Its `answers` are the gold sub-question
    (route) or the accepted answers (other steps). Images are files beside the trajectory file, or in `images` beside it.

    Args:
      text_only: leaves out trajectories with images.

    Raises:
      ValueError: names file, row and key; an image that is not there; ids that repeat; no trajectory.
    """

    def __init__(self, path: str | pathlib.Path, *, text_only: bool = False) -> None:
        super().__init__()
        first_locations: dict[str, RowLocation] = {}
        for location, trajectory in read_trajectories(path):
            if text_only and trajectory.images:
                continue
            first = first_locations.setdefault(trajectory.id, location)
            if first != location:
                raise location.error(
                    f"id {trajectory.id!r} is that of {first.unit} {first.number} too; ids must be distinct"
                )
            instead = f"leave out trajectories with images: trajectories/text:{location.path}"
            images = tuple(picture_beside(name, location, "images", instead) for name in trajectory.images)
            for number, step in enumerate(golden_steps(trajectory), 1):
                example = Example(
                    id=f"{trajectory.id}/{number}",
                    question=trajectory.question,
                    answers=(step.query,) if step.kind == "route" else step.answers,
                    images=images,
                    metadata={"step": step},
                )
                self.append(example)
        if not self:
            why = " without images" if text_only else ""
            raise ValueError(f"{path} holds no trajectories{why}; write one JSON object per line")


def golden_step(example: Example) -> GoldenStep | None:
    """The step of an example; None if the example is a question."""
    step = example.metadata.get("step")
    return step if isinstance(step, GoldenStep) else None


def check_retrievers(source: Iterable[Example], tools: Sequence[str], name: str) -> None:
    """Checks that the policy has a knowledge base for every golden step. Other steps can be neither learnt nor rewarded.

    Raises:
      ValueError: names the missing retrievers and counts their steps.
    """
    labels = {label_of(tool) for tool in (*tools, NONE)}
    steps = [step for example in source if (step := golden_step(example)) is not None and step.kind == "route"]
    missing = collections.Counter(step.retrievers[0] for step in steps if step.retrievers[0] not in labels)
    if missing:
        counts = ", ".join(f"{retriever!r} ({number})" for retriever, number in missing.most_common())
        raise ValueError(
            f"{name}: {missing.total()} of {len(steps)} golden routes name retrievers that config.knowledge lacks: {counts}; "
            f"there are {', '.join(map(label_of, tools))}. Add their knowledge bases (text_image is 'text image retriever'), "
            "or leave their trajectories out (trajectories/text:FILE leaves out those with images)"
        )
