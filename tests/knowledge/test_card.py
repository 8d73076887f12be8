"""README.md in a knowledge base's directory."""

import pathlib

from routerl_jax.knowledge.builds import write_card
from routerl_jax.knowledge.store import Delta, Embedding, Manifest


def test_what_a_card_says(tmp_path: pathlib.Path) -> None:
    manifest = Manifest(
        kind="dense_text",
        name="wiki",
        count=12_345,
        corpus="/home/me/secret/corpus.jsonl.gz",
        corpus_sha256="ab12",
        config={"encoder": "/home/me/secret/encoder", "shard_size": 64, "parts": ["/home/me/secret/a.jsonl"]},
        created="2026-11-26T12:00:00+00:00",
        embedding=Embedding(encoder="/home/me/secret/encoder", digest="cd34", dim=384, query_prefix="query: |"),
        index={"backend": "exact"},
        updates=2,
        delta=Delta(generation=3, added=10, deleted=4),
    )
    manifest.write(tmp_path)
    write_card(tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    for line in (
        "# wiki",
        f'rj.load_kb("{tmp_path.name}").search(["..."], k=5)',
        "| passages | 12,345 of the corpus; since then 10 added, 4 deleted |",
        "| corpus | corpus.jsonl.gz |",
        "| corpus sha256 | ab12 |",
        "| times updated | 2 |",
        "| encoder | encoder, 384 wide, float32 |",
        '| put before queries | "query: \\|" |',
        "| index | exact |",
        'encoder = "encoder"',
        "shard_size = 64",
        'parts = ["a.jsonl"]',
    ):
        assert line in lines, line
    assert "secret" not in "\n".join(lines)
    assert not any(line.startswith("| put before passages") for line in lines)


def test_the_card_of_a_kind_without_passages(tmp_path: pathlib.Path) -> None:
    Manifest(kind="web", name="web", count=0, corpus="", corpus_sha256="", created="now", stored=False).write(tmp_path)
    write_card(tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert "| passages | none of its own; it asks others |" in lines
    assert not any(line.startswith(("| corpus", "| encoder", "| index")) for line in lines)
    assert "Passages are the corpus's: its licence is theirs." not in lines
