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
from routerl_jax.evaluation.metrics import ANSWERED, JUDGE, answered, too_few_answered
from routerl_jax.evaluation.report import heading, marks_text, score_text
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
                [(row[metric], *row[f"{metric}_interval"]) if _measured(row, metric) else None for row in rows],
            )
            for metric in metrics
            if any(_measured(row, metric) for row in rows)
        ]
        if series:
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


def _measured(row: Mapping[str, Any], metric: str) -> bool:
    """Whether a row has a number: some question has a reply, and for `judge` some verdict counts."""
    return metric in row and answered(row, metric)[0] > 0


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
            if not _measured(row, metric):
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
_MOST_TESTS = 15  # most significant tests that are shown with their intervals, below the matrix of all
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
        if marks := _marks(results["benchmarks"], metric, results["card"]):
            console.print(Text(marks))
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
        about = f"{_MEANS} {_marks(benchmarks, metric, card)}".strip()
        blocks += [Heading(_title(metric)), Paragraph(about), table, *_answered_alone(benchmarks, metric)]
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
            blocks += _tests(name, metric, result, card)
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
    """A metric of every row on every benchmark, in percent with its 95 % interval (evaluation.report.score_text).

    The best row of a benchmark is bold if the tests tell it apart from every other one. With several benchmarks there is a
    column with the mean over them, for rows that are on all of them. Agents that are `unfinished` on all benchmarks
    have empty rows.
    """
    agents = list(dict.fromkeys([*(name for result in benchmarks.values() for name in result["rows"]), *unfinished]))
    several = len(benchmarks) > 1
    headings = [
        "agent",
        *(f"{name} (n={result['n']})" for name, result in benchmarks.items()),
        *(["mean"] if several else []),
    ]
    best = [_told_apart(result, metric) for result in benchmarks.values()]
    rows = []
    for agent in agents:
        ours = [result["rows"].get(agent) for result in benchmarks.values()]
        cells = ["-" if row is None else score_text(row, metric) for row in ours]
        if several:
            cells.append("-" if None in ours else score_text(_mean_row(ours, metric), metric))
        rows.append([agent, *cells])
    bold = {(agents.index(name), column) for column, name in enumerate(best, 1) if name}
    return Table(headings, rows, frozenset(bold))


def _told_apart(result: Mapping[str, Any], metric: str) -> str:
    """The best row of a benchmark, if a test tells it apart from every other row; else ""."""
    pairs = {
        frozenset((test["first"], test["second"]))
        for test in result["tests"]
        if test["metric"] == metric and test["holm"] < _LEVEL
    }
    values = {name: row.get(metric) for name, row in result["rows"].items()}
    best = max(values, key=lambda name: -1.0 if values[name] is None else values[name])
    others = values.keys() - {best}
    return best if others and all(frozenset((best, other)) in pairs for other in others) else ""


