"""The learner: exact masks, results that don't depend on layout, and plain references."""

import dataclasses
import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from routerl_jax.core.types import Sequence
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.logprobs import Scores, target_scores
from routerl_jax.learning.losses import LossConfig, objective, token_weights
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.decoder import for_programs
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny

LOSS = LossConfig(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.05)
SGD = optax.sgd(0.1)  # one object: learners of equal settings then share what they compile
SEQUENCES = tiny.random_sequences(13)
ADVANTAGES = np.random.default_rng(1).normal(size=13).tolist()


def learner(devices=1, buckets=(64, 128), micro_tokens=256, loss=LOSS, optimizer=None, **model):
    mesh = make_mesh(devices=jax.devices()[:devices])
    return Learner(tiny.model(devices, **model), optimizer or SGD, loss, BatchLayout(mesh, buckets, micro_tokens))


def build(made, sequences=SEQUENCES, aggregation="token", ref=True):
    weights = token_weights([s.loss_mask for s in sequences], aggregation, 10.0)
    refs = [np.where(s.loss_mask, s.logprobs - 0.1, 0).astype(np.float32) for s in sequences] if ref else None
    return made.layout.build(sequences, weights, ADVANTAGES[: len(sequences)], refs)


# --- exact masks -------------------------------------------------------------------------------------------------------


def logits_loss(logits, fields, loss=LOSS):
    """The learner's objective as a function of the logits; the reference of an exact KL is uniform."""
    full = jax.nn.log_softmax(logits)
    logprobs = jnp.take_along_axis(full, fields["targets"][..., None], axis=-1)[..., 0]
    entropies, words = -(jnp.exp(full) * full).sum(axis=-1), full.shape[-1]
    exact = -np.log(words) - full.mean(axis=-1) if loss.kl == "forward" else np.log(words) - entropies
    return objective(loss, Scores(logprobs, entropies, exact), fields)[0]


@pytest.mark.parametrize(
    "loss",
    [
        LOSS,
        LossConfig(kind="reinforce"),
        LossConfig(kl="k2", kl_coef=1.0),
        LossConfig(entropy_coef=0.01),
        LossConfig(clip_high=0.28, kl_coef=0.15, min_entropy=0.2),
        LossConfig(kl="forward", kl_coef=0.15, min_entropy=0.05),
        LossConfig(kl="reverse", kl_coef=0.15),
        LossConfig(ratio="sequence", kl_coef=0.05),
    ],
)
def test_gradient_is_exactly_zero_at_every_token_the_policy_did_not_sample(loss):
    made = learner()
    batch, _ = build(made)
    fields = {
        name: jnp.asarray(getattr(batch, name)).reshape(-1, made.layout.width)
        for name in ("targets", "weights", "advantages", "old_logprobs", "ref_logprobs", "segment_ids")
    }
    logits = jax.random.normal(jax.random.key(0), (*fields["targets"].shape, 50)) * 3
    fields["targets"] = fields["targets"] % 50
    scored = jax.jit(functools.partial(jax.value_and_grad(logits_loss), loss=loss))
    value, gradient = scored(logits, fields)
    unsampled = np.asarray(fields["weights"]) == 0
    assert (np.asarray(gradient)[unsampled] == 0).all()
    assert (np.abs(np.asarray(gradient)[~unsampled]).max(axis=-1) > 0).mean() > 0.4  # clipped ones have none
    assert unsampled.mean() > 0.3
    # Nor does the loss see them: NaN for logits (so for log-probs and entropies), or for what else it reads, changes nothing.
    assert scored(jnp.where(unsampled[..., None], jnp.nan, logits), fields)[0] == value
    poisoned = {
        **fields,
        **{k: jnp.where(unsampled, jnp.nan, fields[k]) for k in ("old_logprobs", "ref_logprobs", "advantages")},
    }
    assert scored(logits, poisoned)[0] == value


