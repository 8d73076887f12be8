"""Which questions a corpus can't answer: no passage states an answer, gold passages are absent, or no search finds them.

Wikipedia's dumps of different years, and parts of it, answer different questions of the same data set, which moves results by
more than algorithms do (arXiv 2605.27881).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.progress import Bar
from routerl_jax.core.text import UNSPACED, folded, states
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.gold_paths import bare_title, gold_path
from routerl_jax.evaluation.metrics import group_fields
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.rewards.metrics import NORMALIZERS, accepted_answers
from routerl_jax.rewards.retrieval import CLOSED, gold_passages_of

KINDS = ("words", "short", "number", "yes/no")
REASONS = ("answer", "gold", "search")
_SHORT = 3  # letters up to which an answer stands somewhere in any large corpus
_SAMPLE = 2000  # passages whose words tell which words are rare
_UNSPACED = re.compile(f"[{UNSPACED}]+")
_BATCH = 256  # queries of a search


@dataclasses.dataclass(kw_only=True)
class Finding:
    """What is known of a question.

    Attributes:
      kind: of its answers, by the strongest of them: words; short (up to three letters or one character), number and yes/no,
        which stand in many passages, or in none, for no reason.
      stated: whether a passage states an accepted answer; None: no passages were read, or the answer is yes or no, or nothing
        that the normaliser leaves.
      absent: ids (or titles) of gold passages that no passage has; None: none is known, or no passages were read.
      answer_ranks: best rank, from 1, of a passage that states an answer, by way of searching (`SEARCHES`); 0: not found.
      gold_ranks: the worst rank of its gold passages, each at its best; 0: one was not found.
    """

    kind: str
    stated: bool | None = None
    absent: tuple[str, ...] | None = None
    answer_ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    gold_ranks: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def unknown(self) -> bool:
        """Whether nothing can be said: yes or no, and no gold passage is named."""
        return self.stated is None and self.absent is None and not self.answer_ranks and not self.gold_ranks

    def reason(self) -> str:
        """Why it can't be answered: one of `REASONS`; "" if it can, or nothing is known against it."""
        if self.stated is False:
            return "answer"
        if self.absent:
            return "gold"
        # a yes or a number in some passage says nothing
        ranks = self.answer_ranks if self.kind == "words" else self.gold_ranks
        return "search" if ranks and not any(ranks.values()) else ""


SEARCHES = ("question", "gold queries")  # with the question itself; with the sub-questions of its gold path


