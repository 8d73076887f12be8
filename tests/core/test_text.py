"""Texts for strangers: without the directories of this machine, and as cells of tables."""

import pytest

from routerl_jax.core.text import markdown_cell, without_directories


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/me/secret/corpus.jsonl", "corpus.jsonl"),
        ("~/models/small", "small"),
        ('["/home/me/a.jsonl", "~/b.jsonl:0.5"]', '["a.jsonl", "b.jsonl:0.5"]'),
        ("file:/home/me/a.jsonl", "file:a.jsonl"),
        ("https://example.org/data/a.jsonl", "https://example.org/data/a.jsonl"),
        ('"http://127.0.0.1:8000/v1"', '"http://127.0.0.1:8000/v1"'),
        ("Qwen/Qwen2.5-1.5B, runs/a", "Qwen/Qwen2.5-1.5B, runs/a"),
        ("1/2 and a / b", "1/2 and a / b"),
    ],
)
def test_paths_keep_their_last_part(text: str, expected: str) -> None:
    assert without_directories(text) == expected


def test_a_cell_ends_no_cell_and_begins_no_html() -> None:
    assert markdown_cell("a|b\n<script>") == "a\\|b &lt;script>"