def test_only_decisions_get_the_policy_gradient():
    """With min_entropy, sure tokens contribute nothing to the policy gradient, and still take part in the KL."""
    logits = jnp.array([[[8.0, 0.0, 0.0], [0.3, 0.0, 0.1]]])  # one sure token, one open decision
    fields = {
        "targets": jnp.array([[0, 1]]),
        "weights": jnp.array([[0.5, 0.5]]),
        "advantages": jnp.array([[1.0, 1.0]]),
        "old_logprobs": jnp.log(jnp.array([[0.9, 0.3]])),
        "ref_logprobs": jnp.log(jnp.array([[0.5, 0.3]])),
    }

    def gradient(loss):
        return np.abs(np.asarray(jax.grad(logits_loss)(logits, fields, loss))).max(axis=-1)[0]

    sure, decision = gradient(LossConfig(min_entropy=0.5))
    assert sure == 0
    assert decision == pytest.approx(gradient(LossConfig())[1])
    assert gradient(LossConfig())[0] > 0
    assert gradient(LossConfig(min_entropy=0.5, kl_coef=0.1))[0] > 0


def test_sampled_positions_are_the_trained_ones():
    """Exactly the sampled tokens carry weight, each at the position that predicts it."""
    made = learner()
    batch, index = build(made)
    weights = np.asarray(batch.weights)
    for sequence, (micro, shard, start) in zip(SEQUENCES, index.starts):
        span = weights[micro, shard, start : start + len(sequence)]
        np.testing.assert_array_equal(span[:-1] > 0, sequence.loss_mask[1:])
        assert span[-1] == 0
    assert (weights > 0).sum() == sum(s.loss_mask[1:].sum() for s in SEQUENCES)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)


# --- log-probs ---------------------------------------------------------------------------------------------------------


@jax.jit
def forward(params, tokens):
    """Log-softmax over one padded row."""
    return jax.nn.log_softmax(nnx.merge(GRAPH, params)(tokens))[0]


GRAPH = nnx.split(tiny.model())[0]


def padded(sequence):
    return jnp.asarray(np.pad(sequence.tokens, (0, 128 - len(sequence)))[None])


def plain_logprobs(params, sequence):
    values = forward(params, padded(sequence))[np.arange(len(sequence) - 1), sequence.tokens[1:]]
    return jnp.concatenate([jnp.zeros(1), values])


