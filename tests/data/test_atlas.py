"""Atlas: answers are where the gold path says and nowhere else, splits share no entity, practice shows no routing."""

import collections
import json

import numpy as np
import pytest

from routerl_jax.data.atlas import extract, world
from routerl_jax.data.atlas.builder import AtlasExamples
from routerl_jax.data.atlas.demonstrations import UNKNOWN, DemonstrationSource
from routerl_jax.data.atlas.drills import ReadingDrills
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.readers import open_dataset
from routerl_jax.rewards.metrics import exact_match

SPLITS: tuple[world.Split, ...] = ("train", "validation", "test")


@pytest.fixture(scope="module")
def questions() -> dict[str, list[world.Question]]:
    return {split: world.real_questions(split) for split in SPLITS}


@pytest.fixture(scope="module")
def records() -> list[world.Record]:
    return world.records(world.real_entities())


def test_enough_questions_of_every_kind(questions: dict[str, list[world.Question]]) -> None:
    assert sum(map(len, questions.values())) >= 2000
    for split in SPLITS:
        kinds = collections.Counter(question.kind for question in questions[split])
        assert min(kinds["none"], kinds["single"], kinds["multi"]) >= 80
        assert {hop.kb for question in questions[split] for hop in question.hops} == set(world.KNOWLEDGE_BASES)
        crossing = [q for q in questions[split] if len({hop.kb for hop in q.hops}) > 1]
        assert len(crossing) > 100  # questions that need more than one knowledge base


def test_ids_are_unique(questions: dict[str, list[world.Question]]) -> None:
    ids = [question.id for split in SPLITS for question in questions[split]]
    assert len(ids) == len(set(ids))


def test_splits_share_no_entity(questions: dict[str, list[world.Question]]) -> None:
    names = {split: {name for question in questions[split] for name in question.entities} for split in SPLITS}
    assert not names["train"] & names["test"]
    assert not names["train"] & names["validation"]
    assert not names["validation"] & names["test"]


def test_every_answer_is_in_its_gold_passage(
    questions: dict[str, list[world.Question]], records: list[world.Record]
) -> None:
    passages = {record.passage.id: record for record in records}
    for question in (question for split in SPLITS for question in questions[split]):
        for hop in question.hops:
            record = passages[hop.passage_id]
            assert record.kb == hop.kb
            assert hop.value in record.passage.text, question
            assert record.entity in question.entities
        if not question.hops:
            assert question.answer in question.text


def test_wrong_knowledge_bases_do_not_hold_the_answer(
    questions: dict[str, list[world.Question]], records: list[world.Record]
) -> None:
    """For the last hop's entity, no passage of another knowledge base contains the answer."""
    about = collections.defaultdict(list)
    for record in records:
        about[record.entity].append(record)
    for question in (question for split in SPLITS for question in questions[split] if question.hops):
        last = question.hops[-1]
        entity = next(record.entity for record in records if record.passage.id == last.passage_id)
        elsewhere = [record.passage.text for record in about[entity] if record.kb != last.kb]
        assert not any(question.answer in text for text in elsewhere), question


def test_multi_hop_questions_hide_their_entity(questions: dict[str, list[world.Question]]) -> None:
    for question in (question for split in SPLITS for question in questions[split] if question.kind == "multi"):
        assert question.hops[0].value not in question.text or len(question.hops[0].value) < 5, question
        assert question.hops[0].value in question.hops[1].query  # the second step needs what the first found


def test_backward_questions_are_unambiguous(questions: dict[str, list[world.Question]]) -> None:
    """ "The country whose capital is X": one entity only."""
    found = collections.defaultdict(set)
    for question in (question for split in SPLITS for question in questions[split]):
        for hop in question.hops:
            if hop.query.startswith("Which "):
                found[hop.query].add(hop.value)
    assert len(found) > 200
    assert all(len(values) == 1 for values in found.values())


def test_builder_reads_the_same_questions(questions: dict[str, list[world.Question]]) -> None:
    """tensorflow-datasets' array_record files, read without TensorFlow, hold what the world makes."""
    source = open_dataset("atlas/validation")
    assert isinstance(source, AtlasExamples)
    assert len(source) == len(questions["validation"])
    for i in (0, 7, len(source) - 1):
        example, question = source[i], questions["validation"][i]
        assert (example.id, example.question, example.answers) == (question.id, question.text, (question.answer,))
        assert [hop["passage_id"] for hop in example.metadata["path"]] == [hop.passage_id for hop in question.hops]
        assert example.metadata["kind"] == question.kind


