"""Shared beginnings with pictures in them: equality with sequences apart, each picture once, slots counted by hand."""

import dataclasses
import functools
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import Sequence
from routerl_jax.learning.batch import Batch, BatchIndex, BatchLayout, bundles
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.patches import ImagePatches
from routerl_jax.parallel.mesh import make_mesh
from tests import seeing

SYSTEM = "Question: what is on the flag? "  # at least as many tokens as are worth sharing


@functools.cache
def host() -> ImageTokens:
    return seeing.model().image_tokens


@functools.cache
def picture(seed: int) -> ImagePatches:
    """All of one size: 3 x 4 tokens."""
    return host().process(seeing.picture(seed))


def ids(text: str) -> list[int]:
    return seeing.tokenizer().encode(text)


def feed(ledger: Ledger, text: str, *shown: int) -> int:
    """Feeds text with pictures at its marks. Returns the number of tokens."""
    fed = host().fed(ids(text), [seeing.picture(seed) for seed in shown], ledger.next_position)
    ledger.feed(**fed)
    return len(fed["tokens"])


def sample(ledger: Ledger, rng: np.random.Generator, first: int, count: int) -> None:
    """`count` sampled tokens; siblings differ in the first."""
    tokens = [first, *rng.integers(10, 200, count - 1).tolist()]
    ledger.sample(tokens, rng.uniform(-7, -4, count).tolist(), 0)


def attempts(rng: np.random.Generator, shown: int, lengths: Seq[int], after: str = " and why?") -> list[Sequence]:
    """A group: answers of these lengths to one question about one picture."""
    result = []
    for i, length in enumerate(lengths):
        ledger = Ledger()
        feed(ledger, SYSTEM + seeing.MARKER + after, shown)
        sample(ledger, rng, 10 + i, length)
        result.append(ledger.sequence())
    return result


def one_picture() -> tuple[list[Sequence], int]:
    """Five attempts. The last token of the prompt is computed once for each."""
    group = attempts(np.random.default_rng(0), 0, (9, 5, 7, 6, 4))
    prompt = len(ids(SYSTEM)) + 1 + 12 + 1 + len(ids(" and why?"))
    assert len(group[0]) == prompt + 9
    return group, (prompt + 9) + (1 + 5) + (1 + 7) + (1 + 6) + (1 + 4)


def different_pictures() -> tuple[list[Sequence], int]:
    """Two pictures of one size under one text, their attempts in turn: the text before the pictures is shared by all."""
    rng = np.random.default_rng(1)
    flags, maps = attempts(rng, 0, (9, 5)), attempts(rng, 1, (6, 4))
    before = len(ids(SYSTEM)) + 1  # with the token that begins a picture, which is computed once for each of the two
    rest = 12 + 1 + len(ids(" and why?"))
    slots = (before + rest + 9) + (1 + 5) + (1 + rest + 6) + (1 + 4)
    return [flags[0], maps[0], flags[1], maps[1]], slots


def observed_picture() -> tuple[list[Sequence], int]:
    """A forked attempt at a question with a picture: two of three ways observe one picture, the third another of its size."""
    rng = np.random.default_rng(2)
    trunk = Ledger()
    prompt = feed(trunk, SYSTEM + seeing.MARKER + "?", 0)
    result = []
    for way, seen in enumerate((2, 3, 2)):
        ledger = trunk.copy()
        if way:
            ledger.feed([20, 21, 22])
        else:
            ledger.sample([20, 21, 22], [-5.0, -4.0, -6.0], 0)
        rest = feed(ledger, "see " + seeing.MARKER + " now", seen)
        sample(ledger, rng, 10 + way, 6 + way)
        result.append(ledger.sequence())
    before = len(ids("see ")) + 1
    return result, (prompt + 3 + rest + 6) + (1 + rest - before + 7) + (1 + 8)


def beside_text() -> tuple[list[Sequence], int]:
    """A group with a picture, a group of text, and one of text with the very ids and positions of the picture's tokens."""
    rng = np.random.default_rng(3)
    seen, written = attempts(rng, 0, (5, 6)), attempts(rng, 1, (4, 4))
    written = [dataclasses.replace(sequence, images=()) for sequence in written]
    texts = []
    for i in range(3):
        ledger = Ledger()
        prompt = feed(ledger, SYSTEM + "no picture")
        sample(ledger, rng, 10 + i, 5)
        texts.append(ledger.sequence())
    before = len(ids(SYSTEM)) + 1
    rest = 12 + 1 + len(ids(" and why?"))
    shown = (before + rest + 5) + (1 + 6)
    as_text = (1 + rest + 4) + (1 + 4)
    common = len(ids(SYSTEM))
    plain = (1 + prompt - common + 5) + (1 + 5) + (1 + 5)
    return [written[0], texts[0], seen[0], texts[1], seen[1], written[1], texts[2]], shown + as_text + plain


