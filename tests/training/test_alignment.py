"""The vision tower is aligned alone: figures' features turn to their embeddings, and the language is as it was."""

import jax
import numpy as np
import pytest
from flax import nnx

from configs.atlas_sight import TOWER
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.sight import add_sight
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training.alignment import align_tower, cosines, figure_embeddings, sheets
from tests import tiny


@pytest.fixture
def model() -> VisionLanguageModel:
    mesh = single_device_mesh()
    decoder = load_pretrained("atlas-warm-start", mesh)
    assert isinstance(decoder, Decoder)
    return add_sight(decoder, TOWER, jax.random.key(0), mesh)


def own_cosine(model: VisionLanguageModel) -> float:
    inputs, slots, labels = sheets(model, [99])
    found = cosines(model.visual(inputs)[0][slots], figure_embeddings(model))
    return float(found[np.arange(len(labels)), labels].mean())


def test_the_tower_alone_moves_towards_the_figures(model: VisionLanguageModel) -> None:
    before = nnx.state(model, nnx.Param)
    kept = {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(before)}
    cosine = own_cosine(model)
    align_tower(model, 60, seed=0)
    assert own_cosine(model) > cosine + 0.1
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[0] != "visual":
            np.testing.assert_array_equal(np.asarray(leaf.get_value()), kept[path])


def test_each_figure_has_its_own_place(model: VisionLanguageModel) -> None:
    inputs, slots, labels = sheets(model, [1])
    assert len(slots) == len(labels) == 16 * 16
    assert len(set(np.asarray(slots).tolist())) == len(slots)
    assert set(np.asarray(labels).tolist()) == set(range(10))
    assert inputs.patches.shape == (1, 16 * 64, 1176)
    again = sheets(model, [1])
    np.testing.assert_array_equal(again[2], labels)


def test_what_sees_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.warm_start\.align is for a policy that sees"):
        align_tower(tiny.model(), 1, seed=0)
