"""A run's knowledge bases: one corpus as passages, as a graph of Atlas's facts, and both together."""

import dataclasses
import itertools
import pathlib

import pytest

from routerl_jax.data.atlas import pages, world
from routerl_jax.knowledge.graph.kb import GraphKB
from routerl_jax.knowledge.hybrid import HybridKB, reciprocal_rank_fusion
from routerl_jax.models.images import decode_image
from routerl_jax.training import atlas_sources, knowledge
from routerl_jax.training import config as schema
from routerl_jax.training.setup import open_knowledge
from tests.knowledge import late
from tests.training.small_run import make_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("encoder")
    make_encoder(directory)
    return str(directory)


def spec(encoder: str, **changes) -> schema.KnowledgeConfig:
    return schema.KnowledgeConfig(encoder=encoder, **{"source": "atlas/elements"} | changes)


def opened(**knowledge):
    config = schema.TrainConfig(model=schema.ModelConfig(path="somewhere"), knowledge=knowledge)
    return open_knowledge(config, progress=False)


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path))
    return tmp_path


def test_a_place_in_the_cache_depends_on_all_that_is_read(encoder: str, cache: pathlib.Path):
    corpus, triples = cache / "corpus", cache / "triples.jsonl"
    corpus.mkdir()
    graph = spec(encoder, source=str(corpus), kind="graph", settings={"extractor": "given", "triples": str(triples)})
    places = []
    for file in (corpus / "a.jsonl", corpus / "b.jsonl", triples):
        for content in ("one", "two"):
            file.write_text(content)
            places.append(knowledge.kb_cache_directory("graph", graph))
    assert len(set(places)) == len(places)


def test_a_folder_of_documents_is_a_source(encoder: str, cache: pathlib.Path):
    folder = cache / "handbook"
    (folder / "rules").mkdir(parents=True)
    (folder / "rules" / "leave.md").write_text("# Days of leave\n\nThirty in a year.\n")
    (folder / "torn.pdf").write_bytes(b"%PDF-1.4")
    one = spec(encoder, source=str(folder))
    (found,) = opened(text=one)["text"].search(["days of leave"], k=3)
    assert [(passage.id, passage.title) for passage in found] == [("rules/leave.md#0", "leave > Days of leave")]
    place = knowledge.kb_cache_directory("text", one)
    (folder / "more.txt").write_text("Another text.")
    assert knowledge.kb_cache_directory("text", one) != place  # it is built anew
    assert len(opened(text=one)["text"].search(["text"], k=3)[0]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "dense"}, r"config\.knowledge\.text: .*'dense'"),
        ({"source": "gone.jsonl"}, r"config\.knowledge\.text\.source='gone\.jsonl' does not exist"),
        ({"source": "atlas/nowhere"}, r"config\.knowledge\.text: .*nowhere"),
        ({"settings": {"shards": 1}}, r"config\.knowledge\.text\.settings\.shards"),
        ({"source": ""}, r"config\.knowledge\.text: there is no knowledge base in the cache and no source"),
        ({"members": ("other",)}, r"config\.knowledge\.text\.members: kind='dense_text' joins no others"),
        ({"kind": "hybrid", "members": ("other",)}, r"config\.knowledge\.text\.members=\('other',\) must name"),
    ],
)
def test_what_cannot_be_opened_is_told_without_opening_it(encoder: str, cache: pathlib.Path, changes, message: str):
    with pytest.raises(ValueError, match=message):
        knowledge.check_knowledge({"text": spec(encoder, **changes)})
    assert not (cache / "knowledge").exists()