class AnswerCheck:
    """Reads passages once, then searches. Memory: the words of the answers, and the names of the gold passages.

    Args:
      normalizer: of answers and passages (`rewards.metrics`); an answer is stated where its words follow each other.
    """

    def __init__(self, examples: Sequence[Example], normalizer: str = "search_r1") -> None:
        self.examples = examples
        normalize = NORMALIZERS.get(normalizer)
        self._normalize = lambda text: normalize(folded(text))  # as scores compare texts (rewards.metrics)
        self._golds = [gold_passages_of(example) for example in examples]
        # "" for an answer that the normaliser erases, such as the band The The
        self._answers = [[self._normalize(answer) for answer in example.answers] for example in examples]
        self.findings = [Finding(kind=_kind(example, answers)) for example, answers in zip(examples, self._answers)]

    def read(self, passages: Iterable[Passage], *, progress: str = "") -> int:
        """Looks for answers and gold passages in all passages of all knowledge bases. Returns the number of passages."""
        wanted = {text for hops in self._golds for hop in hops for text in (hop.passage_id, hop.title) if text}
        bare_wanted = {bare_title(hop.title) for hops in self._golds for hop in hops if hop.title}
        ids, titles, bare_titles = set[str](), set[str](), set[str]()
        stated = _Stated(self._answers, self.examples, self._normalize)
        count = 0
        for passage in Bar(passages, desc=progress, unit="passage", disable=not progress):
            count += 1
            ids |= {passage.id, passage.id.partition("#")[0]} & wanted
            if passage.title:
                titles |= {passage.title} & wanted
                bare_titles |= {bare_title(passage.title)} & bare_wanted
            stated.add(f"{passage.title}\n{passage.text}")
        found = stated.finish()
        for finding, hops, number in zip(self.findings, self._golds, range(len(self.examples))):
            telling = finding.kind != "yes/no" and any(self._answers[number])
            finding.stated = number in found if telling else None
            missing = [hop.passage_id or hop.title for hop in hops if not hop.named_in(ids, titles, bare_titles)]
            finding.absent = tuple(missing) if hops else None
        return count

    def search(self, bases: Mapping[str, KnowledgeBase], k: int, *, progress: bool = False) -> None:
        """Searches every knowledge base for every question, and for the sub-questions of its gold path, if it has any."""
        queries: dict[str, list[tuple[int, str]]] = {name: [] for name in SEARCHES}
        for number, example in enumerate(self.examples):
            queries["question"].append((number, example.question))
            sub_questions = {hop.query for hop in gold_path(example) or () if hop.query}
            queries["gold queries"] += [(number, query) for query in sorted(sub_questions)]
        for way, asked in queries.items():
            gold_best: dict[tuple[int, int], int] = {}
            bar = Bar(total=len(asked) * len(bases), desc=f"searching ({way})", unit="query", disable=not progress)
            with bar:
                for base in bases.values():
                    for start in range(0, len(asked), _BATCH):
                        part = asked[start : start + _BATCH]
                        for (number, _), results in zip(part, base.search([query for _, query in part], k=k)):
                            self._rank(way, number, results, gold_best)
                        bar.update(len(part))
            for number in {number for number, _ in asked}:
                if hops := self._golds[number]:
                    ranks = [gold_best.get((number, i), 0) for i in range(len(hops))]
                    self.findings[number].gold_ranks[way] = max(ranks) if all(ranks) else 0

    def _rank(self, way: str, number: int, results: Sequence[Passage], gold_best: dict[tuple[int, int], int]) -> None:
        finding, example = self.findings[number], self.examples[number]
        for rank, passage in enumerate(results, 1):
            for i, hop in enumerate(self._golds[number]):
                if rank < gold_best.get((number, i), rank + 1) and hop.found_in((passage,)):
                    gold_best[number, i] = rank
        if finding.kind == "yes/no":
            return
        before = finding.answer_ranks.setdefault(way, 0)
        for rank, passage in enumerate(results[: before - 1] if before else results, 1):
            text = f"{passage.title}\n{passage.text}"
            plain = self._normalize(text)
            if any(states(plain, answer) for answer in self._answers[number]) or _in_range(example, text):
                finding.answer_ranks[way] = rank
                return


class _Stated:
    """Finds the questions whose answers some text states. An answer is looked for where its rarest word stands."""

    def __init__(self, answers: Sequence[Sequence[str]], examples: Sequence[Example], normalize: Any) -> None:
        self._normalize = normalize
        self._questions: dict[str, set[int]] = collections.defaultdict(set)
        for number, plain in enumerate(answers):
            for answer in plain:
                if answer and answer not in CLOSED:
                    self._questions[answer].add(number)
        self._ranges = {i: example for i, example in enumerate(examples) if example.metadata.get("answer_ranges")}
        self._any_range = self._with_all_ranges()
        self._by_word: dict[str, list[str]] | None = None
        self._sample: list[str] = []
        self._found: set[int] = set()

    def add(self, text: str) -> None:
        if self._ranges and accepted_answers(self._any_range, text):
            found = {i for i, example in self._ranges.items() if _in_range(example, text)}
            self._found |= found
            self._ranges = {i: example for i, example in self._ranges.items() if i not in found}
            self._any_range = self._with_all_ranges()
        if self._by_word is None:
            self._sample.append(self._normalize(text))
            if len(self._sample) == _SAMPLE:
                self._index()
        elif self._by_word:
            self._look(self._normalize(text))

    def _with_all_ranges(self) -> Example:
        """A question that accepts what any of the questions left accepts, so that most texts are looked through once."""
        ranges = [limits for example in self._ranges.values() for limits in example.metadata["answer_ranges"]]
        return Example(id="", question="", answers=(), metadata={"answer_ranges": ranges})

    def finish(self) -> set[int]:
        """The numbers of the questions that were found."""
        if self._by_word is None:
            self._index()
        return self._found

    def _index(self) -> None:
        counts = collections.Counter(word for text in self._sample for word in _words(text))
        self._by_word = collections.defaultdict(list)
        for answer in self._questions:
            self._by_word[min(_words(answer), key=lambda word: (counts[word], -len(word), word))].append(answer)
        self._by_word = dict(self._by_word)
        for text in self._sample:
            self._look(text)
        self._sample = []

    def _look(self, text: str) -> None:
        assert self._by_word is not None
        padded = f" {text} "
        for word in _words(text) & self._by_word.keys():
            missing = []
            for answer in self._by_word[word]:
                if f" {answer} " in padded or (not answer.isascii() and states(text, answer)):
                    self._found |= self._questions[answer]
                else:
                    missing.append(answer)
            if missing:
                self._by_word[word] = missing
            else:
                del self._by_word[word]


