"""Small things that many tests need: a vocabulary, a random policy, a scripted knowledge base."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Passage
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.data.vocabulary import train_tokenizer
from routerl_jax.learning.batch import TOKEN_FIELDS, Batch
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.sharding import shardings
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar

VOCABULARY = 320
GRAMMAR = R1RouterGrammar(tools=("text", "table"))
_TEXTS = (
    "Question: What is the capital of Ghana? I need the capital. text retriever table retriever",
    "The national holiday of Togo is Independence Day, 27 April. It is not there. That is it.",
)


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level vocabulary of 320 with the R1-Router tags as single tokens."""
    return train_tokenizer(_TEXTS * 3, VOCABULARY, GRAMMAR.special_tokens, context=256)


def with_template(given: Tokenizer, template: str | None) -> Tokenizer:
    """A copy of a tokenizer, with this chat template. `tokenizer` is shared by all tests, which must not change it."""
    hf = copy.deepcopy(given.hf)
    hf.chat_template = template
    return Tokenizer(hf)


def config(**changes) -> DecoderConfig:
    """A two-layer decoder."""
    fields = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "embed": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "mlp": 64,
        "max_length": 256,
        "tied_embeddings": True,
        "init_scale": 0.15,
    }
    return DecoderConfig(**{**fields, **changes})


def model(
    devices: int = 1, seed: int = 0, dtype=jnp.float32, layout: str = "replicated", mesh=None, **changes
) -> Decoder:
    """A random policy with its tokenizer, on the first `devices` devices (or a given mesh)."""
    mesh = mesh or make_mesh(devices=jax.devices()[:devices])
    made = Decoder(config(**changes), jax.random.key(seed), param_dtype=dtype)
    params = nnx.state(made, nnx.Param)
    nnx.update(made, jax.tree.map(jax.device_put, params, shardings(params, mesh, layout)))
    made.tokenizer = tokenizer()
    return made


def random_sequences(count: int, seed: int = 0, turns: int = 3, longest: int = 20) -> list[TokenSequence]:
    """Conversations of random tokens, fed and sampled segments in turn, with made-up behaviour log-probs."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        ledger = Ledger()
        for _ in range(rng.integers(1, turns + 1)):
            ledger.feed(rng.integers(0, VOCABULARY, rng.integers(2, longest)).tolist())
            sampled = int(rng.integers(1, longest))
            ledger.sample(rng.integers(0, VOCABULARY, sampled).tolist(), rng.uniform(-7, -4, sampled).tolist(), 0)
        result.append(ledger.sequence())
    return result


class ScriptedKB:
    """A knowledge base that returns passages naming the query; remembers its batches."""

    def __init__(self, name: str = "text") -> None:
        self.name = name
        self.batches: list[list[str]] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.batches.append(list(queries))
        return [
            [
                Passage(id=f"{self.name}-{i}", title="", text=f"fact {i} about {len(query)}", score=1.0 - i)
                for i in range(k)
            ]
            for query in queries
        ]


def unpack(batch: Batch) -> list[dict[str, np.ndarray]]:
    """The sequences of a batch: `tokens` [T], and every per-target field by name, [T - 1] (the target's, not its place's)."""
    fields = {name: np.asarray(getattr(batch, name)) for name in TOKEN_FIELDS if getattr(batch, name) is not None}
    found = []
    for segment in np.unique(fields["segment_ids"])[1:]:
        at = fields["segment_ids"] == segment
        sequence = {name: values[at] for name, values in fields.items()}
        found.append({name: values if name == "tokens" else values[:-1] for name, values in sequence.items()})
    return found