def test_two_processes_may_write_a_source_at_once(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """The other is done between this one's writing and its renaming."""
    rows, write, others = [{"id": "1"}], pathlib.Path.write_text, []

    def interrupted(self: pathlib.Path, *arguments, **options) -> int:
        written = write(self, *arguments, **options)
        if not others:
            others.append(self)
            atlas_sources._written_rows("source.jsonl", rows)
        return written

    monkeypatch.setattr(pathlib.Path, "write_text", interrupted)
    path = pathlib.Path(atlas_sources._written_rows("source.jsonl", rows))
    assert path.read_text() == '{"id": "1"}\n'
    assert [file.name for file in path.parent.iterdir()] == ["source.jsonl"]


def test_three_ways_to_search_one_corpus(encoder: str, cache: pathlib.Path):
    kbs = opened(
        both=schema.KnowledgeConfig(kind="hybrid", members=("passage", "graph")),
        passage=spec(encoder, index="exact"),
        graph=spec(encoder, kind="graph", settings={"walk": {"link_facts": 1}}),
        words=spec(encoder, kind="bm25"),
    )
    assert list(kbs) == ["both", "passage", "graph", "words"]
    assert {name: kb.cost for name, kb in kbs.items()} == {"both": 3.0, "passage": 1.0, "graph": 2.0, "words": 0.1}
    graph, both = kbs["graph"], kbs["both"]
    assert isinstance(graph, GraphKB)
    assert isinstance(both, HybridKB)
    assert graph.settings.link_facts == 1
    facts = set(graph.triples(range(len(graph.graph.fact_ends))))
    assert ("iron", "chemical symbol", "fe") in facts
    assert ("iron", "atomic number", "26") in facts
    query = ["Which element has the chemical symbol Fe?"]
    expected = reciprocal_rank_fusion([kbs[name].search(query, 6)[0] for name in ("passage", "graph")], 3)
    assert both.search(query, 3) == [expected]
    assert kbs["words"].search(["atomic number of Iron"], 1)[0][0].title == "Iron"
    built = {path: path.stat().st_mtime_ns for path in cache.rglob("kb.json")}
    assert len(built) == 3
    opened(graph=spec(encoder, kind="graph", settings={"walk": {"link_facts": 1}}))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("kb.json")} == built  # found, not built again


def test_pages_by_their_text(encoder: str, cache: pathlib.Path, tmp_path: pathlib.Path):
    """By words, which have no encoder and no index, and by vectors; what was built in a directory of one's own is opened."""
    pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed (the extra pages)")
    late.write_pdf(tmp_path / "documents" / "deck.pdf", ["Hello world", "Revenue of Ghana in 1957"])
    settings = {"pages": {"text": "layer"}}
    fields = {"kind": "ocr", "source": str(tmp_path / "documents"), "index": "exact"}
    words = spec(encoder, **fields, settings=settings | {"retriever": "bm25"})
    vectors = spec(encoder, **fields, settings=settings, directory=str(tmp_path / "kb"))
    for _ in range(2):  # built, then found
        kbs = opened(words=words, vectors=vectors)
        assert [kb.cost for kb in kbs.values()] == [0.1, 1.0]
        assert kbs["words"].search(["Ghana"], 2)[0][0].id == "deck.pdf#2"
        assert {page.id for page in kbs["vectors"].search(["Ghana"], 2)[0]} == {"deck.pdf#1", "deck.pdf#2"}
    with pytest.raises(ValueError, match=r"vectors.encoder='all-MiniLM-L6-v2', but .* built with another"):
        opened(vectors=dataclasses.replace(vectors, encoder="all-MiniLM-L6-v2"))
    with pytest.raises(ValueError, match="retriever='bm25' has no encoder"):
        opened(words=dataclasses.replace(words, settings={**words.settings, "encoder": encoder}))


@pytest.mark.slow
def test_atlas_s_pages_are_found_by_title_and_seen(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """One at a time, next to each other in print of two sizes; drawn once, and nothing of what is on them is text."""
    every, drawn = pages.all_pages, []
    monkeypatch.setattr(pages, "all_pages", lambda size=pages.PRINT: itertools.islice(every(size), 6))
    encoded = pages.encoded
    monkeypatch.setattr(pages, "encoded", lambda page: drawn.append(page) or encoded(page))
    small = schema.KnowledgeConfig(source="atlas/pages", kind="ocr", settings={"retriever": "bm25"})
    kbs = opened(small=small, large=dataclasses.replace(small, source="atlas/pages/96"))
    assert len(drawn) == 12
    for kb, print_size in zip(kbs.values(), (12, 96)):
        assert len(kb) == 6
        [[found]] = kb.search(["land of Albania"], 1)
        assert (found.id, found.title, found.text) == ("pages/Albania/land", "Albania: land", "Albania: land")
        page, picture = pages.page("Albania", "land", print_size), decode_image(found.image)
        assert picture.size == pages.SIZE
        for plate in page.plates:
            left, top, _, bottom = plate.box
            pixel = picture.getpixel((left + 2, (top + bottom) // 2))
            assert max(abs(a - b) for a, b in zip(pixel, pages.COLOURS[plate.colour])) < 12  # what JPEG leaves
        assert pathlib.Path(found.image).read_bytes() == encoded(page)  # what was drawn is not encoded again
    [elsewhere] = opened(small=dataclasses.replace(small, directory=str(cache / "kb"))).values()
    assert elsewhere.search(["land of Albania"], 1)[0][0].id == "pages/Albania/land"
    assert len(drawn) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "bm25"}, r"config\.knowledge\.pages\.kind='bm25' shows no pages; set it to 'ocr' or 'pages'"),
        ({"source": "atlas/pages/100"}, r"config\.knowledge\.pages: print of 100 pixels does not fit a page"),
        ({"source": "atlas/pages/large"}, r"config\.knowledge\.pages: Atlas has no knowledge base 'pages/large'"),
        ({"settings": {"pages": {"text": "none"}}}, r"config\.knowledge\.pages\.settings.*leaves nothing to search"),
    ],
)
def test_pages_that_can_t_be_opened(cache: pathlib.Path, changes, message: str):
    pages = schema.KnowledgeConfig(**{"source": "atlas/pages", "kind": "ocr"} | changes)
    with pytest.raises(ValueError, match=message):
        knowledge.check_knowledge({"pages": pages})
    assert not (cache / "knowledge").exists()


