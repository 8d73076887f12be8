"""Three real sources, and questions that only one of them answers: the data of benchmarks.real_model.

python -m benchmarks.real_data --output=runs/real_data
python -m benchmarks.real_data --output=runs/real_data --data=DIRECTORY --pack=benchmarks/real_sample.zip

The first unpacks the sample of this repository, whose LICENCES.md says what is whose. The second makes everything from the data
sets themselves, and the sample of what their licences let us pass on (`UNLICENSED` is left out).

DIRECTORY has a folder per data set (`training_sets` and `other_sets` name them), with `questions_dev.jsonl.gz` and
`corpus.jsonl.gz` or `tables.jsonl.gz`. Written are the sources and the questions:

- `people.jsonl`, `works.jsonl`: passages of Wikipedia about people, and about films, music, books and series (`about` tells
  them apart by how they begin); those about anything else are left out
- `table.jsonl`: rows of WikiTableQuestions' tables
- `train.jsonl`, `validation.jsonl`, `test.jsonl`: the parts of 2WikiMultihopQA's questions, its facts asked in several
  wordings, WikiTableQuestions, and questions made from cells of its tables. Whatever is asked about one title is in one of the
  three.
- `other_sets.jsonl`: PopQA, HotpotQA, MuSiQue (its relations are asked in the wordings of the facts) and Open-WikiTable, which
  are in none of these, about titles that `train.jsonl` does not ask about
- `paraphrases.jsonl`: the questions of `test.jsonl` in other words
- `kinds_train.jsonl`, `kinds_validation.jsonl`, `kinds_test.jsonl`: questions of several kinds (`kind`), for one policy. Those
  above, and `bridge`: two passages of which the first names the second's title, such as "When was the director of Range War
  born?". They are made from passages that say who made a work. No passage of one search states the answer

A question is kept if one source alone shows an answer to it, by the question or by a title that it names, among `K` passages
of BM25. A passage must be of a title that the question names; where the data set says which passage or table answers, it must
be that one. All others are counted. No more than `MOST` of a source are kept in a file.

A source keeps every passage of the titles that are asked about, and others up to `SIZE`. The questions must be answered by one
source alone both among all passages and among these.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from routerl_jax.core.files import write_atomic
from routerl_jax.core.rows import read_rows
from routerl_jax.core.text import folded, states
from routerl_jax.core.types import Passage
from routerl_jax.data.gold_paths import bare_title, without_aside
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25
from routerl_jax.knowledge.load import load_kb
from routerl_jax.rewards.metrics import NORMALIZERS

K = 2
WORDS = {"people": 60, "works": 60, "table": 45}
CORPORA = ("popqa", "2wikimultihopqa", "hotpotqa", "musique", "musique_ketrag", "r1searcher_traces")
SHARES = (("test", 50), ("validation", 6), ("train", 44))  # percent of the titles of the training sets
MADE = 400  # questions made from cells
MOST = 150
SIZE = 8000
KINDS = {"train": (100, 200), "validation": (20, 40), "test": (100, 150)}  # questions of each source, and bridges
UNLICENSED = ("open_wikitable",)  # its repository states no licence
SAMPLE = pathlib.Path(__file__).with_name("real_sample.zip")
# Of rows that are read as a sentence is: a comparison over all rows, or a count, needs more than a row.
_NO_LOOKUP = re.compile(
    r"(how many|how much|what is the (total|difference|average|sum)|did |is |was |were |does |are )"
)
_WORK = re.compile(
    r"\b(?:is|was|are) (?:an?|the) (?:[^\s.]+ ){0,8}?(?:film|movie|album|song|single|novel|book|series|sitcom|play|opera"
    r"|musical|game|poem|magazine|newspaper|comic|manga|anime|documentary|soundtrack)\b"
    r"(?! (?:director|producer|actor|actress|writer|composer|editor|critic|star|score|studio|festival|company|designer|player))"
)
_PERSON = re.compile(r"\([^()]*\b(?:born|died)\b|\([^()]*\d{3,4}\s*[–-][^()]*\d{3,4}[^()]*\),? (?:was|is) ")
_NORMALIZE = NORMALIZERS.get("search_r1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a data set.

    Attributes:
      tables: rows of a table answer it; otherwise passages.
      titles: titles that the question names, further queries.
      gold: titles of the passages or tables that answer it; empty: not known.
    """

    id: str
    set: str
    tables: bool
    question: str
    answers: tuple[str, ...]
    titles: tuple[str, ...] = ()
    gold: frozenset[str] = frozenset()


