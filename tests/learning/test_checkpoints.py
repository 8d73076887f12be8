"""Checkpoints: the same state back, on other devices too, and clear words where that can't be."""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routerl_jax.learning import checkpoints as checkpoints_module
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.checkpoints import Checkpoints, Damaged, model_fields
from routerl_jax.learning.learner import Learner, LearnerState
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.config import ExpertsConfig
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.mirrors import MARK
from tests import tiny

ROLLOUTS = b"waiting" * 20
SEQUENCES = tiny.random_sequences(6)


def make_learner(devices: int = 2, fsdp: int = 1, seed: int = 0) -> Learner:
    mesh = make_mesh({"data": -1, "fsdp": fsdp}, jax.devices()[:devices])
    model = tiny.model(seed=seed, mesh=mesh, layout="fsdp" if fsdp > 1 else "replicated")
    return Learner(model, OptimizerConfig(lr=1e-2).build(10), LossConfig(kl_coef=0.1), BatchLayout(mesh, [128], 256))


def update(learner: Learner) -> None:
    weights = token_weights([s.loss_mask for s in SEQUENCES], "token", 1.0)
    batch, _ = learner.layout.build(SEQUENCES, weights, [1.0, -1.0] * 3)
    learner.update(batch)


@dataclasses.dataclass(frozen=True)
class Saved:
    """Checkpoints of steps 3 and 5; what the learner held at step 5, and its weights after one more update."""

    checkpoints: Checkpoints
    state: LearnerState
    reference: nnx.State
    after: nnx.State


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    learner, checkpoints = make_learner(), Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", keep=2)
    extra = {"model": model_fields(tiny.config()), "stream": {"next": 7}, "stage": "main"}
    for step in (1, 3, 5):
        update(learner)
        checkpoints.save(step, learner.state, learner.reference, extra)
    checkpoints.wait()
    state, reference = jax.device_get((learner.state, learner.reference))
    update(learner)
    return Saved(checkpoints, state, reference, jax.device_get(learner.params))


def assert_close(first: Any, second: Any, atol: float = 0) -> None:
    a, b = jax.tree.leaves(first), jax.tree.leaves(second)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


@pytest.mark.parametrize(("devices", "fsdp"), [(2, 1), (4, 2)])
def test_restored_on_any_mesh(saved: Saved, devices: int, fsdp: int) -> None:
    """All values, in the places of the learner that takes over, which then goes on as the other did."""
    learner = make_learner(devices, fsdp, seed=1)
    places = [leaf.sharding for leaf in jax.tree.leaves((learner.state, learner.reference))]
    state, reference, extra = saved.checkpoints.restore(5, learner.state, learner.reference, tiny.config())
    assert_close(state, saved.state)
    assert_close(reference, saved.reference)
    assert (extra["stream"], extra["stage"]) == ({"next": 7}, "main")
    assert [leaf.sharding for leaf in jax.tree.leaves((state, reference))] == places
    learner.state, learner.reference = state, reference
    update(learner)
    # On other devices sums come in another order, of which AdamW makes up to a hundredth of its step of 1e-2.
    assert_close(learner.params, saved.after, atol=1e-4 if fsdp > 1 else 0)


def test_weights_alone(saved: Saved) -> None:
    like = nnx.state(tiny.model(seed=2), nnx.Param)
    assert_close(saved.checkpoints.restore_params(5, like, tiny.config()), saved.state.params)
    again = Checkpoints(saved.checkpoints.directory, keep=2)
    assert again.latest() == 5
    earlier = jax.device_get(again.restore_params(3, like, tiny.config()))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), earlier, saved.state.params)
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_a_model_with_experts_is_known_again(tmp_path: pathlib.Path) -> None:
    """Its fields are nested, and JSON has no tuples."""
    model = tiny.model(
        model_type="qwen3_moe", qk_norm=True, experts=ExpertsConfig(count=4, chosen=2, mlp=16, dense_layers=(1,))
    )
    params = nnx.state(model, nnx.Param)
    state = LearnerState(params=params, opt_state=(), updates=jnp.zeros((), jnp.int32))
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=1)) as checkpoints:
        checkpoints.save(1, state, None, {"model": model_fields(model.config)})
        checkpoints.wait()
        assert_close(checkpoints.restore_params(1, params, model.config), params)


def test_no_checkpoint_yet(tmp_path: pathlib.Path) -> None:
    assert Checkpoints(tmp_path / "none", keep=2).latest() is None


