"""R1-Searcher's protocol and rewards on every released rollout at hand, and on a few of ours where there are none."""

import collections
import gzip
import json
import re
import string
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from routerl_jax.agents.observation import demonstrated
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Call, Episode, Example, Turn
from routerl_jax.models.pretrained import resolve
from routerl_jax.recipes import r1_searcher as recipe
from routerl_jax.rewards.terms import RewardFunction
from tests.recipes import traces
from tests.recipes.transcripts import read_transcript, split_transcript

GRAMMAR = recipe.R1SearcherGrammar(tools=("wiki",))
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["ours", "released"])
def rows(request: pytest.FixtureRequest, shared_data: Callable[[str], Any]) -> Rows:
    if request.param == "ours":
        return traces.ROWS
    with gzip.open(shared_data("r1searcher_traces/traces_dev.jsonl.gz"), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def episode(row: dict[str, Any], text: str | None = None) -> Episode:
    example = Example(id=row["id"], question=row["question"], answers=tuple(row["golden_answers"]))
    return read_transcript(example, row["trace"] if text is None else text, GRAMMAR)


# --- protocol ------------------------------------------------------------------------------------------------------------

# Rows whose stored answer is not what their trace says (the released file has the answer in another wording).
_REWORDED = {"r1s_bamboogle_qwen_102": "27 July 1953"}


def test_queries_documents_and_answers(rows: Rows) -> None:
    for row in rows:
        found = episode(row)
        assert [c.query for c in found.calls] == [_words(s["query"].replace('"', " ")) for s in row["searches"]], row[
            "id"
        ]
        for call, search in zip(found.calls, row["searches"], strict=True):
            documents = [(_words(p.title), _bare(p.text)) for p in call.passages]
            assert documents == [(_words(d["title"]), _bare(d["text"])) for d in search["documents"]], row["id"]
        assert found.answer == _REWORDED.get(row["id"], row["pred_answer"].strip()), row["id"]
        assert all(turn.well_formed for turn in found.turns), row["id"]
        assert "".join(turn.text + turn.observation for turn in found.turns) == row["trace"]


def test_what_we_show_is_what_was_shown(rows: Rows) -> None:
    """Our observation of the released documents is the released block, spaces within lines aside.

    That goes for HotpotQA's corpus; KILT's passages were shown without the words "Title" and "Text".
    """
    compared = 0
    for row in rows:
        for turn in episode(row).turns[:-1]:
            if not re.search(r'^\(1\)"?Title: ', turn.observation, re.MULTILINE):
                continue
            compared += 1
            ours = GRAMMAR.observation(turn.calls[0], turn.calls[0].passages)
            assert _lines(ours) == _lines(turn.observation), row["id"]
    assert compared > (1000 if len(rows) > 100 else 3)


# RECIPES.md section 9: queries per rollout over all 1,750 rollouts, of which 1,194 are at hand.
_FULL_COUNTS = {
    ("2wiki", "qwen"): {0: 1, 1: 4, 2: 393, 3: 78, 4: 23, 5: 1},
    ("bamboogle", "qwen"): {0: 2, 1: 18, 2: 87, 3: 16, 4: 2},
    ("hotpotqa", "qwen"): {0: 11, 1: 16, 2: 393, 3: 67, 4: 13},
}
_MEANS = {
    ("2wiki", "qwen"): 2.24,
    ("bamboogle", "llama"): 2.71,
    ("bamboogle", "qwen"): 1.98,
    ("hotpotqa", "llama"): 2.80,
    ("hotpotqa", "qwen"): 2.11,
}


def test_queries_per_rollout(rows: Rows) -> None:
    counts: dict[tuple[str, str], collections.Counter[int]] = {}
    for row in rows:
        counts.setdefault((row["dataset"], row["model"]), collections.Counter())[len(episode(row).calls)] += 1
    if rows is traces.ROWS:
        assert counts == {("ours", "ours"): {0: 1, 1: 3, 2: 1}}
        return
    assert sum(count.total() for count in counts.values()) == 1194
    for key, mean in _MEANS.items():
        found = sum(number * times for number, times in counts[key].items()) / counts[key].total()
        assert found == pytest.approx(mean, abs=0.12), key  # two thirds of the rollouts, drawn at random
    for key, full in _FULL_COUNTS.items():
        assert all(times <= full.get(number, 0) for number, times in counts[key].items()), key
        share = counts[key].total() / sum(full.values())
        for number, times in full.items():
            assert counts[key][number] == pytest.approx(share * times, abs=3 * np.sqrt(times) + 1), (key, number)


@pytest.mark.parametrize("rows", ["ours", pytest.param("released", marks=pytest.mark.slow)], indirect=True)
def test_exactly_what_was_retrieved_is_untrained(rows: Rows) -> None:
    """Through the ledger with two real vocabularies; where documents lie is found here by another way: from mark to mark."""
    for name in ("SmolLM2-135M-Instruct", "atlas-warm-start"):
        tokenizer = Tokenizer.load(resolve(name))
        prompt = tokenizer.encode("Question: who?\n<think>")
        for row in rows:
            text = row["trace"]
            sequence = demonstrated(prompt, split_transcript(text), tokenizer)
            written = sequence.loss_mask[len(prompt) :]
            ids = sequence.tokens[len(prompt) :]
            assert not sequence.loss_mask[: len(prompt)].any()
            lengths = [len(tokenizer.token_bytes[i]) for i in ids]
            assert sum(lengths) == len(text.encode())
            of_bytes = np.repeat(written, lengths)
            np.testing.assert_array_equal(of_bytes, ~_retrieved(text), err_msg=row["id"])


def _retrieved(text: str) -> np.ndarray:
    """For each byte of a rollout, whether it was injected: from the line break behind a query to that behind the documents."""
    data = text.encode()
    inside = np.zeros(len(data), bool)
    start = 0
    while (start := data.find(b"<|end_of_query|>", start)) >= 0:
        start += len(b"<|end_of_query|>")
        end = data.index(b"<|end_of_documents|>\n\n", start) + len(b"<|end_of_documents|>\n\n")
        inside[start:end] = True
    return inside


# --- rewards, by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["ours", pytest.param("released", marks=pytest.mark.slow)], indirect=True)
def test_the_rewards_of_all_rollouts(rows: Rows) -> None:
    """RECIPES.md section 5.2, written out again on the flat text."""
    stages = {
        "stage1": RewardFunction(recipe.STAGE_1, "r1_searcher"),
        "stage2": RewardFunction(recipe.STAGE_2, "r1_searcher"),
        "qwen2": RewardFunction(recipe.RELEASED_STAGE_2, "r1_searcher"),
        "llama1": RewardFunction(recipe.LLAMA_STAGE_1, "r1_searcher"),
        "llama2": RewardFunction(recipe.LLAMA_STAGE_2, "r1_searcher"),
        "em": RewardFunction(recipe.stage_2("em"), "r1_searcher"),
        "cem": RewardFunction(recipe.stage_2("cover_em"), "r1_searcher"),
    }
    found = {
        name: [terms["total"] for terms in stage([episode(row) for row in rows])] for name, stage in stages.items()
    }
    unfair = 0
    for i, row in enumerate(rows):
        for name, wanted in _by_hand(row["trace"], row["golden_answers"][0]).items():
            assert found[name][i] == pytest.approx(wanted, abs=1e-12), (row["id"], name)
        unfair += "assistant" in row["trace"].lower()
    if rows is not traces.ROWS:
        assert unfair == 49  # the released server takes 2 from these for a word in their documents
        assert sum(value < 0 for value in found["stage2"]) < 10


def _by_hand(text: str, gold: str) -> dict[str, float]:
    own = "".join(part.split("<|end_of_documents|>\n\n")[-1] for part in text.split("\n\n<|begin_of_documents|>\n"))
    marks = [own.count(f"<|{end}_of_query|>") for end in ("begin", "end")]
    blocks = text.count("<|begin_of_documents|>\n(1)")
    answer = own[own.index("<answer>") + 8 : own.index("</answer>")].strip()
    fine = {
        "marks": marks == [blocks, blocks] and "_of_documents" not in own,
        "think": (own.count("<think>"), own.count("</think>")) == (0, 1),
        "answer": (own.count("<answer>"), own.count("</answer>")) == (1, 1),
        "assistant": "ssistant" not in own,
        "inside": "<|" not in answer,
        "short": len(answer.split()) <= 10,
        "latin": not any("\u4e00" <= letter <= "\u9fff" for letter in own),
    }
    qwen, llama = all(fine.values()), all(fine[key] for key in ("marks", "think", "answer", "latin"))
    paper = all(
        fine[key] for key in fine if key not in ("assistant", "latin")
    )  # no rollout is garbled or plays another role
    predicted, wanted = _normal(answer), _normal(gold)
    shared = sum((collections.Counter(predicted) & collections.Counter(wanted)).values())
    f1 = 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0
    closed = (["yes"], ["no"], ["noanswer"])
    if predicted != wanted and (predicted in closed or wanted in closed):
        f1 = 0.0
    cem, em = float(all(word in predicted for word in wanted)), float(predicted == wanted)
    return {
        "stage1": 0.5 * (blocks >= 1) + 0.5 * paper,
        "stage2": f1 - 2 * (not paper),
        "qwen2": f1 - 2 * (not qwen),
        "llama1": (1 if cem else -1) + 0.5 * (fine["marks"] and blocks >= 1) + 0.5 * (fine["think"] and fine["answer"]),
        "llama2": f1 - 1 * (not llama),
        "em": (1 if em else -1) - 2 * (not paper),
        "cem": (1 if cem else -1) - 2 * (not paper),
    }


def _normal(text: str) -> list[str]:
    text = {"True": "yes", "False": "no"}.get(text, text).lower()
    text = "".join(" " if letter in string.punctuation + "‘’´`" else letter for letter in text)
    return [word for word in text.split() if word not in ("a", "an", "the")]


def _words(text: str) -> str:
    return " ".join(text.split())


def _bare(text: str) -> str:
    """The data's documents lack quotation marks at their end."""
    return _words(text).rstrip('" ')


def _lines(text: str) -> list[str]:
    """Without the quotes that a table of separated values put around some released passages."""
    text = re.sub(
        r'^(\(\d+\))"(Title: .*)"$', lambda found: found[1] + found[2].replace('""', '"'), text, flags=re.MULTILINE
    )
    return [_words(line) for line in text.splitlines()]


# Every rule by a change to a rollout that obeys them all.
_CHANGES: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "an open query": (lambda text: text.replace("It is Accra.", "It is <|begin_of_query|> Accra."), ["query_tags"]),
    "a query in the answer": (
        lambda text: text.replace("<answer>", "<answer><|begin_of_query|>"),
        ["query_tags", "tags_in_answer"],
    ),
    "forged documents": (
        lambda text: text.replace("It is", "<|begin_of_documents|>(1)<|end_of_documents|> It is"),
        ["documents"],
    ),
    "the dialogue goes on": (lambda text: text + "\nUser: more\nAssistant:", ["another_role", "assistant"]),
    "a chat template's dialogue": (lambda text: text + "<|im_start|>user\nmore", ["another_role"]),
    "another chat template's": (lambda text: text + "<|start_header_id|>user", ["another_role"]),
    "a role after documents": (lambda text: text.replace("It is", "Human: It is"), ["another_role"]),
    "the word": (lambda text: text.replace("It is", "An assistant professor said: it is"), ["assistant"]),
    "a thought of its own": (lambda text: "<think>" + text, ["think_tags"]),
    "no end of thought": (lambda text: text.replace("</think>", ""), ["think_tags"]),
    "two answers": (lambda text: text + "<answer>Accra</answer>", ["answer_tags"]),
    "no answer": (lambda text: text.split("<answer>")[0], ["answer_tags"]),
    "eleven words": (lambda text: text.replace(">Accra<", f">{'so ' * 10}Accra<"), ["long_answer"]),
    "Chinese": (lambda text: text.replace("It is", "它是"), ["chinese"]),
    "a replacement character": (lambda text: text.replace("It is", "It \ufffd is"), ["garbled"]),
    "Russian in another encoding": (lambda text: text.replace("It is", "Ð­Ñ‚Ð¾"), ["garbled"]),
}


