"""Reading drills for the supervised warm start: invented passages, then questions about them or the passages again.

A demonstration asks for one value out of two hundred tokens, which teaches reading slowly. In a drill almost every learnt token
must be read from the text. Drills have nothing to do with knowledge bases.
"""

from __future__ import annotations

import numpy as np

from routerl_jax.data.atlas import world
from routerl_jax.data.atlas.demonstrations import invented_scene

Drill = list[tuple[str, bool]]  # (text, is it learnt)

_PER_WORLD = 64


class ReadingDrills:
    """A random-access, reproducible stream of drills (item i is a function of seed and i).

    Args:
      seed: root of the randomness.
      passages: number of passages in a drill.
    """

    def __init__(self, seed: int = 0, passages: int = 4) -> None:
        self.seed = seed
        self.passages = passages

    def __getitem__(self, index: int) -> Drill:
        rng = np.random.default_rng([3, self.seed, index])
        scene = invented_scene(self.seed * 1_000_003 + index // _PER_WORLD)
        records = list(scene.records.values())
        shown = [records[i] for i in rng.choice(len(records), self.passages, replace=False)]
        if rng.random() < 0.5:  # two passages about one entity, as a search returns them
            near = [r for r in records if r.entity == shown[0].entity and r is not shown[0]]
            if near:
                shown[1] = near[int(rng.integers(len(near)))]
        text = "".join(f"{record.passage.text}\n" for record in shown)
        if rng.random() < 0.4:
            repeated = [shown[i].passage.text for i in rng.permutation(len(shown))]
            return [(text, False), *((f"{line}\n", True) for line in repeated)]
        facts = [(record.entity, world.RELATIONS[key]) for record in shown for key in sorted(record.relations)]
        drill: Drill = [(text, False)]
        for i in rng.permutation(len(facts)):
            name, relation = facts[i]
            value = scene.entities[name].facts[relation.key]
            if relation.identifies and rng.random() < 0.3:
                drill += [(f"Which {relation.kind} has the {relation.noun} {value}?", False), (f" {name}\n", True)]
            else:
                drill += [(f"What is the {relation.noun} of {name}?", False), (f" {value}\n", True)]
        return drill
