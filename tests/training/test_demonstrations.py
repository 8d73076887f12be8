"""Episodes that were written to files, as demonstrations: which are learnt, and what of them."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.types import Episode, Example, Shown, Turn
from routerl_jax.evaluation.records import episode_of, episode_record, write_records
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.recipes.r1_searcher import R1SearcherGrammar
from routerl_jax.training import sft
from routerl_jax.training.config import AgentConfig, EvaluationConfig, KnowledgeConfig, TrainConfig, WarmStartConfig
from routerl_jax.training.demonstrations import (
    Worked,
    drawn,
    mixed,
    open_demonstrations,
    shown_questions,
    shuffled,
    sight_demonstrations,
    then,
)
from routerl_jax.training.setup import build_recipe
from tests import seeing, tiny
from tests.recipes import traces
from tests.recipes.transcripts import read_transcript
from tests.training.small_run import make_sft_config

GRAMMAR = R1SearcherGrammar(tools=("text",))


def records() -> list[dict[str, Any]]:
    """Our five rollouts: two are right, one of them has two searches."""
    examples = [
        Example(id=row["id"], question=row["question"], answers=tuple(row["golden_answers"])) for row in traces.ROWS
    ]
    return [
        episode_record(read_transcript(example, row["trace"], GRAMMAR), step=0)
        for example, row in zip(examples, traces.ROWS)
    ]


def make_config(source: pathlib.Path, **changes: Any) -> TrainConfig:
    warm_start = WarmStartConfig(demonstrations=str(source), examples=2, vocabulary=400)
    return make_sft_config(
        agent=AgentConfig(grammar="r1_searcher", prompt_suffix="<think>"),
        knowledge={"text": KnowledgeConfig()},
        evaluation=EvaluationConfig(every=1, normalizer="r1_searcher"),
        warm_start=dataclasses.replace(warm_start, **changes),
        steps=1,
    )


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    rows = records()
    write_json_lines(tmp_path / "episodes" / "a" / "step-000000.jsonl", rows[:2])
    write_json_lines(tmp_path / "episodes" / "step-000001.jsonl", rows[2:])
    return tmp_path / "episodes"


def agent_of(config: TrainConfig) -> SearchAgent:
    return build_recipe(config).agent


def test_a_record_gives_its_episode_back(source: pathlib.Path) -> None:
    for record, file in zip(records()[2:], read_rows(source / "step-000001.jsonl")):
        place, row = file
        assert episode_record(episode_of(row, place), step=0) == record


def test_the_good_ones_are_learnt(source: pathlib.Path) -> None:
    config = make_config(source)
    agent = agent_of(config)
    training, held_out = open_demonstrations(config, agent)
    names = {training[i].example.id for i in range(10)}
    assert names | {held_out[i].example.id for i in range(10)} == {"none", "two"}
    assert len(names) == 1  # the other question is held out
    everything, _ = open_demonstrations(make_config(source, select={"format": 1.0}, least=1.0), agent)
    order = [everything[i].example.id for i in range(8)]
    assert len(set(order)) == 4  # of five, which obey the protocol, one is held out
    assert set(order[:4]) == set(order[4:])  # an epoch has each once
    again, _ = open_demonstrations(make_config(source, select={"format": 1.0}, least=1.0), agent)
    assert [again[i].example.id for i in range(8)] == order


def test_what_the_policy_wrote_is_learnt(source: pathlib.Path) -> None:
    config = make_config(source, select={"searches": 1.0}, least=2.0)
    agent, tokenizer = agent_of(config), tiny.tokenizer()
    with pytest.raises(
        ValueError, match=r"1 of 5 episodes, on 1 questions, reach config.warm_start.least; two questions"
    ):
        open_demonstrations(config, agent)
    everything, _ = open_demonstrations(make_config(source, select={}, least=0.0), agent)
    worked = next(one for one in (everything[i] for i in range(4)) if one.example.id != "none")
    row = next(row for row in traces.ROWS if row["id"] == worked.example.id)
    sequence = worked.sequence(agent, tiny.model())
    text = tokenizer.decode(sequence.tokens)
    assert text == f"Question: {row['question']}\n<think>{row['trace']}"
    own = "".join(turn["text"] for turn in records()[traces.ROWS.index(row)]["turns"])
    assert tokenizer.decode(sequence.tokens[sequence.loss_mask]) == own


@pytest.mark.slow
def test_a_supervised_run_on_episodes(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rejection-sampled baseline from end to end, the protocol's marks single tokens of its vocabulary."""
    monkeypatch.setattr(sft, "_HELD_OUT", 2)
    monkeypatch.setattr(sft, "_VOCABULARY_EXAMPLES", 4)
    monkeypatch.setattr(sft, "build_mesh", lambda _: single_device_mesh())
    metrics = sft.train_sft(make_config(source, select={"format": 1.0}, least=1.0), tmp_path / "run")
    assert np.isfinite(metrics["held_out/nll"])
    vocabulary = json.loads((tmp_path / "run" / "policy" / "tokenizer.json").read_text())
    assert set(GRAMMAR.special_tokens) <= {token["content"] for token in vocabulary["added_tokens"]}


