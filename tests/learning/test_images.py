"""Sequences with images in the learner: the sampler's numerics, gradients into the tower, frozen towers, devices."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Action, Episode, Example, Shown
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner, trained_parameters
from routerl_jax.learning.losses import LossConfig
from routerl_jax.models.regions import RegionRule
from routerl_jax.parallel.mesh import make_mesh
from tests import seeing, tiny


@pytest.fixture(scope="module")
def sequences() -> list:
    """What an engine sampled: two pictures and an observed one, one picture, text alone, text alone."""
    model = seeing.model()
    engine = Engine(model, rows=4, max_length=128)
    encode = seeing.tokenizer().encode
    mark = seeing.MARKER
    prompts = [
        (f"{mark} and {mark}:", [seeing.picture(0), seeing.picture(1, 40, 16)]),
        (f"what is {mark}?", [seeing.picture(2)]),
        ("no picture", []),
        ("Question: none here either", []),
    ]
    streams = [engine.open(encode(text), str(i), images=shown) for i, (text, shown) in enumerate(prompts)]
    for turn in range(2):
        for stream in streams:
            engine.request(stream, max_tokens=5, sampling=Sampling(temperature=1.0))
        while engine.busy:
            engine.step()
        if not turn:
            engine.feed(streams[0], encode(f"see {mark} now"), [seeing.picture(3, 16, 24)])
            engine.feed(streams[3], encode("nothing found"))
    return [stream.ledger.sequence() for stream in streams]


SGD = optax.sgd(1e-2)  # one object: learners of equal settings then share what they compile


def learner(model, sizes=None, **options) -> Learner:
    mesh = make_mesh(sizes) if sizes else make_mesh(devices=jax.devices()[:1])
    layout = BatchLayout(mesh, (64, 128), 256, model)
    loss = LossConfig(kind="reinforce")
    return Learner(model, SGD, loss, layout, trainable=trained_parameters(model, **options))


def batch(learner: Learner, sequences: list):
    weights = [s.loss_mask.astype(np.float32) / 8 for s in sequences]
    return learner.layout.build(sequences, weights, [1.0, -1.0, 0.5, 2.0])


def test_sampler_and_learner_agree(sequences: list) -> None:
    """1e-4: float32 in another order; text-only batches need no images and give the same."""
    ours = learner(seeing.model())
    scored = ours.logprobs(sequences)
    for sequence, logprobs in zip(sequences, scored):
        sampled = sequence.loss_mask
        np.testing.assert_allclose(logprobs[sampled], sequence.logprobs[sampled], rtol=0, atol=1e-4)
    assert batch(ours, sequences)[0].images is not None
    assert ours.layout.build(sequences[2:], [s.loss_mask for s in sequences[2:]], [0.0, 0.0])[0].images is None
    for alone, together in zip(ours.logprobs(sequences[2:]), scored[2:]):
        np.testing.assert_allclose(alone, together, rtol=0, atol=1e-5)


def test_a_picture_that_several_sequences_show_is_encoded_once(sequences: list) -> None:
    """As a group's samples do. 1e-5: float32 sums in another order."""
    ours = learner(seeing.model())
    group = [sequences[1]] * 3
    made, index = ours.layout.build(group, [s.loss_mask for s in group], [0.0] * 3)
    assert made.images is not None
    assert [len(np.unique(row)) - 1 for row in np.asarray(made.images.segments).reshape(-1, 1024)] == [1]
    [alone] = ours.logprobs([sequences[1]])
    for logprobs in ours.batch_logprobs(made, index):
        np.testing.assert_allclose(logprobs, alone, rtol=0, atol=1e-5)


def test_an_update_moves_the_tower(sequences: list) -> None:
    """And a frozen one, not by a bit: it has no gradients and no optimiser state."""
    for frozen in ((), ("visual",)):
        model = seeing.model()
        ours = learner(model, frozen=frozen)
        before = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
        before = {path: np.asarray(leaf.get_value()) for path, leaf in before.items()}
        made, _ = batch(ours, sequences)
        ours.update(made)
        moved = {
            path[0]
            for path, leaf in nnx.to_flat_state(ours.params)
            if not np.array_equal(np.asarray(leaf.get_value()), before[path])
        }
        assert ("visual" in moved) == (not frozen)
        assert {"embedding", "blocks", "final_norm"} <= moved
        towers = [path for path, _ in nnx.to_flat_state(ours.state.params) if path[0] == "visual"]
        assert bool(towers) == (not frozen)
    with pytest.raises(ValueError, match="a qwen2_5_vl model has no part 'eyes'"):
        trained_parameters(model, ("eyes",))


