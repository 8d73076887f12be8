"""The same policy, measured in several ways: how far corpus, k, metric, prompt, retriever and decoding move its numbers.

python -m benchmarks.differences --workdir=DIR --keep=benchmarks/results/differences.json [--data=DATA] [--only=atlas,..] \
    [--picture=docs/images/why_your_numbers_differ.png]

Prints the tables of docs/comparisons.md#why-your-numbers-differ. Without --workdir it prints and draws what the file has. There
are four parts. `atlas` needs no files. The others need DATA, a directory with hotpotqa/, 2wikimultihopqa/, musique/ and
r1searcher_traces/, and are left out without it.

  atlas      the packaged policy on questions of the embedded world; each setting is changed alone
  hotpotqa   SmolLM2-135M-Instruct as vanilla RAG on real questions, likewise (--questions of them)
  retrieval  gold passages that BM25 finds for the same questions, by k and corpus; no policy
  released   R1-Searcher's published answers under every normaliser and metric; no policy

Each setting is a comparison of its own (launch.evaluate, in DIR), so a killed call goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.agent import LLM
from routerl_jax.core.files import write_atomic, write_json_lines
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.world import KNOWLEDGE_BASES, passages_of, records
from routerl_jax.evaluation.figures import color_of, dots, new_figure, panels_of, save_figure
from routerl_jax.evaluation.paired import compare_scores
from routerl_jax.evaluation.records import read_records
from routerl_jax.evaluation.report import heading
from routerl_jax.extras.baselines.baseline import ChatPrompt, SearchResults
from routerl_jax.extras.baselines.vanilla_rag import READ, VanillaRAG
from routerl_jax.extras.comparison.compare import compare
from routerl_jax.extras.comparison.config import ComparisonConfig
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.rewards.scoring import bootstrap_intervals
from routerl_jax.training.config import EngineConfig, KnowledgeConfig, MeshConfig, ModelConfig
from routerl_jax.training.knowledge import open_knowledge_bases

BASE = "the base setting"
_NORMALIZER = "search_r1"
_HEADLINE = ("em", "f1", "cover_em")
_TRACES = "r1searcher_traces/traces_dev.jsonl.gz"
LATIN = {"words": {"split": "latin"}}  # the words of BM25 in the kept results
_INVENTED = 300  # countries whose passages enlarge Atlas's corpora


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The base configuration with a change.

    Attributes:
      group: what is changed.
      name: the new value.
      changes: fields of the comparison's configuration.
    """

    group: str
    name: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worded(VanillaRAG):
    """Vanilla RAG with another wording of its prompt.

    Attributes:
      task: the instructions.
      order: text around `{documents}` and `{question}`.
    """

    task: str = READ
    order: str = "Documents:\n{documents}\n\nQuestion: {question}"

    async def read(self, example: Example, llm: LLM, results: SearchResults) -> Episode:
        question = self.question(example, llm)

        def asking(documents: str) -> ChatPrompt:
            text = self.order.replace("{question}", question).replace("{documents}", documents)
            return ChatPrompt(task=self.task, text=text, cue="Answer:")

        request = self.fitted(example, llm, results.passages, asking, results.failure, self.answer_tokens)
        return await self.answer(example, llm, request)


# --- the settings ---


def atlas(workdir: pathlib.Path, questions: int) -> tuple[ComparisonConfig, list[Setting]]:
    """The packaged policy in its own protocol on Atlas."""
    own: dict[str, Any] = {"grammar": "r1_router", "answer_tokens": 24}
    base = ComparisonConfig(
        agents=("search",),
        benchmarks=("atlas",),
        questions=questions,
        k=2,
        searches=2,
        turn_tokens=64,
        instruct=False,
        settings={"search": own},
        model=ModelConfig(path="atlas-warm-start"),
        mesh=MeshConfig(cpu_devices=1),
        engine=EngineConfig(rows=64, max_length=512),
    )

    def prompted(text: str) -> dict[str, Any]:
        return {"settings": {"search": {**own, "settings": {"prompt": text}}}}

    gold = {hop.passage_id for example in _asked(base) for hop in gold_passages_of(example)}
    invented = records(invented_world(0, countries=_INVENTED, elements=100))
    sizes: dict[str, dict[str, list[Any]]] = {"gold passages alone": {}, f"with {_INVENTED} invented countries": {}}
    for kb in KNOWLEDGE_BASES:
        real = passages_of(kb)
        names = {passage.id for passage in real}  # an invented country may be called like a real one
        added = [record.passage for record in invented if record.kb == kb and record.passage.id not in names]
        sizes["gold passages alone"][kb] = [passage for passage in real if passage.id in gold]
        sizes[f"with {_INVENTED} invented countries"][kb] = real + added
    corpora = []
    for name, passages in sizes.items():
        number = sum(map(len, passages.values()))
        knowledge = {
            kb: KnowledgeConfig(source=_corpus(workdir, f"{_slug(name)}-{kb}", some), index="exact")
            for kb, some in passages.items()
        }
        corpora.append(Setting(group="corpus", name=f"{number:,} passages: {name}", changes={"knowledge": knowledge}))
    return base, [
        *corpora,
        *(Setting(group="k", name=f"k={k}", changes={"k": k}) for k in (1, 5)),
        Setting(group="rounds", name="at most 1 search", changes={"searches": 1}),
        Setting(
            group="retriever", name="BM25 for passages", changes={"retriever": "bm25", "retriever_settings": LATIN}
        ),
        Setting(group="prompt", name="`Q:` for `Question:`", changes=prompted("Q: {question}\n")),
        Setting(group="prompt", name="the question alone", changes=prompted("{question}\n")),
        *(
            Setting(group="decoding", name=f"temperature 1, seed {s}", changes={"temperature": 1.0, "seed": s})
            for s in range(2)
        ),
    ]


