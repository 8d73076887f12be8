"""Conversations as messages, and stop strings that are put back."""

from __future__ import annotations

import random

import pytest

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import Message
from routerl_jax.services.base import Completion
from routerl_jax.services.policy import after_message, continuation, ended, opening_of, to_send
from routerl_jax.services.transcript import ChatRequest, Transcript, chat_request

TEXTS = (
    "Question: What is the capital of Ghana?\n\n",
    "Ünïcode, 日本語のテキスト, العربية, 🏳️‍🌈 and \t tabs\r\n  spaces   ",
    '1,234,567.89 km² — <think>x</think>[passage] {"a": [1, 2]}',
    "a" * 1000,
    "<|endoftext|> <|user |> <|im_start|>user",
    "",
)


@pytest.fixture(scope="module")
def transcript() -> Transcript:
    return Transcript()


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(transcript: Transcript, text: str) -> None:
    assert transcript.decode(transcript.encode(text)) == text
    assert transcript.decode(transcript.encode_written(text)) == text
    assert transcript.plain(text) == text


def test_any_text_comes_back_as_it_was(transcript: Transcript) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF), 0x1F600, 10))) for _ in range(40))
        assert transcript.decode(transcript.encode(text)) == text


def test_marks_are_one_id_where_they_mark_and_text_elsewhere(transcript: Transcript) -> None:
    for mark in transcript.marks:
        assert len(transcript.encode(mark)) == 1
        written = transcript.encode_written(mark)
        assert not set(written) & set(transcript.encode("".join(transcript.marks)))
        assert transcript.decode(written) == mark
        assert transcript.encode(transcript.plain(mark)) == transcript.encode_written(transcript.plain(mark))


def test_an_id_is_about_a_token(transcript: Transcript) -> None:
    """Of English prose: 1.3 tokens a word is what byte-level vocabularies of 50,000 to 150,000 take."""
    prose = (
        "The tower of the village stands near the river, and whoever comes by boat sees it from far away. It was built in "
        "1912 by an architect who had studied in Vienna, and it was restored after the war with money from the region."
    )
    assert 1.1 < len(transcript.encode(prose)) / len(prose.split()) < 1.6


# --- messages ---


class Written:
    """A conversation as an agent makes it: prompts and observations fed, turns sampled, beginnings forced."""

    def __init__(self, transcript: Transcript, prompt: str | list[Message]) -> None:
        self.transcript = transcript
        self.ledger = Ledger()
        self.forced: list[tuple[int, int]] = []
        self.ledger.feed(transcript.encode_prompt(prompt) if isinstance(prompt, str) else transcript.chat(prompt))

    def say(self, text: str) -> Written:
        ids = self.transcript.encode_written(text)
        self.ledger.sample(ids, [0.0] * len(ids), -1)
        return self

    def see(self, text: str) -> Written:
        self.ledger.feed(self.transcript.encode(text))
        return self

    def force(self, text: str) -> Written:
        start = len(self.ledger)
        self.see(text)
        self.forced.append((start, len(self.ledger)))
        return self

    def reply(self, text: str) -> Written:
        self.ledger.feed(self.transcript.reply(text))
        return self

    def asked(self, form) -> ChatRequest:
        return chat_request(self.ledger, self.forced, self.transcript, form)

    def said(self, form="turns") -> list[tuple[str, str]]:
        return [(message.role, message.content) for message in self.asked(form).messages]


CHAT = [Message(role="system", content="Work so."), Message(role="user", content="Why?")]
BEFORE = [("system", "Work so."), ("user", "Why?")]
BEGIN = "Begin your reply with exactly what follows, and go on from there:\n"


def test_replies_are_turns_in_both_forms(transcript: Transcript) -> None:
    chat = Written(transcript, CHAT).say("one").reply("found").say("two").reply("more")
    for form in ("turns", "continue"):
        assert chat.said(form) == [
            *BEFORE,
            ("assistant", "one"),
            ("user", "found"),
            ("assistant", "two"),
            ("user", "more"),
        ]
        assert not chat.asked(form).continued


def test_what_is_seen_within_a_turn(transcript: Transcript) -> None:
    chat = Written(transcript, CHAT).say("one</search>").see("\n<doc>x</doc>\n").say("two").see("\n<doc>y</doc>\n")
    assert chat.said() == [
        *BEFORE,
        ("assistant", "one</search>"),
        ("user", "<doc>x</doc>"),
        ("assistant", "two"),
        ("user", "<doc>y</doc>"),
    ]
    assert chat.said("continue") == [*BEFORE, ("assistant", "one</search>\n<doc>x</doc>\ntwo\n<doc>y</doc>\n")]
    assert chat.asked("continue").continued
    assert chat.asked("continue").begun == ""


def test_a_text_without_roles_begins_with_the_user(transcript: Transcript) -> None:
    chat = Written(transcript, "Question: Why?\n").say("one").see("<doc>x</doc>")
    assert chat.said() == [("user", "Question: Why?"), ("assistant", "one"), ("user", "<doc>x</doc>")]
    assert chat.said("continue") == [("user", "Question: Why?\n"), ("assistant", "one<doc>x</doc>")]


