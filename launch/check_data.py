r"""Finds questions that occur in both training and evaluation data, and questions that a corpus can't answer.

    python -m launch.check_data --train=hotpot_train.jsonl --test=hotpot_dev.jsonl
    python -m launch.check_data --train=nq.jsonl,hotpot.jsonl --train_range=0,80000 --test=bamboogle.jsonl --output=pairs.jsonl
    python -m launch.check_data --test=questions.jsonl --knowledge=corpus.jsonl.gz --output=answerable.jsonl
    python -m launch.check_data --test=questions.jsonl --knowledge=text=kb/hotpotqa,tables=kb/tables --k=1,5,20 \
        --mark --output=marked.jsonl

Without --knowledge it prints the most similar pairs first, and writes all of them to --output. The exit status is 2 if the
data fail the check (--fail_on: exact, near or none), else 0. 100,000 questions against 10,000 take 8 seconds of one CPU core.

With --knowledge it says which questions of --test (or --train) can't be answered from there: no passage states an accepted
answer; gold passages are absent; or, in knowledge bases that can be searched, no search finds the answer. --output gets the
questions that can be answered.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from launch.command import check_writable, start

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("train", None, "Training questions, in the form of config.data.train.")
    flags.DEFINE_string("test", None, "Evaluation questions; default: --test_range of --train.")
    flags.DEFINE_list("train_range", [], "START,STOP: items of --train.")
    flags.DEFINE_list("test_range", [], "START,STOP: items of --test.")
    flags.DEFINE_float("threshold", 0.6, "Least similarity of a near-duplicate, in (0, 1].")
    flags.DEFINE_integer("words", 1, "Words of a shingle.")
    flags.DEFINE_enum("fail_on", "exact", ["exact", "near", "none"], "What makes the exit status 2.")
    flags.DEFINE_integer("show", 20, "Pairs, and groups of questions, to print.")
    flags.DEFINE_list(
        "knowledge", [], "A corpus, a directory of a knowledge base or its URL; or several as NAME=PLACE,NAME=PLACE."
    )
    flags.DEFINE_list("k", ["1", "5", "20", "100"], "Passages of a search of --knowledge; the largest is searched for.")
    flags.DEFINE_string("normalizer", "search_r1", "Of answers and passages: search_r1, r1_searcher or vqa.")
    flags.DEFINE_bool("mark", False, "--output gets all questions, with metadata.answerable true or false.")
    flags.DEFINE_string(
        "output", None, "A .jsonl file for all pairs; with --knowledge, for the questions that can be answered."
    )
    flags.DEFINE_bool("json", False, "Print one JSON object.")


def main(_: Sequence[str]) -> None:
    import json

    from routerl_jax.core.config import naming
    from routerl_jax.data.overlap import examples_of
    from routerl_jax.data.readers import Subset, open_dataset

    def opened(name: str, limits: Sequence[str], flag: str):
        with naming(f"--{flag.removesuffix('_range')}"):
            source = open_dataset(name)
        if not limits:
            return source
        if len(limits) != 2 or not all(limit.strip().isdecimal() for limit in limits):
            raise ValueError(f"--{flag}={','.join(limits)}: expected START,STOP")
        with naming(f"--{flag}"):
            return Subset(source, *map(int, limits))

    if not (FLAGS.train or (FLAGS.test and FLAGS.knowledge)):
        raise ValueError("give --train; or --test and --knowledge")
    compared = FLAGS.train and (FLAGS.test or (FLAGS.train_range and FLAGS.test_range))
    if not compared and not FLAGS.knowledge:
        raise ValueError("give --test, or --train_range and --test_range of one data set; or --knowledge")
    if FLAGS.mark and not (FLAGS.knowledge and FLAGS.output):
        raise ValueError("--mark is for --knowledge and --output")
    if FLAGS.output:
        check_writable("--output", FLAGS.output, file=True)
    test_name, flag = (FLAGS.test, "test_range") if FLAGS.test or FLAGS.test_range else (FLAGS.train, "train_range")
    test = list(examples_of(opened(test_name or FLAGS.train, getattr(FLAGS, flag), flag)))
    results, failed = {}, False
    if compared:
        results, failed = _overlaps(opened(FLAGS.train, FLAGS.train_range, "train_range"), test)
    if FLAGS.knowledge:
        results["knowledge"] = _answerable(test)
    if FLAGS.json:
        print(json.dumps(results, ensure_ascii=False))
    if failed:
        sys.exit(2)


def _overlaps(train: Any, test: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """Prints the pairs. Returns them for --json, and whether the check failed."""
    import dataclasses

    from routerl_jax.core.files import write_json_lines
    from routerl_jax.data.overlap import examples_of, find_overlaps

    pairs = find_overlaps(
        examples_of(train), test, threshold=FLAGS.threshold, words=FLAGS.words, progress=sys.stderr.isatty()
    )
    pairs.sort(key=lambda pair: (not pair.exact, -pair.score))
    keeps = FLAGS.output and not FLAGS.knowledge
    if keeps:
        write_json_lines(pathlib.Path(FLAGS.output), (dataclasses.asdict(pair) for pair in pairs))
    exact = len({pair.test_id for pair in pairs if pair.exact})
    near = len({pair.test_id for pair in pairs} - {pair.test_id for pair in pairs if pair.exact})
    if not FLAGS.json:
        for pair in pairs[: FLAGS.show]:
            print(f"{'exact' if pair.exact else f'{pair.score:.3f}'}  train {pair.train_id}: {pair.train_question}")
            print(f"{'':5}   test {pair.test_id}: {pair.test_question}")
        if len(pairs) > FLAGS.show:
            print(f".. and {len(pairs) - FLAGS.show} more" + ("" if keeps else "; --output=FILE.jsonl keeps them all"))
        print(
            f"{len(train):,} training questions, {len(test):,} evaluation questions: {exact} of these occur in training, "
            f"{near} more nearly so (similarity >= {FLAGS.threshold:g})"
        )
    failed = bool((exact and FLAGS.fail_on != "none") or (near and FLAGS.fail_on == "near"))
    return {"pairs": [dataclasses.asdict(pair) for pair in pairs], "exact": exact, "near": near}, failed


def _answerable(examples: Sequence[Any]) -> dict[str, Any]:
    """Prints which questions --knowledge can't answer, and writes --output. Returns what is known of them."""
    import dataclasses
    import itertools
    import time

    from routerl_jax.core.buckets import fetched
    from routerl_jax.core.files import write_json_lines
    from routerl_jax.extras.answerable import AnswerCheck, summary
    from routerl_jax.extras.curation.questions import question_row
    from routerl_jax.knowledge.bm25 import Bm25Config, passages_or_rows
    from routerl_jax.knowledge.hybrid import is_url
    from routerl_jax.knowledge.load import load_kb
    from routerl_jax.knowledge.store import MANIFEST, Manifest

    if not all(text.strip().isdecimal() and int(text) for text in FLAGS.k):
        raise ValueError(f"--k={','.join(FLAGS.k)}: expected whole numbers of at least 1, such as 1,5,20")
    ks = sorted({int(text) for text in FLAGS.k})
    places: dict[str, str] = {}
    for part in FLAGS.knowledge:
        name, equals, place = part.partition("=")
        name, place = (name, place) if equals and "/" not in name else (str(len(places) + 1), part)
        if not place or name in places:
            raise ValueError(f"--knowledge={part}: give PLACE, or NAME=PLACE with another name for each")
        places[name] = place
    read, searched = [], {}
    for name, place in places.items():
        built = not is_url(place) and (fetched(place) / MANIFEST).is_file()
        if not is_url(place) and not (built and not Manifest.read(fetched(place)).stored):
            read.append(fetched(place))
        if is_url(place) or built:
            searched[name] = load_kb(place)
    check, progress, began = AnswerCheck(examples, FLAGS.normalizer), sys.stderr.isatty(), time.monotonic()
    passages = None
    if len(read) == len(places):  # what is only searched may hold an answer that no other has
        sources = itertools.chain.from_iterable(passages_or_rows(Bm25Config(), path) for path in read)
        passages = check.read(sources, progress="reading passages" if progress else "")
    read_seconds = time.monotonic() - began
    if searched:
        check.search(searched, ks[-1], progress=progress)
    results = {
        "places": places,
        "passages": passages,
        "searched": list(searched),
        "seconds": {"read": read_seconds, "search": time.monotonic() - began - read_seconds},
        **summary(check, ks),
    }
    if FLAGS.output:
        output = pathlib.Path(FLAGS.output)

        def rows() -> Iterator[dict[str, Any]]:
            for example, finding in zip(examples, check.findings):
                reason = finding.reason()
                if FLAGS.mark:
                    why = {"unanswerable_because": reason} if reason else {}
                    yield question_row(
                        example, {} if finding.unknown else {"answerable": not reason, **why}, output.parent
                    )
                elif not reason:
                    yield question_row(example, {}, output.parent)

        write_json_lines(output, rows())
    if not FLAGS.json:
        _print(results)
    return results | {
        "findings": [
            {"id": example.id, **dataclasses.asdict(finding), "reason": finding.reason()}
            for example, finding in zip(examples, check.findings)
        ]
    }