def test_pictures_that_were_in_memory_alone_cannot_be_learnt_from(tmp_path: pathlib.Path) -> None:
    """Their names are empty. Episodes that are not learnt may have had such."""
    path, good = tmp_path / "episodes.jsonl", {"none", "two"}
    config = make_config(path)
    write_json_lines(path, [{**row, "images": [] if row["id"] in good else [""]} for row in records()])
    assert open_demonstrations(config, agent_of(config))
    write_json_lines(path, [{**row, "images": [""]} for row in records()])
    with pytest.raises(ValueError, match=r"the pictures of 2 episodes, the first at question 'none', were in memory"):
        open_demonstrations(config, agent_of(config))


def test_episodes_with_pictures_are_learnt_as_they_were_seen(tmp_path: pathlib.Path) -> None:
    """A page from a file, and a crop of it that was in memory: tokens, pictures and mask as a rollout feeds them."""
    page = tmp_path / "page.png"
    Image.fromarray(seeing.picture(1)).save(page)
    crop = Image.open(page).crop((4, 4, 20, 20))
    images = seeing.image_tokens()
    shown = [Shown(passage="p", image=page), Shown(image=crop, parent="d", box=(4.0, 4.0, 20.0, 20.0))]
    shown = [dataclasses.replace(item, digest=images.process(item.image).digest) for item in shown]
    observation, first, last = (
        f"it shows: {seeing.MARKER}{seeing.MARKER}\n",
        "<search>flag</search>",
        "<answer>x</answer>",
    )
    turns = [
        Turn(text=first, stop_reason="stop", tokens=1, observation=observation, shown=shown),
        Turn(text=last, stop_reason="stop", tokens=1),
    ]
    episodes = [
        Episode(
            example=Example(id=name, question=f"{name}?", answers=("x",)),
            sample=0,
            answer="x",
            turns=turns,
            sequences=[],
        )
        for name in ("one", "two")
    ]
    write_records(tmp_path / "episodes.jsonl", episodes)
    config = make_config(tmp_path / "episodes.jsonl", select={"em": 1.0}, least=1.0)
    agent = agent_of(config)
    training, _ = open_demonstrations(config, agent)
    found = training[0].sequence(agent, seeing.model())
    ledger, tokenizer = Ledger(), seeing.tokenizer()
    ledger.feed(agent.opening(training[0].example, tokenizer))
    for text in (first, last):
        ids = tokenizer.encode(text)
        ledger.sample(ids, [0.0] * len(ids), version=0)
        if text == first:
            ledger.feed(**images.fed(tokenizer.encode(observation), [page, crop], ledger.next_position))
    expected = ledger.sequence()
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(found.loss_mask, expected.loss_mask)
    assert [(at, image.digest) for at, image in found.images] == [(at, image.digest) for at, image in expected.images]
    write_json_lines(tmp_path / "lost.jsonl", [episode_record(episode) for episode in episodes])
    with pytest.raises(ValueError, match=r"the pictures of 2 episodes, the first at question 'one', were in memory"):
        open_demonstrations(make_config(tmp_path / "lost.jsonl", select={"em": 1.0}, least=1.0), agent)


def test_conversations_with_pictures(tmp_path: pathlib.Path) -> None:
    """The agent's own prompt, what the assistant wrote to the letter and learnt, pictures as a user's messages and not."""
    for name, seed in (("a.png", 1), ("b.png", 2)):
        Image.fromarray(seeing.picture(seed)).save(tmp_path / name)
    texts = ["<search>flag</search>", "<bbox>[1, 2, 9, 9]</bbox>", "<answer>x</answer>"]

    def row(question: str) -> dict[str, Any]:
        contents = [f"Do this and that. Question: {question}", texts[0], "<image>", texts[1], "<image>", texts[2]]
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        return {"messages": said, "images": ["a.png", "b.png"]}

    write_json_lines(tmp_path / "sft.jsonl", [row("one?"), row("two?")])
    config = make_config(pathlib.Path("x"), demonstrations=f"messages:{tmp_path / 'sft.jsonl'}")
    agent = agent_of(config)
    training, held_out = open_demonstrations(config, agent)
    assert (len(training), len(held_out)) == (1, 1)
    question = training[0].example.question
    assert {question, held_out[0].example.question} == {"one?", "two?"}
    assert {one.question for one in shown_questions(config.warm_start.demonstrations)} == {"one?", "two?"}
    model, tokenizer = seeing.model(), seeing.tokenizer()
    found = training[0].sequence(agent, model)
    digests = [seeing.image_tokens().process(tmp_path / name).digest for name in ("a.png", "b.png")]
    assert [image.digest for _, image in found.images] == digests
    assert tokenizer.decode(found.tokens[found.loss_mask]) == "".join(texts)
    pads = tokenizer.decode(found.tokens).split("<|image_pad|>")
    assert pads[0] == f"Question: {question}\n<think>{texts[0]}\nUser: <|vision_start|>"
    assert pads[-1] == f"<|vision_end|>\nAssistant: {texts[2]}"
    with pytest.raises(ValueError, match=r"demonstration '[12]': an observation shows a picture|sees no images"):
        training[0].sequence(agent, tiny.model())