def hotpotqa(workdir: pathlib.Path, data: str, questions: int) -> tuple[ComparisonConfig, list[Setting]]:
    """A pretrained model as vanilla RAG on real questions over their own passages, by BM25."""
    agent = "benchmarks.differences:Worded"
    base = ComparisonConfig(
        agents=(agent,),
        benchmarks=("hotpotqa",),
        questions=questions,
        data=data,
        retriever="bm25",
        retriever_settings=LATIN,
        k=3,
        searches=1,
        settings={agent: {"answer_tokens": 24}},
        model=ModelConfig(path="SmolLM2-135M-Instruct"),
        mesh=MeshConfig(cpu_devices=1),
        engine=EngineConfig(rows=8, max_length=1280),
    )

    def worded(**fields: Any) -> dict[str, Any]:
        return {"settings": {agent: {**base.settings[agent], **fields}}}

    corpora = [
        Setting(group="corpus", name=name, changes={"knowledge": {"text": KnowledgeConfig(source=source)}})
        for name, source in _hotpotqa_corpora(workdir, data, _asked(base))
    ]
    return base, [
        *corpora,
        *(Setting(group="k", name=f"k={k}", changes={"k": k}) for k in (1, 5)),
        Setting(group="prompt", name="a shorter instruction", changes=worded(task="Answer the question.")),
        Setting(
            group="prompt",
            name="the question before the documents",
            changes=worded(order="Question: {question}\n\nDocuments:\n{documents}"),
        ),
        Setting(group="prompt", name="plain text, no chat template", changes={"instruct": False}),
        Setting(group="decoding", name="temperature 1, seed 0", changes={"temperature": 1.0}),
    ]


def _hotpotqa_corpora(workdir: pathlib.Path, data: str, examples: Sequence[Example]) -> list[tuple[str, str]]:
    """(name, file) of a smaller and a larger corpus than HotpotQA's own."""
    gold = {hop.passage_id for example in examples for hop in gold_passages_of(example)}
    own = _rows(data, "hotpotqa")
    others = [row for name in ("2wikimultihopqa", "musique") for row in _rows(data, name)]
    named = [
        ("gold passages alone", [row for row in own if row["id"] in gold]),
        ("with 2WikiMultihopQA's and MuSiQue's", own + others),
    ]
    return [(f"{len(rows):,} passages: {name}", _corpus(workdir, _slug(name), rows)) for name, rows in named]


def _rows(data: str, name: str) -> list[dict[str, Any]]:
    """A corpus. Ids are made unique by its name, except HotpotQA's, which questions name."""
    path = pathlib.Path(data).expanduser() / name / "corpus.jsonl.gz"
    prefix = "" if name == "hotpotqa" else f"{name}/"
    return [{"id": prefix + str(row["id"]), "title": row["title"], "text": row["text"]} for _, row in read_rows(path)]


def _corpus(workdir: pathlib.Path, name: str, passages: Sequence[Any]) -> str:
    rows = [
        passage if isinstance(passage, dict) else {"id": passage.id, "title": passage.title, "text": passage.text}
        for passage in passages
    ]
    path = workdir / "corpora" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(path, rows)
    return str(path)