def test_unknown_knowledge_base() -> None:
    with pytest.raises(ValueError, match=r"no knowledge base 'pictures'; it has text, table, elements"):
        world.passages_of("pictures")


def test_facts_are_clean() -> None:
    rows = json.loads(extract.FACTS.read_text(encoding="utf-8"))
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(value and value == value.strip() for row in rows for value in row.values())


@pytest.mark.parametrize(
    ("amount", "text"),
    [(7, "7"), (468, "468"), (10_991, "11 thousand"), (31_244_005, "31.2 million"), (1_210_000_000, "1210 million")],
)
def test_rounded(amount: float, text: str) -> None:
    assert extract.rounded(amount) == text


def test_invented_worlds_have_unique_new_names() -> None:
    real = {entity.name for entity in world.real_entities()}
    for seed in range(200):
        names = [entity.name for entity in invented_world(seed)]
        assert len(set(names)) == len(names)
        assert len(set(names) & real) <= 1
    assert invented_world(3) == invented_world(3)
    assert invented_world(3) != invented_world(4)


def test_invented_worlds_teach_no_real_fact() -> None:
    """Names are recombined from syllables, values are shuffled: no invented entity has a real one's facts."""
    held_out = {(e.name, e.facts.get("capital")) for e in world.real_entities()}
    for seed in range(100):
        assert not held_out & {(e.name, e.facts.get("capital")) for e in invented_world(seed) if e.kind == "country"}


def test_demonstrations_show_no_routing() -> None:
    """The searched knowledge base is uniform and independent of the one that holds the answer, after a miss too."""
    source = DemonstrationSource(size=6000, seed=11)
    right = {hop.query: hop.kb for split in SPLITS for q in world.real_questions(split) for hop in q.hops}
    first: collections.Counter[tuple[str, str]] = collections.Counter()
    later: collections.Counter[str] = collections.Counter()
    for i in range(3000):
        for n, step in enumerate(source[i].steps):
            if step.query in right:
                first[right[step.query], step.tool] += 1
            if n:
                later[step.tool] += 1
    for gold in world.KNOWLEDGE_BASES:
        counts = np.array([first[gold, kb] for kb in world.KNOWLEDGE_BASES])
        assert counts.sum() > 100
        expected = counts.sum() / 3
        assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-squared, 2 degrees of freedom, p = 0.001
    counts = np.array([later[kb] for kb in world.KNOWLEDGE_BASES])
    assert (np.abs(counts / counts.sum() - 1 / 3) < 0.05).all()


def test_demonstrations_answer_only_what_they_found() -> None:
    source = DemonstrationSource(size=1000, seed=5)
    answered = 0
    for i in range(1000):
        demonstration = source[i]
        if demonstration.answer == UNKNOWN:
            continue
        answered += 1
        assert exact_match(demonstration.answer, demonstration.example.answers)
        seen = [demonstration.example.question, *(p.text for step in demonstration.steps for p in step.passages)]
        assert any(demonstration.answer in text for text in seen)
        assert len(demonstration.steps) <= 3
    assert 300 < answered < 900


def test_demonstrations_use_no_held_out_entity() -> None:
    held_out = {entity.name for entity in world.real_entities() if entity.split != "train"}
    shared = held_out & {name for e in world.real_entities() if e.split == "train" for name in e.facts.values()}
    source = DemonstrationSource(size=400, seed=2, invented=0.0)
    for i in range(400):
        titles = {passage.title for step in source[i].steps for passage in step.passages}
        assert not titles & (held_out - shared)


def test_demonstrations_are_reproducible() -> None:
    one, other = DemonstrationSource(size=10, seed=4), DemonstrationSource(size=10, seed=4)
    assert [one[i] for i in range(10)] == [other[i] for i in range(10)]
    assert one[0] != DemonstrationSource(size=10, seed=5)[0]


def test_drills_ask_only_for_what_they_show() -> None:
    drills = ReadingDrills(seed=3)
    kinds = collections.Counter()
    for i in range(200):
        drill = drills[i]
        (shown, learnt), *rest = drill
        assert not learnt
        assert shown.count("\n") == 4
        wanted = [text.strip() for text, learnt in rest if learnt]
        assert len(wanted) >= 2
        kinds[all(text in shown.split("\n") for text in wanted)] += 1
        assert all(text in shown for text in wanted), drill
    assert min(kinds.values()) > 40  # passages again, and questions
    assert drills[0] == ReadingDrills(seed=3)[0]
    assert drills[0] != ReadingDrills(seed=4)[0]
