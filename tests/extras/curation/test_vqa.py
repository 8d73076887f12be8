"""Questions about pictures of concepts: every rule broken once, kinds alike, kills."""

from __future__ import annotations

import collections
import json
import pathlib
import signal
from typing import Any

import pytest

from routerl_jax.data.readers import open_dataset
from routerl_jax.extras.curation.job import AttemptFailed
from routerl_jax.extras.curation.vqa import (
    TAXONOMY,
    QuestionAnswer,
    VqaConfig,
    balanced,
    equal_shares,
    read_concepts,
    read_kind,
    read_question,
)
from routerl_jax.models.images import decode_image
from routerl_jax.services.base import Completion
from tests.extras.curation.teacher import Scripted
from tests.extras.curation.vqa_job import KINDS, concept_of, config, knowing, run, serve
from tests.programs import finish, refusal, start
from tests.web_servers import Chats, serving


def listed(directory: pathlib.Path, *names: str) -> pathlib.Path:
    path = directory / "concepts.txt"
    path.write_text("\n".join(names))
    return path


def journal(workdir: pathlib.Path) -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, (workdir / "concepts.jsonl").read_text().splitlines())}


def written(question: str, answer: str) -> str:
    return f"<question>{question}</question> <answer>{answer}</answer>"


RULES = {
    written("Which bird is shown here?", "A great auk"): "",
    written("What is  the bird\nin front?", "the Great Auk."): "",
    written("Which bird is shown here?", "A penguin"): "answer without the concept",
    written("Which bird is shown here?", "The greatest auk"): "answer without the concept",
    written("Name the bird?", "Great auk"): "no question word",
    written("Whatever bird is it?", "Great auk"): "no question word",
    written("Which auk is shown here?", "Great auk"): "given away",
    written("What is a great auk?", "Great auk"): "given away",
    written("Which bird does the article describe?", "Great auk"): "not as one would ask",
    written("Which bird is it? Where is it?", "Great auk"): "not as one would ask",
    written("Which bird is it", "Great auk"): "not as one would ask",
    written(f"Which bird is {'very ' * 40}old?", "Great auk"): "not as one would ask",
    "Which bird is it? Great auk": "unreadable reply",
    "<none/>": "not shown",
}


@pytest.mark.parametrize("reply", RULES)
def test_the_rules(reply: str) -> None:
    if RULES[reply]:
        with pytest.raises(AttemptFailed) as told:
            read_question(reply, ("great auk", "garefowl"))
        assert told.value.outcome == RULES[reply]
    else:
        asked = read_question(reply, ("great auk", "garefowl"))
        assert asked in (
            QuestionAnswer(question="Which bird is shown here?", answer="A great auk"),
            QuestionAnswer(question="What is the bird in front?", answer="the Great Auk."),
        )


def test_another_name_is_the_concept_and_kinds_are_those_of_the_taxonomy() -> None:
    assert read_question(written("Which bird is it?", "A garefowl"), ("great auk", "garefowl")).answer == "A garefowl"
    assert read_kind("it is <kind> nature </kind>") == "Nature"
    with pytest.raises(
        AttemptFailed, match="'birds' is none of Arts, Place, People, Industry, Science, Nature, Entities, Events"
    ):
        read_kind("<kind>Birds</kind>")


def test_questions_are_made_and_open_as_a_dataset(tmp_path: pathlib.Path) -> None:
    model = Scripted(lambda user, _: knowing(user))
    report = run(tmp_path / "out", config(listed(tmp_path, *KINDS, "Otter"), sample=5, test=2), model)
    assert (report.concepts, report.accepted, report.use.calls) == (6, 6, 12)
    assert report.kinds == {"Arts": 1, "Industry": 1, "Science": 1, "Nature": 3}
    assert report.train == {"Science": 1, "Nature": 2}
    assert report.test == {"Arts": 1, "Industry": 1}
    chat, _ = model.asked[0]
    assert len(chat[0].images) == 1
    data = open_dataset(str(tmp_path / "out" / "questions.jsonl"))
    (otter,) = (data[i] for i in range(len(data)) if data[i].metadata["concept"] == "otter")
    assert otter.answers == ("The otter", "otter")
    assert otter.metadata["type"] == "Nature"
    assert decode_image(otter.images[0]).size == (16, 16)
    parts = [open_dataset(str(tmp_path / "out" / f"{name}.jsonl")) for name in ("train", "test")]
    train, test = ({part[i].metadata["concept"] for i in range(len(part))} for part in parts)
    assert (len(train), len(test), train & test) == (3, 2, set())


REPLIES: dict[str, Any] = {
    "unseen": ("", "no picture"),
    "broken": ("", "search failed"),
    "lute": ("<none/>", "not shown"),
    "tram": (written("Which vehicle is it?", "A bus"), "answer without the concept"),
    "fern": (written("Is it a plant?", "fern"), "no question word"),
    "otter": (Completion(error="503", finish="error"), "model failed"),
}