def plain(text: str) -> str:
    return _NORMALIZE(folded(text))


def passages_of(data: pathlib.Path) -> dict[str, list[dict[str, str]]]:
    """The passages of each source, cut to `WORDS`, each once."""
    texts: dict[str, dict[tuple[str, str], None]] = {name: {} for name in WORDS}
    for table in rows(data / "wikitablequestions/tables.jsonl.gz"):
        for cells in table["rows"]:
            texts["table"][table["title"], _row(table["header"], cells)] = None
    for dataset in CORPORA:
        for row in rows(data / dataset / "corpus.jsonl.gz"):
            if (name := about(row["text"])) and row["title"]:
                texts[name][row["title"], " ".join(row["text"].split()[: WORDS[name]])] = None
    return {
        name: [{"id": f"{name}-{i}", "title": title, "text": text} for i, (title, text) in enumerate(these)]
        for name, these in texts.items()
    }


def about(text: str) -> str:
    """The source of a passage, by its beginning; "": neither."""
    begins = [
        (match.start(), name)
        for name, form in (("works", _WORK), ("people", _PERSON))
        if (match := form.search(text[:240]))
    ]
    return min(begins)[1] if begins else ""


def _drawn(text: str) -> int:
    """A number that is the text's, on every machine."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def _row(header: list[str], cells: list[str]) -> str:
    pairs = [f"{' '.join(head.split())}: {' '.join(cell.split())}" for head, cell in zip(header, cells) if cell.strip()]
    return " ".join("; ".join(pairs).split()[: WORDS["table"]])


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path)]


# Of the facts of 2WikiMultihopQA and the relations of MuSiQue.
_WORDINGS: dict[str, tuple[str, ...]] = {
    "director": ("Who directed {}?", "Who made {}?", "Which director is behind {}?"),
    "performer": ("Who sings {}?", "Who recorded {}?", "Which artist performed {}?"),
    "composer": ("Who wrote the music for {}?", "Who composed {}?"),
    "producer": ("Who produced {}?", "Which producer is behind {}?"),
    "author": ("Who wrote {}?", "Who is the author of {}?"),
    "screenwriter": ("Who wrote the script of {}?",),
    "publication date": ("When did {} come out?", "When was {} released?", "What is the release date of {}?"),
    "country of origin": ("Which country is {} from?", "In which country was {} made?"),
    "country of citizenship": (
        "Which country is {} from?",
        "What is the nationality of {}?",
        "What is {}'s nationality?",
    ),
    "date of birth": ("When was {} born?", "What is {}'s date of birth?", "On what day was {} born?"),
    "date of death": ("When did {} die?", "What is the date of {}'s death?", "On what day did {} die?"),
    "place of birth": ("Where was {} born?", "What is {}'s birthplace?", "Where does {} come from?"),
    "place of death": ("Where did {} die?", "In what place did {} pass away?"),
    "father": ("Who is {}'s father?", "Whose child is {}?", "Who was the father of {}?"),
    "mother": ("Who is {}'s mother?", "Who was the mother of {}?"),
    "spouse": ("Who is {} married to?", "Who is the spouse of {}?", "Whom did {} marry?"),
    "educated at": ("Where did {} study?",),
    "record label": ("Which label released {}?",),
    "member of sports team": ("Which team did {} play for?",),
}


def training_sets(data: pathlib.Path) -> Iterator[Question]:
    """2WikiMultihopQA's parts and facts, WikiTableQuestions' look-ups, and its cells."""
    for row in rows(data / "2wikimultihopqa/questions_dev.jsonl.gz"):
        triples: list[list[str]] = row.get("evidence_triples") or []
        for i, (part, (subject, _, answer)) in enumerate(zip(row.get("decomposition") or (), triples)):
            asked = {"question": part["question"], "golden_answers": [answer], "supporting_titles": [subject]}
            yield from _question("2wiki parts", asked | {"id": f"{row['id']}-{i}"})
        for i, (subject, relation, answer) in enumerate(triples):
            yield from _facts("2wiki facts", f"{row['id']}-{i}", subject, relation, answer)
    titles = {table["id"]: table["title"] for table in rows(data / "wikitablequestions/tables.jsonl.gz")}
    for row in rows(data / "wikitablequestions/questions_dev.jsonl.gz"):
        lookup = not _NO_LOOKUP.match(row["question"].lower()) and len(row["question"].split()) <= 18
        if lookup and len(row["golden_answers"]) == 1:
            named = {"supporting_titles": [titles[id] for id in row["supporting"]]}
            yield from _question("wikitablequestions", row | named, tables=True)
    yield from _made(data)


def _facts(name: str, id: str, subject: str, relation: str, answer: str) -> Iterator[Question]:
    """A fact in two of its relation's wordings."""
    wordings = _WORDINGS.get(relation, ())
    first = _drawn(id)
    for number in range(min(2, len(wordings))):
        wording = wordings[(first + number) % len(wordings)]
        asked = {"id": f"{id}-{number}", "question": wording.format(without_aside(subject)), "golden_answers": [answer]}
        yield from _question(name, asked, (subject,))


