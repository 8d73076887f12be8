"""All formats of the package, and the choice of the format of a row."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterator

from absl import logging

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.formats import pages, pictures, text, verl
from routerl_jax.data.formats.format import FORMATS, QuestionFormat, Row, unpacked_row
from routerl_jax.data.formats.tables import is_pattern, read_question_rows
from routerl_jax.data.pictures import MissingPictureError

# The first format that matches a row is used. So formats with special keys come first, and the plain one, for all rows, last.
_IN_ORDER: dict[str, QuestionFormat] = {
    "fvqa": verl.Fvqa(),
    "vrag": verl.VragRows(),
    "verl": verl.Verl(),
    "hybridqa": pages.HybridQa(),
    "open_wikitable": pages.OpenWikiTable(),
    "vidoseek": pages.ViDoSeek(),
    "slidevqa": pages.SlideVQA(),
    "mmlongbench_doc": pages.MMLongBenchDoc(),
    "livevqa": pictures.LiveVQA(),
    "mmsearch": pictures.MMSearch(),
    "simplevqa": pictures.SimpleVQA(),
    "dynvqa": pictures.DynVQA(),
    "popqa": text.PopQA(),
    "musique": text.Musique(),
    "2wikimultihopqa": text.TwoWiki(),
    "hotpotqa": text.HotpotQA(),
    "r1_searcher": text.R1Searcher(),
    "hipporag": text.HippoRag(),
    "bamboogle": text.Bamboogle(),
    "infoseek": pictures.InfoSeek(),
    "flashrag": text.FlashRag(),
}
for _name, _form in _IN_ORDER.items():
    FORMATS.register(_name)(_form)


def split_name(name: str) -> tuple[str, str]:
    """(format, file) of `hotpotqa:FILE`; the format is "" if none is named."""
    head, colon, path = name.partition(":")
    return (head, path) if colon and head in FORMATS and not pathlib.Path(name).exists() else ("", name)


def format_of(row: Row) -> QuestionFormat:
    """The format whose keys a row has."""
    return next(form for form in _IN_ORDER.values() if form.matches(row))


def read_examples(
    path: str | pathlib.Path, form: str = ""
) -> Iterator[tuple[RowLocation, Example | MissingPictureError | None]]:
    """The questions of a file, or of all files that a name with * or ? matches, with their locations.

    For a question whose picture is missing or can't be read, it yields the error to raise. For a question without an answer,
    which the caller should leave out, it yields None.

    Args:
      form: a key of `FORMATS`; "": the keys of each row decide.

    Raises:
      ValueError: while reading: names file, row and key.
    """
    fixed_format = FORMATS.get(form) if form else None
    several = is_pattern(str(path))
    for location, row in read_question_rows(path):
        row = unpacked_row(row)
        form_of_row = fixed_format or format_of(row)
        for part in form_of_row.parts(row, location):
            try:
                example = form_of_row.example(part, location)
            except MissingPictureError as error:
                yield location, error
                continue
            if several and example is not None and example.id == str(location.number):  # numbers of rows repeat
                example = dataclasses.replace(example, id=f"{location.path.name.partition('.')[0]}/{example.id}")
            yield location, example


def read_passages(path: str | pathlib.Path, form: str = "") -> Iterator[tuple[RowLocation, list[Passage]]]:
    """For each row of a file of questions, the passages that it holds."""
    fixed_format = FORMATS.get(form) if form else None
    for location, row in read_question_rows(path):
        row = unpacked_row(row)
        yield location, (fixed_format or format_of(row)).passages(row, location)


def distinct_examples(
    path: str | pathlib.Path,
    form: str = "",
    *,
    pictures: bool = False,
    left_out: collections.Counter[str] | None = None,
) -> Iterator[Example]:
    """The questions of a file that have answers; with `pictures` only those with a picture. Logs how many are left out.

    Args:
      left_out: gets the number of rows that are left out, by what they lack (`answer`, `picture`).

    Raises:
      ValueError: while reading: a row cannot be used, an id repeats, or no question has an answer.
    """
    numbers: dict[str, int] = {}
    left_out = collections.Counter() if left_out is None else left_out
    for location, example in read_examples(path, form):
        if example is None:
            left_out["answer"] += 1
            continue
        if pictures and (isinstance(example, ValueError) or not example.images):
            left_out["picture"] += 1
            continue
        if isinstance(example, ValueError):
            raise example
        first = numbers.setdefault(example.id, location.number)
        if first != location.number:
            raise location.error(f"id {example.id!r} was used in {location.unit} {first} already; ids must be distinct")
        yield example
    counts = ", ".join(f"{count} rows have no {lacking}" for lacking, count in left_out.items())
    if not numbers:
        raise ValueError(f"questions file {path} holds no questions{counts and f' ({counts})'}")
    rows = len(numbers) + left_out.total()
    for lacking, count in left_out.items():
        logging.warning("%s: %d of %d rows have no %s and are left out", path, count, rows, lacking)