def test_what_can_not_be_restored_is_named(saved: Saved) -> None:
    checkpoints = saved.checkpoints
    like = nnx.state(tiny.model(), nnx.Param)
    with pytest.raises(ValueError, match=r"checkpoints has no checkpoint of step 1; it has \[3, 5\]"):  # keep=2
        checkpoints.restore_params(1, like, tiny.config())
    wider = tiny.config(embed=48, mlp=96)
    for attempt in (
        lambda: checkpoints.restore_params(5, like, wider),
        lambda: checkpoints.restore(5, saved.state, saved.reference, wider),
    ):
        message = (
            r"another architecture \(embed: 32 there, 48 here, mlp: 64 there, 96 here\); use the model it was made with"
        )
        with pytest.raises(ValueError, match=message):
            attempt()


def flip(path: pathlib.Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x40
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[pathlib.Path], None]] = {
    "first byte": lambda path: flip(path, 0),
    "byte in the middle": lambda path: flip(path, 0.5),
    "last byte": lambda path: flip(path, 1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


def small_state() -> tuple[LearnerState, Any]:
    params = nnx.state(tiny.model(), nnx.Param)
    moments = jax.tree.map(lambda leaf: leaf + 1, params)
    return LearnerState(params=params, opt_state=moments, updates=jnp.ones((), jnp.int32)), params


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint with everything that one can hold."""
    directory = tmp_path_factory.mktemp("whole") / "checkpoints"
    state, reference = small_state()
    with contextlib.closing(Checkpoints(directory, keep=2)) as checkpoints:
        checkpoints.save(4, state, reference, {"model": model_fields(tiny.config()), "stream": {"next": 7}}, ROLLOUTS)
    return directory


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("hashed", [True, False], ids=["small files", "files of any size"])
def test_damage_to_any_file_is_noticed(
    whole: pathlib.Path, tmp_path: pathlib.Path, damage: str, hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large files only the arrays are checked, so that bytes which nobody reads may change there; and so in orbax's notes
    of times."""
    state, reference = small_state()
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    assert {"params", "optimizer", "reference", "rollouts", "extra"} <= {name.parts[1] for name in names}
    if not hashed:
        monkeypatch.setattr(checkpoints_module, "_SMALL", 0)
        whole = tmp_path / "unhashed"
        with contextlib.closing(Checkpoints(whole, keep=2)) as checkpoints:
            checkpoints.save(
                4, state, reference, {"model": model_fields(tiny.config()), "stream": {"next": 7}}, ROLLOUTS
            )
        names = [path.relative_to(whole) for path in sorted(whole.rglob("d/*"))]  # files of arrays
    for number, name in enumerate(names):
        place = tmp_path / str(number)
        shutil.copytree(whole, place)
        if not (place / name).stat().st_size:
            continue
        DAMAGES[damage](place / name)
        with contextlib.closing(Checkpoints(place, keep=2)) as checkpoints:
            noticed, restored, waiting = None, (), b""
            try:
                restored = checkpoints.restore(4, state, reference, tiny.config())
                waiting = checkpoints.rollouts(4)
            except Damaged as error:
                noticed = str(error)
            if noticed is not None:
                assert f"{place}/4 is damaged" in noticed
                assert len(noticed) < 600
                continue
            assert not hashed or name.name in (MARK, "commit_success.txt"), f"{name}: nobody noticed"
            assert_close(restored[:2], (state, reference))
            assert (restored[2]["stream"], waiting) == ({"next": 7}, ROLLOUTS), name


def test_checkpoints_of_earlier_versions_are_read(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(whole, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "4" / "digests").unlink()
    metadata = tmp_path / "checkpoints" / "4" / "extra" / "metadata"
    metadata.write_text(metadata.read_text().replace('"digests": true, ', "").replace(', "digests": true', ""))
    state, reference = small_state()
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=2)) as checkpoints:
        assert_close(checkpoints.restore(4, state, reference, tiny.config())[0], state)


def test_copies_beside_a_checkpoint_do_no_harm(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What a killed session left, and a user's copies; under the name of another step one is refused."""
    place = pathlib.Path(shutil.copytree(whole, tmp_path / "checkpoints"))
    for name in ("5.orbax-checkpoint-tmp-1234", "5.bak", "4 (copy)"):
        shutil.copytree(place / "4", place / name)
    state, reference = small_state()
    with contextlib.closing(Checkpoints(place, keep=2)) as checkpoints:
        checkpoints.save(5, state, reference, {"model": model_fields(tiny.config())})
    shutil.copytree(place / "4", place / "6")
    with contextlib.closing(Checkpoints(place, keep=2)) as checkpoints:
        assert checkpoints.steps() == [6, 5, 4]
        assert_close(checkpoints.restore(5, state, reference, tiny.config())[0], state)
        with pytest.raises(Damaged, match=r"checkpoints/6 is damaged: it is a copy of step 4; take .* \(5, 4\)"):
            checkpoints.restore(6, state, reference, tiny.config())