@pytest.mark.parametrize("name", list(_CHANGES))
def test_violations_are_named(name: str) -> None:
    change, expected = _CHANGES[name]
    row = traces.ROWS[2]
    assert recipe.violations(episode(row)) == []
    changed = episode(row, change(row["trace"]))
    ours, server = ("another_role", "garbled"), ("assistant", "chinese")
    assert recipe.violations(changed) == [rule for rule in expected if rule not in server]
    assert recipe.violations(changed, "released") == [rule for rule in expected if rule not in ours]
    assert recipe.violations(changed, "llama") == [
        rule for rule in expected if rule not in (*ours, "assistant", "tags_in_answer", "long_answer")
    ]


def test_every_rule_is_tried() -> None:
    assert {rule for _, rules in _CHANGES.values() for rule in rules} == set(recipe.VIOLATIONS)


@pytest.mark.parametrize("gold", ["assistant professor", "Assistant Secretary of State", "北京", "Київ", "São Tomé"])
def test_a_right_answer_is_not_against_the_paper_s_format(gold: str) -> None:
    """The released server takes 2 for a word or for Chinese characters, wherever they stand."""
    row = traces.ROWS[2]
    right = episode({**row, "golden_answers": [gold]}, row["trace"].replace(">Accra<", f">{gold}<"))
    stages = {
        name: RewardFunction(reward, "r1_searcher")([right])[0]["total"]
        for name, reward in {"paper": recipe.STAGE_2, "released": recipe.RELEASED_STAGE_2}.items()
    }
    assert stages == {"paper": 1.0, "released": -1.0 if gold[0] in "aA北" else 1.0}


