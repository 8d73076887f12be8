"""Questions in two data sets: nothing is missed, templates are no overlap, and the numbers of real files."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import random
from collections import Counter
from collections.abc import Callable

import pytest

from routerl_jax.core.types import Example
from routerl_jax.data.overlap import find_overlaps, words_of
from routerl_jax.data.readers import open_dataset
from tests.programs import launch_here, refusal


def examples(*questions: str, prefix: str = "q") -> list[Example]:
    return [Example(id=f"{prefix}{i}", question=text, answers=("x",)) for i, text in enumerate(questions)]


def test_case_accents_and_punctuation_do_not_count() -> None:
    train = examples("Où est Lomé?", "Who wrote “1984”?", "Who wrote 1985?")
    pairs = find_overlaps(train, examples("who wrote 1984", "ou est LOME ?", prefix="t"), threshold=1.0)
    assert [(pair.train_id, pair.test_id, pair.exact, pair.score) for pair in pairs] == [
        ("q1", "t0", True, 1.0),
        ("q0", "t1", True, 1.0),
    ]
    assert find_overlaps(examples("?!"), examples("?!", prefix="t"))[0].exact  # no words at all: the text itself
    assert not find_overlaps(examples("?!"), examples("!?", prefix="t"))


def brute_force(
    train: list[Example], test: list[Example], threshold: float, words: int
) -> dict[tuple[str, str], float]:
    """Weighted Jaccard of all pairs, from its definition."""

    def shingles(example: Example) -> frozenset[tuple[str, ...]]:
        parts = words_of(example.question)
        return frozenset(tuple(parts[i : i + words]) for i in range(max(len(parts) - words, 0) + 1))

    sets = {example.id: shingles(example) for example in [*train, *test]}
    counts = Counter(itertools.chain.from_iterable(sets.values()))
    weight = {shingle: math.log1p(len(sets) / count) for shingle, count in counts.items()}
    found = {}
    for a, b in itertools.product(train, test):
        common, union = sets[a.id] & sets[b.id], sets[a.id] | sets[b.id]
        score = sum(map(weight.__getitem__, common)) / sum(map(weight.__getitem__, union))
        if score >= threshold and words_of(a.question) != words_of(b.question):
            found[a.id, b.id] = score
    return found


@pytest.mark.parametrize("words", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9, 1.0])
def test_no_pair_is_missed(threshold: float, words: int) -> None:
    """Against all pairs, on random questions of few words, many of which repeat with changes."""
    rng = random.Random(words)
    vocabulary = [f"w{i}" for i in range(40)]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randint(1, 9))) for _ in range(150)]
    changed = []
    for text in rng.choices(texts, k=80):
        parts = text.split()
        parts[rng.randrange(len(parts))] = rng.choice(vocabulary)
        changed.append(" ".join(rng.sample(parts, len(parts)) if rng.random() < 0.3 else parts))
    train, test = examples(*texts), examples(*changed, prefix="t")
    pairs = [pair for pair in find_overlaps(train, test, threshold=threshold, words=words) if not pair.exact]
    found = {(pair.train_id, pair.test_id): pair.score for pair in pairs}
    expected = brute_force(train, test, threshold, words)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)
    assert threshold > 0.6 or expected


def test_what_a_template_shares_is_no_overlap() -> None:
    """Twelve of thirteen words are equal here, but many questions have them."""
    names = [f"Name{i}" for i in range(100)]
    template = "What is the place of birth of the director of the film {}?"
    train = examples(*(template.format(name) for name in names))
    assert not find_overlaps(train, examples(template.format("Elsewhere"), prefix="t"))
    again = find_overlaps(train, examples("Of the film Name7, what is the director's place of birth?", prefix="t"))
    assert [pair.train_id for pair in again] == ["q7"]


def test_questions_without_spaces_between_words_are_compared_by_characters() -> None:
    train = examples(
        "日本で一番高い山は何ですか", "法国的首都是哪里？", "ทำไมฟ้าถึงเป็นสีฟ้า", "Pourquoi le ciel est-il bleu?"
    )
    test = examples("日本で一番高い山の名は何ですか？", "法国 的首都是哪里", "水の沸点は何度ですか", prefix="t")
    pairs = find_overlaps(train, test)
    assert [(pair.train_id, pair.test_id, pair.exact) for pair in pairs] == [("q0", "t0", False), ("q1", "t1", True)]
    assert find_overlaps(
        examples("भारत की राजधानी क्या है"), examples("भारत की राजधानी कौन है", prefix="t"), threshold=0.5
    )
    assert not find_overlaps(examples("भारत की राजधानी क्या है"), examples("नदी का उद्गम कहाँ है", prefix="t"))


def test_questions_about_pictures_differ_by_their_pictures() -> None:
    def seen(name: str, image: object) -> Example:
        return Example(id=name, question="What is this?", answers=("x",), images=(image,))

    train = [seen("a", "cat.png"), seen("b", b"dog")]
    pairs = find_overlaps(train, [seen("c", b"dog"), seen("d", "dog.png")])
    assert [(pair.train_id, pair.test_id) for pair in pairs] == [("b", "c")]

    def linked(name: str, url: str) -> Example:
        return Example(id=name, question="What is this?", answers=("x",), metadata={"image_urls": [url]})

    pairs = find_overlaps([linked("a", "http://a/1"), linked("b", "http://a/2")], [linked("c", "http://a/2")])
    assert [(pair.train_id, pair.test_id) for pair in pairs] == [("b", "c")]


def test_options() -> None:
    for options in ({"threshold": 0.0}, {"threshold": 1.5}, {"words": 0}):
        with pytest.raises(ValueError, match="must be in"):
            find_overlaps([], [], **options)  # type: ignore[arg-type]
    assert find_overlaps([], examples("a b c")) == []


def test_real_sets_that_share_questions(shared_data: Callable[[str], pathlib.Path]) -> None:
    """R1-Router's 2Wiki questions and ours come from one development set; R1-Searcher's two sets were kept apart."""

    def load(name: str) -> list[Example]:
        source = open_dataset(
            f"{name.split('/')[0]}:{shared_data(name)}" if "2wikim" in name else str(shared_data(name))
        )
        return [source[i] for i in range(len(source))]

    train, test = load("r1router_2wiki_val/questions_dev.jsonl.gz"), load("2wikimultihopqa/questions_dev.jsonl.gz")
    exact = {pair.test_question.casefold() for pair in find_overlaps(train, test) if pair.exact}
    by_hand = {e.question.casefold() for e in train} & {e.question.casefold() for e in test}
    assert len(by_hand) > 80
    assert by_hand <= exact
    apart = find_overlaps(
        load("r1searcher_train/questions_dev.jsonl.gz"), load("r1searcher_eval/questions_dev.jsonl.gz")
    )
    assert not any(pair.exact for pair in apart)
    assert len(apart) < 10


def test_the_program(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, *questions: str) -> pathlib.Path:
        rows = [{"id": f"{name}{i}", "question": text, "answer": "x"} for i, text in enumerate(questions)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / f"{name}.jsonl"

    train = write("train", "Who built the tower of Pisa?", "Who sank the Vasa?", "What is a quark?")
    test = write("test", "who sank the vasa", "The tower of Pisa: who built it?", "Why?")
    output = tmp_path / "pairs.jsonl"
    assert launch_here("check_data", f"--train={train}", f"--test={test}", f"--output={output}") == 2
    shown = capsys.readouterr().out
    assert "exact  train train1: Who sank the Vasa?" in shown
    assert "3 evaluation questions: 1 of these occur in training, 1 more nearly so" in shown
    pairs = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(pair["train_id"], pair["test_id"], pair["exact"]) for pair in pairs] == [
        ("train1", "test0", True),
        ("train0", "test1", False),
    ]
    near = ("check_data", f"--train={train}", f"--test={test}", "--test_range=1,3")
    assert not launch_here(*near)
    assert launch_here(*near, "--fail_on=near") == 2
    assert not launch_here("check_data", f"--train={train}", f"--test={test}", "--fail_on=none")
    assert not launch_here("check_data", f"--train={train}", "--train_range=0,2", "--test_range=2,3")
    assert "give --test, or --train_range" in refusal("check_data", f"--train={train}")
    assert "--test_range=1: expected START,STOP" in refusal(
        "check_data", f"--train={train}", f"--test={test}", "--test_range=1"
    )