def _mean_row(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """A row with the mean of a metric over several rows, without it if one of them has no number; and their `answered`."""
    counts = [answered(row, metric) for row in rows]
    values = [row[metric] for row, (count, _) in zip(rows, counts) if count and row.get(metric) is not None]
    mean = {metric: sum(values) / len(values)} if len(values) == len(rows) else {}
    count, asked = map(sum, zip(*counts))
    return {**mean, "n": asked, "n_answered": count, "n_judged": count}


def _lacking(benchmarks: Mapping[str, Any], metric: str) -> list[tuple[str, str, int, int]]:
    """(benchmark, agent, questions answered, questions asked) of the rows with fewer than all of their questions answered."""
    rows = [(name, agent, row) for name, result in benchmarks.items() for agent, row in result["rows"].items()]
    counts = [(name, agent, *answered(row, metric)) for name, agent, row in rows]
    return [(name, agent, count, asked) for name, agent, count, asked in counts if count < asked]


def _answered_alone(benchmarks: Mapping[str, Any], metric: str) -> list[Block]:
    """The rows that lack replies or verdicts, with the metric of the other questions alone; [] if there are none."""
    agents = {agent for _, agent, _, _ in _lacking(benchmarks, metric)}
    if not agents:
        return []
    scores = {f"{metric}{end}": f"{metric}{ANSWERED}{end}" for end in ("", "_interval")}

    def alone(row: Mapping[str, Any]) -> dict[str, Any]:
        count, asked = answered(row, metric)
        return {**row, **({} if count == asked else {key: row.get(name) for key, name in scores.items()})}

    results = {
        name: {
            **result,
            "rows": {agent: alone(row) for agent, row in result["rows"].items() if agent in agents},
            "tests": [],
        }
        for name, result in benchmarks.items()
    }
    about = "The same without these questions. Agents that failed on different questions can't be compared by it."
    return [
        Paragraph(about),
        metric_table({name: result for name, result in results.items() if result["rows"]}, metric),
    ]


def _label(agent: str, row: Mapping[str, Any]) -> str:
    """The agent's name, with "n of N" if its numbers are of questions of which only n had a reply."""
    count, asked = answered(row, "em")
    return agent if count == asked else f"{agent}, {count} of {asked}"


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
                _label(agent, row),
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
    by_rule = ["answers by rule"] if any(map(_rules, rows.values())) else []
    cells = [
        [_label(agent, row), *(_percent(row.get(key)) for key, _ in columns), *(_rules(row) or "-" for _ in by_rule)]
        for agent, row in rows.items()
    ]
    return Table(["agent", *(title for _, title in columns), *by_rule], cells)


def _rules(row: Mapping[str, Any]) -> str:
    """The number of answers that each rule of extraction found; "" for an agent without such rules."""
    shares = {key.removeprefix("answer_rule/"): row[key] for key in row if key.startswith("answer_rule/")}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{rule} {round(share * row['n'])}" for rule, share in ordered)


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
    seeds = card["decoding"]["seeds"]
    if seeds > 1:
        decoding = f"{decoding} and the {seeds - 1} after it (each question is asked {seeds} times)"
    lacking = list(dict.fromkeys(part for metric in card["metrics"] for part in _lacking(benchmarks, metric)))
    if lacking:
        parts = [f"{agent} on {name} ({count} of {asked})" for name, agent, count, asked in lacking]
        unfinished += f" Not every question has a reply, or a verdict: {', '.join(parts)}."
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


_MEANS = (
    "Percent; in brackets the 95 % interval (bootstrap over the questions, and over the seeds if there are several; where all "
    "scores are equal, such as at 0 and 100 %, Wilson's score interval). Bold: the best, if the tests below tell it apart from "
    "every other agent."
)


def _marks(benchmarks: Mapping[str, Any], metric: str, card: Mapping[str, Any]) -> str:
    """What the marks in the cells of a metric mean, and what missing verdicts count."""
    rows = [row for result in benchmarks.values() for row in result["rows"].values()]
    judged = metric == JUDGE
    seen = {str(i): row if judged else {**row, "n_judged": row["n"]} for i, row in enumerate(rows)}
    return marks_text(seen, card["judge"]["failed"] if judged else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _p_value(value: float, digits: int = 4) -> str:
    least = 10**-digits
    return f"{'< ' if value < least else ''}{max(value, least):.{digits}f}"


def _tests_about(card: Mapping[str, Any]) -> str:
    pairs = f"every agent against {card['reference']}" if card["reference"] else "every two agents"
    scores = "scores" if card["decoding"]["seeds"] == 1 else "means over the seeds"
    return (
        f"Paired tests of {pairs}, on the same questions: McNemar's exact test where {scores} are 0 or 1, else 9,999 random "
        "flips of signs. The difference is in points, the first agent's less the second's, with its 95 % interval (paired "
        "bootstrap; Tango's score interval where all differences are equal); p is corrected by Holm's method for the number of "
        "tests of a metric on a benchmark. In a matrix the differences, of the row's agent less the column's, are above the "
        "diagonal, and the corrected p below it. Bold: told apart."
    )


def tests_matrix(tests: Sequence[Mapping[str, Any]]) -> Table:
    """Tests of every two agents: above the diagonal differences in percentage points, below it the corrected p."""
    names = list(dict.fromkeys(name for test in tests for name in (test["first"], test["second"])))
    cells, bold = [["-"] * len(names) for _ in names], set()
    for i in range(len(names)):
        cells[i][i] = ""
    for test in tests:
        i, j = names.index(test["first"]), names.index(test["second"])
        cells[i][j], cells[j][i] = f"{100 * test['difference']:+.1f}", _p_value(test["holm"], 3)
        bold |= {(i, j + 1), (j, i + 1)} if test["holm"] < _LEVEL else set()
    rows = [[f"{i} {name}", *row] for i, (name, row) in enumerate(zip(names, cells), 1)]
    return Table(["agent", *(str(i) for i in range(1, len(names) + 1))], rows, frozenset(bold))


def _tests(name: str, metric: str, result: Mapping[str, Any], card: Mapping[str, Any]) -> list[Block]:
    tests = [test for test in result["tests"] if test["metric"] == metric]
    most = card["most failed"]
    out = [
        f"{agent} ({count} of {asked})"
        for agent, row in result["rows"].items()
        if too_few_answered(row, metric, most)
        for count, asked in [answered(row, metric)]
    ]
    lack = "replies and verdicts" if metric == JUDGE else "replies"
    told = f"Not tested, because more than {100 * most:g} % of the {lack} are missing: {', '.join(out)}."
    excluded = [Paragraph(told)] if out else []
    title = Heading(f"{_title(metric)}, {name}", 3)
    if not tests:
        return [title, *excluded] if excluded else []
    significant = [test for test in tests if test["holm"] < _LEVEL]
    count = f"{len(significant) or 'none'} of {_counted(len(tests), 'pair')} of agents"
    summary = Paragraph(f"Told apart (corrected p below {_LEVEL:g}): {count}.")
    if card["reference"] or len(tests) == 1:
        return [title, summary, *excluded, tests_table(tests)]
    shown = [tests_table(significant)] if 0 < len(significant) <= _MOST_TESTS else []
    return [title, summary, *excluded, tests_matrix(tests), *shown]


def _shares(benchmarks: Mapping[str, Any], part: str, columns: Sequence[tuple[str, str]]) -> Table:
    """Shares of all rows, in percent. They are in `part` of a row, or in the row itself if that is ""."""
    lines = []
    for name, result in benchmarks.items():
        for agent, row in result["rows"].items():
            shares = row[part] if part else row
            lines.append([name, _label(agent, row), *(_percent(shares.get(key)) for key, _ in columns)])
    return Table(["benchmark", "agent", *(title for _, title in columns)], lines, texts=2)


def _verdicts(benchmarks: Mapping[str, Any], card: Mapping[str, Any]) -> list[Block]:
    if "judge" not in card:
        return []
    about = (
        "Percent of questions. A string metric agrees where it finds right or wrong what the judge finds so; percent of the "
        "answers with such a verdict. The last two columns say how often the judge finds right what CEM finds right, and what "
        "CEM finds wrong: where they are about equal, it does not tell answers apart. "
    ) + marks_text({}, card["judge"]["failed"])
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
            counts["the judge's verdict can't be read"] = row.get("judge/unreadable", 0.0)
            counts["the judge gave no verdict"] = row.get("judge/failed", 0.0)
            counts["cut short by a limit"] = row["truncated_rate"]
            counts["no answer, these included"] = 1 - row["answered_rate"]
            counts["searches that failed"] = row["tool_error_rate"] * row["searches_per_question"]
            numbers = {failure: round(share * row["n"]) for failure, share in counts.items()}
            lines += [[name, agent, failure, str(number)] for failure, number in numbers.items() if number]
    about = "Numbers of questions, and of searches that failed. A question without an answer counts as wrong in all metrics."
    if not any(agent for _, agent, _, _ in lines):
        about = "Every question was answered, and no search failed."
        about += " Every answer has a verdict." if "judge" in card else ""
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
