"""Multi-turn generation: our engine beside transformers' generate, which feeds the whole conversation again each turn.

    python -m benchmarks.rollout [--size 0.9M] [--repeats 5]

The same work on both sides: groups of 8 attempts, 24-token questions, three turns of 24 sampled tokens, two observations of 96
tokens between them, temperature 1, equal weights. Transformers runs the whole batch at once, with its KV cache within a turn.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import numpy as np

GROUPS, SAMPLES, PROMPT, TURNS, SAMPLED, OBSERVED = 16, 8, 24, 3, 24, 96


def main() -> None:
    import torch

    from benchmarks import peers
    from routerl_jax.engine.engine import Engine
    from routerl_jax.engine.sampling import Sampling

    arguments = peers.arguments(__doc__)
    model = peers.policy(arguments.size)
    twin = peers.torch_twin(model)
    model.tokenizer.eos_ids = frozenset()  # both sides sample exactly as many tokens as asked
    length = PROMPT + TURNS * SAMPLED + (TURNS - 1) * OBSERVED
    engine = Engine(model, rows=GROUPS * SAMPLES, max_length=length + 8)
    rng = np.random.default_rng(0)

    def tokens(*shape: int) -> np.ndarray:
        return rng.integers(0, peers.VOCABULARY, shape)

    def ours() -> None:
        prompts, observations = tokens(GROUPS, PROMPT), tokens(TURNS - 1, GROUPS * SAMPLES, OBSERVED)
        streams = [
            engine.open(prompts[i // SAMPLES].tolist(), str(i // SAMPLES), i % SAMPLES) for i in range(GROUPS * SAMPLES)
        ]
        for turn in range(TURNS):
            for stream in streams:
                engine.request(stream, max_tokens=SAMPLED, sampling=Sampling())
            while engine.busy:
                engine.step()
            if turn < TURNS - 1:
                for stream, observation in zip(streams, observations[turn]):
                    engine.feed(stream, observation.tolist())
        assert all(len(stream.ledger) == length for stream in streams)
        for stream in streams:
            engine.close(stream)

    def theirs() -> None:
        prompts, observations = tokens(GROUPS, PROMPT), tokens(TURNS - 1, GROUPS * SAMPLES, OBSERVED)
        batch = torch.tensor(prompts).repeat_interleave(SAMPLES, 0)
        for turn in range(TURNS):
            batch = peers.sample(twin, batch, SAMPLED)
            if turn < TURNS - 1:
                batch = torch.cat([batch, torch.tensor(observations[turn])], 1)
        assert batch.shape == (GROUPS * SAMPLES, length)

    sampled = GROUPS * SAMPLES * TURNS * SAMPLED
    name = f"{arguments.size}, {GROUPS * SAMPLES} conversations, {length} tokens each"
    print(peers.hardware())
    print("| policy and work | ours, sampled tokens/s | transformers | ratio (range) |\n|---|---:|---:|---:|")
    print(peers.row(name, sampled, *peers.in_turn(ours, theirs, arguments.repeats)))


if __name__ == "__main__":
    main()
