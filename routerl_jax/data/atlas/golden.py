"""Golden trajectories of Atlas's questions. They are made from the gold paths, without a model, so they have no errors."""

from __future__ import annotations

from collections.abc import Sequence

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.trajectories import (
    NONE,
    AnswerStep,
    FinalStep,
    RouteStep,
    Step,
    Trajectory,
    document_of,
    label_of,
)


def golden_trajectory(
    example: Example, results: Sequence[Sequence[Passage]], images: Sequence[str] = ()
) -> Trajectory | None:
    """The gold path of a question as a trajectory. Each sub-question goes to the knowledge base that answers it.

    Args:
      example: a question of Atlas.
      results: for each hop of its path, the passages that the hop's knowledge base returns for the hop's query.
      images: names of the files with the question's pictures.

    Returns:
      The trajectory. None if a gold passage was not found, because the documents then don't state the answer.
    """
    steps: list[Step] = []
    for hop, passages in zip(example.metadata["path"], results, strict=True):
        if hop["passage_id"] not in [passage.id for passage in passages]:
            return None
        documents = tuple(document_of(hop["kb"], passage) for passage in passages)
        steps.append(RouteStep(query=hop["query"], retrievers=(label_of(hop["kb"]),)))
        steps.append(AnswerStep(answer=hop["value"], documents=documents))
    steps += [RouteStep(query=NONE, retrievers=(NONE,)), FinalStep(answers=example.answers)]
    return Trajectory(id=example.id, question=example.question, steps=tuple(steps), images=tuple(images))