@pytest.mark.parametrize("devices", [1, 8])
def test_log_probs_equal_a_forward_pass_of_each_sequence_alone(devices):
    made = learner(devices)
    params = nnx.state(tiny.model(), nnx.Param)
    for sequence, values in zip(SEQUENCES, made.logprobs(SEQUENCES)):
        expected = np.where(sequence.loss_mask, plain_logprobs(params, sequence), 0.0)  # fed tokens are not scored
        np.testing.assert_allclose(values, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("direction", "share"), [("forward", 0.0), ("forward", None), ("reverse", 0.25), ("reverse", 1.0)]
)
def test_chunked_scores_equal_unchunked(monkeypatch, direction, share):
    """Also of a part of the targets, which differ by row: a whole row, and none of another."""
    from routerl_jax.learning import logprobs as module

    model, reference = tiny.model(), tiny.model(seed=1)
    tokens = jax.random.randint(jax.random.key(0), (3, 40), 0, tiny.VOCABULARY)
    arguments = (
        tokens,
        jnp.roll(tokens, -1, 1),
        jnp.broadcast_to(jnp.arange(40), (3, 40)),
        jnp.ones((3, 40), jnp.int32),
    )

    scored = None
    if share is not None:
        chosen = np.random.default_rng(2).random((3, 40)) < share
        chosen[0], chosen[1] = share > 0, share == 1
        scored = jnp.asarray(chosen)

    def gradient(scored=scored):
        graph, params = nnx.split(model)

        def f(params):
            settings = {"temperature": 0.8, "entropy": True, "reference": reference, "direction": direction}
            scores = target_scores(nnx.merge(graph, params), *arguments, scored=scored, **settings)
            return scores.logprobs.sum() + 0.3 * scores.entropies.sum() + 0.5 * scores.divergences.sum(), scores

        return jax.jit(jax.grad(f, has_aux=True))(params)

    grads, scores = gradient()
    # 3 tokens of 3 rows, for two models: 14 chunks, the last padded
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2 * 9 * tiny.VOCABULARY * 4)
    chunked, in_chunks = gradient()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), in_chunks, scores)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), chunked, grads)
    whole = gradient(None)[1]
    if scored is not None:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, jnp.where(scored, b, 0.0), atol=1e-5), scores, whole)
    scores = whole
    softmax = nnx.jit(lambda of: jax.nn.softmax(of(tokens) / 0.8))
    p, q = np.asarray(softmax(model), np.float64), np.asarray(softmax(reference), np.float64)
    np.testing.assert_allclose(scores.entropies, -(p * np.log(p)).sum(-1), atol=1e-5)
    exact = (q * np.log(q / p)).sum(-1) if direction == "forward" else (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(scores.divergences, exact, atol=1e-5)


# --- updates -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_objective_on_the_way():
    """The next update is that of a learner that had it from the start."""
    other = LossConfig(clip_high=0.4, entropy_coef=0.05)
    first, second = learner(), learner(loss=other)
    first.switch(other, 1.0)
    np.testing.assert_array_equal(first.update(build(first)[0])[1], second.update(build(second)[0])[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), first.params, second.params)
    warm, _ = first.update(build(first)[0])
    first.switch(other, 0.5)
    cold, _ = first.update(build(first)[0])
    assert abs(cold["loss"] - warm["loss"]) > 1e-3
    with pytest.raises(ValueError, match="the reference was not kept"):
        second.switch(LOSS, 1.0)


@pytest.mark.parametrize("kept", [False, True])
def test_initial_weights_are_kept_for_a_reference_alone(kept):
    model = tiny.model()
    initial = weakref.ref(nnx.to_pure_dict(nnx.state(model))["embedding"])
    mesh = make_mesh(devices=jax.devices()[:1])
    made = Learner(model, optax.sgd(0.1), LossConfig(), BatchLayout(mesh, (64, 128), 256), keep_reference=kept)
    made.update(build(made)[0])
    del model
    gc.collect()
    assert (initial() is not None) == kept


@pytest.mark.slow
def test_a_restart_is_a_new_learner_of_the_same_weights():
    """Moments, schedule and reference: the next updates are those of a learner made from these weights."""
    settings = OptimizerConfig(lr=1e-2, schedule="linear", warmup=2)
    going = learner(optimizer=settings.build(10))
    for _ in range(3):
        going.update(build(going)[0])
    weights = jax.tree.map(jnp.copy, going.params)
    going.restart()
    going.switch(LOSS, 1.0, settings.build(5))  # a schedule of half the length
    model = tiny.model()
    nnx.update(model, weights)
    fresh = Learner(model, settings.build(5), LOSS, going.layout)
    for _ in range(4):  # the rate of the first is 0, of the last three it falls
        going.update(build(going)[0])
        fresh.update(build(fresh)[0])
    jax.tree.map(np.testing.assert_array_equal, going.params, fresh.params)
    jax.tree.map(np.testing.assert_array_equal, going.reference, weights)  # later updates leave it alone
    assert int(going.state.updates) == 7
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), going.params, weights)
    assert any(jax.tree.leaves(changed))


@pytest.mark.parametrize(
    ("devices", "buckets", "micro_tokens"),
    [(1, (128,), 128), (1, (64, 96, 128), 4096), (8, (64, 128), 256), (4, (128,), 1024)],
)
def test_layout_and_sharding_do_not_change_the_update(devices, buckets, micro_tokens):
    base, other = learner(), learner(devices, buckets, micro_tokens)
    for made in (base, other):
        for first in (0, 6):
            made.last, _ = made.update(build(made, SEQUENCES[first : first + 7])[0])
    for name, value in base.last.items():
        np.testing.assert_allclose(other.last[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b), atol=2e-5), base.params, other.params)


