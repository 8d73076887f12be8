"""What the page is told: filters, relatives, health, what is new, and nothing that no record names."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the web page needs the extra `serve`")

from starlette.testclient import TestClient

from routerl_jax.evaluation.records import write_records
from routerl_jax.extras.viewer.app import create_app
from routerl_jax.extras.viewer.runs import find_runs
from routerl_jax.services.asgi import LOOPBACK
from tests.extras.viewer.made_run import episode, make_run, write_metrics

Ask = Callable[..., Any]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def client(run: pathlib.Path) -> Iterator[TestClient]:
    app = create_app(find_runs([run]))
    with TestClient(app, base_url="http://localhost") as client:
        client.viewer = app.state.viewer  # type: ignore[attr-defined]
        until(lambda: app.state.viewer.follower.settled)
        yield client


def until(done: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `done` gives, once it is true."""
    ends = time.monotonic() + seconds
    while not (result := done()):
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.05)
    return result


def found(client: TestClient, **given: Any) -> list[str]:
    """question:sample of each episode that passes a filter, in order."""
    reply = client.get("/api/episodes", params=given)
    assert reply.status_code == 200, reply.text
    return [f"{row['id']}:{row['sample']}" for row in reply.json()["rows"]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["b:0", "page:0", "a:0", "a:1", "forked:0", "forked:0", "a:0"]),
        ({"order": "old", "source": "training"}, ["a:0", "a:1", "forked:0", "forked:0", "b:0", "page:0"]),
        ({"reward_min": 1}, ["page:0", "a:0", "forked:0", "a:0"]),
        ({"reward_max": 0.5}, ["b:0", "a:1", "forked:0"]),
        ({"advantage_min": 0.5}, ["a:0"]),
        ({"order": "-advantage", "advantage_min": -9}, ["a:0", "forked:0", "forked:0", "a:1"]),
        ({"tokens_max": 9}, ["forked:0"]),
        ({"kb": "pages"}, ["page:0"]),
        ({"kb": ["pages", "table"]}, ["page:0", "a:1", "forked:0", "a:0"]),
        ({"kb": "(no search)"}, []),
        ({"failure": "truncated"}, ["forked:0"]),
        ({"failure": "none", "source": "evaluation/trained"}, ["a:0"]),
        ({"correct": "wrong"}, ["b:0", "a:1", "forked:0"]),
        ({"dataset": "dataset: zoo", "step_min": 1}, ["b:0", "page:0"]),
        ({"dataset": "dataset: elsewhere"}, []),
        ({"text": "THE END"}, ["b:0"]),  # in a retrieved passage
        ({"text": "forked?"}, ["forked:0", "forked:0"]),  # in a query
        ({"question": "a"}, ["a:0", "a:1", "a:0"]),
        ({"question": "a", "kb": "table", "correct": "right"}, ["a:0"]),
        ({"limit": 2, "offset": 1}, ["page:0", "a:0"]),
    ],
)
def test_filters(client: TestClient, given: dict[str, Any], expected: list[str]) -> None:
    assert found(client, **given) == expected


def test_counts_are_of_what_one_more_choice_would_show(client: TestClient) -> None:
    told = client.get("/api/episodes", params={"kb": "table", "correct": "right"}).json()
    assert told["total"] == 1
    assert dict(told["facets"]["kb"]) == {"pages": 1, "table": 1, "text": 2, "(no search)": 0}
    assert dict(told["facets"]["correct"]) == {"right": 1, "wrong": 2, "unknown": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rewards_min": 1}, "there is no filter 'rewards_min'"),
        ({"reward_min": "much"}, "reward_min='much' is no number"),
        ({"order": "random"}, "order='random' must be one of new"),
        ({"failure": "bad"}, "failure='bad' must be one of no answer"),
        ({"offset": -1}, "offset='-1' must be a whole number"),
        ({"offset": "1e30"}, "offset='1e30' must be a whole number"),
        ({"offset": 10**30}, "offset='1000000000"),
        ({"offset": "9" * 5000}, "must be a whole number from 0 to"),
    ],
)
def test_what_is_no_filter_is_refused(client: TestClient, given: dict[str, Any], message: str) -> None:
    reply = client.get("/api/episodes", params=given)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def one(client: TestClient, **given: Any) -> dict[str, Any]:
    rows = client.get("/api/episodes", params=given).json()["rows"]
    return client.get("/api/episode", params={"key": rows[0]["key"]}).json()


def test_relatives(client: TestClient) -> None:
    told = one(client, question="a", source="training")
    assert [brief["sample"] for brief in told["siblings"]] == [1]
    assert [brief["source"] for brief in told["elsewhere"]] == ["evaluation/trained"]
    assert told["forks"] == []
    assert told["brief"]["advantage"] == 0.5
    assert sum(told["record"]["tokens"][0]["sampled"]) == 3
    forked = one(client, question="forked")
    assert [brief["kbs"] for brief in forked["forks"]] == [["text"], ["table"]]
    assert forked["siblings"] == []


