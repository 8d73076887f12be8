"""A language model shows how to search on demand: what it reads and writes, what is rejected, kills, and learning from it."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import signal
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs import mmsearch_r1_data
from routerl_jax.agents.observation import demonstrated
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Demonstration, DemonstrationStep, TextAndImage
from routerl_jax.evaluation.records import episode_of
from routerl_jax.extras.curation.teaching import TeachingConfig, until_stop
from routerl_jax.models.huggingface import load_without_weights, save_pretrained
from routerl_jax.recipes.mmsearch_r1.protocol import REFUSAL
from routerl_jax.services.base import Completion
from routerl_jax.training import config as schema
from routerl_jax.training.demonstrations import Worked, open_demonstrations
from routerl_jax.training.setup import build_recipe
from routerl_jax.training.sft import train_sft
from tests import seeing
from tests.extras.curation.teacher import Scripted
from tests.extras.curation.teaching_job import IMAGE, RIGHT, TEXT, Pages, config, run, serve
from tests.programs import finish, refusal, start
from tests.web_servers import Chats, serving


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small policy that sees, as a directory."""
    directory = tmp_path_factory.mktemp("student") / "policy"
    save_pretrained(seeing.model(context=2048), directory)
    return directory


@pytest.fixture
def questions(tmp_path: pathlib.Path) -> pathlib.Path:
    return asked(tmp_path, "a", "b", "c", "d")


def asked(directory: pathlib.Path, *names: str) -> pathlib.Path:
    """Questions that name themselves, each with a picture."""
    rows = []
    for number, name in enumerate(names):
        Image.fromarray(seeing.picture(number)).save(directory / f"{name}.png")
        rows.append({"id": name, "question": f"Capital ({name})?", "golden_answers": ["Accra"], "image": f"{name}.png"})
    path = directory / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def journal(workdir: pathlib.Path) -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, (workdir / "questions.jsonl").read_text().splitlines())}


def name_of(user: str) -> str:
    return user.rpartition("Capital (")[2][0]


def on_demand(user: str) -> str:
    """Searches by the picture, then in words, then answers."""
    if user.startswith("Answer the question about the picture."):
        return IMAGE
    return TEXT if "Title 0\n" in user else RIGHT