def _in_range(example: Example, text: str) -> bool:
    """Whether a text has a number in one of the question's ranges."""
    return len(accepted_answers(example, text)) > len(example.answers)


def _words(plain: str) -> set[str]:
    """The words of a normalised text; of a script without spaces, pairs of characters."""
    words = set(plain.split())
    if plain.isascii():
        return words
    words = {word for word in words if not _UNSPACED.search(word)}
    for run in _UNSPACED.findall(plain.replace(" ", "")):
        words |= {run[i : i + 2] for i in range(len(run) - 1)} | set(run)
    return words


def _kind(example: Example, plain: Sequence[str]) -> str:
    """The strongest kind (`KINDS`) of a question's normalised answers."""
    kinds = {"number"} if example.metadata.get("answer_ranges") else set()
    for answer in plain:
        if answer in CLOSED:
            kinds.add("yes/no")
        elif not any(character.isalpha() for character in answer):
            kinds.add("number" if any(character.isnumeric() for character in answer) else "short")
        else:
            kinds.add("short" if len(answer) <= (1 if _UNSPACED.search(answer) else _SHORT) else "words")
    return next(kind for kind in KINDS if kind in kinds)


def summary(check: AnswerCheck, ks: Sequence[int]) -> dict[str, Any]:
    """Counts and shares.

    Returns:
      - `questions`, `answerable` (the share that nothing speaks against), `unanswerable` (numbers by reason), and `unknown`,
        the number of yes/no questions about whose gold passages nothing is known;
      - `kinds`: for each kind of answer the number of `questions`, and of those with a `reason`;
      - `recall`: for each way of searching, the share of questions that find an answer (kind words) and all gold passages
        among the first k, by `answer@K` and `gold@K`, and the number of these questions;
      - `by`: for data set, type, relation, .. and each value, `questions`, `answerable` and the numbers by reason.
    """
    findings = check.findings
    reasons = [finding.reason() for finding in findings]
    kinds = {
        kind: {"questions": len(numbers), **_by_reason([reasons[i] for i in numbers])}
        for kind in KINDS
        if (numbers := [i for i, finding in enumerate(findings) if finding.kind == kind])
    }
    by: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, list[int]]] = {}
    for number, example in enumerate(check.examples):
        for key, values in (group_fields(example.metadata) | _relations(example)).items():
            for value in dict.fromkeys([values] if isinstance(values, str) else values):
                groups.setdefault(key, {}).setdefault(value, []).append(number)
    for key, values in groups.items():
        if len(values) > 1 and len(values) < len(findings):
            by[key] = {
                value: {"questions": len(numbers), **_by_reason([reasons[i] for i in numbers])}
                for value, numbers in sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
            }
    return {
        "questions": len(findings),
        **_by_reason(reasons),
        "unknown": sum(finding.unknown for finding in findings),
        "kinds": kinds,
        "recall": {way: found for way in SEARCHES if (found := _recall(findings, way, ks))},
        "by": by,
    }


def _by_reason(reasons: Sequence[str]) -> dict[str, Any]:
    return {
        "answerable": float(np.mean([not reason for reason in reasons])),
        "unanswerable": {name: reasons.count(name) for name in REASONS},
    }


def _recall(findings: Sequence[Finding], way: str, ks: Sequence[int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    of_answers = [f.answer_ranks[way] for f in findings if f.kind == "words" and way in f.answer_ranks]
    of_gold = [f.gold_ranks[way] for f in findings if way in f.gold_ranks]
    for name, ranks in (("answer", of_answers), ("gold", of_gold)):
        if ranks:
            result |= {f"{name}@{k}": float(np.mean([0 < rank <= k for rank in ranks])) for k in ks}
            result[f"{name} questions"] = len(ranks)
    return result


def _relations(example: Example) -> dict[str, list[str]]:
    """PopQA's relation, and those of 2WikiMultihopQA's triples."""
    triples = example.metadata.get("evidence_triples") or ()
    names = [str(example.metadata["prop"])] if example.metadata.get("prop") else [str(triple[1]) for triple in triples]
    return {"relation": names} if names else {}
