"""A planner and a grounder show how to search pages and look closer: what they are asked, what is written down, what is
rejected, kills, balance, and learning from it."""

from __future__ import annotations

import base64
import collections
import dataclasses
import io
import json
import math
import pathlib
import signal
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs import vrag_rl_data
from routerl_jax.agents.driver import run as run_agent
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Example, Passage, Sequence
from routerl_jax.data.atlas import pages
from routerl_jax.data.rounds import read_messages
from routerl_jax.extras.curation.expert_job import ExpertsReport, balanced
from routerl_jax.extras.curation.experts import ExpertJobConfig
from routerl_jax.extras.curation.job import ReplyFile
from routerl_jax.models.huggingface import load_without_weights, save_pretrained
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.recipes.vrag_rl.protocol import VRAGTags
from routerl_jax.services.config import JudgeConfig
from routerl_jax.training import config as schema
from routerl_jax.training.demonstrations import Worked, open_demonstrations
from routerl_jax.training.setup import build_recipe
from tests import seeing
from tests.agents.scripted import SeeingScript
from tests.extras.curation import expert_run
from tests.extras.curation.expert_run import (
    Messages,
    Titles,
    config,
    is_planner,
    knowing,
    located,
    question_in,
    run,
    text_of,
)
from tests.programs import finish, refusal, start
from tests.web_servers import Chats, Server, serving

