"""REPLUG, RECOMP, Selective Context and LongLLMLingua, call by call: a scripted policy with scripted log-probabilities."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Passage
from routerl_jax.engine.streams import Generated
from routerl_jax.extras.baselines.vanilla_rag import RECOMP, REPLUG, LongLLMLingua, SelectiveContext, mixed, share
from tests.agents.scripted import ScriptedEngine
from tests.extras.baselines.playing import EXAMPLE, played

Q = EXAMPLE.question
BARE: dict[str, Any] = {"instruct": False}


class ScoringEngine(ScriptedEngine):
    """A scripted policy that gives a text a log-probability: `score(what stands before, the text)`, spread over its tokens."""

    def __init__(self, turns: list[str], score: Callable[[str, str], float]) -> None:
        super().__init__(lambda *_: turns.pop(0), max_length=20_000)
        self.score = score
        self.scored: list[tuple[str, str]] = []

    def step(self):
        finished = []
        for key, (stream, _, _, given) in list(self._wanted.items()):
            if given:
                before, text = (self.tokenizer.decode(ids) for ids in (stream.ledger.tokens, given))
                self.scored.append((before, text))
                words = [(found.end(), found[0].strip()) for found in re.finditer(r"\s*\S+\s*?", text)] or [(0, "")]
                values, at = [], 0  # token by token, each with its word's
                for token in given:
                    at += len(self.tokenizer.decode([token]))
                    values.append(self.score(before, next((word for end, word in words if end >= at), words[-1][1])))
                stream.ledger.feed(given)
                del self._wanted[key]
                finished.append((stream, Generated(tokens=given, stop_reason="length", stop=None, logprobs=values)))
        return finished or super().step()


class Given:
    """Finds the same passages whatever is asked."""

    def __init__(self, *texts: str, scores: tuple[float, ...] = ()) -> None:
        self.found = [
            Passage(id=str(n), title=f"T{n}", text=text, score=(scores or (1.0,) * len(texts))[n])
            for n, text in enumerate(texts)
        ]

    def search(self, queries, k):
        return [self.found[:k] for _ in queries]


# --- REPLUG ---


def test_replug_takes_the_answer_that_is_likeliest_over_all_documents():
    """Three documents say Jane, Mary, Mary; each is sure of its own. By count it is Mary; a retriever that is much surer of the
    first makes it Jane."""
    said = {"one": "Jane", "two": "Mary", "three": "Mary"}

    def score(before, text):
        own = next(answer for page, answer in said.items() if f": {page}\n" in before)
        return -0.1 if text == own else -5.0

    for scores, answer in (((0.0, 0.0, 0.0), "Mary"), ((9.0, 0.0, 0.0), "Jane")):
        engine = ScoringEngine([f" {name}\n" for name in said.values()], score)
        (episode,) = run(REPLUG(**BARE), [EXAMPLE], engine, {"text": Given(*said, scores=scores)})
        assert episode.answer == answer
        prompts = [f"Documents:\n[1] T{n}: {page}\n\nQuestion: {Q}\nAnswer:" for n, page in enumerate(said)]
        assert engine.scored == [(prompt, f" {name}\n") for prompt in prompts for name in ("Jane", "Mary")]
        assert len(episode.turns) == 3


def test_the_mixture_by_hand():
    """Two documents of weights 3/4 and 1/4: 0.75 * 0.2 + 0.25 * 0.8 = 0.35 for the first answer, 0.75 * 0.3 + 0.25 * 0.1 = 0.25
    for the second."""
    assert mixed(np.log([[0.2, 0.3], [0.8, 0.1]]), np.log([3.0, 1.0]).tolist()) == 0
    assert mixed(np.log([[0.2, 0.3], [0.8, 0.1]]), [9.0, 0.0]) == 1


def test_replug_without_documents_or_answers():
    nothing = played(REPLUG(**BARE), "Mary\n", tools=("text",), example=_asking("nothing"))
    assert (nothing.episode.answer, len(nothing.chats)) == ("Mary", 1)
    silent = played(REPLUG(k=2, **BARE), "\n", "\n")
    assert silent.episode.answer is None
    assert silent.episode.invalid_actions == 2


def _asking(question):
    return dataclasses.replace(EXAMPLE, question=question)


# --- RECOMP ---


@pytest.mark.parametrize("summary", ["none\n", "\n", '"None."\n'])
def test_recomp_answers_directly_where_nothing_helps(summary):
    found = played(RECOMP(k=2, **BARE), summary, "Mary\n")
    assert found.asked == [("text", Q, 2)]
    assert found.chats[1] == f"Question: {Q}\nAnswer:Mary\n"
    assert found.episode.answer == "Mary"


def test_recomp_reads_its_summary_alone():
    found = played(RECOMP(k=2, **BARE), " It was she.\n", "Mary\n")
    assert found.chats[0].startswith(f"Documents:\n[1] text1: <text1 on {Q}>\n[2] text2")
    assert found.chats[1] == f"Documents:\n[1] It was she.\n\nQuestion: {Q}\nAnswer:Mary\n"


# --- Selective Context ---


def informed(before, word):
    """Words in capitals say much."""
    return -9.0 if word.strip().isupper() else -1.0


def test_selective_context_keeps_what_is_not_expected():
    engine = ScoringEngine([" Mary\n"], informed)
    tool = Given("the MOTHER of HER. it is so.", "and MARY was")
    (episode,) = run(SelectiveContext(drop=0.75, **BARE), [EXAMPLE], engine, {"text": tool})
    assert [text for _, text in engine.scored] == ["the MOTHER of HER.", "it is so.", "and MARY was"]
    shown = engine.tokenizer.decode(episode.sequences[-1].tokens)
    assert shown.startswith(f"Documents:\n[1] T0: MOTHER HER.\n[2] T1: MARY\n\nQuestion: {Q}\nAnswer:")
    assert episode.answer == "Mary"


def test_selective_context_by_sentences_leaves_documents_out():
    engine = ScoringEngine([" Mary\n"], informed)
    tool = Given("the MOTHER of HER. it is so.", "and so on")
    (episode,) = run(SelectiveContext(drop=0.6, unit="sentence", **BARE), [EXAMPLE], engine, {"text": tool})
    shown = engine.tokenizer.decode(episode.sequences[-1].tokens)
    assert shown.startswith(f"Documents:\n[1] T0: the MOTHER of HER.\n\nQuestion: {Q}\nAnswer:")


# --- LongLLMLingua ---


def test_longllmlingua_ranks_and_shortens_by_the_question():
    def score(before, word):
        if "Question" in word or "Who" in word or ("Q" in before[:1] and word.strip() in ("Mary", "mother")):
            return -1.0  # words that the question makes likelier
        return -3.0 if "second" not in before else -2.0

    engine = ScoringEngine([" Mary\n"], score)
    tool = Given("first a b c", "second Mary mother x")
    (episode,) = run(LongLLMLingua(rate=0.5, spread=0.25, **BARE), [EXAMPLE], engine, {"text": tool})
    shown = engine.tokenizer.decode(episode.sequences[-1].tokens)
    # the second is the likelier context: first, and 3 of its 4 words are kept, then 2 of 4
    assert shown.startswith("Documents:\n[1] T1: second Mary mother\n[2] T0: first a\n\nQuestion")
    befores = [before for before, _ in engine.scored]
    assert befores == ["T0\nfirst a b c", "T1\nsecond Mary mother x", *["\n", f"Question: {Q}\n"] * 2]


def test_shares_fall_with_the_rank():
    assert [share(place, 4, 0.5, 0.2) for place in range(4)] == pytest.approx([0.7, 0.6, 0.5, 0.4])
    assert share(0, 1, 0.9, 0.3) == 1.0