CASES = [one_picture, different_pictures, observed_picture, beside_text]


@pytest.fixture(scope="module")
def learners() -> dict[bool, Learner]:
    """Without sharing and with. Every case fits one micro-batch, so each compiles one update."""
    model, mesh = seeing.model(), make_mesh(devices=jax.devices()[:1])
    return {
        share: Learner(model, optax.sgd(1.0), LossConfig(), BatchLayout(mesh, (256,), 512, model, share=share))
        for share in (False, True)
    }


def laid_out(layout: BatchLayout, sequences: Seq[Sequence], junk: float = 0.0) -> tuple[Batch, BatchIndex]:
    """Random advantages, one per token; `junk` stands where nothing is trained."""
    rng = np.random.default_rng(9)
    count = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    weights = [sequence.loss_mask.astype(np.float32) / count for sequence in sequences]
    drawn = [rng.normal(size=len(sequence)) for sequence in sequences]
    advantages = [np.where(s.loss_mask, a, junk).astype(np.float32) for s, a in zip(sequences, drawn)]
    with_junk = [dataclasses.replace(s, logprobs=np.where(s.loss_mask, s.logprobs, junk)) for s in sequences]
    return layout.build(with_junk, weights, advantages)


def stepped(learner: Learner, batch: Batch) -> tuple[list[np.ndarray], np.ndarray, float]:
    """Gradients (of a step of plain descent), log-probabilities and loss; the learner stays as it was."""
    before = learner.state
    learner.state = jax.tree.map(jnp.copy, before)  # the update takes it away
    metrics, logprobs = learner.update(batch)
    gradients = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before.params, learner.state.params)
    learner.state = before
    return jax.tree.leaves(gradients), logprobs, metrics["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_and_gradients_are_those_of_sequences_apart(case: Any, learners: dict[bool, Learner]) -> None:
    """Tower and decoder, in float32: 1e-5 of the largest gradient of a parameter, which may be above 1."""
    sequences, slots = case()
    found = {}
    for share, learner in learners.items():
        batch, index = laid_out(learner.layout, sequences)
        gradients, logprobs, loss = stepped(learner, batch)
        found[share] = gradients, index.split(logprobs), loss
        assert index.tokens == (slots if share else sum(map(len, sequences)))
    for apart, together in zip(found[False][0], found[True][0], strict=True):
        np.testing.assert_allclose(together, apart, rtol=0, atol=1e-5 * max(1.0, float(np.abs(apart).max())))
    assert max(np.abs(leaf).max() for leaf in found[False][0]) > 1e-2
    for apart, together in zip(found[False][1], found[True][1], strict=True):
        np.testing.assert_allclose(together, apart, rtol=0, atol=1e-5)
    assert found[True][2] == pytest.approx(found[False][2], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_the_policys_trains_nothing(case: Any, learners: dict[bool, Learner]) -> None:
    """Weights are 0 but where a token was sampled; what else stands at fed tokens changes no bit of the gradient."""
    sequences, _ = case()
    learner = learners[True]
    batch, index = laid_out(learner.layout, sequences)
    sampled = np.zeros(batch.weights.shape, bool)
    for sequence, (micro, shard, at) in zip(sequences, index.placed):
        sampled[micro, shard, at[:-1]] |= sequence.loss_mask[1:]
    np.testing.assert_array_equal(np.asarray(batch.weights) != 0, sampled)
    assert sampled.sum() == sum(sequence.loss_mask.sum() for sequence in sequences)
    clean, junk = stepped(learner, batch)[0], stepped(learner, laid_out(learner.layout, sequences, junk=50.0)[0])[0]
    for ours, theirs in zip(clean, junk, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    nothing = dataclasses.replace(batch, weights=jnp.zeros_like(batch.weights))
    assert not any(leaf.any() for leaf in stepped(learner, nothing)[0])


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_pictures_get_their_own_features(case: Any) -> None:
    """On rows of two shards: behind every picture's token, in the order of a picture's tokens, lie its own patches."""
    sequences, _ = case()
    model, mesh = seeing.model(), make_mesh({"data": 2}, devices=jax.devices()[:2])
    batch, index = laid_out(BatchLayout(mesh, (128,), 256, model, share=True), sequences)
    assert batch.images is not None
    patches, features = np.asarray(batch.images.patches), np.asarray(batch.image_index)
    told = np.zeros(features.shape, bool)
    for sequence, (micro, shard, at) in zip(sequences, index.placed):
        for first, image in sequence.images:
            assert isinstance(image, ImagePatches)
            slots = at[first : first + image.tokens]
            groups = patches[micro, shard].reshape(-1, image.group, patches.shape[-1])
            own = image.patches.reshape(-1, image.group, patches.shape[-1])[image.slots]
            np.testing.assert_array_equal(groups[features[micro, shard, slots]], own)
            told[micro, shard, slots] = True
    np.testing.assert_array_equal(features >= 0, told)


def pictures_in(batch: Batch) -> list[int]:
    """How many pictures the tower sees in each micro-batch."""
    assert batch.images is not None
    segments = np.asarray(batch.images.segments)[: int(batch.count)]
    return [len(np.unique(row)) - 1 for micro in segments for row in micro]


def test_a_shared_picture_is_in_the_batch_once() -> None:
    """Rows hold one sequence each, or one bundle: the picture goes with its tokens. Patches: 3 x 4 groups of 4."""
    group, slots = one_picture()
    model, mesh = seeing.model(), make_mesh(devices=jax.devices()[:1])
    longest = max(map(len, group))
    apart, _ = laid_out(BatchLayout(mesh, (longest,), longest, model), group)
    together, index = laid_out(BatchLayout(mesh, (slots,), slots, model, share=True), group)
    assert pictures_in(apart) == [1, 1, 1, 1, 1]
    assert pictures_in(together) == [1]
    assert together.images is not None
    assert (np.asarray(together.images.segments) > 0).sum() == 3 * 4 * 4
    assert (np.asarray(together.image_index) >= 0).sum() == 12
    assert index.tokens == slots
    several, _ = laid_out(BatchLayout(mesh, (256,), 256, model, share=True), observed_picture()[0])
    assert pictures_in(several) == [3]
    assert (np.asarray(several.image_index) >= 0).sum() == 3 * 12


def test_a_picture_parts_sequences_of_equal_ids() -> None:
    """To the token before it: by what it shows alone, or by where it begins; the same picture made anew parts nothing."""
    flags, maps = (attempts(np.random.default_rng(0), shown, (4,))[0] for shown in (0, 1))
    np.testing.assert_array_equal(flags.tokens, maps.tokens)
    np.testing.assert_array_equal(flags.positions, maps.positions)
    nothing = [np.zeros(len(flags))] * 2
    before = len(ids(SYSTEM))
    [bundle] = bundles([flags, maps], nothing, longest=256)
    assert bundle.starts == [0, before]
    anew = dataclasses.replace(flags, images=((before + 1, seeing.model().image_tokens.process(seeing.picture(0))),))
    [bundle] = bundles([flags, anew], nothing, longest=256)
    assert bundle.starts == [0, len(flags) - 1]
    later = dataclasses.replace(flags, images=((before + 2, picture(0)),))
    [bundle] = bundles([flags, later], nothing, longest=256)
    assert bundle.starts == [0, before]
    assert len(bundles([flags, maps], nothing, longest=256, least=before + 1)) == 2


def test_groups_of_equal_ids_are_not_mixed_up() -> None:
    """Thirty questions with one text and pictures of one size: a row has the attempts at one of them, its prompt once."""
    rng = np.random.default_rng(4)
    ledger = Ledger()
    prompt = feed(ledger, SYSTEM + seeing.MARKER + "?", 0)
    sequences = []
    for question in range(30):
        image = dataclasses.replace(picture(0), digest=f"picture {question}")
        for _ in range(4):
            attempt = ledger.copy()
            sample(attempt, rng, int(rng.integers(10, 200)), 8)
            sequences.append(dataclasses.replace(attempt.sequence(), images=((ledger.images[0][0], image),)))
    sequences = [sequences[i] for i in rng.permutation(len(sequences))]
    longest = prompt + 8 + 3 * 9
    made = bundles(sequences, [s.loss_mask for s in sequences], longest=longest)
    assert [len({sequences[i].images[0][1].digest for i in bundle.members}) for bundle in made] == [1] * 30
    assert [len(bundle) for bundle in made] == [longest] * 30
