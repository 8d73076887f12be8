"""Images in conversations: what the engine sampled is what one pass over the whole sequence, images included, says.

1e-4: float32 sums in another order (cache and buffer apart, other batches).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.engine import images
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.models.decoder import Features
from routerl_jax.models.patches import concatenate
from routerl_jax.parallel.mesh import make_mesh
from tests import seeing, tiny

SAMPLING = Sampling(temperature=1.0)


def ids(text: str) -> list[int]:
    return seeing.tokenizer().encode(text)


def logprobs(model, sequence) -> np.ndarray:
    """Of every token but the first, by one pass over the whole sequence with its pictures where the ledger has them.

    Rows of the embedding without a token have no part in it.
    """
    features = None
    if sequence.images:
        placed = [image for _, image in sequence.images]
        inputs = concatenate(placed)
        index = np.full((1, len(sequence)), -1)
        slots = iter(inputs.slots)
        for first, image in sequence.images:
            index[0, first : first + image.tokens] = [next(slots) for _ in range(image.tokens)]
        values = model.features(jax.tree.map(lambda x: jnp.asarray(x)[None], inputs))
        features = Features(values=values, index=jnp.asarray(index))
    hidden = model.hidden(sequence.tokens[None], sequence.positions[:, None], features=features)
    vocabulary = np.asarray(sorted(model.tokenizer.hf.get_vocab().values()))
    logits = np.full((len(sequence) - 1, model.config.vocab_size), -np.inf)
    logits[:, vocabulary] = model.unembed(hidden)[0, :-1, vocabulary].T
    scores = np.asarray(jax.nn.log_softmax(logits))
    return scores[np.arange(len(sequence) - 1), sequence.tokens[1:]]


def check(model, streams) -> None:
    for stream in streams:
        sequence = stream.ledger.sequence()
        sampled = sequence.loss_mask[1:]
        assert sampled.any()
        np.testing.assert_allclose(
            sequence.logprobs[1:][sampled], logprobs(model, sequence)[sampled], rtol=0, atol=1e-4
        )


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def start(engine: Engine, rounds: int = 2) -> list:
    """A group of two on one picture, a text, a text with two pictures; then each is shown one more, or reads a text."""
    prompts = [
        (f"{seeing.MARKER}what?", [seeing.picture(0)], "a", 0),
        (f"{seeing.MARKER}what?", [seeing.picture(0)], "a", 1),
        (f"{seeing.MARKER}what?", [seeing.picture(1)], "b", 0),  # equal tokens, another picture
        ("Question: no picture here", [], "c", 0),
        (f"Two: {seeing.MARKER} and {seeing.MARKER}.", [seeing.picture(2, 40, 16), seeing.picture(3)], "d", 0),
    ]
    streams = [engine.open(ids(text), name, sample, images=shown) for text, shown, name, sample in prompts]
    for turn in range(rounds):
        for stream in streams:
            engine.request(stream, max_tokens=4, sampling=SAMPLING)
        finish(engine)
        if turn < rounds - 1:
            for number, stream in enumerate(streams):
                shown = [seeing.picture(10 + number, 16, 40)] if number % 2 else []
                engine.feed(stream, ids(f"seen: {seeing.MARKER * len(shown)} go on"), shown)
    return streams


def test_equal_tokens_and_pictures_in_other_places_are_not_shared() -> None:
    """A picture and, as text, its tokens; and the other way round: equal ids, which are fed in one call."""
    model = seeing.model()
    engine = Engine(model, rows=2, max_length=128)
    picture, image = seeing.picture(0), model.vl_config.image_id
    as_text = [image] * model.image_tokens.process(picture).tokens
    first = engine.open([1, image, 2], images=[picture])
    engine.feed(first, [*as_text, 3])
    second = engine.open([1, *as_text, 2])
    engine.feed(second, [image, 3], [picture])
    assert first.ledger.tokens == second.ledger.tokens
    for stream in (first, second):
        engine.request(stream, max_tokens=4, sampling=SAMPLING)
    finish(engine)
    check(model, [first, second])


@pytest.mark.parametrize("kind", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
def test_prompts_and_observations_with_pictures_and_without(kind: str) -> None:
    """With Qwen3-VL's features of several layers, and positions interleaved, too."""
    model = seeing.model(kind=kind)
    engine = Engine(model, rows=8, max_length=256)
    streams = start(engine)
    check(model, streams)
    assert engine.stats.forked_tokens > 0  # the group shares its picture
    group = [stream.ledger.sequence() for stream in streams[:3]]
    assert group[0].images[0][1].digest == group[1].images[0][1].digest
    assert not np.allclose(
        group[0].logprobs[group[0].loss_mask][0], group[2].logprobs[group[2].loss_mask][0], atol=1e-3
    )
    # after an image, positions go on behind its larger side, not behind its number of tokens
    first, image = group[0].images[0]
    assert group[0].positions[0, first + image.tokens] == first + max(image.grid) // 2 < first + image.tokens