@pytest.mark.slow
def test_chunks_of_logits_do_not_change_the_update(monkeypatch):
    """On one device, where no weights are split over `fsdp` (chunks are skipped), and where they are."""
    from routerl_jax.learning import logprobs as module

    base = learner()
    expected, _ = base.update(build(base)[0])
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2**9 * tiny.VOCABULARY)  # 128 tokens: at least four chunks
    meshes = [
        {"data": 1, "fsdp": 1, "tensor": 1},
        {"data": 4, "fsdp": 1, "tensor": 2},
        {"data": 2, "fsdp": 4, "tensor": 1},
    ]
    for shape in meshes:
        mesh = make_mesh(shape, devices=jax.devices()[: math.prod(shape.values())])
        made = Learner(
            tiny.model(mesh=mesh, layout="fsdp+tensor"), optax.sgd(0.1), LOSS, BatchLayout(mesh, (128,), 4096)
        )
        metrics, _ = made.update(build(made)[0])
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-6, err_msg=f"{name} {shape}")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b), atol=2e-5), base.params, made.params)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adamw(0.01, eps=1e-3)], ids=["sgd", "adamw"])
def test_fsdp_and_tensor_layouts_give_the_same_update(optimizer):
    """AdamW's eps is well above float32's noise in the gradients, which its first steps otherwise blow up to full size."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharded = Learner(tiny.model(mesh=mesh, layout="fsdp+tensor"), optimizer, LOSS, BatchLayout(mesh, (128,), 256))
    base = learner(buckets=(128,), optimizer=optimizer)
    before = jax.tree.map(np.array, base.params)
    for first in (0, 6):
        metrics, _ = sharded.update(build(sharded, SEQUENCES[first : first + 7])[0])
        expected, _ = base.update(build(base, SEQUENCES[first : first + 7])[0])
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-3, atol=1e-6, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b), atol=2e-6), sharded.params, base.params)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), base.params, before)
    assert min(jax.tree.leaves(moved)) > 0.003
    gate = sharded.params["blocks"]["gate"].get_value()
    assert not gate.sharding.is_fully_replicated
    moments = optax.tree_utils.tree_get(sharded.state.opt_state, "mu")
    assert moments is None or moments["blocks"]["gate"].get_value().sharding == gate.sharding


@pytest.mark.slow
def test_remat_changes_memory_not_results():
    mesh = make_mesh(devices=jax.devices()[:1])
    results = []
    for remat in ("none", "full", "dots"):
        made = Learner(tiny.model(), optax.sgd(0.1), LOSS, BatchLayout(mesh, (128,), 256), remat=remat)
        made.update(build(made)[0])
        results.append(made.params)
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), results[0], other)


def test_number_of_compilations():
    made = learner(optimizer=optax.sgd(0.1))  # shares nothing with learners of other tests
    for count in (1, 5, 13, 3, 9, 13, 2):
        made.update(build(made, SEQUENCES[:count])[0])
    assert made.compilations == 3  # mini-batches of 1, 2 and up to 4 micro-batches; smaller ones use the largest so far
    for count in (4, 13, 7):
        made.update(build(made, SEQUENCES[:count])[0])
    assert made.compilations == 3


def test_learners_of_equal_settings_share_what_they_compile():
    """Also where each has loaded its own tokenizer; smaller micro-batches of one are no matter of the other."""
    optimizer = OptimizerConfig(lr=0.0125).build(7)
    assert OptimizerConfig(lr=0.0125).build(9) is optimizer  # a constant rate is that of any number of updates
    first = learner(optimizer=optimizer)
    first.update(build(first)[0])
    second = learner(optimizer=optimizer)
    second.update(build(second)[0])
    assert (first.compilations, second.compilations) == (1, 0)
    graphs = []
    for spare in (0, 0, 8):
        model = tiny.model(vocab_size=tiny.VOCABULARY + spare)
        model.tokenizer = tiny.with_template(tiny.tokenizer(), None)
        graphs.append(nnx.graphdef(for_programs(model)))
    assert graphs[0] == graphs[1] != graphs[2]
    assert hash(graphs[0]) == hash(graphs[1])
    first.layout.halve()
    metrics = [made.update(build(made)[0])[0]["loss"] for made in (first, second)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


def test_scores_in_portions_do_not_enlarge_the_updates():
    """They are those of one large batch (1e-5: float32 sums in another order)."""
    parts, whole = learner(), learner()
    scored = parts.logprobs(SEQUENCES, portion=4), whole.logprobs(SEQUENCES)
    for got, expected in zip(*scored, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert build(parts, SEQUENCES[:1])[0].tokens.shape[0] < build(whole, SEQUENCES[:1])[0].tokens.shape[0] == 4


def test_metrics_say_what_happened():
    made = learner(loss=dataclasses.replace(LOSS, entropy_coef=0.01))
    metrics, _ = made.update(build(made)[0])
    assert set(metrics) == {"pg_loss", "clip_fraction", "kl", "entropy", "loss", "grad_norm"}
    assert 0 <= metrics["clip_fraction"] <= 1
    assert 0 < metrics["entropy"] <= np.log(tiny.VOCABULARY)
    np.testing.assert_allclose(
        metrics["loss"], metrics["pg_loss"] + 0.05 * metrics["kl"] - 0.01 * metrics["entropy"], rtol=1e-4
    )
    assert int(made.state.updates) == 1


# --- batches and optimiser ---------------------------------------------------------------------------------------------


def test_packing_keeps_every_sequence_whole_and_apart():
    layout = BatchLayout(make_mesh(devices=jax.devices()[:2]), (64, 128), 256)
    sequences = tiny.random_sequences(40, seed=5)
    batch, index = layout.build(sequences, [s.loss_mask for s in sequences], [0.0] * 40)
    tokens, segments, positions = (np.asarray(getattr(batch, name)) for name in ("tokens", "segment_ids", "positions"))
    for i, (sequence, (micro, shard, start)) in enumerate(zip(sequences, index.starts)):
        span = (micro, shard, slice(start, start + len(sequence)))
        np.testing.assert_array_equal(tokens[span], sequence.tokens)
        np.testing.assert_array_equal(positions[span], np.arange(len(sequence)))
        assert (segments[span] == i + 1).all()
        row = layout.buckets[int(batch.buckets[micro])]
        assert start // row == (start + len(sequence) - 1) // row  # inside one row
    assert (segments > 0).sum() == sum(map(len, sequences))
    assert (segments > 0).sum() / (int(batch.count) * segments[0].size) > 0.6  # packed, not padded
    values = np.arange(tokens.size, dtype=np.float32).reshape(tokens.shape)
    for row, (micro, shard, start), sequence in zip(index.split(values), index.starts, sequences):
        of_tokens = values[micro, shard, start : start + len(sequence) - 1]
        np.testing.assert_array_equal(row[1:], np.where(sequence.loss_mask[1:], of_tokens, 0.0))
    written = np.concatenate([sequence.loss_mask[1:] for sequence in sequences])
    assert np.asarray(batch.scored).sum() == written.sum()


def test_a_sequence_that_fits_no_bucket_is_refused():
    layout = BatchLayout(make_mesh(devices=jax.devices()[:1]), (16,), 64)
    tokens = np.zeros(20, np.int32)
    sequence = Sequence(
        tokens=tokens,
        loss_mask=tokens > 0,
        logprobs=tokens.astype(np.float32),
        positions=np.zeros((3, 20), np.int32),
        versions=tokens,
    )
    fix = "more than the longest of the buckets .16,.: add a longer one to config.learner.length_buckets"
    with pytest.raises(ValueError, match=f"sequence 0 has 20 tokens, {fix}"):
        layout.build([sequence], [sequence.loss_mask], [0.0])
    for shapes in (layout.micro_batches, layout.abstract):  # of the compile check, which has no sequences yet
        with pytest.raises(ValueError, match=f"a sequence of 20 tokens is {fix}"):
            shapes(1, 20)


def test_optimizer_decays_matrices_only_and_schedules():
    params = nnx.state(tiny.model(), nnx.Param)
    optimizer = OptimizerConfig(lr=1.0, weight_decay=0.5, b1=0.0, b2=0.0).build(10)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert np.abs(updates["embedding"].get_value()).max() > 0
    assert np.abs(updates["blocks"]["q"].get_value()).max() > 0
    assert np.abs(updates["blocks"]["mlp_norm"].get_value()).max() == 0
    assert np.abs(updates["final_norm"].get_value()).max() == 0
    rate = OptimizerConfig(lr=2.0, schedule="linear", warmup=4, decay_to=0.5).learning_rate(14)
    np.testing.assert_allclose([rate(0), rate(2), rate(4), rate(9), rate(14)], [0, 1, 2, 1.5, 1.0])
    rate = OptimizerConfig(lr=2.0, schedule="cosine", decay_to=0.1).learning_rate(10)
    np.testing.assert_allclose([rate(0), rate(5), rate(10)], [2, 1.1, 0.2], rtol=1e-6)


def test_sigmoid_schedule():
    """MMSearch-R1's: from 2e-6 down by 95 %, half of it in 45 updates. 1 / (1 + e^2) = 0.119203, 1 / (1 + e^10) = 4.54e-5."""
    released = OptimizerConfig(lr=2e-6, schedule="sigmoid", decay_to=0.05, midpoint=45)
    expected = [0.05 + 0.95 * share for share in (1 - 4.53979e-5, 0.880797, 0.5, 0.119203, 4.53979e-5, 0)]
    for updates in (60, 10_000):  # the run's length changes nothing
        rate = released.learning_rate(updates)
        np.testing.assert_allclose([float(rate(t)) / 2e-6 for t in (0, 36, 45, 54, 90, 5000)], expected, rtol=1e-5)
        np.testing.assert_allclose(rate(jnp.int32(54)), 2e-6 * expected[3], rtol=1e-5)  # as the optimiser counts
    rate = OptimizerConfig(lr=2.0, schedule="sigmoid", decay_to=0.0, warmup=20).learning_rate(100)
    np.testing.assert_allclose([float(rate(t)) for t in (10, 60, 68)], [1.0, 1.0, 2 * 0.119203], rtol=1e-5)
    with pytest.raises(ValueError, match="midpoint=-1 must not be negative"):
        OptimizerConfig(schedule="sigmoid", midpoint=-1)
    with pytest.raises(
        ValueError, match=r"optimizer\.midpoint=45 is of schedule='sigmoid', not of 'cosine': set it to 0"
    ):
        OptimizerConfig(schedule="cosine", midpoint=45)