def test_mistakes_in_conversations_are_named(tmp_path: pathlib.Path) -> None:
    agent = agent_of(make_config(tmp_path))
    for name, message in (
        ("lost.jsonl", r"config\.warm_start\.demonstrations: .*lost.jsonl does not exist"),
        ("lost.txt[pictures]", r"config\.warm_start\.demonstrations: .*lost.txt does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            open_demonstrations(make_config(tmp_path, demonstrations=f"messages:{tmp_path / name}"), agent)
    write_json_lines(tmp_path / "sft.jsonl", [{"messages": []}])
    with pytest.raises(ValueError, match=r"sft.jsonl, line 1: key 'messages' must be a list"):
        open_demonstrations(make_config(tmp_path, demonstrations=f"messages:{tmp_path / 'sft.jsonl'}"), agent)


def test_mistakes_are_named(tmp_path: pathlib.Path) -> None:
    agent = agent_of(make_config(tmp_path))
    with pytest.raises(
        ValueError, match=r"neither 'atlas' nor 'annotated' nor 'drawn' nor a .jsonl file of episodes nor a directory"
    ):
        open_demonstrations(make_config(tmp_path), agent)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1: no episode as a run .*: key 'id' is missing"):
        open_demonstrations(make_config(tmp_path), agent)
    row = {**records()[0], "turns": [{"words": ""}]}
    with pytest.raises(ValueError, match=r"x, line 3: no episode as a run .*: key 'action' is missing"):
        episode_of(row, RowLocation(pathlib.Path("x"), "line", 3))


def made(config: TrainConfig, agent: SearchAgent) -> tuple[Any, Any]:
    """What `config.warm_start.demonstrations` can name."""
    example = Example(id="mine", question="Who?", answers=("me",))
    worked = [Worked(example, [(f" {config.agent.k}\n", True)]), Worked(example, [(" me\n", True)], bare=True)]
    return worked, worked[:1]


def test_demonstrations_can_be_made_by_a_function() -> None:
    config = make_config(pathlib.Path(f"made:{__name__}:made"))
    agent = agent_of(config)
    shown, held_out = open_demonstrations(config, agent)
    assert (len(shown), len(held_out)) == (2, 1)
    assert shown[0].pieces == [(f" {config.agent.k}\n", True)]
    broken = make_config(pathlib.Path("made:tests.training.test_demonstrations:missing"))
    with pytest.raises(ValueError, match=r"config\.warm_start\.demonstrations: cannot load maker of demonstrations"):
        open_demonstrations(broken, agent)


@pytest.mark.slow
def test_streams_can_be_mixed() -> None:
    listed = [Worked(Example(id=str(number), question="Who?", answers=("x",)), []) for number in range(8)]
    plans, sight = shuffled(listed, seed=3), sight_demonstrations(seed=3)
    stream = mixed(plans, sight, every=5)
    seen = [stream[index] for index in range(16)]
    assert [one.bare for one in seen] == [index % 5 == 0 for index in range(16)]
    assert [one.example.id for one in seen if one.bare] == [sight[index].example.id for index in range(4)]
    assert [one for one in seen if not one.bare] == [plans[index] for index in range(16) if index % 5]
    epochs = [[plans[index].example.id for index in range(start, start + 8)] for start in (0, 8)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [str(number) for number in range(8)]
    assert epochs[0] != epochs[1]
    (piece, learnt), *none = sight[0].pieces
    assert (learnt, none) == (True, [])
    assert piece.startswith(" ")
    assert piece.endswith("\n")


def test_a_stream_begins_with_another_and_drawn_ones_are_functions_of_seed_and_index() -> None:
    def draw(rng: np.random.Generator) -> Worked:
        return Worked(Example(id=str(rng.integers(1000)), question="Who?", answers=("x",)), [])

    first, rest = drawn([1, 0], draw), drawn([1, 1], draw)
    stream = then(first, 3, rest)
    assert [stream[index] for index in range(6)] == [
        *map(first.__getitem__, range(3)),
        *map(rest.__getitem__, (3, 4, 5)),
    ]
    assert [stream[index] for index in range(6)] == [stream[index] for index in range(6)]
    assert len({first[index].example.id for index in range(9)} | {rest[0].example.id}) > 5
    assert len(stream) == 2**31


def test_a_bare_one_has_no_prompt_of_an_agent(tmp_path: pathlib.Path) -> None:
    config = make_config(tmp_path)
    agent, model = agent_of(config), tiny.model()
    prompted, bare = (one.sequence(agent, model) for one in made(config, agent)[0])
    assert model.tokenizer is not None
    assert model.tokenizer.decode(bare.tokens.tolist()) == "Who? me\n"
    assert model.tokenizer.decode(bare.tokens[bare.loss_mask].tolist()) == " me\n"
    assert model.tokenizer.decode(prompted.tokens.tolist()).startswith("Question: Who?")