_REASONS = {
    "answer": "no passage states an accepted answer",
    "gold": "a gold passage is absent",
    "search": "no search finds the answer",
}


def _print(results: dict[str, Any]) -> None:
    from routerl_jax.core.console import print_listing

    def row(name: str, counts: dict[str, Any]) -> tuple[str, ...]:
        count = counts["questions"]
        lacking = (f"{number} ({number / count:.1%})" for number in counts["unanswerable"].values())
        return (name, f"{count:,}", f"{counts['answerable']:.1%}", *lacking)

    headings = ("questions with", "questions", "can be answered", *_REASONS.values())
    rows = [row("any answer", results), *(row(f"an answer of kind {kind}", n) for kind, n in results["kinds"].items())]
    where = "places that can only be searched" if results["passages"] is None else f"{results['passages']:,} passages"
    print_listing(f"{results['questions']:,} questions, {where}", headings, rows)
    for key, groups in results["by"].items():
        title = f"by {key}" + (f", the largest {FLAGS.show} of {len(groups)}" if len(groups) > FLAGS.show else "")
        print_listing(title, (key, *headings[1:]), [row(name, n) for name, n in list(groups.items())[: FLAGS.show]])
    for way, recall in results["recall"].items():
        shares = [(name, f"{share:.1%}") for name, share in recall.items() if "@" in name]
        counts = ", ".join(f"{count:,} {name}" for name, count in recall.items() if "@" not in name)
        print_listing(f"found by {way} ({counts})", ("among the first", "questions"), shares)
    if results["unknown"]:
        print(
            f"{results['unknown']:,} questions are answered by yes or no, and name no gold passages: nothing is said of them"
        )


if __name__ == "__main__":
    start(main, define_flags)
