"""FVQA, MMSearch-R1's training and test set (lmms-lab/FVQA; arXiv 2506.20670): verl's rows with aliases and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, Row, distinct, search_kind, strings
from routerl_jax.data.formats.verl import Verl

_ALIASES = "reward_model.candidate_answers"


class Fvqa(Verl):
    """`{prompt: [{content: question, role: user}], images: [{bytes, path}], reward_model: {ground_truth, candidate_answers:
    "[..]", style}, data_source, image_urls, data_id, category}`. mini_data.pq of MMSearch-R1's repository has no `data_id` and
    no `category`. `image_urls` is null there and in the released sets, as far as public readers show them.

    The accepted answers are `ground_truth` and then the aliases, which are JSON inside of a string. The id is `data_id`, else
    verl's. `category` becomes `metadata["kind"]` where it is search_free or search_required.
    """

    def matches(self, row: Row) -> bool:
        reward = row.get("reward_model")
        return isinstance(reward, Mapping) and "candidate_answers" in reward

    def example(self, row: Row, location: RowLocation) -> Example | None:
        example = super().example(row, location)
        if example is None:
            return None
        named = row.get("data_id")
        return dataclasses.replace(
            example,
            id=example.id if named is None else str(named),
            answers=distinct(
                example.answers, strings(row["reward_model"]["candidate_answers"], location, _ALIASES, listed=True)
            ),
            metadata=search_kind({key: value for key, value in example.metadata.items() if key != "data_id"}),
        )


FORMATS.register("fvqa")(Fvqa())
