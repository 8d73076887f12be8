"""`python -m launch.score` as a user runs it: its table, its JSON and its error messages."""

import json
import pathlib
import re
from typing import Any

import pytest
from PIL import Image

from tests import seeing
from tests.programs import fine, launch, launch_here, refusal
from tests.web_servers import Chats, serving

ROWS: list[dict[str, Any]] = [
    {"id": "1", "prediction": "The Eiffel Tower", "golden_answers": ["eiffel tower"], "dataset": "d", "model": "x"},
    {"id": "2", "prediction": "well known", "golden_answers": "well-known", "dataset": "d", "model": "x"},
    {"id": "3", "pred_answer": None, "golden_answers": ["Paris"], "dataset": "[d]", "model": "y"},
]


@pytest.fixture
def predictions(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "predictions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


def test_json(predictions: pathlib.Path) -> None:
    given = (f"--predictions={predictions}", "--normalizer=r1_searcher", "--group=dataset,model", "--json")
    result = json.loads(fine(launch("score", *given)))
    assert (result["n"], result["em"], result["normalizer"]) == (3, pytest.approx(2 / 3), "r1_searcher")
    assert {name: (group["n"], group["f1"]) for name, group in result["groups"].items()} == {
        "d/x": (2, 1.0),
        "[d]/y": (1, 0.0),
    }
    low, high = result["intervals"]["em"]
    assert 0.0 <= low <= result["em"] <= high <= 1.0


def test_table(predictions: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not launch_here("score", f"--predictions={predictions}", "--group=dataset,model")
    shown = capsys.readouterr().out
    assert all(
        title in shown for title in ("EM", "CEM", "SubEM", "F1", "F1-Recall", "ANLS", "d/x", "[d]/y", "search_r1")
    )
    overall = next(line for line in shown.splitlines() if " all " in line)
    # ANLS of the three: 1 - 4/16 ("The "), 1 - 1/10 (the hyphen), 0
    assert [cell for cell in overall.split() if cell[0].isalnum()] == ["all", "3", *["33.33"] * 5, "55.00"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, (), "absent.jsonl: No such file"),
        ("{", (), "rows.jsonl, line 1: not JSON"),
        ('{"prediction": "x"}', (), "rows.jsonl, line 1: key 'golden_answers' is missing"),
        ('{"prediction": "x", "golden_answers": "x"}', ("--normalizer=squad",), "unknown normalizer 'squad'"),
        (
            '{"prediction": "x", "golden_answers": "x"}',
            ("more.jsonl",),
            "launch.score: unexpected argument 'more.jsonl'",
        ),
    ],
)
def test_bad_input(
    tmp_path: pathlib.Path,
    text: str | None,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / ("absent.jsonl" if text is None else "rows.jsonl")
    if text is not None:
        path.write_text(text)
    assert message in refusal("score", f"--predictions={path}", "--json", *arguments)
    assert capsys.readouterr().out == ""


# --- recorded rounds, with a judge ---

ANSWERS = ("Accra", "the capital Accra", "Lagos", None)  # right, right but for exact match, wrong, refused
SEARCHED = "<reason>a flag</reason><search><img></search>"
JUDGED = '{"mmsearch_r1.judged_accuracy": 0.9, "mmsearch_r1.format": 0.1}'


def lenient(messages: list[dict[str, Any]]) -> str:
    """Finds an answer right that has the capital in it."""
    return (
        "Yes" if "Accra" in re.findall(r"^Answer to grade: (.*)$", messages[-1]["content"], re.MULTILINE)[-1] else "No"
    )


@pytest.fixture
def rounds(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Four attempts, each after a search by the picture."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    Image.fromarray(seeing.picture(0)).save(tmp_path / "a.png")
    rows = []
    for i, answer in enumerate(ANSWERS):
        said = (
            "Unable to answer due to lack of relevant information" if answer is None else f"<answer>{answer}</answer>"
        )
        turns = [
            {"text": SEARCHED, "tool": "image_search", "observation": "x"},
            {"text": f"<reason>so</reason>{said}"},
        ]
        rows.append(
            {"id": str(i), "question": "Capital?", "golden_answers": ["Accra"], "image": "a.png", "rounds": turns}
        )
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "rounds.jsonl"


def judge_at(url: str, **changes: Any) -> str:
    """The flag."""
    given = {"model": "m", "base_url": url, "style": "mmsearch_r1", "retries": 0, "api_key_env": "JUDGE_KEY", **changes}
    return f"--judge={json.dumps(given)}"


def test_recorded_rounds_with_a_judge(rounds: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its metrics beside exact match, its verdict on each answer, and with `--reward` the paper's reward by its word."""
    chats = Chats(lenient, key="secret-7")
    flags = (f"--trajectories={rounds}", "--recipe=mmsearch_r1")
    with serving(chats) as server:
        judge = judge_at(f"{server.url}/v1")
        assert not launch_here("score", *flags, judge, "--json")
        by_answers = json.loads(capsys.readouterr().out)
        assert not launch_here("score", *flags, judge, f"--reward={JUDGED}", "--json")
        by_verdicts = json.loads(capsys.readouterr().out)
        assert not launch_here("score", *flags, judge)
        assert "judge %" in capsys.readouterr().out
    assert len(chats.bodies) == 3  # the refused one is not asked about, and none is asked about twice
    for found in (by_answers, by_verdicts):
        assert (found["metrics"]["em"], found["metrics"]["judge"]) == (0.25, 0.5)
        assert (found["metrics"]["judge/asked"], found["metrics"]["judge/em_agreement"]) == (0.75, pytest.approx(2 / 3))
        assert [row["verdict"] for row in found["episodes"]] == ["right", "right", "wrong", "unasked"]
        assert found["episodes"][2]["said"] == "No"
        assert (found["judge"]["model"], found["judge"]["style"]) == ("m", "mmsearch_r1")
        assert "secret-7" not in json.dumps(found)
    rewards = [[row["reward"] for row in found["episodes"]] for found in (by_answers, by_verdicts)]
    assert rewards == [pytest.approx([0.91, 0.1, 0.1, 0.0]), pytest.approx([0.91, 0.91, 0.1, 0.0])]
    assert by_verdicts["reward"]["total"] == pytest.approx(1.92 / 4)


def test_a_judge_that_is_gone_leaves_its_answers_out(rounds: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (f"--trajectories={rounds}", "--recipe=mmsearch_r1", f"--reward={JUDGED}", "--json")
    assert not launch_here("score", *flags, judge_at("http://127.0.0.1:9/v1", failed="leave_out"))
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["judge/failed"] == 0.75
    assert found["reward"]["total"] == found["reward"]["mmsearch_r1.judged_accuracy"] == 0.0  # the refused one alone
    assert found["reward"]["mmsearch_r1.format"] == pytest.approx(0.075)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (('--judge={"modle": "m"}',), "unknown config key --judge.modle; did you mean --judge.model?"),
        (('--judge={"style": "vragg", "model": "m"}',), "--judge: unknown judge style 'vragg'; did you mean 'vrag'?"),
        (('--judge={"style": "vrag"}',), "--judge: the chat model's `model` is not set"),
        (('--judge={"model": "m", "api_key_env": "NO_KEY"}',), "--judge: the environment variable NO_KEY is not set"),
        (("--judge=m",), "--judge=m: not JSON"),
        (("--judge=[]",), '--judge=[]: give an object, such as {"model": "Qwen2.5-7B-Instruct"}'),
        ((f"--reward={JUDGED}",), "the term 'mmsearch_r1.judged_accuracy' asks a judge: give --judge"),
        (('--reward={"em": 1, "emm": 1}',), "--reward: unknown reward term 'emm'"),
    ],
)
def test_a_judge_and_a_reward_that_can_not_be(rounds: pathlib.Path, flags: tuple[str, ...], message: str) -> None:
    assert message in refusal("score", f"--trajectories={rounds}", "--recipe=mmsearch_r1", *flags)


def test_predictions_have_no_judge(predictions: pathlib.Path) -> None:
    said = refusal("score", f"--predictions={predictions}", '--judge={"model": "m"}')
    assert "--judge goes with --trajectories" in said