def test_gradient_of_the_tower_is_that_of_the_loss(sequences: list) -> None:
    """The step of plain gradient descent against central differences of the loss, along random directions of the tower."""
    model = seeing.model()
    ours = learner(model)
    made, index = batch(ours, sequences)
    start = jax.tree.map(np.array, ours.params)  # the update takes the arrays away
    ours.update(made)
    step = jax.tree.map(lambda new, old: (new - old) / -1e-2, ours.params, start)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), start)
    direction = nnx.from_flat_state(
        [
            (p, leaf if p[0] == "visual" else leaf.replace(leaf.get_value() * 0))
            for p, leaf in nnx.to_flat_state(direction)
        ]
    )
    weights = [np.asarray(s.loss_mask, np.float32) / 8 * a for s, a in zip(sequences, (1.0, -1.0, 0.5, 2.0))]

    def loss(size: float) -> float:
        moved = jax.tree.map(lambda leaf, way: leaf + size * way, start, direction)
        scored = ours.batch_logprobs(made, index, moved)
        return -sum(float((w * lp).sum()) for w, lp in zip(weights, scored))

    expected = (loss(2e-3) - loss(-2e-3)) / 4e-3
    got = sum(float((a * b).sum()) for a, b in zip(jax.tree.leaves(step), jax.tree.leaves(direction)))
    assert abs(expected) > 0.01
    np.testing.assert_allclose(got, expected, rtol=0.03)  # float32 differences of a loss of size 5


@pytest.mark.slow
def test_eight_devices(sequences: list) -> None:
    one = learner(seeing.model())
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    eight = learner(seeing.model(mesh=make_mesh(sizes), layout="fsdp+tensor"), sizes)
    for ours in (one, eight):
        ours.update(batch(ours, sequences)[0])
    for (path, a), (_, b) in zip(nnx.to_flat_state(one.params), nnx.to_flat_state(eight.params), strict=True):
        np.testing.assert_allclose(a.get_value(), b.get_value(), rtol=0, atol=2e-5, err_msg=str(path))


def test_a_text_layout_refuses_images(sequences: list) -> None:
    layout = BatchLayout(make_mesh(devices=jax.devices()[:1]), (128,), 256, tiny.model())
    with pytest.raises(ValueError, match="sequences hold images, but the batch layout is for a text model"):
        layout.build(sequences, [s.loss_mask for s in sequences], [0.0] * 4)


class Zooms(Agent):
    """Is shown five pictures of mixed sizes, then a region of the last one, and a region of that."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation("look:")
        for number, size in enumerate([(24, 32), (90, 50), (16, 120), (40, 40), (240, 320)]):
            turn = await chat.generate(max_tokens=3)
            chat.observe([Shown(image=seeing.picture(number, *size))])
        for _ in range(2):
            turn = await chat.generate(max_tokens=3)
            turn.action = Action(kind="region", box=(8, 4, 33, 29))
            crop = chat.look(turn, RegionRule(least=4))
            assert crop is not None
            chat.observe(["closer: ", crop])
        await chat.generate(max_tokens=3)
        return chat.episode(answer=None)


def test_sampler_and_learner_agree_on_crops_of_crops() -> None:
    """1e-4: float32 in another order."""
    model = seeing.model()
    (episode,) = run(Zooms(), [Example(id="q", question="", answers=())], Engine(model, rows=2, max_length=256), {})
    (sequence,) = episode.sequences
    assert len({image.digest for _, image in sequence.images}) == 7
    assert [turn.shown[0].box for turn in episode.turns[5:7]] == [(64, 30, 264, 218), (104, 53, 229, 201)]
    ours = Learner(
        model,
        optax.sgd(1e-2),
        LossConfig(kind="reinforce"),
        BatchLayout(make_mesh(devices=jax.devices()[:1]), (256,), 256, model),
    )
    sampled = sequence.loss_mask
    assert sampled.sum() > 8
    np.testing.assert_allclose(ours.logprobs([sequence])[0][sampled], sequence.logprobs[sampled], rtol=0, atol=1e-4)
