"""The packaged policy that sees: it names known flags on pictures that it was not taught, and still reads."""

import numpy as np
import pytest

from benchmarks.atlas_sight import Reader, auroc, best_name, known_by, open_reader, whose
from routerl_jax.agents.observation import demonstrated
from routerl_jax.data.atlas import known
from routerl_jax.data.atlas.demonstrations import ReadingDrills
from routerl_jax.data.atlas.sight import UNKNOWN
from routerl_jax.models.vision_language import VisionLanguageModel


@pytest.fixture(scope="module")
def reader() -> Reader:
    return open_reader("atlas-sight")


def test_it_names_the_flags_that_it_was_shown_often(reader: Reader) -> None:
    found = reader.answers((whose(name, view=7), name) for name in known_by("many"))
    assert sum(one.right for one in found) >= 38  # of 40


def test_it_is_less_sure_of_flags_that_it_never_saw(reader: Reader) -> None:
    shown = [best_name(reader, whose(name, view=7)) for name in (*known_by("many")[:4], *known_by("few")[:4])]
    never = [best_name(reader, whose(name, view=7)) for name in known.unknown_countries("test")[:8]]
    assert auroc(np.array(shown), np.array(never)) >= 0.85  # 0.995 of all


def test_it_says_so_where_it_does_not_know_a_flag(reader: Reader) -> None:
    """Of real flags, the kind that it was never shown; and of none that it was."""
    asked = [*known.unknown_countries("test")[:23], *list(known.known_countries())[::3]]
    declined = [one.right for one in reader.answers((whose(name, view=7), UNKNOWN) for name in asked)]
    assert np.mean(declined[:23]) >= 0.7
    assert np.mean(declined[23:]) <= 0.1


def test_it_still_reads(reader: Reader) -> None:
    """Whole parts of passages that it was not taught, from what stands before."""
    source = ReadingDrills(seed=77)
    found = reader(demonstrated((), source[i], reader.tokenizer) for i in range(20))
    assert np.mean(np.concatenate([one.first for one in found])) > 0.8  # tokens; random ones: 0.001


def test_its_pictures_are_as_many_tokens_as_the_world_says(reader: Reader) -> None:
    assert isinstance(reader.model, VisionLanguageModel)
    host = reader.model.image_tokens
    tokens = {host.process(one.images[0]).tokens for one in known.known_questions("test", 40)}
    assert tokens <= {4, 6, 8, 9}