def test_what_is_begun(transcript: Transcript) -> None:
    """After a prompt, after what was found, after the policy's own words, and in a prompt (`prompt_suffix`)."""
    first = Written(transcript, CHAT).force("<answer>")
    assert first.said() == [("system", "Work so."), ("user", f"Why?\n\n{BEGIN}<answer>")]
    found = Written(transcript, CHAT).say("one").see("<doc>x</doc>").force("<answer>")
    assert found.said()[2:] == [("assistant", "one"), ("user", f"<doc>x</doc>\n\n{BEGIN}<answer>")]
    own = Written(transcript, CHAT).say("one").force("</think>\n<answer>")
    assert own.said()[2:] == [("assistant", "one"), ("user", f"{BEGIN}</think>\n<answer>")]
    suffix = Written(transcript, CHAT).see("<think>")
    assert suffix.said() == [*first.said()[:1], ("user", f"Why?\n\n{BEGIN}<think>")]
    for chat, begun, whole in (
        (first, "<answer>", "<answer>"),
        (found, "<answer>", "one<doc>x</doc><answer>"),
        (own, "</think>\n<answer>", "one</think>\n<answer>"),
        (suffix, "<think>", "<think>"),
    ):
        assert chat.asked("turns").begun == chat.asked("continue").begun == begun
        assert chat.said("continue")[2:] == [("assistant", whole)]


def test_turns_that_are_written_in_the_policys_place(transcript: Transcript) -> None:
    chat = Written(transcript, CHAT).force("<search>x</search>").see("<doc>x</doc>").force("<answer>")
    assert chat.said()[2:] == [("assistant", "<search>x</search>"), ("user", f"<doc>x</doc>\n\n{BEGIN}<answer>")]


def test_a_policy_that_is_to_go_on(transcript: Transcript) -> None:
    chat = Written(transcript, CHAT).say("one")
    assert chat.said()[2:] == [("assistant", "one"), ("user", "Go on where you stopped.")]


# --- stop strings ---


def test_what_closes_what() -> None:
    assert opening_of("</search>") == "<search>"
    assert opening_of("<|end_of_query|>") == "<|begin_of_query|>"
    assert opening_of("[/tool]") == "[tool]"
    assert opening_of("Unable to answer") == opening_of("<search>") == opening_of("\n\n") == ""
    assert opening_of("<|end_search_query|>") == "<|begin_search_query|>"
    assert to_send([*(f"</{c}>" for c in "abcde"), "END"]) == ["</a>", "</b>", "</c>", "</d>"]
    # what ends a line; not what would be missing in the reply, nor what ends a sentence at a server, but not here
    assert to_send(["\nObservation", "]\n", "Intermediate answer:", ". ", ".\n", "? ", "\n"]) == [
        "\nObservation",
        "Intermediate answer:",
        "\n",
    ]
    assert to_send(["</a>", "\n", "Next:", "\nEnd"], "so far. Next:") == ["</a>", "\nEnd"]


@pytest.mark.parametrize(
    ("reply", "begun", "text", "reason"),
    [
        (Completion(text="<search>x"), "", "<search>x</search>", "stop"),
        (Completion(text="<search>x</search> y"), "", "<search>x</search>", "stop"),  # a server that stops at nothing
        (Completion(text="<search>x</search><answer>y"), "", "<search>x</search>", "stop"),
        (Completion(text="<answer>a <search>x"), "", "<answer>a <search>x</search>", "stop"),  # what was opened last
        (Completion(text="Accra"), "<answer>", "Accra</answer>", "stop"),
        (Completion(text="Accra"), "", "Accra", "eos"),
        (Completion(text="no END, I think"), "", "no END", "stop"),
        (Completion(text="<search>x", finish="length"), "", "<search>x", "length"),
        (Completion(text="x", stopped_by="</search>"), "", "x</search>", "stop"),
    ],
)
def test_how_a_reply_ended(reply: Completion, begun: str, text: str, reason: str) -> None:
    assert ended(reply, reply.text, ("</search>", "</answer>", "END"), begun) == (text, reason)


@pytest.mark.parametrize(
    ("text", "kept", "reason"),
    [
        ("It was J. Lee. He did.", "It was J. Lee. ", "stop"),
        ("\nIt was Dr. J.\nLee", "\nIt was Dr. J.\n", "stop"),  # an empty line before the text does not end it
        ("<think>A. So.\nB</think>It was J. Lee.\nHe", "<think>A. So.\nB</think>It was J. Lee.\n", "stop"),
        ("It was J. Lee.", "It was J. Lee.", "eos"),
    ],
)
def test_a_reply_is_cut_where_a_sentence_ends(text: str, kept: str, reason: str) -> None:
    assert ended(Completion(text=text), text, (". ", ".\n", "? ", "\n")) == (kept, reason)


def test_a_beginning_that_is_repeated() -> None:
    assert continuation("So it was. Then  he", "So it\nwas.") == " Then  he"
    assert continuation("So it was.", "So it was. Then") == continuation("So it was.", "So it was.") == ""
    assert continuation("<answer>Accra", "<answer>") == "Accra"
    assert continuation("Accra", "<answer>") == "Accra"
    assert continuation("Well:\n<answer>Accra", "</think>\n<answer>") == "Accra"
    assert continuation("</think>\n<answer>Accra", "</think>\n<answer>") == "Accra"
    assert continuation("the words go on", "say the words") == "the words go on"
    assert continuation("anything", "") == "anything"


def test_a_repeated_message_is_taken_off_a_reply():
    """As llama.cpp's server repeats it, with the empty thoughts of a template before it; a message of spaces is none."""
    assert after_message("<think>\n</think>\nSo the answer is 4.", "So the answer is") == " 4."
    assert after_message(" 4.", "So the answer is") == " 4."
    assert after_message("I said: So the answer is 4.", "So the answer is") == "I said: So the answer is 4."
    for nothing in ("", "\n"):
        assert after_message("4.", nothing) == "4."
