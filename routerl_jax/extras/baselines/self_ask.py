"""Self-Ask with a search engine (Press et al., arXiv 2210.03350)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, SearchResults, answered, reply_text
from routerl_jax.extras.baselines.forms import last_line, tidied
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.worked import WORKED, WorkedExample, examples

# The paper's marks. Its loop stops at them and parses them.
NEEDED = "Are follow up questions needed here:"
FOLLOW_UP = "Follow up:"
INTERMEDIATE = "Intermediate answer:"
FINAL = "So the final answer is:"

TASK = (
    f'Answer the question by asking simpler ones first. After "{NEEDED}" write Yes or No. Then, for each simpler question, a '
    f'line "{FOLLOW_UP}" with the question; a line "{INTERMEDIATE}" with what a search engine finds for it follows. When '
    f'nothing is missing, write a line "{FINAL}" with the answer alone, in a few words.'
)


@baseline("self_ask", paper="2210.03350", about="asks itself follow-up questions, which a search answers")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAsk(Baseline):
    """Writes follow-up questions in one conversation. Each is searched for, and the results are its intermediate answer.

    If nothing is found, or the search fails, the policy writes the intermediate answer itself, as in the authors' code. If a
    turn has neither a follow-up question nor a final answer, the final answer is begun for the policy. This also happens when
    the budget is used up.

    The paper's search engine gives a short answer (Google's answer box or snippet). A knowledge base gives passages, so here
    the k best of each, on one line, replace it. The paper has no limit on follow-up questions; FlashRAG's is 5. FlashRAG (and
    so R1-Searcher) shows passages above the question, only those of the latest follow-up question, and lets the model write
    all intermediate answers: `above=True`.

    Attributes:
      k: passages per follow-up question.
      max_follow_ups: most follow-up questions.
      above: use FlashRAG's form.
      shots: number of worked questions in the task; 4 in the paper.
    """

    k: int = 1
    searches_field: ClassVar[str] = "max_follow_ups"

    max_follow_ups: int = 5
    above: bool = False
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results = await self.search(tools, example.question) if self.above else SearchResults()
        chat, written, turn = self.begin(example, llm, self.request(example, llm, results, "")), "", None
        for follow_up in range(self.max_follow_ups + 1):
            turn = await self.generate(chat, (INTERMEDIATE, "\nQuestion:"), opening=f"\n{FINAL}")
            text = reply_text(turn, llm).split("\nQuestion:")[0]
            if answer := tidied(last_line(text, FINAL) or ""):
                return chat.episode(answer=answered(turn, answer))
            query = last_line(text.removesuffix(INTERMEDIATE), FOLLOW_UP)
            if not query or follow_up == self.max_follow_ups:
                break
            turn.action, turn.well_formed = self.search_action(query), text.endswith(INTERMEDIATE)
            results = await self.search(tools, query)
            if self.above:
                written += text.removesuffix(INTERMEDIATE).rstrip() + f"\n{INTERMEDIATE}"
                chat.close()
                chat = self.begin(example, llm, self.request(example, llm, results, written))
            elif (observation := self.intermediate(text, results)) and not self.tell(chat, llm, turn, observation):
                break
        assert turn is not None
        if turn.action is None:
            answered(turn, None, f'there is neither "{FOLLOW_UP}" nor "{FINAL}"')
        return await self.conclude(chat, llm, turn, opening=f"\n{FINAL}")

    def intermediate(self, text: str, results: SearchResults) -> str:
        """The text after a follow-up question: the mark and the passages, or only the mark, for the policy to go on."""
        mark = "" if text.endswith(INTERMEDIATE) else f"\n{INTERMEDIATE}"
        passages = " ".join(" ".join(passage.text.split()) for passage in results.passages)
        return f"{mark} {passages}\n" if passages else mark

    def request(self, example: Example, llm: LLM, results: SearchResults, written: str) -> ChatPrompt:
        """The prompt with the question and the text so far; with `above`, the passages stand above the question."""
        question, begun = f"Question: {self.question(example, llm)}", f"{NEEDED}{written}"
        task = TASK + examples([worked(shot) for shot in WORKED[: self.shots]])
        if not self.above:
            return ChatPrompt(task=task, text=question, begun=begun)

        def request_of(documents: str) -> ChatPrompt:
            return ChatPrompt(task=task, text=f"Documents:\n{documents}\n\n{question}", begun=begun)

        return self.fitted(example, llm, results.passages, request_of, results.failure)

    @property
    def search_budget(self) -> int:
        """One search per follow-up question, of each knowledge base. With `above`, there is one more, for the question."""
        return (self.max_follow_ups + self.above) * max(1, len(self.tools))


def worked(shot: WorkedExample) -> str:
    """A worked question in Self-Ask's form."""
    steps = "".join(f"{FOLLOW_UP} {hop.question}\n{INTERMEDIATE} {hop.answer}\n" for hop in shot.hops)
    return f"Question: {shot.question}\n{NEEDED} Yes.\n{steps}{FINAL} {shot.answer}"
