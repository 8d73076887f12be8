"""Atlas: answers are where the gold path says and nowhere else, splits share no entity, practice shows no routing."""

import collections
import hashlib
import io
import itertools
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routerl_jax.core.types import Passage
from routerl_jax.data.atlas import flags, world
from routerl_jax.data.atlas.demonstrations import UNKNOWN, DemonstrationSource, ReadingDrills, Scene, StepSource
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.questions import (
    PICTURES,
    SHOWN,
    AtlasExamples,
    Hop,
    Question,
    picture_passages,
    real_questions,
)
from routerl_jax.data.atlas.questions import captions as flag_captions
from routerl_jax.data.readers import open_dataset
from routerl_jax.data.trajectories import golden_steps
from routerl_jax.rewards.metrics import exact_match
from routerl_jax.training.golden import golden_trajectory

SPLITS: tuple[world.Split, ...] = ("train", "validation", "test")


@pytest.fixture(scope="module")
def questions() -> dict[str, list[Question]]:
    return {split: list(real_questions(split)) for split in SPLITS}


@pytest.fixture(scope="module")
def records() -> list[world.Record]:
    return world.records(world.real_entities())


@pytest.mark.parametrize(
    ("split", "none", "single", "multi", "crossing"),
    # A third of the questions about countries alone is left out, so that no knowledge base can be ignored.
    [("train", 437, 3076, 1788, 1472), ("validation", 95, 654, 237, 164), ("test", 221, 1458, 759, 621)],
)
def test_number_of_questions_of_every_kind(
    questions: dict[str, list[Question]], split: str, none: int, single: int, multi: int, crossing: int
) -> None:
    kinds = collections.Counter(question.kind for question in questions[split])
    assert kinds == {"none": none, "single": single, "multi": multi}
    assert {hop.kb for question in questions[split] for hop in question.hops} == set(world.KNOWLEDGE_BASES)
    assert sum(len({hop.kb for hop in q.hops}) > 1 for q in questions[split]) == crossing  # need two knowledge bases


def test_ids_are_unique(questions: dict[str, list[Question]]) -> None:
    ids = [question.id for split in SPLITS for question in questions[split]]
    assert len(ids) == len(set(ids))


def test_splits_share_no_entity(questions: dict[str, list[Question]]) -> None:
    names = {split: {name for question in questions[split] for name in question.entities} for split in SPLITS}
    assert not names["train"] & names["test"]
    assert not names["train"] & names["validation"]
    assert not names["validation"] & names["test"]


def test_every_answer_is_in_its_gold_passage(questions: dict[str, list[Question]], records: list[world.Record]) -> None:
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
    questions: dict[str, list[Question]], records: list[world.Record]
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


def test_multi_hop_questions_hide_their_entity(questions: dict[str, list[Question]]) -> None:
    for question in (question for split in SPLITS for question in questions[split] if question.kind == "multi"):
        assert question.hops[0].value not in question.text or len(question.hops[0].value) < 5, question
        assert question.hops[0].value in question.hops[1].query  # the second step needs what the first found


def test_backward_questions_are_unambiguous(questions: dict[str, list[Question]]) -> None:
    """ "The country whose capital is X": one entity only."""
    found = collections.defaultdict(set)
    for question in (question for split in SPLITS for question in questions[split]):
        for hop in question.hops:
            if hop.query.startswith("Which "):
                found[hop.query].add(hop.value)
    assert len(found) > 200
    assert all(len(values) == 1 for values in found.values())


def test_the_data_set_has_the_questions_of_the_world(questions: dict[str, list[Question]]) -> None:
    source = open_dataset("atlas/validation")
    assert isinstance(source, AtlasExamples)
    assert len(source) == len(questions["validation"])
    for i in (0, 7, len(source) - 1):
        example, question = source[i], questions["validation"][i]
        assert (example.id, example.question, example.answers) == (question.id, question.text, (question.answer,))
        assert [hop["passage_id"] for hop in example.metadata["path"]] == [hop.passage_id for hop in question.hops]
        assert example.metadata["kind"] == question.kind