def test_every_fact_that_a_passage_states_is_a_triple():
    texts = {passage.id: passage.text for passage in world.passages_of("all")}
    rows = world.triples_of("all")
    assert {row["passage_id"] for row in rows} == set(texts)
    for row in rows:
        for subject, _, value in row["triples"]:
            assert subject in texts[row["passage_id"]]
            assert value in texts[row["passage_id"]]
    assert sum(len(row["triples"]) for row in rows) > 2000


@pytest.mark.parametrize(
    ("knowledge", "message"),
    [
        (
            {"both": {"kind": "hybrid", "members": ("text", "passage")}},
            r"both.members=\('text', 'passage'\).*of this run: $",
        ),
        ({"both": {"kind": "hybrid"}}, r"both.members=\(\) must name"),
        ({"text": {"members": ("graph",)}}, "text.members: kind='dense_text' joins no others"),
        ({"text": {"source": "atlas/all", "settings": {"walks": {}}}}, "config.knowledge.text.settings.walks"),
        ({"text": {"source": "atlas/all", "kind": "graph", "settings": {"walk": {"steps": 1}}}}, "walk.steps"),
    ],
)
def test_mistakes_are_named(knowledge, message, cache: pathlib.Path):
    with pytest.raises(ValueError, match=message):
        opened(**{name: schema.KnowledgeConfig(**fields) for name, fields in knowledge.items()})


def test_two_sources_of_the_same_passages_are_refused(tmp_path: pathlib.Path):
    """A copy under another name, too. Another kind of knowledge base of the same passages is none of these."""
    row = '{"id": "1", "title": "Lemur", "text": "Lemurs live on Madagascar."}\n'
    (tmp_path / "a.jsonl").write_text(row)
    (tmp_path / "copy.jsonl").write_text(row)
    (tmp_path / "other.jsonl").write_text(row.replace("Lemur", "Tenre"))

    def bm25(name: str, **changes) -> schema.KnowledgeConfig:
        return schema.KnowledgeConfig(source=str(tmp_path / name), kind="bm25", **changes)

    knowledge.check_sources_differ(
        {"a": bm25("a.jsonl"), "b": bm25("other.jsonl"), "c": schema.KnowledgeConfig(source="atlas/text")}
    )
    knowledge.check_sources_differ(
        {"a": bm25("a.jsonl"), "b": schema.KnowledgeConfig(source=str(tmp_path / "copy.jsonl"))}
    )
    for second in ("a.jsonl", "copy.jsonl"):
        message = rf"config.knowledge.notes.source='.*{second}' has the same passages as config.knowledge.a.source"
        with pytest.raises(ValueError, match=message):
            knowledge.check_sources_differ(
                {"a": bm25("a.jsonl"), "notes": bm25(second, description="notes of meetings")}
            )


@pytest.mark.parametrize("kind", ["bm25", "dense_text"])
def test_a_part_of_atlas_in_a_directory_of_one_s_own(
    encoder: str, cache: pathlib.Path, tmp_path: pathlib.Path, kind: str
):
    """Built, found, and told from another part."""
    mine = spec(encoder, kind=kind, index="exact", directory=str(tmp_path / "kb"))
    for _ in range(2):
        [[found]] = opened(text=mine)["text"].search(["atomic number of Iron"], 1)
        assert kind != "bm25" or found.title == "Iron"  # the encoder is a random one
    with pytest.raises(ValueError, match=r"config.knowledge.text.source=.*, but the knowledge base in .* another"):
        opened(text=dataclasses.replace(mine, source="atlas/text"))