def test_right_attempts_are_what_the_student_would_have_recorded(
    student: pathlib.Path, questions: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """In words of the student's form, with the pictures that it would have been shown; the teacher is told how to work."""
    model, tools = Scripted(lambda user, _: on_demand(user)), {"image": Pages(), "text": Pages()}
    settings = config(questions, student)
    report = run(tmp_path / "out", settings, model, tools)
    assert (report.tried, report.accepted, report.ways) == ({"questions": 4}, {"questions": 4}, {"image, text": 4})
    assert (report.use.calls, report.searches, report.reasons) == (12, 8, {})
    assert isinstance(tools["image"].asked[0], TextAndImage)
    assert tools["text"].asked == ["capital of Ghana"] * 4
    first, second, third = (chat for chat, _ in model.asked if name_of(chat[0].content) == "a")
    assert first[0].content.startswith("Answer the question about the picture.")
    assert len(first[0].images) == 1
    assert [message.role for message in third] == ["user", "assistant", "user", "assistant", "user"]
    assert "1. [picture 1] Title 0\n2. [picture 2] Title 1\n" in second[2].content
    assert "</information>\nThe question: Capital (a)?" in second[2].content  # its text alone, as in the paper
    assert len(second[2].images) == 2

    policy = load_without_weights(str(student))
    images, tokenizer, agent = policy.image_tokens, seeing.tokenizer(), settings.build_agent()  # type: ignore[union-attr]
    rows = list(read_rows(tmp_path / "out" / "demonstrations.jsonl"))
    for place, row in rows:
        episode = episode_of(row, place)
        calls = episode.calls
        worked = Demonstration(
            example=episode.example,
            steps=(
                DemonstrationStep(thought="which flag?", query="", tool="image", passages=calls[0].passages),
                DemonstrationStep(
                    thought="it is Ghana", query="capital of Ghana", tool="text", passages=calls[1].passages
                ),
            ),
            thought="so",
            answer="Accra",
        )
        opening = agent.opening(episode.example, tokenizer, seeing.MARKER)
        expected = demonstrated(images.fed(opening, episode.example.images), agent.pieces(worked), tokenizer, images)
        recorded = Worked(episode.example, _pieces(episode)).sequence(agent, policy)  # type: ignore[arg-type]
        np.testing.assert_array_equal(recorded.tokens, expected.tokens)
        np.testing.assert_array_equal(recorded.loss_mask, expected.loss_mask)
        assert len(recorded.images) == 1 + 2


def _pieces(episode):
    from routerl_jax.training.demonstrations import _pieces

    return _pieces(episode)


@pytest.mark.slow
def test_a_policy_that_sees_learns_from_them(
    student: pathlib.Path, questions: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    settings = config(questions, student)
    run(tmp_path / "out", settings, Scripted(lambda user, _: on_demand(user)))
    training = schema.TrainConfig(
        kind="sft",
        recipe="mmsearch_r1",
        steps=1,
        model=schema.ModelConfig(path=str(student)),
        mesh=schema.MeshConfig(cpu_devices=1),
        engine=schema.EngineConfig(max_length=1024),
        learner=schema.LearnerConfig(micro_tokens=1024),
        agent=settings.agent,
        knowledge=settings.knowledge,
        data=schema.DataConfig(train=str(questions), validation="", test="", overlap="ignore"),
        evaluation=schema.EvaluationConfig(every=0),
        warm_start=schema.WarmStartConfig(demonstrations=str(tmp_path / "out" / "demonstrations.jsonl"), examples=2),
    )
    learnt, held_out = open_demonstrations(training, build_recipe(training).agent)
    assert (len(learnt), len(held_out)) == (3, 1)
    train_sft(training, tmp_path / "run")
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(np.isfinite(row["actor/loss"]) for row in logged if "actor/loss" in row)


OUTCOMES = {
    "a": (RIGHT, "accepted"),
    "b": ("<reason>so</reason>\n<answer>Lagos</answer>", "wrong answer"),
    "c": (f"<reason>no</reason>\n{REFUSAL}", "refused"),
    "d": ("It is Accra.", "unreadable turn"),
    "e": ("<answer>Accra</answer>", "out of form"),
    "f": (Completion(error="503", finish="error"), "model failed"),
    "g": ("<reason>x</reason><text_search>broken</text_search>", "search failed"),
    "h": ("<think>or <answer>Lagos</answer>?</think><reason>so</reason><answer>Accra</answer> indeed", "accepted"),
}


def test_outcomes_are_told_apart_and_failures_are_tried_again(student: pathlib.Path, tmp_path: pathlib.Path) -> None:
    settings = config(asked(tmp_path, *OUTCOMES), student)
    model = Scripted(lambda user, _: OUTCOMES[name_of(user)][0])
    report = run(tmp_path / "out", settings, model, {"image": Pages(), "text": Pages("broken")})
    assert {name: row["outcome"] for name, row in journal(tmp_path / "out").items()} == {
        name: outcome for name, (_, outcome) in OUTCOMES.items()
    }
    assert report.reasons == {outcome: 1 for _, outcome in OUTCOMES.values() if outcome != "accepted"}
    assert "out of form 1" in (tmp_path / "out" / "report.md").read_text()
    assert "neither a search at the end nor an answer" in journal(tmp_path / "out")["d"]["attempts"][0]["detail"]
    again = Scripted(lambda user, _: RIGHT)
    report = run(tmp_path / "out", settings, again)
    assert {name_of(chat[0].content) for chat, _ in again.asked} == {"f", "g"}
    assert report.accepted == {"questions": 4}
    with pytest.raises(ValueError, match=r"agent\.k differs: 2, now 3.*--overwrite"):
        run(tmp_path / "out", dataclasses.replace(settings, agent=dataclasses.replace(settings.agent, k=3)), again)


def test_limits_attempts_and_patience(student: pathlib.Path, questions: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A search that may not be made ends an attempt; another may be right; failures in a row end the job."""
    settings = config(questions, student, attempts=2, temperature=1.0, questions=1)
    model = Scripted(lambda user, sample: RIGHT if sample else TEXT)
    assert run(tmp_path / "out", settings, model).accepted == {"questions": 1}
    (record,) = journal(tmp_path / "out").values()
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["unreadable turn", "accepted"]
    assert "no further search in words is left" in record["attempts"][0]["detail"]
    short = config(questions, student, max_length=20, questions=1)
    assert run(tmp_path / "short", short, Scripted(lambda *_: RIGHT)).reasons == {"too long": 1}
    down = Scripted(lambda *_: Completion(error="401", finish="error"))
    with pytest.raises(ValueError, match=r"2 questions in a row failed \(model failed: 401\)"):
        run(tmp_path / "down", config(questions, student, patience=2, concurrency=1), down)


def test_a_killed_job_asks_nothing_twice_that_was_finished(student: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The teacher is a server of the OpenAI protocol, which gets the pictures; killed while two questions are in flight."""
    path = asked(tmp_path, *"abcdef")
    process = None

    def text_of(message: dict[str, Any]) -> str:
        content = message["content"]
        return content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")

    def reply(messages: list[dict[str, Any]]) -> str:
        if process is not None and sum(counted().values()) >= 4:
            process.kill()
        return on_demand(text_of(messages[-1]))

    def counted() -> collections.Counter[str]:
        return collections.Counter(name_of(text_of(b["messages"][0])) for b in chats.bodies if len(b["messages"]) == 1)

    chats = Chats(reply)  # type: ignore[arg-type]
    with serving(chats) as server:
        arguments = (str(path), str(student), f"{server.url}/v1")
        process = start("tests.extras.curation.teaching_job", tmp_path / "out", *arguments)
        finish(process, -signal.SIGKILL)
        process = None
        finished = set(journal(tmp_path / "out"))
        assert 1 <= len(finished) < 6
        assert not (tmp_path / "out" / "demonstrations.jsonl").exists()
        with (tmp_path / "out" / "questions.jsonl").open("a") as file:
            file.write('{"id": "f", "data')  # as if it had been killed while it wrote
        report = serve(tmp_path / "out", *arguments)
        assert report.accepted == {"questions": 6}
        assert all(count == 1 for name, count in counted().items() if name in finished)
        last = max(chats.bodies, key=lambda body: len(body["messages"]))["messages"]
        shown = [sum("image_url" in part for part in m["content"]) for m in last[::2]]
        assert shown == [1, 2, 0]  # the question's, those of the pages; the question is repeated without its picture
        chats.bodies.clear()
        serve(tmp_path / "out", *arguments)
        assert not chats.bodies


def test_settings_are_checked(tmp_path: pathlib.Path) -> None:
    for changes, message in (
        ({"data": ""}, "config.data is not set"),
        ({"student": ""}, "config.student is not set"),
        ({"attempts": 2}, "config.temperature=0.0: all 2 attempts"),
        ({"metric": "bleu"}, "config.metric='bleu'"),
        ({"patience": 0}, "patience=0"),
    ):
        with pytest.raises(ValueError, match=message):
            config("x.jsonl", "policy", **changes)
    shipped = from_config_dict(TeachingConfig, mmsearch_r1_data.get_config("sft"))
    assert shipped.build_agent().limits.allowed == 2
    arguments = ("construct_data", "--config=configs/mmsearch_r1_data.py:sft", f"--workdir={tmp_path / 'out'}")
    assert "no-such.jsonl" in refusal(*arguments, "--config.data=no-such.jsonl")
    assert until_stop("a</search>b</answer>") == "a</search>"
    assert until_stop(" a ") == "a"