@pytest.mark.slow
def test_eight_devices_and_few_rows() -> None:
    """Rows over eight devices; then fewer rows than conversations, so that some are fed again, pictures included."""
    alone = [stream.ledger.sequence() for stream in start(Engine(seeing.model(), rows=8, max_length=256))]
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    for engine in (
        Engine(seeing.model(mesh=mesh, layout="fsdp+tensor"), rows=8, max_length=256),
        Engine(seeing.model(), rows=2, max_length=256),
    ):
        streams = start(engine)
        check(seeing.model(), streams)
        for stream, sequence in zip(streams, alone):
            np.testing.assert_array_equal(stream.ledger.tokens, sequence.tokens)
    assert engine.stats.evictions > 0


def test_pictures_that_do_not_fit_one_call(monkeypatch) -> None:
    """A budget of one picture a call, and prompts fed in pieces that cut through it, change nothing."""
    whole = [stream.ledger.sequence() for stream in start(Engine(seeing.model(), rows=8, max_length=256), rounds=1)]
    monkeypatch.setattr(images, "MOST_PATCHES", 64)
    engine = Engine(seeing.model(), rows=8, max_length=256)
    engine._calls._extend_steps = (8,)
    streams = start(engine, rounds=1)
    for stream, sequence in zip(streams, whole):
        np.testing.assert_array_equal(stream.ledger.tokens, sequence.tokens)
        np.testing.assert_allclose(stream.ledger.sequence().logprobs, sequence.logprobs, atol=1e-5)


def test_new_weights_see_the_pictures_again() -> None:
    from flax import nnx

    model = seeing.model()
    engine = Engine(model, rows=8, max_length=256)
    streams = start(engine, rounds=1)
    nnx.update(model, jax.tree.map(lambda value: value * 1.1, nnx.state(model, nnx.Param)))
    engine.update(nnx.split(model)[1], version=1)
    done = [len(stream.ledger) for stream in streams]
    for stream in streams:
        engine.request(stream, max_tokens=3, sampling=SAMPLING)
    finish(engine)
    for stream, before in zip(streams, done):
        sequence = stream.ledger.sequence()
        np.testing.assert_allclose(
            sequence.logprobs[before:], logprobs(model, sequence)[before - 1 :], rtol=0, atol=1e-4
        )


def test_forks_and_image_marks_in_texts() -> None:
    """A fork sees what its origin saw; the mark of an image in a retrieved text is text."""
    model = seeing.model()
    engine = Engine(model, rows=8, max_length=256)
    stream = engine.open(ids(f"{seeing.MARKER} what?"), "a", images=[seeing.picture(5)])
    engine.feed(stream, ids(f"a page says {seeing.MARKER}"))
    engine.request(stream, max_tokens=2, sampling=SAMPLING)
    finish(engine)
    fork = engine.fork(stream, sample=1)
    for one in (stream, fork):
        engine.request(one, max_tokens=4, sampling=SAMPLING)
    finish(engine)
    check(model, [stream, fork])


def test_marks_of_its_own_beside_the_pictures_in_one_chat() -> None:
    """What a policy wrote comes into its next chat as text: whole marks after the pictures, and halves of them anywhere."""
    model = seeing.model()
    engine = Engine(model, rows=2, max_length=256)
    shown = [seeing.picture(6), seeing.picture(7, 40, 16)]
    half = seeing.MARKS[1]
    prompt = f"{half} {seeing.MARKER}{seeing.MARKER} is {seeing.MARKER} {seeing.MARKS[0]}{half}{half} a flag?"
    stream = engine.open(ids(prompt), "a", images=shown)
    first, second = (at for at, _ in stream.ledger.images)
    before, between = (len(ids(f"{half} {seeing.MARKS[0]}")), len(ids(seeing.MARKS[2] + seeing.MARKS[0])))
    assert (first, second) == (before, before + model.image_tokens.process(shown[0]).tokens + between)
    engine.request(stream, max_tokens=4, sampling=SAMPLING)
    finish(engine)
    check(model, [stream])
    sequence = stream.ledger.sequence()
    text = np.ones(len(sequence), bool)
    for at, image in sequence.images:
        text[at : at + image.tokens] = False
        assert len(set(sequence.positions[0, at : at + image.tokens])) == 1  # seen at one time
    assert (
        sequence.positions[:, text] == sequence.positions[0, text]
    ).all()  # which texts, marks among them, never are
    assert (np.diff(sequence.positions[0, text]) >= 1).all()


def test_errors() -> None:
    engine = Engine(seeing.model(), rows=4, max_length=64)
    with pytest.raises(ValueError, match=r"the prompt of example 'x': 1 image tokens .* stand for 2 images"):
        engine.open(ids(seeing.MARKER), "x", images=[seeing.picture(0)] * 2)
    with pytest.raises(ValueError, match=r"the prompt of example 'x': image: not an image .* give JPEG"):
        engine.open(ids(seeing.MARKER), "x", images=[b"nothing"])
    stream = engine.open(ids(seeing.MARKER), "x", images=[seeing.picture(0)])
    with pytest.raises(ValueError, match=r"\d+ tokens do not fit: the conversation of example .* has room for \d+"):
        engine.feed(stream, ids(seeing.MARKER * 3), [seeing.picture(1, 40, 40)] * 3)
    blind = Engine(tiny.model(), rows=4, max_length=64)
    with pytest.raises(ValueError, match="a llama model sees no images; use a vision-language model"):
        blind.open([1, 2, 3], images=[seeing.picture(0)])