def test_rejections_are_counted_by_rule_and_failures_are_tried_again(tmp_path: pathlib.Path) -> None:
    settings = config(listed(tmp_path, *REPLIES, "thylacine"), attempts=2, concurrency=1)
    mended = iter([written("What is this thylacine?", "thylacine"), knowing("were found for: thylacine")])

    def reply(user: str, sample: int) -> str | Completion:
        if "<kind>" in user:
            return knowing(user)
        if "could not be used" in user:
            return next(mended) if "thylacine" in user else now
        name = concept_of(user)
        return next(mended) if name == "thylacine" else keep(REPLIES[name][0])

    now: Any = ""

    def keep(text: Any) -> Any:
        nonlocal now
        now = text
        return text

    model = Scripted(reply)
    report = run(tmp_path / "out", settings, model)
    assert {name: row["outcome"] for name, row in journal(tmp_path / "out").items()} == {
        **{name: outcome for name, (_, outcome) in REPLIES.items()},
        "thylacine": "accepted",
    }
    assert report.reasons == {outcome: 1 for _, outcome in REPLIES.values()}
    assert report.replies == {
        "not shown": 1,  # of which no other is asked for
        "answer without the concept": 2,
        "no question word": 2,
        "given away": 1,
        "accepted": 1,
    }
    assert "given away 1" in (tmp_path / "out" / "report.md").read_text()
    again = Scripted(lambda user, _: knowing(user))
    report = run(tmp_path / "out", settings, again)
    assert {concept_of(chat[0].content) for chat, _ in again.asked if "<kind>" not in chat[0].content} == {"otter"}
    assert report.accepted == 2
    with pytest.raises(ValueError, match=r"attempts differs: 2, now 3.*--overwrite"):
        run(tmp_path / "out", config(settings.concepts), again)


def test_kinds_are_alike() -> None:
    there = {"a": 10, "b": 3, "c": 0, "d": 1}
    assert equal_shares(there, 8) == {"a": 4, "b": 3, "c": 0, "d": 1}
    assert equal_shares(there, 99) == there
    assert equal_shares(there, 0) == dict.fromkeys(there, 0)
    rows = [{"id": str(i), "metadata": {"type": kind}} for i, kind in enumerate([*TAXONOMY] * 4 + ["Arts"] * 20)]
    train, test = balanced(rows, 16, 8, 0)
    for part in (train, test):
        assert collections.Counter(row["metadata"]["type"] for row in part) == dict.fromkeys(TAXONOMY, 1)
    assert not {row["id"] for row in train} & {row["id"] for row in test}
    assert balanced(rows, 16, 8, 0) == (train, test)
    assert balanced(rows, 16, 8, 1) != (train, test)


def test_a_killed_job_asks_nothing_twice_that_was_finished(tmp_path: pathlib.Path) -> None:
    path = listed(tmp_path, *KINDS)
    process = None

    def text_of(body: dict[str, Any]) -> str:
        content = body["messages"][-1]["content"]
        return content if isinstance(content, str) else content[-1]["text"]

    def reply(messages: list[dict[str, Any]]) -> str:
        if process is not None and len(chats.bodies) >= 7:
            process.kill()
        return knowing(text_of({"messages": messages}))

    def counted() -> collections.Counter[str]:
        return collections.Counter(concept_of(text_of(b)) for b in chats.bodies if "<kind>" not in text_of(b))

    chats = Chats(reply)  # type: ignore[arg-type]
    with serving(chats) as server:
        url = f"{server.url}/v1"
        process = start("tests.extras.curation.vqa_job", tmp_path / "out", str(path), url)
        finish(process, -signal.SIGKILL)
        process = None
        finished = set(journal(tmp_path / "out"))
        assert 1 <= len(finished) < 6
        assert serve(tmp_path / "out", str(path), url).accepted == 6
        assert all(count == 1 for name, count in counted().items() if name in finished)
        chats.bodies.clear()
        serve(tmp_path / "out", str(path), url)
        assert not chats.bodies


def test_settings_and_concepts_are_checked(tmp_path: pathlib.Path) -> None:
    for changes, message in (
        ({"concepts": ""}, "config.concepts is not set"),
        ({"knowledge": {}}, "config.knowledge must be one knowledge base"),
        ({"sample": 5, "test": 5}, "config.test=5 must be less than config.sample=5"),
        ({"attempts": 0}, "attempts=0"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**{"concepts": "x.txt", **changes})
    rows = tmp_path / "concepts.jsonl"
    rows.write_text('{"concept": "great  auk", "aliases": ["garefowl"]}\n{"concept": "Great auk"}\n')
    (auk,) = read_concepts(str(rows))
    assert auk.names == ("great auk", "garefowl")
    rows.write_text('{"concept": "auk"}\n{"name": "x"}\n')
    with pytest.raises(ValueError, match=r"concepts\.jsonl.*line 2.*'concept'"):
        read_concepts(str(rows))
    arguments = ("construct_data", "--config=configs/mmsearch_r1_data.py:vqa", f"--workdir={tmp_path / 'out'}")
    assert "no-such.txt" in refusal(*arguments, "--config.concepts=no-such.txt")
    assert VqaConfig.sample == 6000
