"""ReAct: alternating thoughts, actions and observations (Yao et al., arXiv 2210.03629)."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import one_line
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, SearchResults, answered, reply_text
from routerl_jax.extras.baselines.forms import tidied
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.worked import WORKED, WorkedExample, examples

TASK = (
    'Answer the question in steps. A step is a line "Thought:" and a line "Action:"; a line "Observation:" with what came of '
    "it follows. There are three actions: search[query] looks for documents; lookup[words] shows the next sentence with these "
    "words in what the last search found; finish[answer] ends with the answer alone, in a few words."
)
_ACTION = re.compile(r"Action(?: \d+)?:[ \t]*(search|lookup|finish)\[(.*)\]", re.IGNORECASE)
LAST = "Thought: I have to answer now.\nAction: finish["
INVALID = "That is no action. Write search[query], lookup[words] or finish[answer]."


@baseline("react", paper="2210.03629", about="thinks, searches or looks up, and observes, step by step")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReAct(Baseline):
    """Thinks and acts step by step in one conversation.

    In each step the policy writes a thought and an action, and an observation follows. The actions are search[query],
    lookup[words] (shows the next sentence with these words in the results of the last search) and finish[answer]. The
    observation after a turn without an action says that it is invalid, and the turn costs a step. (The authors' code asks once
    more for the action alone.)

    The paper's search opens the Wikipedia page of a name and shows its first five sentences, or names five similar pages. Here
    it shows the k best documents of each knowledge base. If no step has finish[], the paper ends without an answer or falls
    back on chain of thought. Here an answer is begun for the policy.

    Attributes:
      max_steps: most steps; 7 for HotpotQA in the paper.
      shots: number of worked questions in the task; 6 in the paper.
    """

    searches_field: ClassVar[str] = "max_steps"

    max_steps: int = 7
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        task = TASK + examples([worked(sentence) for sentence in WORKED[: self.shots]])
        chat = self.begin(example, llm, ChatPrompt(task=task, text=f"Question: {self.question(example, llm)}"))
        sentences: list[str] = []  # sentences in the results of the last search
        looked: dict[str, int] = {}  # number of sentences shown so far, by the words looked up
        turn = None
        for _ in range(self.max_steps):
            turn = await self.generate(chat, ("\nObservation", "]\n", "\nQuestion:"), opening=LAST)
            kind, argument = parse(reply_text(turn, llm))
            if kind == "finish":
                return chat.episode(answer=answered(turn, tidied(argument) or None, "finish[] has nothing in it"))
            if kind == "search":
                turn.action, turn.well_formed = self.search_action(argument), True
                results = await self.search(tools, argument)
                sentences, looked = sentences_of(results), {}
                observation = found_text(results)
            elif kind == "lookup":
                turn.well_formed = True
                matches = [sentence for sentence in sentences if argument.lower() in sentence.lower()]
                index = looked.get(argument, 0)
                looked[argument] = index + 1
                has_match = index < len(matches)
                observation = (
                    f"({index + 1} of {len(matches)}) {matches[index]}" if has_match else "There is no more of it."
                )
            else:
                answered(turn, None, INVALID)
                observation = INVALID
            begun = turn.text.rstrip().endswith("Observation")
            mark = ": " if begun else ("" if turn.text.endswith("\n") else "\n") + "Observation: "
            if not self.tell(chat, llm, turn, f"{mark}{one_line(observation, ())}\n"):
                break
        assert turn is not None
        return await self.conclude(chat, llm, turn, opening=LAST, closing="]")

    @property
    def search_budget(self) -> int:
        """One search per step, of each knowledge base."""
        return self.max_steps * max(1, len(self.tools))


def parse(text: str) -> tuple[str, str]:
    """(action, argument) of the first action on a line of its own, else of the first one.

    ("", "") if there is none or it has no argument; finish[] may be empty.
    """
    lines = (_ACTION.match(line.strip()) for line in text.splitlines())
    match = next(filter(None, lines), None) or _ACTION.search(text)
    kind, argument = (match[1].lower(), " ".join(match[2].split())) if match else ("", "")
    return (kind, argument) if argument or kind == "finish" else ("", "")


def sentences_of(results: SearchResults) -> list[str]:
    """The sentences of the results, in order."""
    return [
        sentence
        for passage in results.passages
        for sentence in re.split(r"(?<=[.?!])\s+", passage.text.strip())
        if sentence
    ]


def found_text(results: SearchResults) -> str:
    """The observation after a search."""
    if not results.passages:
        return results.failure or "Nothing was found."
    return " ".join(f"({number}) {passage.title}: {passage.text}" for number, passage in enumerate(results.passages, 1))


def worked(shot: WorkedExample) -> str:
    """A worked question in ReAct's form."""
    steps = [f"Question: {shot.question}"]
    for hop in shot.hops:
        steps += [f"Thought: {hop.question}", f"Action: search[{hop.question.rstrip('?')}]"]
        steps.append(f"Observation: (1) {hop.title}: {hop.text}")
    return "\n".join([*steps, f"Thought: {shot.hops[-1].fact}", f"Action: finish[{shot.answer}]"])