TAGS = VRAGTags(tools=("pages",))
FRAME = (160, 120)  # of a page as the policy sees it: a pixel is 8.4 raw ones


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small policy that sees pages at 160 x 120, as a directory."""
    directory = tmp_path_factory.mktemp("student") / "policy"
    model = seeing.model(context=4096)
    model.image_processor = dataclasses.replace(seeing.PROCESSOR, max_pixels=FRAME[0] * FRAME[1])
    save_pretrained(model, directory)
    return directory


@pytest.fixture(scope="module")
def policy(student: pathlib.Path) -> VisionLanguageModel:
    model = load_without_weights(str(student))
    assert isinstance(model, VisionLanguageModel)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where pages are drawn, once."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture
def chats() -> Chats:
    return Chats(knowing)  # type: ignore[arg-type]


@pytest.fixture
def server(chats: Chats) -> Iterator[Server]:
    with serving(chats) as found:
        yield found


@pytest.fixture
def make(
    tmp_path: pathlib.Path, folder: pathlib.Path, student: pathlib.Path, server: Server
) -> Callable[..., ExpertsReport]:
    """Runs a job of some questions in `tmp_path / "out"`."""

    def making(examples: list[Example], workdir: str = "out", **changes: Any) -> ExpertsReport:
        data = expert_run.write(tmp_path / "questions.jsonl", examples)
        return run(tmp_path / workdir, config(data, student, **changes), f"{server.url}/v1", Titles(folder))

    return making


def journal(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, (workdir / "questions.jsonl").read_text().splitlines())}


def rows(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, (workdir / "demonstrations.jsonl").read_text().splitlines())}


def pictures(message: dict[str, Any]) -> list[Image.Image]:
    parts = message["content"] if isinstance(message["content"], list) else []
    uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) for uri in uris]


# --- what is written down ---


def test_rows_are_what_the_policy_s_own_rollout_would_have_been(
    make: Callable[..., ExpertsReport],
    tmp_path: pathlib.Path,
    folder: pathlib.Path,
    student: pathlib.Path,
    policy: VisionLanguageModel,
) -> None:
    """Token by token, pictures included: the agent, whose policy writes the same turns, is shown the same pages and crops."""
    examples = expert_run.questions(6)
    report = make(examples)
    assert report.accepted == report.written == {"questions": 6}
    assert report.accepted_actions == {
        "search > answer": 2,
        "search > look > answer": 2,
        "search > look > search > look > answer": 2,
    }
    assert (report.steps, report.unusable, report.reasons) == ({2: 2, 3: 2, 5: 2}, {}, {})
    assert (report.use.calls, report.grounder_use.calls, report.searches) == (20, 6, 8)
    agent = config("x", student).build_agent()
    found = [recorded for _, recorded in read_messages(tmp_path / "out" / "demonstrations.jsonl")]
    assert {one.example.id for one in found} == {example.id for example in examples}
    for recorded in found:
        learnt = Worked(recorded.example, agent.recorded_pieces(recorded)).sequence(agent, policy)
        texts = [item.text for item in recorded.rounds]
        engine = SeeingScript(lambda _e, _s, turn, texts=texts: texts[turn], max_length=4000, canonical=True)
        engine.images = policy.image_tokens
        (episode,) = run_agent(agent, [recorded.example], engine, {"pages": Titles(folder)})
        assert episode.answer == recorded.example.answers[0]
        assert episode.invalid_actions == 0
        same(learnt, episode.sequences[0])
        assert len(learnt.images) == len(texts) - 1


def same(one: Sequence, other: Sequence) -> None:
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
    np.testing.assert_array_equal(one.positions, other.positions)
    assert [(start, image.digest) for start, image in one.images] == [(s, image.digest) for s, image in other.images]


def test_boxes_are_in_the_frame_of_the_policy(
    make: Callable[..., ExpertsReport], chats: Chats, tmp_path: pathlib.Path
) -> None:
    """The grounder marks a plate of 112 x 28 in a picture of 1120 x 840; the policy's box, in 160 x 120, is at least 28 x 28,
    in whole numbers, and what it is shown holds the plate and little more."""
    examples = [example for example in expert_run.questions(6) if example.metadata["type"] == "fine"]
    make(examples, picture_pixels=1120 * 840)
    asked = [body["messages"] for body in chats.bodies if not is_planner(body["messages"])]
    assert {picture.size for messages in asked for picture in pictures(messages[0])} == {(1120, 840)}
    assert all(len(messages) == 1 for messages in asked)
    made = rows(tmp_path / "out")
    for example in examples:
        messages, images = made[example.id]["messages"], made[example.id]["images"]
        action = TAGS.parse(messages[4]["content"])
        left, top, right, bottom = action.box
        assert all(value.is_integer() for value in action.box)
        assert 0 <= left < right <= FRAME[0]
        assert 0 <= top < bottom <= FRAME[1]
        assert min(right - left, bottom - top) >= 28
        assert max(right - left, bottom - top) <= 30
        (name,) = example.metadata["supporting"]
        gold = example.metadata["boxes"][name]
        scale = [Fraction(pages.SIZE[i % 2], FRAME[i % 2]) for i in range(4)]
        edges = [Fraction(value) * by for value, by in zip(action.box, scale)]
        cut = math.floor(edges[0]), math.floor(edges[1]), math.ceil(edges[2]), math.ceil(edges[3])
        slack = 2  # of the grounder's whole pixels, 1.2 raw ones, and of rounding them
        assert cut[0] <= gold[0] + slack
        assert cut[1] <= gold[1] + slack
        assert cut[2] >= gold[2] - slack
        assert cut[3] >= gold[3] - slack
        page = Image.open(images[0]).convert("RGB")
        crop = Image.open(tmp_path / "out" / images[1])
        assert images[1].startswith("pictures/")
        np.testing.assert_array_equal(np.asarray(crop), np.asarray(page.crop(cut)))


def test_the_file_is_learnt_from(
    make: Callable[..., ExpertsReport], tmp_path: pathlib.Path, student: pathlib.Path
) -> None:
    """As `demonstrations="messages:FILE"` loads it, by a run of the recipe; a system message tells others how to work."""
    make(expert_run.questions(6))
    (message,) = {row["messages"][0]["content"] for row in rows(tmp_path / "out").values()}
    assert "<bbox>[left, top, right, bottom]</bbox>, in pixels" in message
    training = schema.TrainConfig(
        kind="sft",
        recipe="vrag_rl",
        steps=1,
        model=schema.ModelConfig(path=str(student)),
        agent=config("x", student).agent,
        knowledge={"pages": schema.KnowledgeConfig(source="titles")},
        warm_start=schema.WarmStartConfig(demonstrations=f"messages:{tmp_path / 'out' / 'demonstrations.jsonl'}"),
    )
    learnt, held_out = open_demonstrations(training, build_recipe(training).agent)
    assert (len(learnt), len(held_out)) == (5, 1)


# --- who writes what ---


def thinking(messages: Messages) -> str:
    if is_planner(messages):
        return knowing(messages)
    return f"<thought>There it is, bottom left.</thought>{knowing(messages)}"


@pytest.mark.parametrize("released", [False, True])
def test_the_grounder_gives_the_box_alone_or_the_thought_too(
    make: Callable[..., ExpertsReport], chats: Chats, tmp_path: pathlib.Path, released: bool
) -> None:
    chats.reply = thinking  # type: ignore[assignment]
    examples = [example for example in expert_run.questions(3) if example.metadata["type"] == "fine"]
    make(examples, released=released)
    (row,) = rows(tmp_path / "out").values()
    (asked,) = (body["messages"] for body in chats.bodies if not is_planner(body["messages"]))
    thought = TAGS.parse(row["messages"][4]["content"]).thought
    assert thought == ("There it is, bottom left." if released else "The figures are too small.")
    assert ("inside <thought>" in text_of(asked[0])) == released
    assert "The thought now: The figures are too small." in text_of(asked[0])
    assert "To be looked at: the plate with the value" in text_of(asked[0])
    assert f"(searched for: {examples[0].metadata['supporting_titles'][0]})" in text_of(asked[0])


def test_boxes_on_a_scale(make: Callable[..., ExpertsReport], chats: Chats, tmp_path: pathlib.Path) -> None:
    """A grounder that writes boxes from 0 to 1000 marks the same."""
    examples = [example for example in expert_run.questions(6) if example.metadata["type"] == "fine"]
    make(examples)
    chats.reply = lambda messages: (  # type: ignore[assignment]
        knowing(messages) if is_planner(messages) else f"<box>{located(messages, 1000)}</box>"  # type: ignore[arg-type]
    )
    make(examples, "scaled", box_scale=1000)
    pixels, scaled = (rows(tmp_path / name) for name in ("out", "scaled"))
    for name, row in pixels.items():
        one, other = (TAGS.parse(made["messages"][4]["content"]).box for made in (row, scaled[name]))
        np.testing.assert_allclose(one, other, atol=1)  # rounding to whole numbers of either scale
        assert len(one) == 4


def test_a_gold_page_in_the_place_of_a_bad_search_s(
    make: Callable[..., ExpertsReport], chats: Chats, tmp_path: pathlib.Path
) -> None:
    """With `oracle`, and where the search finds it at all."""
    (example,) = (one for one in expert_run.questions(3) if one.metadata["type"] == "coarse")
    name, topic = example.metadata["entities"][0], example.metadata["topic"]
    assert topic != "people"  # which comes first where nothing else tells

    def vaguely(messages: Messages) -> str:
        return knowing(messages).replace(f"<search>{name}: {topic}", f"<search>{name}")

    chats.reply = vaguely  # type: ignore[assignment]
    shown = {}
    for oracle in (False, True):
        make([example], f"{oracle}", oracle=oracle)
        (row,) = rows(tmp_path / f"{oracle}").values()
        shown[oracle] = pathlib.Path(row["images"][0]).stem
    place = name.replace(" ", "_")
    assert shown == {False: f"{place}-people", True: f"{place}-{topic}"}


# --- what is rejected ---

SEARCH = "<thought>so</thought>\n<search>{title}</search>"
LOOK = "<thought>so</thought>\n<look>the plate</look>"
BOXES = {
    "five numbers": ("<box>[1, 2, 3, 4, 5]</box>", "unreadable box", "has 5 numbers"),
    "words": ("<box>bottom left</box>", "unreadable box", "no list in brackets"),
    "JSON": ('<box>{"left": 1}</box>', "unreadable box", "an object of JSON"),
    "no box": ("It is at the bottom left.", "unreadable box", "no box between"),
    "nothing": ("", "empty reply", "nothing in it"),
    "outside": ("<box>[5000, 5000, 6000, 6000]</box>", "refused box", "lies outside"),
    "reversed": ("<box>[300, 300, 200, 200]</box>", "refused box", "has no area"),
    "huge": ("<box>[0, 0, 1e9, 1e9]</box>", "refused box", "far outside"),
}
PLANS = {
    "words": ("I would look at the page.", "no action", "neither a complete search"),
    "empty": ("", "empty reply", "nothing in it"),
    "thoughts alone": ("<think>hm", "empty reply", "nothing in it"),
    "empty action": ("<thought>so</thought><search> </search>", "no action", "neither"),
    "two actions": (f"<thought>so</thought><search>a</search>{LOOK}", "several actions", "2 actions"),
    "no thought": ("<search>Ghana</search>", "no thought", "no thought"),
    "tags": ("<thought>a <bbox> b</thought><search>Ghana</search>", "out of form", "<bbox>"),
    "a mark": ("<thought>so</thought><search><image></search>", "out of form", "<image>"),
    "early answer": ("<thought>so</thought><answer>4</answer>", "answer before a search", "4"),
    "early look": (LOOK, "look before a page", "the plate"),
    "never": ("<thought>so</thought><search>Ghana: land</search>", "no answer", "in 6 turns"),
    "a dead engine": ("<thought>so</thought><search>broken</search>", "search failed", "down"),
}
AT_ONCE = ("tags", "a mark", "early answer", "early look", "never", "a dead engine")  # nothing is asked again


def test_bad_replies_are_rejected_with_their_reasons(
    make: Callable[..., ExpertsReport], chats: Chats, tmp_path: pathlib.Path
) -> None:
    """Each is asked for once more and told why, and no more than that."""
    fine = [example for example in expert_run.questions(30) if example.metadata["type"] == "fine"]
    bad = [*(("plan", *item) for item in PLANS.items()), *(("box", *item) for item in BOXES.items())]
    # one question for each, its number in its words
    examples = [
        dataclasses.replace(fine[0], id=f"{who}/{name}", question=f"{number} {fine[0].question}")
        for number, (who, name, _) in enumerate(bad)
    ]
    number_of = {example.question: number for number, example in enumerate(examples)}

    def reply(messages: Messages) -> str:
        who, _, (said, _, _) = bad[number_of[question_in(messages)]]
        if is_planner(messages):
            turn = sum(message["role"] == "assistant" for message in messages)
            steps = [said] * 6 if who == "plan" else [SEARCH.format(title=_title(fine[0])), LOOK]
            return steps[turn]
        return said

    chats.reply = reply  # type: ignore[assignment]
    report = make(examples, patience=100)
    made = journal(tmp_path / "out")
    assert not rows(tmp_path / "out")
    for who, name, (_, outcome, detail) in bad:
        record = made[f"{who}/{name}"]
        assert (record["outcome"], record["row"]) == (outcome, None), (who, name)
        assert detail in record["detail"], record["detail"]
    assert report.reasons == collections.Counter(outcome for _, _, (_, outcome, _) in bad)
    again = [(who, outcome) for who, name, (_, outcome, _) in bad if who == "box" or name not in AT_ONCE]
    names = {"plan": "planner", "box": "grounder"}
    assert report.unusable == collections.Counter(
        f"{names[who]}: {outcome}" for who, outcome in again for _ in range(2)
    )
    asked = collections.Counter(question_in(body["messages"]) for body in chats.bodies)
    for number, (who, name, _) in enumerate(bad):
        expected = {"plan": 1 if name in AT_ONCE else 2, "box": 4}[who]
        assert asked[examples[number].question] == (6 if name == "never" else expected), name
    seconds = [text_of(body["messages"][-1]) for body in chats.bodies]
    assert sum("could not be used: the box has 5 numbers" in said for said in seconds) == 1
    assert (
        "- replies that could not be used: grounder: unreadable box 8" in (tmp_path / "out" / "report.md").read_text()
    )


def _title(example: Example) -> str:
    return example.metadata["supporting_titles"][0]


def test_a_second_reply_may_do(make: Callable[..., ExpertsReport], chats: Chats, tmp_path: pathlib.Path) -> None:
    """What is learnt has no trace of the first one."""
    chats.reply = lambda messages: (  # type: ignore[assignment]
        knowing(messages) if "could not be used" in text_of(messages[-1]) else "Hm."  # type: ignore[arg-type]
    )
    examples = expert_run.questions(3)
    report = make(examples)
    assert report.accepted == {"questions": 3}
    assert report.unusable == {"planner: no action": 10, "grounder: unreadable box": 3}
    chats.reply = knowing  # type: ignore[assignment]
    make(examples, "clean")
    strip = {name: _without_pictures(row) for name, row in rows(tmp_path / "out").items()}
    assert strip == {name: _without_pictures(row) for name, row in rows(tmp_path / "clean").items()}


def _without_pictures(row: dict[str, Any]) -> Any:
    return [message["content"] for message in row["messages"]], [pathlib.Path(name).name for name in row["images"]]


def test_wrong_answers_and_further_attempts(
    make: Callable[..., ExpertsReport],
    chats: Chats,
    tmp_path: pathlib.Path,
    student: pathlib.Path,
    policy: VisionLanguageModel,
) -> None:
    """EM decides where there is no judge; the next attempt may be right; short and long trajectories are rejected."""
    examples = expert_run.questions(3)
    seen: collections.Counter[str] = collections.Counter()

    def reply(messages: Messages) -> str:
        said = knowing(messages)
        if "<answer>" in said and is_planner(messages):
            seen[question_in(messages)] += 1
            return said if seen[question_in(messages)] > 1 else "<thought>so</thought><answer>no idea</answer>"
        return said

    chats.reply = reply  # type: ignore[assignment]
    assert make(examples).reasons == {"wrong answer": 3}
    seen.clear()
    report = make(examples, "twice", attempts=2, temperature=0.7)
    assert report.accepted == {"questions": 3}
    assert all(len(record["attempts"]) == 2 for record in journal(tmp_path / "twice").values())
    chats.reply = knowing  # type: ignore[assignment]
    assert make(examples, "short", least_steps=3).reasons == {"too few steps": 1}
    assert make(examples, "whole").accepted == {"questions": 3}
    agent = config("x", student).build_agent()
    lengths = [
        len(Worked(one.example, agent.recorded_pieces(one)).sequence(agent, policy))
        for _, one in read_messages(tmp_path / "whole" / "demonstrations.jsonl")
    ]
    assert make(examples, "long", max_length=sorted(lengths)[1]).reasons == {"too long": 1}


def test_a_judge_decides(
    make: Callable[..., ExpertsReport], server: Server, chats: Chats, tmp_path: pathlib.Path
) -> None:
    """Of what the accepted answers say in other words; one that babbles is heard three times, one that is down ends nothing."""
    examples = expert_run.questions(3)
    verdict = "<judge>True</judge>"

    def reply(messages: Messages) -> str:
        if "examiner" in text_of(messages[0]):
            return verdict
        return knowing(messages).replace("<answer>", "<answer>It should be ")

    chats.reply = reply  # type: ignore[assignment]
    judge = JudgeConfig(model="judge", base_url=f"{server.url}/v1", style="vrag", retries=0)
    assert make(examples, judge=judge).accepted == {"questions": 3}
    assert make(examples, "em").reasons == {"wrong answer": 3}
    verdict = "<judge>False</judge>"
    assert make(examples, "false", judge=judge).reasons == {"wrong answer": 3}
    verdict = "perhaps"
    chats.bodies.clear()
    assert make(examples, "babble", judge=judge).reasons == {"unreadable verdict": 3}
    assert sum("examiner" in text_of(body["messages"][0]) for body in chats.bodies) == 9
    chats.refuse = lambda body: "no" if "examiner" in text_of(body["messages"][0]) else ""
    assert make(examples, "down", judge=judge).reasons == {"judge failed": 3}
    chats.refuse, verdict = (lambda body: ""), "<judge>True</judge>"
    chats.bodies.clear()
    assert make(examples, "down", judge=judge).accepted == {"questions": 3}  # in another sitting
    assert len(chats.bodies) == 3  # verdicts alone


def test_a_page_that_can_t_be_read(
    tmp_path: pathlib.Path, folder: pathlib.Path, student: pathlib.Path, server: Server
) -> None:
    """Rejects the trajectory, and ends nothing."""

    class Gone(Titles):
        image = str(folder / "nowhere.jpg")

        def _passage(self, page: pages.Page) -> Passage:
            return dataclasses.replace(super()._passage(page), image=self.image)

    data = expert_run.write(tmp_path / "questions.jsonl", expert_run.questions(3))
    for image, why in ((Gone.image, "nowhere.jpg"), ("", "has none")):
        tool = Gone(folder)
        tool.image = image
        report = run(tmp_path / why, config(data, student), f"{server.url}/v1", tool)
        assert report.reasons == {"no picture": 3}
        assert why in next(iter(journal(tmp_path / why).values()))["detail"]


# --- sittings ---


@pytest.mark.slow
def test_a_killed_job_asks_nothing_twice(
    tmp_path: pathlib.Path, student: pathlib.Path, server: Server, chats: Chats
) -> None:
    """Neither of finished questions nor of those that were under way: only what had no reply yet."""
    data = expert_run.write(tmp_path / "questions.jsonl", expert_run.questions(6))
    process = None

    def reply(messages: Messages) -> str:
        if process is not None and len(chats.bodies) >= 11:
            process.kill()
        return knowing(messages)

    chats.reply = reply  # type: ignore[assignment]
    arguments = (str(data), str(student), f"{server.url}/v1")
    process = start("tests.extras.curation.expert_run", tmp_path / "out", *arguments)
    finish(process, -signal.SIGKILL)
    process = None
    before = [json.dumps(body) for body in chats.bodies]
    known = len((tmp_path / "out" / "replies.jsonl").read_bytes().splitlines())
    finished = journal(tmp_path / "out")
    assert 1 <= len(finished) < 6
    assert known > sum(len(record["attempts"][0]["actions"]) for record in finished.values())  # some were under way
    assert not (tmp_path / "out" / "demonstrations.jsonl").exists()
    with (tmp_path / "out" / "replies.jsonl").open("a") as file:
        file.write('{"key": "torn')  # as if it had been killed while it wrote
    chats.bodies.clear()
    report = run(tmp_path / "out", config(data, student, concurrency=2), arguments[2])
    after = [json.dumps(body) for body in chats.bodies]
    assert report.accepted == {"questions": 6}
    assert len(set(after)) == len(after)
    assert len(set(before) & set(after)) <= len(before) - known
    assert len(set(before) | set(after)) == 26
    run(tmp_path / "out", config(data, student), arguments[2], opened=lambda: pytest.fail("nothing is left to do"))
    anew = config(data, student, steps_share=0.34, actions_share=0.34)  # of 2, 3 and 5 steps there are two each
    chats.bodies.clear()
    assert run(tmp_path / "out", anew, arguments[2], opened=lambda: pytest.fail("balance asks nobody")).written == {
        "questions": 6
    }
    with pytest.raises(ValueError, match=r"oracle differs: False, now True.*--overwrite"):
        run(tmp_path / "out", config(data, student, oracle=True), arguments[2])


def test_a_dead_server_ends_the_job(make: Callable[..., ExpertsReport], chats: Chats) -> None:
    chats.refuse = lambda body: "no such model"
    with pytest.raises(ValueError, match=r"2 questions in a row failed \(model failed: .*no such model"):
        make(expert_run.questions(6), patience=2, concurrency=1)


def test_replies_are_kept_for_good(tmp_path: pathlib.Path) -> None:
    kept = ReplyFile(tmp_path / "replies.jsonl")
    kept.set_many({"a": b"1", "b": "zwei: ä".encode()})
    kept.close()
    again = ReplyFile(tmp_path / "replies.jsonl")
    assert again.get_many(["b", "c"]) == {"b": "zwei: ä".encode()}
    with pytest.raises(ValueError, match=r"ttl=3\.0"):
        again.set("c", b"3", ttl=3.0)


# --- balance and settings ---


def test_balance_by_steps_and_by_actions() -> None:
    """No number of steps and no sequence of actions has more than its share, first come first kept."""

    def record(*actions: str) -> dict[str, Any]:
        return {"attempts": [{"actions": ["?"]}, {"actions": [*actions, "answer"]}]}

    made = [
        *[record("search")] * 6,
        *[record("search", "look")] * 3,
        *[record("search", "search")] * 2,
        *[record("search", "look", "look")] * 1,
    ]
    half = config("x", "y", steps_share=0.4, actions_share=1.0)
    counts = collections.Counter(len(one["attempts"][-1]["actions"]) for one in balanced(made, half))
    assert counts == {2: 2, 3: 2, 4: 1}  # of five, at most two
    both = config("x", "y", steps_share=1.0, actions_share=0.3)
    counts = collections.Counter(" ".join(one["attempts"][-1]["actions"]) for one in balanced(made, both))
    assert max(counts.values()) <= 0.3 * counts.total()
    assert balanced(made, config("x", "y")) == made
    assert balanced([], half) == []


def test_settings_are_checked(tmp_path: pathlib.Path, student: pathlib.Path) -> None:
    for changes, message in (
        ({"data": ""}, "config.data is not set"),
        ({"student": ""}, "config.student is not set"),
        ({"attempts": 2}, "config.temperature=0.0: all 2 attempts"),
        ({"metric": "bleu"}, "config.metric='bleu'"),
        ({"least_steps": 7}, "config.least_steps=7: a trajectory has at most config.agent.max_searches=6"),
        ({"steps_share": 0.0}, "steps_share=0.0"),
        ({"picture_pixels": 0}, "picture_pixels=0"),
    ):
        with pytest.raises(ValueError, match=message):
            config(*(changes.pop(key, "x") for key in ("data", "student")), **changes)  # type: ignore[attr-defined]
    for settings in ({"shows": "text"}, {"looks": False}):
        agent = dataclasses.replace(config("x", student).agent, settings=settings)
        with pytest.raises(ValueError, match=r"config\.agent\.settings"):
            config("x", student, agent=agent).build_agent()
    for variant, written in (("paper", False), ("released", True)):
        shipped = from_config_dict(ExpertJobConfig, vrag_rl_data.get_config(variant))
        assert (shipped.released, shipped.oracle, shipped.build_agent().max_turns) == (written, written, 6)
    with pytest.raises(ValueError, match="expected one of paper, released"):
        vrag_rl_data.get_config("mine")
    arguments = ("construct_data", "--config=configs/vrag_rl_data.py", f"--workdir={tmp_path / 'out'}")
    assert "no-such.json" in refusal(*arguments, "--config.data=vidoseek:no-such.json")