def test_questions_of_some_kinds(questions: dict[str, list[Question]]) -> None:
    source = open_dataset("atlas/validation/single+multi")
    wanted = [question.id for question in questions["validation"] if question.kind != "none"]
    assert [source[i].id for i in range(len(source))] == wanted
    assert 0 < len(open_dataset("atlas/validation/none")) == len(questions["validation"]) - len(wanted)


def test_unknown_knowledge_base() -> None:
    with pytest.raises(ValueError, match=r"no knowledge base 'pictures'; it has text, table, elements"):
        world.passages_of("pictures")


def test_facts_are_clean() -> None:
    rows = json.loads(world.FACTS.read_text(encoding="utf-8"))
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(value and value == value.strip() for row in rows for value in row.values())


@pytest.mark.parametrize(
    ("amount", "text"),
    [(7, "7"), (468, "468"), (10_991, "11 thousand"), (31_244_005, "31.2 million"), (1_210_000_000, "1210 million")],
)
def test_rounded(amount: float, text: str) -> None:
    assert world.rounded(amount) == text


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


def statistic(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-squared."""
    return float(((counts - expected) ** 2 / expected).sum())


def test_demonstrations_show_no_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which knowledge base is searched, and whether it has the fact, depends on nothing that was said or found before.

    The knowledge base is uniform given where the fact lies and, from the second search on, given the one searched before
    and its success; success has chance `hit` given where the fact lies and which knowledge base is searched.
    """
    asked: list[Hop] = []
    retrieve = Scene.retrieve

    def recorded(self: Scene, hop: Hop, *arguments: Any) -> tuple[Passage, ...]:
        asked.append(hop)
        return retrieve(self, hop, *arguments)

    monkeypatch.setattr(Scene, "retrieve", recorded)
    source = DemonstrationSource(size=16_000, seed=11)
    tools: dict[tuple[str, str | None, bool], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    hits: dict[tuple[str, str], list[bool]] = collections.defaultdict(list)
    for i in range(len(source)):
        asked.clear()
        previous, hit = None, False
        for step, hop in zip(source[i].steps, asked, strict=True):
            assert step.query == hop.query
            tools[hop.kb, previous, hit][step.tool] += 1
            previous, hit = step.tool, hop.passage_id in [passage.id for passage in step.passages]
            hits[hop.kb, step.tool].append(hit)
    # Critical values for p = 1e-4, as there are dozens of cells: 18.4 at two degrees of freedom, 15.1 at one.
    kbs = world.KNOWLEDGE_BASES
    assert set(tools) == {
        (gold, *before) for gold in kbs for before in [(None, False), *itertools.product(kbs, (True, False))]
    }
    for cell, drawn in tools.items():
        counts = np.array([drawn[kb] for kb in kbs])
        assert counts.sum() > 30, cell
        assert statistic(counts, np.full(3, counts.sum() / 3)) < 18.4, (cell, drawn)
    assert set(hits) == set(itertools.product(kbs, kbs))
    for cell, found in hits.items():
        counts = np.array([sum(found), len(found) - sum(found)])
        assert statistic(counts, len(found) * np.array([source.hit, 1 - source.hit])) < 15.1, (cell, counts)


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


def test_answers_are_forced_under_every_budget() -> None:
    """After one, two or three searches a demonstration may have to answer, with what it found or without."""
    source = DemonstrationSource(size=1000, seed=8)
    shown = [source[i] for i in range(1000)]
    kinds = collections.Counter((len(d.steps), d.answer == UNKNOWN) for d in shown if d.forced)
    assert set(kinds) == {(searches, lost) for searches in (1, 2, 3) for lost in (True, False)}
    assert min(kinds.values()) > 30
    assert all(d.forced for d in shown if len(d.steps) == 3)
    assert sum(not d.forced for d in shown) > 300
    one = DemonstrationSource(size=50, seed=8, max_searches=1)  # too few for two hops
    assert {len(one[i].steps) for i in range(50)} == {0, 1}


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


# --- pictures ----------------------------------------------------------------------------------------------------------


def test_the_usual_questions_are_those_of_before_there_were_pictures() -> None:
    """Published numbers are of these: ids, words, answers and gold paths, in their order (digest of the version without)."""
    source = open_dataset("atlas/validation")
    digest = hashlib.sha256()
    for i in range(len(source)):
        one = source[i]
        row = [one.id, one.question, one.answers, len(one.images), dict(one.metadata)]
        digest.update(json.dumps(row, sort_keys=True).encode())
    assert digest.hexdigest()[:16] == "c540449651a157a8"


@pytest.mark.parametrize(
    ("split", "single", "double"), [("train", 218, 424), ("validation", 44, 86), ("test", 120, 214)]
)
def test_visual_questions(split: str, single: int, double: int, questions: dict[str, list[Question]]) -> None:
    source = open_dataset(f"atlas/{split}/visual")
    assert isinstance(source, AtlasExamples)
    examples = [source[i] for i in range(len(source))]
    assert collections.Counter(len(example.metadata["path"]) for example in examples) == {1: single, 2: double}
    about = {name for question in questions[split] for name in question.entities}
    captions = {record.passage.id: record for record in flag_captions(world.real_entities())}
    passages = {record.passage.id: record for record in world.records(world.real_entities())} | captions
    for example in examples:
        assert example.metadata["kind"] == "visual"
        assert set(example.metadata["entities"]) <= about
        assert not any(name in example.question for name in example.metadata["entities"])  # only the picture tells
        first, *rest = example.metadata["path"]
        assert first["kb"] == "text_image"
        assert first["value"] in captions[first["passage_id"]].passage.text
        assert all(hop["kb"] in ("text", "table") for hop in rest)
        for hop in rest:
            assert hop["value"] in passages[hop["passage_id"]].passage.text
        assert example.answers == (example.metadata["path"][-1]["value"],)
    assert len(open_dataset(f"atlas/{split}/single+visual")) == len(examples) + len(
        open_dataset(f"atlas/{split}/single")
    )


def test_a_question_shows_another_picture_than_the_knowledge_base_holds() -> None:
    source = open_dataset("atlas/validation/visual")
    example = source[0]
    [shown], kept = example.images, flags.flag(example.metadata["entities"][0])
    assert shown != kept
    with Image.open(io.BytesIO(shown)) as one, Image.open(io.BytesIO(kept)) as other:
        assert (one.format, other.format) == ("JPEG", "PNG")
        assert one.size != other.size
    assert open_dataset("atlas/validation/visual")[0].images == example.images


def test_every_country_has_a_caption_with_its_flag() -> None:
    passages = picture_passages()
    countries = [entity.name for entity in world.real_entities() if entity.kind == "country"]
    assert [passage.title for passage in passages] == countries
    assert all(passage.title in passage.text and passage.image.startswith("data:image/png") for passage in passages)
    assert len({passage.image for passage in passages}) == len(countries)
    assert (
        sum(": " in passage.text for passage in passages) == 151
    )  # the source says of these what is on them, in few words


def test_a_made_up_flag_is_as_it_is_described() -> None:
    png, said = flags.invented_flag("Nowhere"), str(flags.invented_design("Nowhere"))
    assert png == flags.invented_flag("Nowhere")
    assert png != flags.invented_flag("Elsewhere")
    count, direction = said.split()[:2]
    with Image.open(io.BytesIO(png)) as picture:
        edge = np.asarray(picture)[:, 0] if direction == "horizontal" else np.asarray(picture)[0]
    bands = 1 + int((np.abs(np.diff(edge.astype(int), axis=0)).sum(1) > 0).sum())
    assert bands == {"two": 2, "three": 3, "four": 4, "five": 5}[count]


TOOLS = (*world.KNOWLEDGE_BASES, PICTURES)


def test_worked_steps_show_no_routing() -> None:
    """The retriever of a route is uniform whatever the question; what an answer says stands in its documents."""
    source = StepSource(size=3000, seed=7, tools=TOOLS)
    routes: dict[bool, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    kinds, unknown = collections.Counter(), 0
    for i in range(len(source)):
        example = source[i]
        step = example.metadata["step"]
        kinds[step.kind] += 1
        assert len(example.images) == ("flag" in example.question)
        if step.kind == "route" and step.query != "none":
            routes[step.query == SHOWN][step.retrievers[0]] += 1
        if step.kind == "answer":
            [answer] = step.answers
            unknown += answer == UNKNOWN
            assert answer == UNKNOWN or any(answer in document.text for document in step.documents)
            assert len(step.documents) == 2
        assert len(step.history) <= 3
        assert step.kind != "route" or len(step.history) < 3
    assert min(kinds.values()) > 300
    assert 0.3 < unknown / kinds["answer"] < 0.5  # hit=0.6
    for counter in routes.values():  # 21.1: p = 1e-4 at three degrees of freedom
        counts = np.array([counter[f"{tool.replace('_', ' ')} retriever"] for tool in TOOLS])
        assert counts.sum() == counter.total() > 100
        assert statistic(counts, np.full(4, counts.sum() / 4)) < 21.1
    assert source[5] == StepSource(size=9, seed=7, tools=TOOLS)[5]
    assert source[5] != StepSource(size=9, seed=8, tools=TOOLS)[5]


def test_worked_steps_are_about_no_held_out_entity() -> None:
    held_out = {entity.name for entity in world.real_entities() if entity.split != "train"}
    trained_on = {entity.name for entity in world.real_entities() if entity.split == "train"}
    trained_on = sorted(trained_on, key=len, reverse=True)
    values = {value for e in world.real_entities() if e.split == "train" for value in e.facts.values()}
    source = StepSource(size=300, seed=1, invented=0.0, tools=TOOLS)
    for i in range(300):
        step = source[i].metadata["step"]
        asked = [source[i].question, step.query, *(query for query, _ in step.history)]
        for name in trained_on:  # Guinea is held out, Papua New Guinea is not
            asked = [text.replace(name, "") for text in asked]
        for name in held_out - values:
            assert not any(f" {name}?" in text or f" of {name} " in text for text in asked)


def test_without_a_picture_knowledge_base_no_step_shows_one() -> None:
    source = StepSource(size=300, seed=1, tools=world.KNOWLEDGE_BASES)
    assert not any(source[i].images for i in range(300))


def test_a_golden_trajectory_is_the_gold_path() -> None:
    source = open_dataset("atlas/validation/visual")
    example = next(source[i] for i in range(len(source)) if len(source[i].metadata["path"]) == 2)
    first, second = example.metadata["path"]
    found = [[Passage(id=hop["passage_id"], title="", text=f"about {hop['value']}")] for hop in (first, second)]
    trajectory = golden_trajectory(example, found, ["flag.jpg"])
    assert trajectory is not None
    assert (trajectory.pattern, trajectory.images) == ("RARARA", ("flag.jpg",))
    steps = list(golden_steps(trajectory))
    assert [step.retrievers for step in steps[::2]] == [
        ("text image retriever",),
        (f"{second['kb']} retriever",),
        ("none",),
    ]
    assert [step.answers for step in steps[1::2]] == [(first["value"],), (second["value"],), example.answers]
    assert steps[4].history == ((first["query"], first["value"]), (second["query"], second["value"]))
    assert steps[1].documents[0].retriever == "text image retriever"
    assert golden_trajectory(example, [found[0], []]) is None  # what it asks for was not found