def other_sets(data: pathlib.Path) -> Iterator[Question]:
    """PopQA, HotpotQA and MuSiQue (of three collections each; MuSiQue's parts and relations, too) and Open-WikiTable."""
    titles = {row["id"]: row["title"] for row in rows(data / "popqa/corpus.jsonl.gz")}
    for row in rows(data / "popqa/questions_dev.jsonl.gz"):
        named = {"supporting_titles": [titles[id] for id in row["supporting"] if id in titles]}
        yield from _question("popqa", row | named)
    for name in ("hotpotqa", "routerag_rl", "musique", "musique_ketrag"):
        for row in rows(data / name / "questions_dev.jsonl.gz"):
            yield from _question("musique" if name.startswith("musique") else "hotpotqa", row)
    for row in rows(data / "r1searcher_eval/questions_dev.jsonl.gz"):
        if (name := row["type"].removesuffix("_500")) in ("hotpotqa", "musique"):
            yield from _question(name, row)
    for row in rows(data / "musique/questions_dev.jsonl.gz"):
        for i, part in enumerate(row["decomposition"]):
            subject, relation_of, relation = (text.strip() for text in part["question"].partition(">>"))
            if "#" in subject:  # an earlier part's answer
                continue
            if relation_of:
                yield from _facts("musique relations", f"{row['id']}-{i}", subject, relation, part["answer"])
            else:
                asked = {"question": subject, "golden_answers": [part["answer"]]}
                yield from _question("musique parts", row | asked | {"id": f"{row['id']}-{i}"})
    for row in rows(data / "open_wikitable/questions_dev.jsonl.gz"):
        if len(row["golden_answers"]) == 1:
            yield from _question("open_wikitable", row, tables=True)


def _question(
    name: str, row: dict[str, Any], named: tuple[str, ...] = (), *, tables: bool = False
) -> Iterator[Question]:
    answers = tuple(answer for answer in row["golden_answers"] if plain(answer) and len(answer.split()) <= 6)
    if not answers or plain(answers[0]) in ("yes", "no"):
        return
    words = f" {plain(row['question'])} "
    if any(f" {plain(answer)} " in words for answer in answers):  # a choice that the question names
        return
    gold = frozenset(row.get("supporting_titles") or ())
    names = {} if tables else {bare_title(title): None for title in (*gold, *named)}
    titles = tuple(title for title in sorted(names) if plain(title) and f" {plain(title)} " in words)
    question = " ".join(row["question"].split())
    yield Question(
        id=f"{name}-{row['id']}", set=name, tables=tables, question=question, answers=answers, titles=titles, gold=gold
    )


