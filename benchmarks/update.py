"""One GRPO step's updates: our learner beside a plain transformers and torch implementation of the same loss.

    python -m benchmarks.update [--size 0.9M] [--repeats 5]

The same sequences (128 conversations of 80 to 280 tokens, a third of them sampled), four mini-batches, AdamW, clipped ratios.
The peer sorts by length, pads micro-batches of 16 conversations, and takes log-softmax of the logits, as trainers commonly do.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import numpy as np

SEQUENCES, MINIBATCHES, PEER_MICRO = 128, 4, 16


def main() -> None:
    import torch

    from benchmarks import peers
    from routerl_jax.core.ledger import Ledger
    from routerl_jax.learning.batch import BatchLayout
    from routerl_jax.learning.learner import Learner
    from routerl_jax.learning.losses import LossConfig, token_weights
    from routerl_jax.learning.optimizer import OptimizerConfig
    from routerl_jax.parallel.mesh import make_mesh

    arguments = peers.arguments(__doc__)
    model = peers.policy(arguments.size)
    twin = peers.torch_twin(model)
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(SEQUENCES):
        ledger = Ledger()
        for _ in range(rng.integers(1, 4)):
            ledger.feed(rng.integers(0, peers.VOCABULARY, rng.integers(54, 64)).tolist())
            ledger.sample(rng.integers(0, peers.VOCABULARY, 28).tolist(), [-7.0] * 28, 0)
        sequences.append(ledger.sequence())
    advantages = rng.normal(size=SEQUENCES).astype(np.float32)
    parts = np.array_split(np.arange(SEQUENCES), MINIBATCHES)

    layout = BatchLayout(make_mesh(), (256, 512), 2048)
    learner = Learner(model, OptimizerConfig(lr=1e-5, weight_decay=0.0).build(1000), LossConfig(), layout)

    def ours() -> None:
        for part in parts:
            chosen = [sequences[i] for i in part]
            weights = token_weights([s.loss_mask for s in chosen], "token", 1.0)
            learner.update(layout.build(chosen, weights, advantages[part].tolist())[0])

    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-5, weight_decay=0.0)

    def theirs() -> None:
        for part in parts:
            order = sorted(part, key=lambda i: len(sequences[i]))
            total = sum(int(sequences[i].loss_mask.sum()) for i in order)
            for at in range(0, len(order), PEER_MICRO):
                micro = [sequences[i] for i in order[at : at + PEER_MICRO]]
                width = max(map(len, micro))
                ids, mask, seen, old = (
                    torch.tensor(np.stack([np.pad(array(s), (0, width - len(s))) for s in micro]))
                    for array in (
                        lambda s: s.tokens.astype(np.int64),
                        lambda s: s.loss_mask.astype(np.float32),
                        lambda s: np.ones(len(s), np.int64),
                        lambda s: s.logprobs,
                    )
                )
                logits = twin(input_ids=ids, attention_mask=seen).logits[:, :-1]
                logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                ratio = (logprobs - old[:, 1:]).exp()
                advantage = torch.tensor(advantages[order[at : at + PEER_MICRO]])[:, None]
                loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                ((loss * mask[:, 1:]).sum() / total).backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    name = f"{arguments.size}, {SEQUENCES} conversations, {MINIBATCHES} updates"
    print(peers.hardware())
    print("| policy and work | ours, trained tokens/s | transformers + torch | ratio (range) |\n|---|---:|---:|---:|")
    print(peers.row(name, sum(map(len, sequences)), *peers.in_turn(ours, theirs, arguments.repeats)))


if __name__ == "__main__":
    main()