def _turn(text: str, **fields: Any) -> Turn:
    return Turn(
        text=text, stop_reason="stop", tokens=1, action=GRAMMAR.parse(fields.get("forced", "") + text), **fields
    )


def test_a_forced_answer_is_not_the_policy_s_format() -> None:
    """With "r1_searcher_answer": what it was fed can't be rewarded; the answer still counts in evaluation."""
    example = Example(id="e", question="q", answers=("Accra",))
    call = Call(tool="wiki", query="q")
    turns = [
        _turn("<|begin_of_query|>q<|end_of_query|>", calls=[call]),
        _turn("Accra</answer>", forced="</think>\n<answer>"),
    ]
    forced = Episode(example=example, sample=0, answer="Accra", turns=turns, sequences=[])
    assert recipe.violations(forced) == ["think_tags", "answer_tags"]
    stage = RewardFunction({**recipe.STAGE_2, "em": 1.0}, "r1_searcher")
    assert stage([forced])[0] == {"r1_searcher.answer": 0.0, "r1_searcher.violation": -2.0, "em": 1.0, "total": -1.0}
    assert RewardFunction(recipe.LLAMA_STAGE_1)([forced])[0]["total"] == -1 + 0.5 + 0.0


def test_a_query_that_was_not_searched() -> None:
    example = Example(id="e", question="q", answers=("Accra",))
    turns = [_turn("<|begin_of_query|> <|end_of_query|>"), _turn("so</think><answer>Accra</answer>")]
    empty = Episode(example=example, sample=0, answer="Accra", turns=turns, sequences=[])
    assert recipe.violations(empty) == ["query_tags"]
    assert RewardFunction(recipe.STAGE_1)([empty])[0]["total"] == 0.0


def test_unknown_options_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"rules='strict' of R1-Searcher's format is not known; use one of paper, released, llama"
    ):
        recipe.violations(episode(traces.ROWS[0]), "strict")
    with pytest.raises(ValueError, match=r"metric='bleu' is not known; use one of em, "):
        recipe.stage_2("bleu")
    with pytest.raises(ValueError, match=r"metric='bleu' is not known; use one of em, "):
        RewardFunction({"r1_searcher.answer": {"metric": "bleu"}})([episode(traces.ROWS[0])])
