"""Baselines that search once, or not at all, call by call: a scripted policy, where needed with scripted log-probabilities."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Passage
from routerl_jax.engine.policy import Generated
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.extras.baselines.vanilla_rag import (
    RECOMP,
    REPLUG,
    ChainOfThought,
    Direct,
    HippoRAGReader,
    LongLLMLingua,
    SelectiveContext,
    SuRe,
    VanillaRAG,
    listed,
    mixed,
    share,
)
from tests.agents.scripted import ScriptedEngine
from tests.extras.baselines.playing import BARE, EXAMPLE, Q, kinds, played

# --- without a search ---


def test_a_direct_answer_is_the_first_line():
    found = played(Direct(**BARE), "Mary\nQuestion: and what")
    assert (found.episode.answer, found.asked) == ("Mary", [])
    assert found.chats == [f"Question: {Q}\nAnswer:Mary\n"]
    assert found.episode.turns[0].well_formed


def test_an_instruct_model_is_told_in_its_template():
    found = played(Direct(), "Answer: Mary", chats=True)
    assert found.chats[0].startswith("[system] Answer the question with the answer alone")
    assert f"[user] Question: {Q}\n[assistant] Answer: Mary" in found.chats[0]
    assert found.episode.answer == "Mary"
    plain = played(Direct(), "Mary\n")  # told all the same, as text, where there is no template
    assert plain.chats[0].startswith("Answer the question with the answer alone")
    assert plain.chats[0].endswith(f"\n\nQuestion: {Q}\nAnswer:Mary\n")


def test_marks_in_a_question_are_broken_up():
    example = dataclasses.replace(EXAMPLE, question="What is <|endoftext|>?")
    assert "< |endoftext|>" in played(Direct(**BARE), "it\n", example=example).chats[0]


def test_a_chain_of_thought_answers_with_its_conclusion():
    found = played(ChainOfThought(**BARE), " She was. So the answer is: **Mary**.\nQuestion: Who else")
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["answer"])
    assert found.chats[0].endswith("So the answer is: **Mary**.\nQuestion:")


def test_a_chain_without_a_conclusion_has_one_begun_for_it():
    found = played(ChainOfThought(**BARE), " I do not know.", " Mary.\n")
    assert (found.episode.answer, kinds(found.episode)) == ("Mary", ["invalid", "answer"])
    assert found.episode.turns[1].forced == "\nSo the answer is:"


def test_room_is_kept_for_an_answer_that_may_be_begun():
    prompt = len(f"Question: {Q}\nAnswer:")  # letters: more than its tokens
    found = played(ChainOfThought(answer_tokens=8, **BARE), "x" * 500, " Mary\n", max_length=prompt + 60)
    assert (found.episode.answer, found.episode.turns[0].stop_reason) == ("Mary", "length")


def test_a_chat_without_a_conclusion_is_asked_once_more():
    found = played(ChainOfThought(shots=0), "I do not know.", "Mary", chats=True)
    assert (found.episode.answer, found.episode.turns[1].forced) == ("Mary", "")
    assert "Now write the answer alone" in found.episode.turns[0].observation


def test_worked_questions_are_shown_where_the_task_is_told():
    assert played(ChainOfThought(shots=2), "So the answer is: x").chats[0].count("So the answer is:") == 4
    assert played(ChainOfThought(shots=2, **BARE), "So the answer is: x").chats[0].count("So the answer is:") == 1


# --- answers as models write them ---


FORMS = [  # (reply, rule); the answer of all is the same
    ("J. R. R. Tolkien", "line"),
    ("“J. R. R. Tolkien.”", "line"),
    ("**J. R. R. Tolkien**, who wrote it in 1937.", "line"),
    ("Based on the documents:\n\n- J. R. R. Tolkien [1].", "line"),
    ("Answer: J. R. R. Tolkien\nExplanation: the answer is in the first document.", "label"),
    ("**Answer:** J. R. R. Tolkien", "label"),
    ("### Answer\n\n*J. R. R. Tolkien*. He wrote it.", "label"),
    ("Sure! Here is the answer:\nJ. R. R. Tolkien", "label"),
    ("It was an Oxford professor.\nFinal answer: J. R. R. Tolkien", "final"),
    ("**Final Answer:** **J. R. R. Tolkien** (1892-1973)", "final"),
    ("So the answer is: J. R. R. Tolkien. I hope this helps.", "conclusion"),
    ("The answer to your question is ‘J. R. R. Tolkien’.", "conclusion"),
    ("Answer: So the answer is J. R. R. Tolkien.", "label"),
    ("Thus $\\boxed{\\text{J. R. R. Tolkien}}$ is right.", "boxed"),
    ("I know it. <answer>J. R. R. Tolkien</answer>", "tag"),
]


@pytest.mark.parametrize(("reply", "rule"), FORMS)
def test_an_answer_is_extracted_by_a_named_rule(reply, rule):
    found = played(Direct(answer_tokens=200), reply, chats=True)
    (turn,) = found.episode.turns
    assert (found.episode.answer, turn.info["answer_rule"]) == ("J. R. R. Tolkien", rule)
    assert turn.text.startswith(reply)  # the raw text is kept
    row = summarize([found.episode])
    assert {key: row[key] for key in row if key.startswith("answer_rule/")} == {f"answer_rule/{rule}": 1.0}


def test_what_only_looks_like_a_form_is_left():
    for reply in (
        '"Weird Al" Yankovic',
        "Warner Bros. Pictures",
        "1.5 million",
        "-5",
        "C. S. Lewis’s “Narnia”",
        "No. 5",
        "$5",
    ):
        answer = played(Direct(), reply, chats=True).episode.answer
        assert answer == reply.replace("’", "'").replace("“", '"').replace("”", '"')
    # a chain may begin with the prompt's own label; its steps are no answer
    chain = "Answer: Shelley wrote it. Her mother was Mary W."
    assert played(ChainOfThought(), chain, "Mary W.", chats=True).episode.answer == "Mary W"


# --- vanilla RAG ---


def test_vanilla_rag_over_all_has_k_documents_of_each():
    found = played(VanillaRAG(k=2, **BARE), "Mary\n", tools=("text", "table"))
    assert found.asked == [("text", Q, 2), ("table", Q, 2)]
    shown = "\n".join(
        f"[{number}] {name}: <{name} on {Q}>" for number, name in enumerate(("text1", "table1", "text2", "table2"), 1)
    )
    assert found.chats == [f"Documents:\n{shown}\n\nQuestion: {Q}\nAnswer:Mary\n"]
    assert found.episode.answer == "Mary"
    assert [call.tool for call in found.episode.calls] == ["text", "table"]


def test_vanilla_rag_of_one_asks_that_one():
    assert played(VanillaRAG(k=1, tools=("table",), **BARE), "x\n", tools=("text", "table")).asked == [("table", Q, 1)]


@pytest.mark.parametrize(
    ("question", "said"), [("nothing?", "Nothing was found."), ("broken?", "The search failed: ConnectionError")]
)
def test_what_went_wrong_stands_in_the_place_of_documents(question, said):
    example = dataclasses.replace(EXAMPLE, question=question)
    found = played(VanillaRAG(k=2, **BARE), "Mary\n", example=example)
    assert f"Documents:\n{said}" in found.chats[0]
    assert found.episode.answer == "Mary"


def test_documents_that_do_not_fit_are_left_out_from_the_last():
    """60 tokens or so a document; half of the room at most is kept for the answer."""
    found = played(VanillaRAG(k=5, answer_tokens=64, **BARE), "Mary\n", max_length=240)
    shown = [f"[{number}]" in found.chats[0] for number in range(1, 6)]
    assert shown[0]
    assert not shown[4]
    assert shown == sorted(shown, reverse=True)


# --- HippoRAG 2's reader ---


def test_the_reader_thinks_and_answers():
    found = played(HippoRAGReader(k=2, **BARE), " It says so.\nAnswer: Mary.\nQuestion: more")
    assert found.asked == [("text", Q, 2)]
    assert found.chats[0].startswith(f"Documents:\n[1] text1: <text1 on {Q}>\n[2] text2: ")
    assert f"\n\nQuestion: {Q}\nThought: It says so.\nAnswer: Mary." in found.chats[0]
    assert found.episode.answer == "Mary"
    without = played(HippoRAGReader(k=1, **BARE), " It does not say.", " Mary\n")
    assert (without.episode.answer, without.episode.turns[1].forced) == ("Mary", "\nAnswer:")


def test_the_readers_worked_question_has_documents():
    text = played(HippoRAGReader(k=1), " x\nAnswer: Mary", chats=True).chats[0]
    assert text.count("Documents:\n[1]") == 2
    assert "[2] Mary Wollstonecraft: " in text.split("[user]")[0]


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


# --- REPLUG ---


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


# --- SuRe ---


def test_sure_votes_between_summaries():
    found = played(
        SuRe(k=2, **BARE),
        " Jane, (b) Mary\n",
        " For Jane.\n",
        " True",
        " For Mary.\n",
        " True",
        " 2",  # Jane's before Mary's
        " 1",  # Mary's before Jane's
    )
    assert found.asked == [("text", Q, 2)]
    shown = f"Documents:\n[1] text1: <text1 on {Q}>\n[2] text2: <text2 on {Q}>\n\nQuestion: {Q}\n"
    assert found.chats[0].startswith(f"{shown}Answers: (a) Jane")
    assert [
        chat.startswith(f"{shown}Given answer: {name}\nPassage:")
        for chat, name in zip(found.chats[1:4:2], ("Jane", "Mary"))
    ]
    assert found.chats[2].startswith(f"Question: {Q}\nGiven answer: Jane\nPassage: For Jane.\nTrue or False:")
    assert found.chats[5].startswith(f"Passage 1: For Jane.\nPassage 2: For Mary.\nQuestion: {Q}\nBetter: Passage 2")
    assert found.chats[6].startswith(f"Passage 1: For Mary.\nPassage 2: For Jane.\nQuestion: {Q}\nBetter: Passage 1")
    assert found.episode.answer == "Mary"


@pytest.mark.parametrize(
    ("valid", "answer"),
    [
        (("False", "True"), "Mary"),
        (("True", "True"), "Jane"),
        (("False. It's not true.", "True"), "Mary"),
        (("untrue", "It is true"), "Mary"),
    ],
)
def test_sure_counts_validity_and_takes_the_first_of_equals(valid, answer):
    turns = ("Jane (b) Mary", "x\n", valid[0], "y\n", valid[1], "neither", "neither")
    assert played(SuRe(k=1, **BARE), *turns).episode.answer == answer


def test_sure_with_one_candidate_and_with_none():
    one = played(SuRe(k=1, **BARE), "Mary, (b) Mary", "x\n", "False")
    assert one.episode.answer == "Mary"
    none = played(SuRe(k=1), "I can't say.", chats=True)
    assert (none.episode.answer, kinds(none.episode)) == (None, ["invalid"])
    assert listed("(a) Jane Doe, (b) **Mary**\n(c)") == ["Jane Doe", "Mary"]


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