@pytest.mark.slow
def test_muon_takes_orthogonal_steps_on_layers_and_adam_steps_elsewhere():
    optimizer = OptimizerConfig(kind="muon", lr=0.02, adam_lr=0.001, weight_decay=0.0, max_grad_norm=1e9)
    made = learner(devices=2, optimizer=optimizer.build(10))
    before = jax.tree.map(np.asarray, made.params)
    made.update(build(made)[0])
    moved = {
        str(path[-1]): np.asarray(new[...]) - np.asarray(old[...])
        for (path, new), (_, old) in zip(nnx.to_flat_state(made.params), nnx.to_flat_state(before))
    }
    for layer in moved["gate"]:  # most singular values about equal, as Newton-Schulz makes them
        values = np.linalg.svd(layer, compute_uv=False)
        assert values.max() / np.median(values) < 1.5
    for layer in moved["q"]:
        values = np.linalg.svd(layer.reshape(layer.shape[0], -1), compute_uv=False)
        assert values.max() / np.median(values) < 1.5
    assert 0.0005 < np.abs(moved["embedding"]).max() < 0.002  # Adam's first step has about the size of the rate


def test_muon_takes_each_expert_as_a_matrix():
    """A stack of experts moves as its experts would alone."""
    made = OptimizerConfig(kind="muon", lr=0.02, weight_decay=0.0, max_grad_norm=1e9).build(10)
    gradients = {
        name: jax.random.normal(jax.random.key(at), (2, 3, *shape))  # layers, experts, in, out
        for at, (name, shape) in enumerate({"gate": (8, 4), "up": (8, 4), "down": (4, 8)}.items())
    }

    def steps(path, gradients):
        state = nnx.from_flat_state([((*path, name), nnx.Param(value)) for name, value in gradients.items()])
        moved, _ = made.update(state, made.init(state), state)
        return {str(path[-1]): np.asarray(value[...]) for path, value in nnx.to_flat_state(moved)}

    stacked = steps(("blocks", "experts"), gradients)
    for expert in range(3):
        alone = steps(("blocks",), {name: value[:, expert] for name, value in gradients.items()})
        for name, value in alone.items():
            np.testing.assert_allclose(stacked[name][:, expert], value, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_reference_scores_a_batch_where_it_lies(devices):
    """Its log-probabilities, and the update with them, are those of a way over the host, to the bit."""
    made, other = learner(devices), learner(devices)
    for one in (made, other):  # so that the reference is no longer the policy
        one.update(build(one)[0])
    batch, index = build(made, ref=False)
    batch = made.with_reference(batch)
    on_host = other.logprobs(SEQUENCES, other.reference)
    for values, expected in zip(index.split(np.asarray(batch.ref_logprobs)), on_host):
        np.testing.assert_array_equal(values, expected)
    weights = token_weights([s.loss_mask for s in SEQUENCES], "token", 1.0)
    from_host, _ = other.layout.build(SEQUENCES, weights, ADVANTAGES, on_host)
    made.update(batch)
    other.update(from_host)
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(one.params) for one in (made, other)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_an_exact_kl_is_that_of_the_vocabulary(devices, kl):
    """None before the first update, then the mean over sampled tokens of the sum over all words; it pulls back alone."""
    loss = LossConfig(kl=kl, kl_coef=0.5)
    made = learner(devices, loss=loss, optimizer=optax.sgd(1.0))
    first, _ = made.update(build(made, ref=False)[0])
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    ours, theirs = ([forward(params, padded(s)) for s in SEQUENCES] for params in (made.params, made.reference))
    terms = []
    for p, q, sequence in zip(ours, theirs, SEQUENCES):
        p, q = (np.asarray(x, np.float64)[np.arange(len(sequence) - 1)] for x in (p, q))
        each = (np.exp(q) * (q - p)).sum(-1) if kl == "forward" else (np.exp(p) * (p - q)).sum(-1)
        terms.append(each[sequence.loss_mask[1:]])
    second, _ = made.update(build(made, ref=False)[0])
    assert second["kl"] == pytest.approx(np.concatenate(terms).mean(), rel=1e-3)
    still = build(made, ref=False)[0]
    still = dataclasses.replace(still, advantages=jnp.zeros_like(still.advantages))
    divergences = [made.update(still)[0]["kl"] for _ in range(6)]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < divergences[0] / 2


def test_a_choice_that_is_never_sampled_comes_back_by_the_forward_kl_alone():
    """The reference says word 0 in three of four cases, the policy hardly ever. Word 1 is sampled, which the reference finds 22
    times as likely: k3 is cut off and has no gradient. The forward KL pulls by the difference of the probabilities."""
    reference = jnp.log(jnp.asarray([0.75, 0.2, 0.05]))
    start = jnp.log(jnp.asarray([0.001, 0.009, 0.99]))  # word 2 is sampled, which the reference finds unlikely
    word = 1  # now and then this one is, 22 times as likely under the reference

    def loss(logits, kl):
        full = jax.nn.log_softmax(logits)
        fields = {"weights": jnp.ones(1), "advantages": jnp.zeros(1), "old_logprobs": full[word][None]}
        fields["ref_logprobs"] = reference[word][None]
        exact = (jnp.exp(reference) * (reference - full)).sum()[None]
        scores = Scores(full[word][None], jnp.zeros(1), exact)
        return objective(LossConfig(kl=kl, kl_coef=1.0, min_entropy=0.2), scores, fields)[0]

    np.testing.assert_array_equal(jax.grad(loss)(start, "k3"), 0)
    np.testing.assert_allclose(jax.grad(loss)(start, "forward"), jnp.exp(start) - jnp.exp(reference), atol=1e-6)
