"""Answers of language models as they really come: with prose, fences, reasoning, cut off, half Python."""

import pytest

from routerl_jax.knowledge.graph.triples import json_value, parse_entities, parse_triples

GOOD = (("Ada", "wrote", "notes"), ("notes", "are about", "engines"))


@pytest.mark.parametrize(
    "text",
    [
        '{"triples": [["Ada", "wrote", "notes"], ["notes", "are about", "engines"]]}',
        '[["Ada", "wrote", "notes"], ["notes", "are about", "engines"]]',
        'Sure! Here they are:\n```json\n{"triples": [["Ada","wrote","notes"],["notes","are about","engines"]]}\n```\nBye {x}.',
        '<think>maybe [["no", "not", "this"]]</think>{"triples": [["Ada","wrote","notes"],["notes","are about","engines"]]}',
        '{"triples": [["Ada", "wrote", "notes"], ["notes", "are about", "engines"],]}',
        '{"triples": [["Ada", "wrote", "notes"], ["notes", "are about", "engines"], ["engines", "ru',
        '{"triples": [["Ada", "wrote", "notes"], ["notes", "are about", "engines"], ["engines", "run"',
        "{'triples': [['Ada', 'wrote', 'notes'], ['notes', 'are about', 'engines']]}",
        '{"triples": [["Ada", "wrote", "notes"] ["notes", "are about", "engines"]]',
        '["Ada", "wrote", "notes"]\n["notes", "are about", "engines"]\n',
        'As [1] and [2] say: {"triples": [["Ada", "wrote", "notes"], ["notes", "are about", "engines"]]}',
        '{"triples": [{"subject": "Ada", "predicate": "wrote", "object": "notes"},'
        ' {"Subject": "notes", "relation": "are about", "object": "engines"}]}',
        '{"triples": [["Ada", "wrote", "notes"], ["Ada", "wrote"], ["notes", "are about", "engines"], 7, ["", "x", "y"]]}',
        '{"triples": [["Ada", "wrote", "notes"], ["Ada", "wrote", "notes"], ["notes", "are about", "engines", ], null]}',
    ],
)
def test_triples(text: str) -> None:
    parsed = parse_triples(text)
    assert parsed is not None
    assert parsed[0] == GOOD


@pytest.mark.parametrize(
    "text", ["", "I can't do that.", "{", "[[[[", '{"triples": "none"}', "[" * 5000, "nan", '{"a": 1}']
)
def test_no_triples(text: str) -> None:
    assert parse_triples(text) is None


def test_an_empty_list_is_an_answer() -> None:
    assert parse_triples('{"triples": []}') == ((), 0)
    assert parse_entities('{"entities": []}') == ()


def test_numbers_spaces_and_half_surrogates() -> None:
    parsed = parse_triples('{"triples": [["Mars", "moons", 2], ["  a \\n b ", "is", "\\ud800c"], ["x", "y", true]]}')
    assert parsed == ((("Mars", "moons", "2"), ("a b", "is", "?c")), 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"entities": ["Ada", "London", "Ada", "", 1815]}', ("Ada", "London", "1815")),
        ('{"named_entities": ["Ada"]}', ("Ada",)),
        ('["Ada", "London"]', ("Ada", "London")),
        ('Of [1]: {"entities": ["Ada"]}', ("Ada",)),
        ('{"entities": ["Ada", "Lon\\"don", "Thames, th', ("Ada", 'Lon"don')),
        ("nothing", None),
        ('{"entities": {"Ada": 1}}', None),
    ],
)
def test_entities(text: str, found: tuple[str, ...] | None) -> None:
    assert parse_entities(text) == found


def test_prose_with_brackets_comes_before_the_value() -> None:
    assert json_value('As in [1] and {this}, the answer is {"keep": [2]}') == [1]
    assert json_value('As in [1] and {this}, the answer is {"keep": [2]}', "keep") == {"keep": [2]}
    assert json_value('As in [1] and {"a": 1}, there is none', "keep") == [1]
    assert json_value('In {this} case the answer is {"keep": [2]}') == {"keep": [2]}
    assert json_value("a" * 300_000) is None
