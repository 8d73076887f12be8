"""The vision tower is aligned alone: figures' features turn to their embeddings, and the language is as it was."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from configs.atlas_sight import TOWER
from routerl_jax.data.atlas.sight import FIGURES
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.sight import add_sight
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import alignment, sft
from routerl_jax.training import config as schema
from routerl_jax.training.alignment import (
    ALIGNED,
    SHEETS_OF_FIGURES,
    Sheets,
    align_tower,
    cosines,
    drawn_sheets,
    sheets_named,
    sign_embeddings,
)
from routerl_jax.training.load import load_policy
from routerl_jax.training.run import Run
from tests import tiny
from tests.training.small_run import make_sft_config


@pytest.fixture
def model() -> VisionLanguageModel:
    mesh = single_device_mesh()
    decoder = load_pretrained("atlas-warm-start", mesh)
    assert isinstance(decoder, Decoder)
    return add_sight(decoder, TOWER, jax.random.key(0), mesh)


def own_cosine(model: VisionLanguageModel) -> float:
    inputs, slots, labels = drawn_sheets(model, SHEETS_OF_FIGURES, [99])
    found = cosines(model.visual(inputs)[0][slots], sign_embeddings(model, FIGURES))
    return float(found[labels].mean())


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
    inputs, slots, labels = drawn_sheets(model, SHEETS_OF_FIGURES, [1])
    assert len(slots) == len(labels) == 16 * 16
    assert len(set(np.asarray(slots).tolist())) == len(slots)
    assert (np.asarray(labels).sum(-1) == 1).all()
    assert np.asarray(labels).any(0).all()
    assert inputs.patches.shape == (1, 16 * 64, 1176)
    again = drawn_sheets(model, SHEETS_OF_FIGURES, [1])
    np.testing.assert_array_equal(again[2], labels)


def test_what_sees_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.warm_start\.align is for a policy that sees"):
        align_tower(tiny.model(), 1, seed=0)


def test_tokens_have_several_signs_or_none(model: VisionLanguageModel) -> None:
    """Of a page, an entry's mark, cell and code are on one token; a token without a label doesn't count."""
    sheets = sheets_named("configs.vrag_rl_small:SHEETS")
    assert sheets_named("") == SHEETS_OF_FIGURES
    with pytest.raises(ValueError, match=r"signs for 144; set config\.model\.max_pixels"):
        drawn_sheets(model, sheets, [1])
    model.image_processor = dataclasses.replace(model.image_processor, max_pixels=84 * 84)
    _, slots, labels = drawn_sheets(model, sheets, [1])
    assert labels.shape == (len(slots), len(sheets.signs))
    assert set(np.asarray(labels).sum(-1).tolist()) == {1, 3}
    unlabelled = Sheets("X", lambda rng: (sheets.draw(rng)[0], ["X", *[""] * 8]))
    assert np.asarray(drawn_sheets(model, unlabelled, [1])[2]).sum() == 16
    assert align_tower(model, 2, seed=0, sheets=unlabelled) == 1


def test_signs_of_several_tokens_and_unknown_sheets_are_refused(model: VisionLanguageModel) -> None:
    with pytest.raises(ValueError, match="no token for each of '1\N{SNOWMAN}'"):
        align_tower(model, 1, seed=0, sheets=Sheets("1\N{SNOWMAN}", SHEETS_OF_FIGURES.draw))
    with pytest.raises(ValueError, match="cannot load kind of sheets"):
        sheets_named("configs.vrag_rl_small:NONE")


@pytest.mark.slow
def test_a_run_with_an_aligned_tower_resumes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint lacks a frozen tower. A later session takes the one of the first: another machine's differs."""
    config = make_sft_config(
        model=schema.ModelConfig(path="atlas-sight", freeze=("visual",)),
        steps=2,
        mesh=schema.MeshConfig(cpu_devices=1),
        engine=schema.EngineConfig(max_length=512),
        evaluation=schema.EvaluationConfig(every=0),
        warm_start=schema.WarmStartConfig(align=2, examples=2),
    )
    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        save = Run.save
        patch.setattr(
            Run, "save", lambda self, *given, **more: (save(self, *given, **more), self.checkpoints.wait(), 1 / 0)
        )
        with pytest.raises(ZeroDivisionError):
            sft.train_sft(config, workdir)
    of_checkpoint = load_policy(workdir, config)
    kept = (workdir / ALIGNED).read_bytes()
    monkeypatch.setattr(alignment, "align_tower", lambda *_: pytest.fail("the tower is aligned a second time"))
    begun = []
    init = Run.__init__
    monkeypatch.setattr(Run, "__init__", lambda self, *given: (init(self, *given), begun.append(self.start))[0])
    (workdir / ALIGNED).write_bytes(kept[:-9])
    with pytest.raises(ValueError, match=r"aligned\.msgpack is damaged .*; delete it, and the tower is aligned again"):
        sft.train_sft(config, workdir, resume=True)
    (workdir / ALIGNED).write_bytes(kept)
    sft.train_sft(config, workdir, resume=True)
    assert begun == [1]
    towers = [
        nnx.to_flat_state(nnx.state(model.visual, nnx.Param)) for model in (of_checkpoint, load_policy(workdir, config))
    ]
    for (path, weight), (_, again) in zip(*towers, strict=True):
        np.testing.assert_array_equal(np.asarray(weight.get_value()), np.asarray(again.get_value()), err_msg=str(path))
