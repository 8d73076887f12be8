"""A vision tower for a text-only policy: its language stays what it was, and it sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.sight import MARKS, add_sight
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import single_device_mesh
from tests import seeing, tiny

TOWER = {"depth": 1, "embed": 16, "heads": 2, "mlp": 16, "patch": 4, "window": 16, "max_pixels": 16 * 16}


def sighted(**changes) -> VisionLanguageModel:
    return add_sight(tiny.model(), {**TOWER, **changes}, jax.random.key(1), single_device_mesh())


def test_on_text_it_computes_what_the_decoder_did() -> None:
    before, model = tiny.model(), sighted()
    ids = np.random.default_rng(0).integers(0, tiny.VOCABULARY, (2, 40))
    logits = model(jnp.asarray(ids))
    assert logits.shape[-1] == tiny.VOCABULARY + len(MARKS)
    np.testing.assert_allclose(logits[..., : tiny.VOCABULARY], before(jnp.asarray(ids)), atol=1e-5)  # rounding


def test_what_it_sees_matters_and_is_saved(tmp_path) -> None:
    model = sighted()
    assert model.tokenizer is not None
    host = model.image_tokens
    marks = model.tokenizer.decode(host.marker)
    prompt = model.tokenizer.encode(f"{marks}What is it?")
    assert prompt[:3] == host.marker

    def logits(of: VisionLanguageModel, picture: np.ndarray) -> np.ndarray:
        placed = host.process(picture)
        assert placed.tokens * 8 * 8 <= TOWER["max_pixels"]
        ids, _ = host.expand(prompt, [placed])
        return np.asarray(of(jnp.asarray([ids]), images=[[placed]])[0, -1])

    one, other = (logits(model, seeing.picture(seed)) for seed in (0, 1))
    assert np.abs(one - other).max() > 1e-6
    save_pretrained(model, tmp_path / "policy")
    loaded = load_pretrained(str(tmp_path / "policy"))
    assert isinstance(loaded, VisionLanguageModel)
    np.testing.assert_allclose(logits(loaded, seeing.picture(0)), one, atol=1e-6)
    assert loaded.image_processor == model.image_processor


def test_what_can_not_be_given_sight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config.model.sight.*dept.*depth"):
        sighted(dept=3)
    blind = tiny.model()
    blind.tokenizer = None
    with pytest.raises(ValueError, match=r"give config.model.path"):
        add_sight(blind, TOWER, jax.random.key(1), single_device_mesh())
    other = tiny.model(model_type="qwen3", qk_norm=True)
    with pytest.raises(ValueError, match=r"a qwen3 with these settings is no text part of a Qwen2.5-VL"):
        add_sight(other, TOWER, jax.random.key(1), single_device_mesh())
