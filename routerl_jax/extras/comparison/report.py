"""The report of a comparison: tables of metrics, tests, behaviour and cost, figures, and the card."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from routerl_jax.core.console import open_console
from routerl_jax.core.files import write_atomic
from routerl_jax.evaluation.figures import color_of, dots, new_figure, panels_of, save_figure
from routerl_jax.evaluation.report import heading
from routerl_jax.extras.comparison.document import Block, Heading, Paragraph, Picture, Table, markdown, page
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES, paper_blocks, policy_name

_MARKS = "osD^vP*X<>"


def metric_figure(benchmarks: Mapping[str, Any], metrics: Sequence[str], path: pathlib.Path) -> None:
    """Writes a PNG with a panel per benchmark: every metric of every agent, with its interval."""
    path.parent.mkdir(parents=True, exist_ok=True)
    agents = list(dict.fromkeys(name for results in benchmarks.values() for name in results["rows"]))
    columns = min(len(benchmarks), 3)
    lines = -(-len(benchmarks) // columns)
    width = 1.2 + max(4.0, 10.8 / columns) * columns
    figure = new_figure((min(width, 12.0), lines * (1.1 + 0.36 * len(agents))))
    panels = panels_of(figure, lines, columns)
    for axis, (name, results) in zip(panels, benchmarks.items()):
        rows = [results["rows"].get(agent, {}) for agent in agents]
        series = [
            (
                heading(metric).removesuffix(" %"),
                [(row[metric], *row[f"{metric}_interval"]) if metric in row else None for row in rows],
            )
            for metric in metrics
            if any(metric in row for row in rows)
        ]
        dots(axis, series, agents)
        axis.set(title=f"{name} (n={results['n']})", xlabel="%")
    for i, axis in enumerate(panels):
        if i >= len(benchmarks):
            axis.remove()
        elif i % columns:
            axis.set_yticklabels([])
    marks = {label: mark for axis in panels for mark, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(marks.values(), marks, loc="outside upper left", frameon=False, fontsize=8, ncols=len(marks))
    save_figure(figure, path)


def cost_figure(benchmarks: Mapping[str, Any], metric: str, path: pathlib.Path) -> None:
    """Writes a PNG with two panels per benchmark: a metric with its interval, by number of searches and by number of tokens."""
    from matplotlib.ticker import LogLocator

    path.parent.mkdir(parents=True, exist_ok=True)
    agents = list(dict.fromkeys(name for results in benchmarks.values() for name in results["rows"]))
    columns = -(-len(agents) // 24)
    figure = new_figure((9.2 + 2.6 * columns, 3.3 * len(benchmarks) + 0.2))
    axes = panels_of(figure, len(benchmarks), 2)
    for i, (name, results) in enumerate(benchmarks.items()):
        searches, tokens = axes[2 * i : 2 * i + 2]
        for agent, row in results["rows"].items():
            if metric not in row:  # no verdict of the judge counts
                continue
            number, cost = agents.index(agent), row["cost"]
            low, value, high = (
                100 * part for part in (row[f"{metric}_interval"][0], row[metric], row[f"{metric}_interval"][1])
            )
            bar = [[max(value - low, 0)], [max(high - value, 0)]]
            style = {
                "fmt": _MARKS[(number // 6) % len(_MARKS)],
                "color": color_of(number),
                "markersize": 7,
                "elinewidth": 1,
                "capsize": 2,
                "alpha": 0.9,
            }
            searches.errorbar([sum(cost["searches"].values())], [value], yerr=bar, label=agent, **style)
            tokens.errorbar([max(cost["read"] + cost["written"], 1)], [value], yerr=bar, **style)
        tokens.set_xscale("log")
        tokens.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # the usual labels, 2 x 10^1, lie over each other
        tokens.xaxis.set_major_formatter("{x:,.0f}")
        tokens.xaxis.set_minor_formatter("")
        searches.set(title=name, ylabel=heading(metric), xlabel="searches of a question")
        tokens.set(title=name, xlabel="tokens of a question, read and written")
        for axis in (searches, tokens):
            axis.set_ylim(bottom=-0.04 * max(axis.get_ylim()[1], 1))  # so that marks at 0 are not cut off
    marks = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels())}
    labelled = [agent for agent in agents if agent in marks]
    figure.legend(
        [marks[a] for a in labelled], labelled, loc="outside right upper", frameon=False, fontsize=8, ncols=columns
    )
    save_figure(figure, path)


TITLE = "Agents on benchmarks"
_MOST_TESTS = 15  # most tests in a table; if there are more, only the significant ones are shown
_LEVEL = 0.05

# (key of a row, heading) of the shares that describe an agent's behaviour
_BEHAVIOUR = (
    ("answered_rate", "answered"),
    ("finish_rate", "by itself"),
    ("forced_rate", "answer begun for it"),
    ("searched_rate", "searched"),
    ("search_ratio", "searches of those allowed"),
    ("invalid_action_rate", "invalid turns"),
    ("truncated_rate", "cut short"),
    ("tool_error_rate", "failed searches"),
    ("policy_failed_rate", "no reply"),
    ("routing_accuracy", "routed rightly"),
    ("recall", "gold passages found"),
    ("ndcg", "NDCG"),
)

# (key, heading) of the questions that the knowledge bases can answer
_ANSWERABLE = (("answerable", "answerable"), ("em", "EM of all"), ("em_answerable", "EM of answerable ones"))

# (key, heading) of the shares of right and wrong answers
_BREAKDOWN = (
    ("correct_with_search", "right, searched"),
    ("correct_without_search", "right, not searched"),
    ("wrong_with_search", "wrong, searched"),
    ("wrong_without_search", "wrong, not searched"),
)

# (check of a judge, what it is called)
_CHECKS = (
    ("longer", "the answer in a longer sentence"),
    ("swapped", "the answer and the accepted answer swapped"),
    ("reversed", "the accepted answers in reverse order"),
)

# (key of a row, heading) of what is told of a judge
_VERDICTS = (
    ("judge", "counts as right"),
    ("judge/asked", "asked"),
    ("judge/right", "right"),
    ("judge/unreadable", "can't be read"),
    ("judge/failed", "failed"),
    ("judge/from_cache", "kept from before"),
    ("judge/em_agreement", "EM agrees"),
    ("judge/cover_em_agreement", "CEM agrees"),
    ("judge/right_where_cover_em", "right where CEM is"),
    ("judge/right_where_not_cover_em", "right where CEM is not"),
)


def write_report(results: Mapping[str, Any], output: pathlib.Path) -> None:
    """Writes report.md, report.html and the pictures in figures/ from the content of results.json."""
    figures, metrics = output / "figures", results["card"]["metrics"]
    metric_figure(results["benchmarks"], metrics, figures / "metrics.png")
    cost_figure(results["benchmarks"], metrics[0], figures / "quality_cost.png")
    blocks = report(results, figures)
    write_atomic(output / "report.md", markdown(blocks, output))
    write_atomic(output / "report.html", page(blocks, TITLE))


def print_metrics(results: Mapping[str, Any]) -> None:
    """Prints the tables of metrics."""
    console = open_console()
    for metric in results["card"]["metrics"]:
        table = metric_table(results["benchmarks"], metric, _unfinished_agents(results["card"]))
        rich_table = RichTable(title=f"{_title(metric)}, percent", header_style="bold", box=box.SIMPLE_HEAD)
        for i, column_heading in enumerate(table.headings):
            rich_table.add_column(column_heading, justify="left" if i == 0 else "right")
        for i, row in enumerate(table.rows):
            rich_table.add_row(
                *(Text(text, "bold green" if (i, j) in table.bold else "") for j, text in enumerate(row))
            )
        console.print(rich_table)
    for benchmark, agents in results["card"]["left out"].items():
        console.print(Text(f"left out of {benchmark}: {', '.join(agents)} (the report says why)"))
    if unfinished := results["card"]["unfinished"]:
        text = ", ".join(f"{_counted(len(counts), 'agent')} on {name}" for name, counts in unfinished.items())
        console.print(Text(f"not finished: {text} (the report says how far they are)"))


def report(results: Mapping[str, Any], figures: pathlib.Path) -> list[Block]:
    """The blocks of the whole report.

    Args:
      figures: the directory of its pictures.
    """
    benchmarks, card = results["benchmarks"], results["card"]
    blocks: list[Block] = [Heading(TITLE, 1), Paragraph(_introduction(benchmarks, card))]
    blocks += [Picture(figures / "metrics.png", "Metrics of every agent, with 95 % intervals")]
    for metric in card["metrics"]:
        table = metric_table(benchmarks, metric, _unfinished_agents(card))
        blocks += [Heading(_title(metric)), Paragraph(_means(metric)), table]
    for name in card["papers"]:
        blocks += paper_blocks(PAPER_TABLES.get(name), results)
    costs = Picture(figures / "quality_cost.png", "Quality against searches and tokens of a question")
    blocks += [Heading("Quality and cost"), costs]
    for name, result in benchmarks.items():
        blocks += [Heading(f"Cost of a question, {name}", 3), cost_table(result["rows"])]
    blocks += [Paragraph(_COST)]
    blocks += [Heading("Which is better"), Paragraph(_tests_about(card))]
    for name, result in benchmarks.items():
        if card["reference"] and card["reference"] not in result["rows"]:
            blocks += [Paragraph(f"{name}: no tests, because {card['reference']} has no results there.")]
        for metric in card["metrics"]:
            blocks += _tests(name, metric, [test for test in result["tests"] if test["metric"] == metric])
    blocks += [
        Heading("How they worked"),
        Paragraph("Percent of questions; invalid turns of turns, failed searches of searches."),
    ]
    for name, result in benchmarks.items():
        blocks += [Heading(name, 3), behaviour_table(result["rows"])]
    blocks += [
        Heading("Right and wrong", 3),
        Paragraph("Percent of questions, by EM, with and without a search."),
        _shares(benchmarks, "breakdown", _BREAKDOWN),
    ]
    marked = {
        name: result
        for name, result in benchmarks.items()
        if any("answerable" in row for row in result["rows"].values())
    }
    if marked:
        about = (
            "Percent of questions. What can be answered is what the questions' metadata say (launch.check_data --mark)."
        )
        blocks += [Heading("Answerable questions", 3), Paragraph(about), _shares(marked, "", _ANSWERABLE)]
    blocks += _verdicts(benchmarks, card) + _left_out(card) + _unfinished(card) + _failures(benchmarks, card)
    return [*blocks, *_card(results)]


def metric_table(benchmarks: Mapping[str, Any], metric: str, unfinished: Sequence[str] = ()) -> Table:
    """A metric of every row on every benchmark, in percent with its 95 % interval. The best of each benchmark is bold.

    With several benchmarks there is a column with the mean over them, for rows that are on all of them. Agents that are
    `unfinished` on all benchmarks have empty rows.
    """
    agents = list(dict.fromkeys([*(name for result in benchmarks.values() for name in result["rows"]), *unfinished]))
    several = len(benchmarks) > 1
    headings = [
        "agent",
        *(f"{name} (n={result['n']})" for name, result in benchmarks.items()),
        *(["mean"] if several else []),
    ]
    values = {agent: [result["rows"].get(agent, {}).get(metric) for result in benchmarks.values()] for agent in agents}
    if several:
        values = {agent: [*row, None if None in row else sum(row) / len(row)] for agent, row in values.items()}
    best = [max((value for value in column if value is not None), default=None) for column in zip(*values.values())]
    rows, bold = [], set()
    for i, agent in enumerate(agents):
        intervals = [result["rows"].get(agent, {}).get(f"{metric}_interval") for result in benchmarks.values()]
        rows.append(
            [agent, *(_with_interval(value, interval) for value, interval in zip(values[agent], [*intervals, None]))]
        )
        bold |= {(i, j + 1) for j, value in enumerate(values[agent]) if value is not None and value == best[j]}
    return Table(headings, rows, frozenset(bold))


def cost_table(rows: Mapping[str, Any]) -> Table:
    """The cost of a question with each agent."""
    bases = list(dict.fromkeys(name for row in rows.values() for name in row["cost"]["searches"]))
    priced = any("money" in row["cost"] for row in rows.values())
    headings = [
        "agent",
        *(f"searches of {name}" for name in bases),
        "searches",
        "at most",
        "turns",
        "tokens read",
        "tokens written",
    ]
    cells = []
    for agent, row in rows.items():
        cost, budget = row["cost"], row["budget"]
        searches = [cost["searches"].get(name, 0.0) for name in bases]
        cells.append(
            [
                agent,
                *(f"{count:.2f}" for count in (*searches, sum(searches))),
                "-" if budget is None else str(budget),
                f"{row['turns_per_question']:.2f}",
                *(f"{cost[key]:.0f}" for key in ("read", "written")),
                f"{cost['seconds']:.3f}",
                *([f"{cost.get('money', 0.0):.5f}"] if priced else []),
            ]
        )
    return Table([*headings, "seconds", *(["money"] if priced else [])], cells)


def behaviour_table(rows: Mapping[str, Any]) -> Table:
    """The behaviour of the agents. Columns without any value are left out."""
    columns = [(key, title) for key, title in _BEHAVIOUR if any(key in row for row in rows.values())]
    cells = [[agent, *(_percent(row.get(key)) for key, _ in columns)] for agent, row in rows.items()]
    return Table(["agent", *(title for _, title in columns)], cells)


def tests_table(tests: Sequence[Mapping[str, Any]]) -> Table:
    """Paired tests, the lowest p first. Differences are in percentage points."""
    cells, bold = [], set()
    for i, test in enumerate(sorted(tests, key=lambda test: (test["holm"], test["p"]))):
        low, high = (100 * end for end in test["interval"])
        difference = f"{100 * test['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
        cells.append(
            [test["first"], test["second"], difference, _p_value(test["p"]), _p_value(test["holm"]), str(test["n"])]
        )
        bold |= {(i, 4)} if test["holm"] < _LEVEL else set()
    return Table(["agent", "against", "difference", "p", "p, corrected", "n"], cells, frozenset(bold), texts=2)


_COST = (
    "Means of a question. A search asks one knowledge base once. Tokens are as an endpoint counts them, prompts anew at every "
    "turn; of a model on this machine's devices each token that it was fed, and sampled, once. Seconds are those of all "
    "questions that ran side by side, shared among them."
)


def _introduction(benchmarks: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    agents = list(dict.fromkeys(name for values in benchmarks.values() for name in values["rows"]))
    temperature = card["decoding"]["temperature"]
    named = list(dict.fromkeys(map(policy_name, card["policies"].values())))
    policies = f"{'The policy is' if len(named) == 1 else 'Policies are'} {' and '.join(named)}."
    decoding = f"at temperature {temperature:g}, seed {card['decoding']['seed']}" if temperature else "greedily"
    compared = (
        f"{_counted(len(agents), 'agent')} on {_counted(len(benchmarks), 'benchmark')} ({', '.join(benchmarks)})."
    )
    unfinished = " Not all is finished: what is missing is listed under Not finished." if card["unfinished"] else ""
    return (
        f"{compared} {policies} All show {card['k']} documents of a search, search in {card['searches']} rounds at most, "
        f"decode {decoding}, and are scored with the normaliser {card['normalizer']}. The card at the end has what else the "
        f"numbers depend on.{unfinished}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _unfinished_agents(card: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for counts in card["unfinished"].values() for name in counts))


def _unfinished(card: Mapping[str, Any]) -> list[Block]:
    counts = card["unfinished"]
    lines = [[agent, *(str(counts[name].get(agent, "")) for name in counts)] for agent in _unfinished_agents(card)]
    about = (
        "Numbers of questions that these agents have answered so far, where they have not answered all. Their places are empty "
        "above. The same command without --finished goes on with them."
    )
    table = Table(["agent", *counts], lines)
    return [Heading("Not finished"), Paragraph(about), table] if lines else []


def _title(metric: str) -> str:
    return heading(metric).removesuffix(" %")


def _means(metric: str) -> str:
    shares = "Percent; in brackets the 95 % interval (bootstrap over the questions)."
    return f"{shares} Answers whose verdict does not count are left out." if metric == "judge" else shares


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + (f" ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})" if interval else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def _tests_about(card: Mapping[str, Any]) -> str:
    pairs = f"every agent against {card['reference']}" if card["reference"] else "every two agents"
    return (
        f"Paired tests of {pairs}, on the same questions: McNemar's exact test where scores are 0 or 1, else 9,999 random "
        "flips of signs. The difference is in points, the first agent's less the second's, with its 95 % interval (paired "
        "bootstrap); p is corrected by Holm's method for the number of tests of a metric on a benchmark."
    )


def _tests(name: str, metric: str, tests: Sequence[Mapping[str, Any]]) -> list[Block]:
    if not tests:
        return []
    significant = [test for test in tests if test["holm"] < _LEVEL]
    title = Heading(f"{_title(metric)}, {name}", 3)
    count = f"{len(significant) or 'none'} of {_counted(len(tests), 'pair')} of agents"
    summary = Paragraph(f"Told apart (corrected p below {_LEVEL:g}): {count}.")
    if len(tests) <= _MOST_TESTS:
        return [title, summary, tests_table(tests)]
    others = Paragraph("results.json has the others.")
    return [title, summary, *([tests_table(significant), others] if significant else [])]


def _shares(benchmarks: Mapping[str, Any], part: str, columns: Sequence[tuple[str, str]]) -> Table:
    """Shares of all rows, in percent. They are in `part` of a row, or in the row itself if that is ""."""
    lines = []
    for name, result in benchmarks.items():
        for agent, row in result["rows"].items():
            shares = row[part] if part else row
            lines.append([name, agent, *(_percent(shares.get(key)) for key, _ in columns)])
    return Table(["benchmark", "agent", *(title for _, title in columns)], lines, texts=2)


def _verdicts(benchmarks: Mapping[str, Any], card: Mapping[str, Any]) -> list[Block]:
    if "judge" not in card:
        return []
    about = (
        "Percent of questions. A string metric agrees where it finds right or wrong what the judge finds so; percent of the "
        "answers with such a verdict. The last two columns say how often the judge finds right what CEM finds right, and what "
        "CEM finds wrong: where they are about equal, it does not tell answers apart."
    )
    blocks = [Heading("Judge"), Paragraph(about), _shares(benchmarks, "", _VERDICTS)]
    lines = [
        [
            name,
            agent,
            variant,
            str(verdicts["n"]),
            *(_percent(verdicts[key]) for key in ("kept", "wrong_to_right", "right_to_wrong")),
        ]
        for name, result in benchmarks.items()
        for agent, row in result["rows"].items()
        for check, variant in _CHECKS
        if (verdicts := row.get("judge_checks", {}).get(check))
    ]
    if lines:
        headings = ["benchmark", "agent", "asked again with", "n", "same verdict", "wrong to right", "right to wrong"]
        note = "The judge was asked again about answers that say the same in another form, to see its bias. Percent of these."
        blocks += [Paragraph(note), Table(headings, lines, texts=3)]
    return blocks


def _left_out(card: Mapping[str, Any]) -> list[Block]:
    lines = [[benchmark, "", why] for benchmark, why in card.get("absent", {}).items()]
    lines += [
        [benchmark, agent, why] for benchmark, agents in card["left out"].items() for agent, why in agents.items()
    ]
    return [Heading("Left out"), Table(["benchmark", "agent", "why"], lines, texts=3)] if lines else []


def _failures(benchmarks: Mapping[str, Any], card: Mapping[str, Any]) -> list[Block]:
    """Failures, with numbers of questions. Every failure that counts as a wrong answer is reported here, and so are the rows of
    files that were left out."""
    lines = []
    for name, values in benchmarks.items():
        file = card["benchmarks"][name]["in the file"]
        if values.get("without_gold"):
            problem = "questions with a gold passage that no knowledge base holds"
            lines.append([name, "", problem, str(values["without_gold"])])
        lines += [[name, "", f"rows without {lack}, left out", str(file[lack])] for lack in file if lack != "questions"]
        for agent, row in values["rows"].items():
            kinds = {key.removeprefix("policy_failed/"): row[key] for key in row if key.startswith("policy_failed/")}
            counts = {f"the policy gave no reply ({kind})": share for kind, share in kinds.items()}
            counts["cut short by a limit"] = row["truncated_rate"]
            counts["no answer, these included"] = 1 - row["answered_rate"]
            counts["searches that failed"] = row["tool_error_rate"] * row["searches_per_question"]
            numbers = {failure: round(share * row["n"]) for failure, share in counts.items()}
            lines += [[name, agent, failure, str(number)] for failure, number in numbers.items() if number]
    about = "Numbers of questions, and of searches that failed. A question without an answer counts as wrong in all metrics."
    if not any(agent for _, agent, _, _ in lines):
        about = "Every question was answered, and no search failed."
    table = Table(["benchmark", "agent", "what", "how many"], lines, texts=3)
    return [Heading("What went wrong"), Paragraph(about), *([table] if lines else [])]


def _card(results: Mapping[str, Any]) -> list[Block]:
    card = results["card"]
    blocks: list[Block] = [Heading("Card")]
    for name, values in card["benchmarks"].items():
        facts = {key: value for key, value in values.items() if key != "knowledge" and value not in ("", None)}
        facts |= {f"knowledge base {kb}": value for kb, value in values["knowledge"].items()}
        blocks += [Heading(f"Benchmark {name}", 3), _facts(facts)]
    agents = [
        [
            name,
            agent,
            row["prompts"],
            _in_words({key: value for key, value in row["agent"].items() if value not in ("", {}, [])}),
        ]
        for name, values in results["benchmarks"].items()
        for agent, row in values["rows"].items()
    ]
    about = "Digests are of what the policy was first asked at each question: task, worked examples, documents."
    blocks += [
        Heading("Agents", 3),
        Paragraph(about),
        Table(["benchmark", "agent", "prompts digest", "made of"], agents, texts=4),
    ]
    common = ("k", "searches", "instruct", "decoding", "normalizer", "captions", "judge")
    facts = {key: card[key] for key in common if key in card} | {
        f"policy {key}": value for key, value in card["policies"].items()
    }
    blocks += [Heading("In common", 3), _facts(facts)]
    blocks += [Heading("Definitions", 3), _facts(card["definitions"]), Heading("Versions", 3), _facts(card["versions"])]
    return blocks


def _facts(facts: Mapping[str, Any]) -> Table:
    return Table(["", ""], [[key, _in_words(value)] for key, value in facts.items()], texts=2)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_in_words(item)}" for key, item in value.items() if item not in ("", None, {}, []))
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    return value if isinstance(value, str) else json.dumps(value)