# Other words for the questions of a pattern: (pattern, wordings). All others are asked within a sentence (`_ASKED`).
_PARAPHRASES: tuple[tuple[str, str], ...] = (
    (r"Who is the director of (?:the )?(?:film )?(.+?)\?", "{0} was made by which director?"),
    (r"Who directed (?:the )?(?:film )?(.+?)\?", "Name the person who made the film {0}."),
    (r"When did (.+?) die\?", "Do you know the date of {0}'s death?"),
    (r"When was (.+?) born\?", "Do you know the birthday of {0}?"),
    (r"Where did (.+?) die\?", "Do you know the place of {0}'s death?"),
    (r"Where was (.+?) born\?", "Do you know the birthplace of {0}?"),
    (r"What is the (.+?) of (.+?)\?", "{1}: I am looking for the {0}."),
    (r"Who is the (.+?) of (.+?)\?", "{1}'s {0}, who is that?"),
)
_ASKED = ("A friend asked me this: {}", "{} Please look it up.", "I would like to know: {}", "Quiz question. {}")


def paraphrased(rows_: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The questions in other words, with the same answers and paths."""
    for row in rows_:
        asked, how = _ASKED[_drawn(row["id"]) % len(_ASKED)].format(row["question"]), "within a sentence"
        for pattern, wording in _PARAPHRASES:
            if match := re.fullmatch(pattern, row["question"], re.IGNORECASE):
                asked, how = wording.format(*match.groups()), "other words"
                break
        yield row | {"id": f"{row['id']}-again", "question": asked, "set": f"{row['set']}, {how}"}


def _made(data: pathlib.Path) -> Iterator[Question]:
    """Questions for a cell of a row that its first cell with letters names, in four wordings."""
    rng = np.random.default_rng(7)
    tables = rows(data / "wikitablequestions/tables.jsonl.gz")
    for number in rng.permutation(len(tables))[: 2 * MADE]:
        table = tables[number]
        cells = table["rows"][rng.integers(len(table["rows"]))]
        named = [i for i, cell in enumerate(cells) if re.search(r"[A-Za-z]{3}", cell) and len(cell.split()) <= 5]
        if len(named) < 2 or len(cells) != len(table["header"]):
            continue
        key, asked = named[0], int(rng.choice(named[1:]))
        head, subject, title = (" ".join(text.split()) for text in (table["header"][asked], cells[key], table["title"]))
        if not re.search(r"[A-Za-z]{5}", head) or len(title.split()) > 8:
            continue
        wordings = (
            f"What is the {head.lower()} of {subject} in {title}?",
            f"Which {head.lower()} does {title} give for {subject}?",
            f"{title}: what is the {head.lower()} for {subject}?",
            f"In {title}, which {head.lower()} belongs to {subject}?",
        )
        text = wordings[rng.integers(len(wordings))]
        made = {"id": f"{table['id']}-{key}", "question": text, "supporting_titles": [table["title"]]}
        yield from _question("cells", made | {"golden_answers": [" ".join(cells[asked].split())]}, tables=True)


class Search:
    """BM25 over the three sources, and which of them shows an answer."""

    def __init__(self, output: pathlib.Path, passages: dict[str, list[dict[str, str]]]) -> None:
        self.bases = {}
        for name, these in passages.items():
            write_rows(output / f"{name}.jsonl", these)
            build_bm25(Bm25Config(corpus=str(output / f"{name}.jsonl"), overwrite=True), output / "kb" / name)
            self.bases[name] = load_kb(output / "kb" / name)

    def shown(self, queries: Iterable[str]) -> dict[str, dict[str, list[Passage]]]:
        """For every query, what each source shows."""
        once = list(dict.fromkeys(queries))
        found: dict[str, dict[str, list[Passage]]] = {query: {} for query in once}
        for name, base in self.bases.items():
            for start in range(0, len(once), 512):
                part = once[start : start + 512]
                for query, results in zip(part, base.search(part, k=K)):
                    found[query][name] = results
        return found

    def answered(self, questions: list[Question]) -> list[dict[str, list[tuple[str, Passage]]]]:
        """For every question and source, the queries that find an answer, each with the first passage that states it."""
        shown = self.shown(query for one in questions for query in (one.question, *one.titles))
        found: list[dict[str, list[tuple[str, Passage]]]] = [collections.defaultdict(list) for _ in questions]
        for one, hits in zip(questions, found):
            golds = [plain(answer) for answer in one.answers]
            for query in (one.question, *one.titles):
                for name, results in shown[query].items():
                    for passage in results:
                        text = plain(f"{passage.title}\n{passage.text}")
                        if any(states(text, gold) for gold in golds):
                            hits[name].append((query, passage))
                            break
        return found


def kept(questions: Iterable[Question], search: Search) -> list[dict[str, Any]]:
    """The questions that one source alone answers, as rows with a gold path; says how many were left out and why."""
    asked = list({plain(one.question): one for one in questions}.values())
    result, counts = [], collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for one, found in zip(asked, search.answered(asked)):
        words = f" {plain(one.question)} "
        own = [
            (name, query, passage)
            for name, hits in found.items()
            for query, passage in hits
            if (name == "table") == one.tables
            and (not one.gold or passage.title in one.gold)
            and (one.tables or f" {plain(bare_title(passage.title))} " in words)
        ]
        counts[one.set]["not found" if not own else "elsewhere, too" if len(found) > 1 else own[0][0]] += 1
        if own and len(found) == 1:
            name, query, passage = own[0]
            result.append(
                {
                    "id": one.id,
                    "question": one.question,
                    "golden_answers": list(one.answers),
                    "set": one.set,
                    "about": bare_title(passage.title),
                    "path": [{"kb": name, "passage_id": passage.id, "title": passage.title, "query": query}],
                }
            )
    for name, count in counts.items():
        print(name, dict(count), file=sys.stderr)
    return result


_BY = re.compile(
    r"\b(directed|written|composed|novel|book|album|song|single)(?: and \w+)? by (?:the )?(?:[A-Z][a-z]+ )?"
    r"(?:[a-z-]+ ){0,3}((?:[A-Z][\w.'-]+ ?){2,4})"
)
_MAKERS = {
    **{"directed": "director", "written": "writer", "composed": "composer", "novel": "author", "book": "author"},
    **dict.fromkeys(("album", "song", "single"), "performer"),
}
_DATE = r"(?:\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{1,2}, \d{4})"
# What a passage about a person says, and questions for it.
_SAID: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(rf"\([^()]*?({_DATE})"), ("When was {} born?", "On what day was {} born?")),
    (
        re.compile(rf"\([^()]*?{_DATE}[^()]*?[–-][^()]*?({_DATE})"),
        ("When did {} die?", "What is the date of {}'s death?"),
    ),
    (re.compile(r"\b(?:is|was) an? ([A-Z][a-z]+)\b"), ("What is the nationality of {}?", "Which country is {} from?")),
)


def bridges(passages: dict[str, list[dict[str, str]]]) -> Iterator[tuple[Question, dict[str, str], dict[str, str]]]:
    """Questions about who made a work, each with the passage about the work, and that about its maker."""
    people = {bare_title(row["title"]): row for row in passages["people"]}
    for work in passages["works"]:
        for verb, words in dict.fromkeys((match[1], match[2]) for match in _BY.finditer(work["text"])):
            named = words.strip(" .'-").split()
            names = (" ".join(named[:count]).lower() for count in range(len(named), 1, -1))
            if not (maker := next((people[name] for name in names if name in people), None)):
                continue
            titles = (without_aside(work["title"]), without_aside(maker["title"]))
            noun = f"the {_MAKERS[verb]} of {titles[0]}"
            for number, (said, wordings) in enumerate(_SAID):
                if answer := said.search(maker["text"]):
                    id = f"bridge-{work['id']}-{maker['id']}-{number}"
                    text = wordings[_drawn(id) % len(wordings)].format(noun)
                    yield (
                        Question(id=id, set="bridge", tables=False, question=text, answers=(answer[1],), titles=titles),
                        work,
                        maker,
                    )


def kept_bridges(
    made_: Iterable[tuple[Question, dict[str, str], dict[str, str]]], search: Search
) -> list[dict[str, Any]]:
    """Those that two searches answer and one does not: as rows with a gold path. At most one of a work."""
    asked = sorted(made_, key=lambda one: _drawn(one[0].id))
    shown = search.shown([query for one, _, _ in asked for query in (one.question, *one.titles)])
    result, counts, works = [], collections.Counter[str](), set[str]()
    for one, work, maker in asked:
        golds, (title, name) = [plain(answer) for answer in one.answers], one.titles
        stated = [
            any(states(plain(f"{passage.title}\n{passage.text}"), gold) for gold in golds)
            for query in (one.question, title)
            for found in shown[query].values()
            for passage in found
        ]
        first = [query for query in (one.question, title) if work["id"] in [p.id for p in shown[query]["works"]]]
        second = maker["id"] in [p.id for p in shown[name]["people"]]
        why = "one search" if any(stated) else "not found" if not (first and second) else "kept"
        counts[why] += 1
        if why != "kept" or work["id"] in works:
            continue
        works.add(work["id"])
        hops = (("works", work, first[0]), ("people", maker, name))
        result.append(
            {
                "id": one.id,
                "question": one.question,
                "golden_answers": list(one.answers),
                "set": "bridge",
                "about": bare_title(name),
                "work": bare_title(title),
                "path": [
                    {"kb": kb, "passage_id": row["id"], "title": row["title"], "query": query}
                    for kb, row, query in hops
                ],
            }
        )
    print("bridge", dict(counts), len(result), file=sys.stderr)
    return result


def exchanged(data: pathlib.Path, name: str, renaming: dict[str, str]) -> None:
    """Writes the questions of `test.jsonl` for sources with other names, as `NAME.jsonl`."""
    these = rows(data / "test.jsonl")
    for row in these:
        row["path"] = [hop | {"kb": renaming.get(hop["kb"], hop["kb"])} for hop in row["path"]]
    write_rows(data / f"{name}.jsonl", these)


def split_of(row: dict[str, Any]) -> str:
    """By the title of the passage that answers, so that all that is asked about it is on one side."""
    share = _drawn(plain(row["about"])) % 100
    for name, percent in SHARES:
        if share < percent:
            return name
        share -= percent
    raise AssertionError(share)


def write_rows(path: pathlib.Path, these: Iterable[dict[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in these))


def chosen(asked: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The files of questions: `MOST` of a source in each, in an order drawn at random."""
    splits = collections.defaultdict(list)
    for row in asked:
        splits[split_of(row)].append(row)
    rng, files, trained = np.random.default_rng(11), {}, set[str]()
    for name, these in (*((name, splits[name]) for name, _ in SHARES), ("other_sets", others)):
        counts = collections.Counter[str]()
        files[name] = []
        for row in (these[i] for i in rng.permutation(len(these))):
            if name == "other_sets" and row["about"] in trained:
                continue
            counts[row["path"][0]["kb"]] += 1
            if counts[row["path"][0]["kb"]] <= MOST:
                files[name].append(row)
        if name == "train":
            trained = {row["about"] for row in files[name]}
    return files


def smaller(
    passages: dict[str, list[dict[str, str]]], asked: Iterable[dict[str, Any]]
) -> dict[str, list[dict[str, str]]]:
    """The sources with every passage of the titles that are asked about, and others up to `SIZE`."""
    titles: dict[str, set[str]] = collections.defaultdict(set)
    for row in asked:
        titles[row["path"][0]["kb"]].add(row["about"])
    result = {}
    for name, these in passages.items():
        needed = [row for row in these if bare_title(row["title"]) in titles[name]]
        rest = sorted(
            (row for row in these if bare_title(row["title"]) not in titles[name]), key=lambda row: _drawn(row["id"])
        )
        result[name] = needed + rest[: max(0, SIZE - len(needed))]
    return result


def made(data: pathlib.Path, output: pathlib.Path) -> None:
    """Sources and questions, from the data sets."""
    passages = passages_of(data)
    questions = [list(training_sets(data)), list(other_sets(data))]
    with tempfile.TemporaryDirectory() as scratch:
        search = Search(pathlib.Path(scratch), passages)
        files = chosen(*(kept(these, search) for these in questions))
    passages = smaller(passages, itertools.chain(*files.values()))
    small = Search(output, passages)
    by_id = {one.id: one for these in questions for one in these}
    for name, these in files.items():
        again = kept([by_id[row["id"]] for row in these], small)
        write_rows(output / f"{name}.jsonl", again)
        if name == "test":
            write_rows(output / "paraphrases.jsonl", paraphrased(again))
        print(name, collections.Counter((row["path"][0]["kb"], row["set"]) for row in again), file=sys.stderr)
    found = kept_bridges(bridges(passages), small)
    sides = {row["about"]: name for name in KINDS for row in rows(output / f"{name}.jsonl")}
    rng = np.random.default_rng(13)
    for name, (of_source, of_bridge) in KINDS.items():
        these, rest = [], collections.Counter(dict.fromkeys(WORDS, of_source) | {"bridge": of_bridge})
        bridged = [row for row in found if split_of(row) == name == sides.get(row["work"], name)]
        for row in (*rows(output / f"{name}.jsonl"), *(bridged[i] for i in rng.permutation(len(bridged)))):
            kind = "bridge" if row["set"] == "bridge" else row["path"][0]["kb"]
            rest[kind] -= 1
            if rest[kind] >= 0:
                these.append(row | {"kind": kind})
        write_rows(output / f"kinds_{name}.jsonl", (these[i] for i in rng.permutation(len(these))))
        print(f"kinds_{name}", collections.Counter(row["kind"] for row in these), file=sys.stderr)


_LICENCES = """# What is in these files, and whose it is

These texts are others' work, under licences of their own. They are kept apart from the code, whose licence is another.

| what | from | licence |
|---|---|---|
| passages of `people.jsonl` and `works.jsonl`; questions of the set `bridge`, made from them | Wikipedia, \
by way of the corpora of PopQA, 2WikiMultihopQA, HotpotQA, \
MuSiQue and R1-Searcher's published rollouts; cut to 60 words | CC BY-SA 4.0 |
| rows of `table.jsonl`; questions of the sets `wikitablequestions` and `cells` | WikiTableQuestions (Pasupat and Liang, \
2015), from Wikipedia's tables; `cells` are questions made from its cells | CC BY-SA 4.0 |
| questions of the sets `2wiki`, `2wiki parts` and `2wiki facts` | 2WikiMultihopQA (Ho et al., 2020); `facts` are its evidence \
in our wordings | Apache-2.0 |
| `hotpotqa` | HotpotQA (Yang et al., 2018) | CC BY-SA 4.0 |
| `musique`, `musique parts`, `musique relations` | MuSiQue (Trivedi et al., 2022); `relations` in our wordings | CC BY 4.0 |
| `popqa` | PopQA (Mallen et al., 2023) | MIT |

Changed: passages and rows are cut, rows are written as text, questions are chosen and partly reworded (`paraphrases.jsonl`).
benchmarks/real_data.py makes them. Questions of Open-WikiTable are not here, because its repository states no licence.
"""


def pack(output: pathlib.Path, path: pathlib.Path) -> None:
    """The sample: the same bytes for the same files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(name: str, text: str) -> None:
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED, 9)

        add("LICENCES.md", _LICENCES)
        for name in (*WORDS, *dict(SHARES), "other_sets", "paraphrases", *(f"kinds_{name}" for name in KINDS)):
            these = (row for row in rows(output / f"{name}.jsonl") if row.get("set") not in UNLICENSED)
            add(f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in these))


def unpack(output: pathlib.Path) -> None:
    with zipfile.ZipFile(SAMPLE) as archive:
        archive.extractall(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, help="data sets; without it, the sample of this repository")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--pack", type=pathlib.Path, help="write a sample")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    if flags.data:
        made(flags.data, flags.output)
    else:
        unpack(flags.output)
    if flags.pack:
        pack(flags.output, flags.pack)


if __name__ == "__main__":
    main()