def _asked(base: ComparisonConfig) -> list[Example]:
    """The questions of a base configuration."""
    from routerl_jax.extras.comparison.compare import prepared

    return prepared(base)[0].examples


# --- the measurements ---


def measured(
    base: ComparisonConfig, settings: Sequence[Setting], directory: pathlib.Path, save: Callable[[dict[str, Any]], None]
) -> None:
    """Runs the base and every setting. `save` gets all results so far after each."""
    base_rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"settings": []}
    for setting in (Setting(group="base", name=BASE), *settings):
        name = _slug(f"{setting.group}-{setting.name}")
        metrics, answers = _run(dataclasses.replace(base, **setting.changes), directory / name)
        base_rows = base_rows or answers
        differences = {}
        for metric in _HEADLINE:
            differences[metric] = compare_scores(_scores(answers, metric), _scores(base_rows, metric))
        results["settings"].append({"group": setting.group, "name": setting.name, **metrics, "from_base": differences})
        if setting.group == "base":
            results |= rescored(answers)
            results["answered"] = _answered(answers)
            results["parts"] = _parts(answers)
        save(results)


def _run(config: ComparisonConfig, directory: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Numbers and answers of the only agent on the only benchmark."""
    (benchmark,) = compare(config, directory, progress=False)["benchmarks"].values()
    (row,) = benchmark["rows"].values()
    keys = tuple(key for metric in _HEADLINE for key in (metric, f"{metric}_interval"))
    keys += (
        "n",
        "tokens_per_question",
        "answered_rate",
        "invalid_action_rate",
    )
    keys += ("recall", "routing_accuracy")
    (episodes,) = sorted((directory / "episodes").glob("*/*.jsonl"))
    answers = [
        {"prediction": record["prediction"], "golds": record["golden_answers"]} for record in read_records(episodes)
    ]
    return {key: row[key] for key in keys if key in row} | {"searches": row["searches_per_question"]}, answers


def _scores(answers: Sequence[Mapping[str, Any]], metric: str, normalizer: str = _NORMALIZER) -> np.ndarray:
    score = ANSWER_METRICS[metric]
    return np.asarray([score(answer["prediction"], answer["golds"], normalizer) for answer in answers])


def rescored(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same answers under every metric and normaliser: `metrics`, METRIC -> NORMALIZER -> [mean, low, high]."""
    table: dict[str, Any] = {}
    for metric in ANSWER_METRICS:
        table[metric] = {}
        for normalizer in NORMALIZERS:
            scores = _scores(answers, metric, normalizer)
            table[metric][normalizer] = [float(scores.mean()), *bootstrap_intervals(scores[:, None])[:, 0].tolist()]
    return {"metrics": table, "n": len(answers)}


def _answered(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """EM over the questions with an answer alone."""
    scores = _scores([answer for answer in answers if answer["prediction"] is not None], "em")
    return {"n": len(scores), "em": float(scores.mean()) if len(scores) else 0.0}


def _parts(answers: Sequence[Mapping[str, Any]], size: int = 100) -> list[float]:
    """EM of the first hundred questions, the second, and so on."""
    scores = _scores(answers, "em")
    return [float(scores[at : at + size].mean()) for at in range(0, len(scores) - size + 1, size)]


def retrieval(workdir: pathlib.Path, data: str) -> dict[str, Any]:
    """Share of the gold passages of all HotpotQA questions that BM25 finds, by corpus and k."""
    examples = _asked(ComparisonConfig(benchmarks=("hotpotqa",), data=data, questions=-1, model=ModelConfig(path="-")))
    own = str(pathlib.Path(data).expanduser() / "hotpotqa" / "corpus.jsonl.gz")
    (small, gold), (large, all_of_them) = _hotpotqa_corpora(workdir / "all", data, examples)
    corpora = {
        small: gold,
        f"{sum(1 for _ in read_rows(pathlib.Path(own))):,} passages: HotpotQA's": own,
        large: all_of_them,
    }
    numbers: dict[str, Any] = {}
    for name, source in corpora.items():
        kb = open_knowledge_bases(
            {"text": KnowledgeConfig(source=source, kind="bm25", settings=LATIN)}, progress=False
        )["text"]
        rankings = kb.search([example.question for example in examples], 10)  # type: ignore[union-attr]
        numbers[name] = {}
        for k in (1, 3, 5, 10):
            shares = [_share(example, passages[:k]) for example, passages in zip(examples, rankings)]
            low, high = bootstrap_intervals(np.asarray(shares)[:, None])[:, 0].tolist()
            numbers[name][f"{k}"] = [float(np.mean(shares)), low, high]
    return {"n": len(examples), "recall": numbers}


def _share(example: Example, passages: Sequence[Passage]) -> float:
    gold = gold_passages_of(example)
    return sum(hop.found_in(tuple(passages)) for hop in gold) / len(gold)


def released(data: str) -> dict[str, Any]:
    """R1-Searcher's published answers under every metric and normaliser, and by its judge.

    Returns:
      The entries of `rescored`; `judge`, the mean of the published verdicts with its interval; and `systems`, for each metric
      the difference (paired.compare_scores) of its two models on the questions that both answered.
    """
    rows = [row for _, row in read_rows(pathlib.Path(data).expanduser() / _TRACES)]
    answers = [{"prediction": row["pred_answer"], "golds": row["golden_answers"]} for row in rows]
    scores = {metric: _scores(answers, metric) for metric in ANSWER_METRICS}
    scores["judge"] = verdicts = np.asarray([float(row["judge"] == "True") for row in rows])
    models = {row["model"] for row in rows}
    by_question: dict[tuple[str, str], dict[str, int]] = {}
    for number, row in enumerate(rows):
        by_question.setdefault((row["dataset"], row["question"]), {})[row["model"]] = number
    both = [numbers for numbers in by_question.values() if numbers.keys() == models]
    first, second = (np.asarray([numbers[model] for numbers in both]) for model in sorted(models))
    systems = {metric: compare_scores(values[first], values[second]) for metric, values in scores.items()}
    judge = [float(verdicts.mean()), *bootstrap_intervals(verdicts[:, None])[:, 0].tolist()]
    return {**rescored(answers), "judge": judge, "systems": systems, "pairs": len(both), "models": sorted(models)}


# --- what is shown ---


def tables(results: Mapping[str, Any]) -> str:
    """Markdown of all parts that there are."""
    parts = []
    for name in ("atlas", "hotpotqa"):
        if name in results:
            parts += [_settings_table(name, results[name]), _remarks(results[name]), _metrics_table(results[name])]
    if "retrieval" in results:
        parts.append(_retrieval_table(results["retrieval"]))
    if "released" in results:
        parts += [_metrics_table(results["released"]), _systems_table(results["released"])]
    return "\n\n".join(part for part in parts if part)


def _settings_table(name: str, part: Mapping[str, Any]) -> str:
    titles = [heading(metric) for metric in _HEADLINE]
    columns = [column for title in titles for column in (title, f"{title.removesuffix(' %')}, difference")]
    lines = [
        f"| {name}, n={part['settings'][0]['n']} | | {' | '.join(columns)} | gold found % | searches |",
        "|---|---" + "|---:" * (len(columns) + 2) + "|",
    ]
    for row in part["settings"]:
        gold = f"{100 * row['recall']:.1f}" if "recall" in row else "-"
        cells = [row["group"], row["name"]]
        for metric in _HEADLINE:
            cells += [_of(row[metric], *row[f"{metric}_interval"]), _moved(row, metric)]
        lines.append("| " + " | ".join([*cells, gold, f"{row['searches']:.2f}"]) + " |")
    return "\n".join(lines)


def _moved(row: Mapping[str, Any], metric: str) -> str:
    if row["group"] == "base":
        return "-"
    moved = row["from_base"][metric]
    low, high = (100 * bound for bound in moved["interval"])
    return f"{100 * moved['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def _remarks(part: Mapping[str, Any]) -> str:
    answered, base = part["answered"], part["settings"][0]
    lines = [
        f"EM over the {answered['n']} of {base['n']} questions with an answer: {100 * answered['em']:.1f} "
        f"(over all: {100 * base['em']:.1f})."
    ]
    if len(part["parts"]) > 1:
        lines.append("EM by hundreds of questions: " + ", ".join(f"{100 * score:.0f}" for score in part["parts"]) + ".")
    return "\n".join(lines)


def _metrics_table(part: Mapping[str, Any]) -> str:
    names = list(NORMALIZERS)
    lines = [f"| n={part['n']} | " + " | ".join(f"`{name}`" for name in names) + " |", "|---|" + "---:|" * len(names)]
    for metric, by in part["metrics"].items():
        lines.append(f"| `{metric}` | " + " | ".join(_of(*by[name]) for name in names) + " |")
    return "\n".join(lines)


def _systems_table(part: Mapping[str, Any]) -> str:
    first, second = part["models"]
    lines = [f"| {first} less {second}, n={part['pairs']} | difference | p |", "|---|---:|---:|"]
    for metric, comparison in part["systems"].items():
        low, high = (100 * bound for bound in comparison["interval"])
        difference = f"{100 * comparison['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
        lines.append(f"| `{metric}` | {difference} | {comparison['p']:.2g} |")
    return f"Judge: {_of(*part['judge'])}\n\n" + "\n".join(lines)


def _retrieval_table(part: Mapping[str, Any]) -> str:
    ks = list(next(iter(part["recall"].values())))
    lines = [f"| n={part['n']} | " + " | ".join(f"k={k}" for k in ks) + " |", "|---|" + "---:|" * len(ks)]
    lines += [f"| {corpus} | " + " | ".join(_of(*by[k]) for k in ks) + " |" for corpus, by in part["recall"].items()]
    return "\n".join(lines)


def _of(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def picture(results: Mapping[str, Any], path: pathlib.Path) -> None:
    """Panels of the settings' EM and F1 with intervals, and of the released answers by metric and normaliser."""
    names = [name for name in ("atlas", "hotpotqa", "released") if name in results]
    tall = max([len(results[name]["settings"]) for name in names if name != "released"], default=6)
    figure = new_figure((5.4 * len(names), 1.4 + 0.3 * tall))
    for axis, name in zip(panels_of(figure, 1, len(names)), names):
        part = results[name]
        if name == "released":
            dots(axis, list(_by_normalizer(part)), list(part["metrics"]))
            mean, low, high = (100 * value for value in part["judge"])
            axis.axvspan(low, high, color="0.9", zorder=0)
            axis.axvline(mean, color="0.4", linewidth=0.8, linestyle=":", label="published judge")
            axis.set_title(f"The same {part['n']:,} published answers:\nmetric and normaliser", fontsize=10)
        else:
            rows = [f"{row['group']}: {row['name']}" if row["group"] != "base" else BASE for row in part["settings"]]
            series = [
                (
                    heading(metric).removesuffix(" %"),
                    [(row[metric], *row[f"{metric}_interval"]) for row in part["settings"]],
                )
                for metric in _HEADLINE
            ]
            dots(axis, series, [textwrap.fill(row.replace("`", ""), 32) for row in rows])
            for number, (_, values) in enumerate(series):
                axis.axvline(100 * values[0][0], color=color_of(number), linewidth=0.8, linestyle=":")
            policy = "0.9M policy on Atlas" if name == "atlas" else "SmolLM2-135M on HotpotQA"
            axis.set_title(
                f"{policy}, {part['settings'][0]['n']} questions:\none setting changed at a time", fontsize=10
            )
        axis.set_xlabel("% with 95 % interval")
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    save_figure(figure, path)


def _by_normalizer(part: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[float, float, float]]]]:
    for normalizer in NORMALIZERS:
        yield normalizer, [tuple(by[normalizer]) for by in part["metrics"].values()]


def _slug(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text.lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path, required=True, help="JSON file of the results")
    parser.add_argument("--workdir", type=pathlib.Path, help="directory of the comparisons; without it nothing is run")
    parser.add_argument("--data", default="", help="directory of real questions, corpora and released answers")
    parts = "atlas,hotpotqa,retrieval,released"
    parser.add_argument("--only", default=parts, help=f"parts to run, of {parts}")
    parser.add_argument("--atlas-questions", type=int, default=256)
    parser.add_argument("--questions", type=int, default=100, help="of HotpotQA, for SmolLM2")
    parser.add_argument("--picture", type=pathlib.Path, help="PNG file")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(parts.split(",")):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {parts}")
    results: dict[str, Any] = json.loads(arguments.keep.read_text()) if arguments.keep.exists() else {}

    def keeping(name: str) -> Callable[[dict[str, Any]], None]:
        def keep(part: dict[str, Any]) -> None:
            results[name] = _rounded(part)
            write_atomic(arguments.keep, json.dumps(results, indent=1, ensure_ascii=False) + "\n")

        return keep

    if arguments.workdir:
        if "released" in only and arguments.data:
            keeping("released")(released(arguments.data))
        if "retrieval" in only and arguments.data:
            keeping("retrieval")(retrieval(arguments.workdir, arguments.data))
        if "atlas" in only:
            measured(
                *atlas(arguments.workdir, arguments.atlas_questions), arguments.workdir / "atlas", keeping("atlas")
            )
        if "hotpotqa" in only and arguments.data:
            base, settings = hotpotqa(arguments.workdir, arguments.data, arguments.questions)
            measured(base, settings, arguments.workdir / "hotpotqa", keeping("hotpotqa"))
    print(tables(results))
    if arguments.picture:
        picture(results, arguments.picture)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
