"""The report of a job that asks a language model: numbers as JSON, and Markdown for people."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from routerl_jax.core.files import write_atomic


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelUse:
    """The use of a language model in all sessions of a job.

    Attributes:
      calls: number of replies.
      prompt_tokens, tokens: number of tokens read and written.
      cost: price of these tokens at the configured prices.
    """

    calls: int
    prompt_tokens: int
    tokens: int
    cost: float

    @classmethod
    def counted(cls, rows: Iterable[Mapping[str, Any]], read_price: float, write_price: float) -> ModelUse:
        """The sum over `rows`, each with `calls`, `prompt_tokens` and `tokens`. Prices are per million tokens."""
        calls = read = written = 0
        for row in rows:
            calls, read, written = calls + row["calls"], read + row["prompt_tokens"], written + row["tokens"]
        cost = (read * read_price + written * write_price) / 1e6
        return cls(calls=calls, prompt_tokens=read, tokens=written, cost=cost)

    def __str__(self) -> str:
        text = f"{self.calls:,} replies, {self.prompt_tokens:,} tokens read, {self.tokens:,} written"
        return text + (f", cost {self.cost:,.2f}" if self.cost else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a job. `str(report)` of its subclasses is Markdown for people.

    Attributes:
      model: name of the model; "" if none was asked.
      use: use of the model.
      seconds: length of this session.
    """

    model: str
    use: ModelUse
    seconds: float

    def record(self) -> dict[str, Any]:
        """The report, JSON-serialisable, with the fields of `use` among its own."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("use"), **fields}

    def write(self, workdir: pathlib.Path) -> None:
        """Writes report.json and report.md."""
        write_report(workdir, self.record(), str(self))


def write_report(workdir: pathlib.Path, record: Mapping[str, Any], text: str) -> None:
    """Writes report.json and report.md of a job."""
    write_atomic(workdir / "report.json", json.dumps(record, indent=2) + "\n")
    write_atomic(workdir / "report.md", text + "\n")


def listed(counts: Mapping[Any, int]) -> str:
    """Counts in words: "name 3, other 2"; "none" if there are none."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