def test_other_machines_see_no_picture_outside_the_run(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Records may come from anywhere, and name any file."""
    pictures = [tmp_path / "private.png", run / "page.png", run / "episodes" / ".." / ".." / "private.png"]
    pictures[0].write_bytes(pictures[1].read_bytes())
    for path in run.rglob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for record in records:
            if record.get("id") == "page":
                record["images"] = list(map(str, pictures))
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    for hosts, statuses in ((LOOPBACK, [200, 200, 200]), (("*",), [404, 200, 404])):
        app = create_app(find_runs([run]), hosts)
        with TestClient(app, base_url="http://localhost") as client:
            until(lambda app=app: app.state.viewer.follower.settled)
            told = one(client, question="page")
            numbers = [told["pictures"].index(str(path)) for path in pictures]
            replies = [client.get("/api/picture", params={"key": told["key"], "n": number}) for number in numbers]
            assert [reply.status_code for reply in replies] == statuses


def test_pictures_are_those_that_a_record_names(client: TestClient, run: pathlib.Path) -> None:
    told = one(client, question="page")
    [look] = told["looks"]
    assert look["crops"][0]["box"] == [20.0, 10.0, 60.0, 40.0]
    picture = client.get("/api/picture", params={"key": told["key"], "n": look["image"]})
    assert picture.content == (run / "page.png").read_bytes()
    assert picture.headers["content-type"] == "image/png"
    crop = client.get("/api/picture", params={"key": told["key"], "n": look["crops"][0]["image"]})
    assert crop.content[1:4] == b"PNG"
    assert client.get("/api/picture", params={"key": told["key"], "n": 9}).status_code == 404
    (run / "page.png").write_text("<svg onload='alert(1)'/>")  # is no picture any more
    assert client.get("/api/picture", params={"key": told["key"], "n": look["image"]}).status_code == 404
    for key in ("run|../../etc/passwd|0", "run|config.json|0", "other|episodes/step-000000.jsonl|0", ""):
        assert client.get("/api/episode", params={"key": key}).status_code == 400
    dots = "%2e%2e"  # plain ones the client itself takes away
    assert client.get(f"/static/js/{dots}/index.html").status_code == 200
    assert client.get(f"/static/{dots}/app.py").status_code == 404


def test_other_names_and_scripts_are_kept_out(client: TestClient) -> None:
    assert client.get("/api/state", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/api/state", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    reply = client.get("/")
    assert "script-src 'self'" in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    static = pathlib.Path(__file__).parents[3] / "routerl_jax" / "extras" / "viewer" / "static" / "js"
    for file in static.glob("*.js"):
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in file.read_text(), f"{file.name} uses {way}"


def test_health(client: TestClient, run: pathlib.Path) -> None:
    told = client.get("/api/health", params={"run": "run"}).json()
    assert [(alarm["step"], alarm["metric"]) for alarm in told["alarms"]] == [
        (2, "actor/grad_norm")
    ]  # the second in a row
    vitals = {vital["metric"]: vital for vital in told["vitals"]}
    assert vitals["actor/grad_norm"]["state"] == "bad"
    assert vitals["actor/grad_norm"]["bound"] == "≤ 10"
    assert vitals["reward/total"]["state"] == "unwatched"
    write_metrics(run, 3, 1.0)
    told = client.get("/api/health", params={"run": "run"}).json()
    assert len(told["alarms"]) == 1
    assert {vital["metric"]: vital["state"] for vital in told["vitals"]}["actor/grad_norm"] == "good"


def test_metrics_go_on_from_where_the_page_is(client: TestClient, run: pathlib.Path) -> None:
    def ask(after: int, mark: str) -> dict[str, Any]:
        return client.get("/api/metrics", params={"run": "run", "after": after, "mark": mark}).json()

    first = ask(0, "")
    assert first["steps"] == [0, 1, 2]
    assert first["values"]["rollout/em"] == [0.0, 0.1, 0.2]
    write_metrics(run, 3, 1.0)
    more = ask(first["count"], first["mark"])
    assert (more["first"], more["steps"]) == (3, [3])
    rows = (run / "metrics.jsonl").read_text().splitlines()[:2]  # as a resumed run writes them anew
    (run / "new").write_text("\n".join(rows) + "\n")
    os.replace(run / "new", run / "metrics.jsonl")
    again = ask(more["count"], more["mark"])
    assert (again["first"], again["steps"]) == (0, [0, 1])


def test_new_records_are_read_and_rewritten_ones_read_anew(client: TestClient, run: pathlib.Path) -> None:
    write_records(run / "episodes" / "step-000002.jsonl", [episode("new")], step=2)
    until(lambda: found(client, question="new") == ["new:0"])
    write_records(run / "episodes" / "step-000002.jsonl", [episode("other")], step=2)
    until(lambda: found(client, question="other") == ["other:0"])
    assert found(client, question="new") == []
    journal = run / "evaluation" / "journal.jsonl"
    line = (run / "evaluation" / "trained.jsonl").read_text().rstrip("\n")
    journal.write_text(f'{line}\n{{"no": "record"}}\n{line[:99]}')  # the last one is being written
    until(lambda: found(client, source="evaluation/journal") == ["a:0"])
    with journal.open("a") as file:
        file.write(line[99:] + "\n")
    until(lambda: found(client, source="evaluation/journal") == ["a:0", "a:0"])
    assert client.get("/api/state").json()["skipped"] == 1
    journal.unlink()
    until(lambda: not found(client, source="evaluation/journal"))


def test_one_id_may_be_that_of_several_questions(client: TestClient, run: pathlib.Path) -> None:
    """Data sets number their questions from 0 on."""
    other = episode("a", answer="cat")
    other = dataclasses.replace(other, example=dataclasses.replace(other.example, question="Who wrote a?"))
    write_records(run / "evaluation" / "other.jsonl", [other])
    until(lambda: found(client, source="evaluation/other"))
    rows = client.get("/api/episodes", params={"question": "a", "order": "old"}).json()["rows"]
    assert [row["question"] for row in rows] == [*["Which animal is a?"] * 3, "Who wrote a?"]
    assert one(client, source="evaluation/other")["elsewhere"] == []
    assert [row["source"] for row in one(client, question="a", source="training")["elsewhere"]] == [
        "evaluation/trained"
    ]


def test_records_of_a_run_that_went_wrong_are_read(client: TestClient, run: pathlib.Path) -> None:
    """NaN, as Python's JSON has it; and a line that no index can hold harms no other."""
    wrong = dataclasses.replace(episode("nan"), rewards={"total": float("nan")})
    path = run / "episodes" / "step-000003.jsonl"
    write_records(path, [wrong, dataclasses.replace(wrong, sample=2**40), episode("after")], step=3)
    until(lambda: found(client, step_min=3) == ["nan:0", "after:0"])
    assert one(client, question="nan")["record"]["rewards"] == {"total": None}
    assert client.get("/api/state").json()["skipped"] == 1
    write_records(run / "episodes" / "step-000004.jsonl", [episode("later")], step=4)
    until(lambda: found(client, question="later"))


def test_a_file_that_is_gone_is_an_answer(client: TestClient, run: pathlib.Path) -> None:
    key = client.get("/api/episodes", params={"question": "b"}).json()["rows"][0]["key"]
    client.viewer.follower.stop()  # type: ignore[attr-defined]
    (run / "episodes" / "step-000001.jsonl").unlink()
    reply = client.get("/api/episode", params={"key": key})
    assert reply.status_code == 400
    assert "can't be read (No such file or directory)" in reply.json()["error"]["message"]
    assert client.get("/api/picture", params={"key": key, "n": 0}).status_code == 404


def test_controls_join_when_they_begin(client: TestClient, run: pathlib.Path) -> None:
    control = run / "controls" / "even"
    write_records(control / "episodes" / "step-000000.jsonl", [episode("a", answer="cat")], step=0)
    until(lambda: found(client, run="run/even") == ["a:0"])
    assert [one["name"] for one in client.get("/api/state").json()["runs"]] == ["run", "run/even"]
    told = one(client, question="a", source="training", run="run")
    assert {brief["run"] for brief in told["elsewhere"]} == {"run", "run/even"}


def test_evaluations_of_a_finished_run(run: pathlib.Path) -> None:
    """What `launch.evaluate --workdir=RUN` writes is shown with the run, and by itself."""
    folder = run / "benchmarks" / "atlas-test"
    folder.mkdir(parents=True)
    (run / "evaluation" / "trained.jsonl").rename(folder / "trained.jsonl")
    (folder / "results.json").write_text("{}")
    (folder / "report.md").write_text("")
    (whole,), (alone,) = find_runs([run]), find_runs([folder])
    assert (folder / "trained.jsonl", "benchmarks/atlas-test/trained") in whole.record_files()
    assert list(alone.record_files()) == [(folder / "trained.jsonl", "trained")]


def test_runs_have_short_names_that_differ(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    for path in paths:
        (path / "episodes").mkdir(parents=True)
    assert [run.name for run in find_runs(paths)] == ["one/run", "two/run"]
    with pytest.raises(ValueError, match="is named twice"):
        find_runs([paths[0], paths[0]])
    with pytest.raises(ValueError, match="holds no run"):
        find_runs([tmp_path])
    (paths[0] / "config.json").write_text(json.dumps({"evaluation": {"normalizer": "vqa"}}))
    assert find_runs(paths)[0].normalizer == "vqa"
