"""Every named benchmark on its files as they are released, and on the real ones; knowledge bases of pictures and of links."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import TextAndImage
from routerl_jax.data import hub
from routerl_jax.extras.comparison.benchmarks import BENCHMARKS, Benchmark, located
from routerl_jax.extras.comparison.compare import PreparedBenchmark, prepared
from routerl_jax.extras.comparison.config import ComparisonConfig
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25
from routerl_jax.knowledge.corpus import read_corpus
from routerl_jax.knowledge.pages.reading import Problems
from routerl_jax.knowledge.pictures import read_pictures
from routerl_jax.knowledge.tables import read_tables
from routerl_jax.training.config import KnowledgeConfig, ModelConfig
from routerl_jax.training.knowledge import open_knowledge_bases
from tests.data import original_rows as rows
from tests.data.original_rows import as_json, as_parquet, png

GIVEN = ComparisonConfig(agents=("direct", "vanilla_rag"), model=ModelConfig(path="atlas-warm-start"), questions=-1)
TABLE = {"header": [["Mill", []], ["Keeper", []]], "data": [[["Blue Mill", ["/wiki/Blue_Mill"]], ["Kim Ott", []]]]}
PLAIN = {"title": "Mills", "section_title": "Ems", "header": ["Mill", "Keeper"], "data": [["Blue Mill", "Kim Ott"]]}
PASSAGE = {"id": "1", "title": "Ems", "text": "Ems has mills."}
PICTURE = {"image_id": "30323912", "image": "a.png", "id": "p", "title": "Blue Mill"}


def wikipedia(data: pathlib.Path) -> None:
    as_json(made(data / "wikipedia") / "corpus.jsonl", PASSAGE)


def mbeir(data: pathlib.Path) -> None:
    """A pool with a text, a picture, and both, whose pictures lie beside cand_pool."""
    made(data / "mbeir" / "mbeir_images" / "webqa").joinpath("1.png").write_bytes(png("blue"))
    picture = "mbeir_images/webqa/1.png"
    as_json(
        made(data / "mbeir" / "cand_pool" / "local") / "mbeir_webqa_task2_cand_pool.jsonl",
        {"did": "2:1", "txt": "A blue mill.", "img_path": None, "modality": "text", "src_content": None},
        {"did": "2:2", "txt": None, "img_path": picture, "modality": "image", "src_content": None},
        {"did": "2:3", "txt": "The mill.", "img_path": picture, "modality": "image,text", "src_content": None},
    )


def split_tables(data: pathlib.Path) -> None:
    piece = {"original_table_id": "table_1_2_3", "page_title": "Mills", "section_title": "", "caption": ""}
    columns = {**piece, "header": ["Mill"], "rows": [["Blue Mill"]], "flattened": "[Title]Mills[Row]Blue Mill"}
    made(data / "open_wikitable").joinpath("splitted_tables.json").write_text(
        json.dumps({name: {"41": value} for name, value in columns.items()})
    )


def r1_routers(data: pathlib.Path) -> None:
    wikipedia(data)
    mbeir(data)
    split_tables(data)


def searches(data: pathlib.Path) -> None:
    """A picture search and a text search for all of MMSearch-R1's sets."""
    wikipedia(data)
    (data / "a.png").write_bytes(png("blue"))
    as_json(data / "image_search.jsonl", {"id": "a", "title": "Blue Mill", "image": "a.png"})


def pages(directory: str) -> Callable[[pathlib.Path], None]:
    def write(data: pathlib.Path) -> None:
        made(data / directory).joinpath("mills_11.png").write_bytes(png("white", 32))

    return write


def linked(tables: str, passages: str) -> Callable[[pathlib.Path], None]:
    def write(data: pathlib.Path) -> None:
        (made(data / tables) / "Mills_of_Ems_0.json").write_text(json.dumps({**TABLE, "title": "Mills", "uid": "m_0"}))
        (made(data / passages) / "Mills_of_Ems_0.json").write_text(json.dumps({"/wiki/Blue_Mill": "It grinds."}))

    return write


def made(directory: pathlib.Path) -> pathlib.Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def pictured(name: str) -> Callable[[pathlib.Path], None]:
    def write(directory: pathlib.Path) -> None:
        (made(directory / "images") / name).write_bytes(png("blue"))

    return write


FVQA = {**rows.FVQA, "images": [{"bytes": png("blue"), "path": None}]}
MMSEARCH = {**rows.MMSEARCH, "query_image": {"bytes": png("blue"), "path": None}}
BLIND = {**rows.MMSEARCH, "sample_id": "text_1", "query_image": None}
VRAG_FILE = {**rows.VIDOSEEK, "uid": "s_1"}
ID = {"infoseek": "infoseek_val_00000001", "dyn_vqa": "en34", "webqa": "1"}

# name: (file of questions, its rows, what else lies beside it, knowledge bases' files, ids of the questions, kinds)
R1_ROUTER = {"text": "dense_text", "text_image": "text_image", "table": "dense_table"}
TWO = {"text": "dense_text", "text_image": "text_image"}
LOOKED_UP = {"image": "reverse_image", "text": "dense_text"}
SETS: dict[str, tuple[Any, ...]] = {
    "infoseek": (
        "infoseek/infoseek_val.jsonl",
        [rows.INFOSEEK],
        "oven_04951567.jpg",
        r1_routers,
        [ID["infoseek"]],
        TWO,
    ),
    "dyn_vqa": ("dyn_vqa/DynVQA_en.202502.jsonl", [rows.DYNVQA], "en34.png", r1_routers, ["en34"], TWO),
    "webqa": ("webqa/webqa_val.jsonl", [rows.WEBQA], "30323912.jpg", r1_routers, ["1"], TWO),
    "open_wikitable": (
        "open_wikitable/test.json",
        [rows.OPEN_WIKITABLE],
        "",
        split_tables,
        ["test_7"],
        {"table": "dense_table"},
    ),
    "hybridqa": (
        "hybridqa/dev.traced.json",
        [rows.HYBRIDQA],
        "",
        linked("hybridqa/WikiTables-WithLinks/tables_tok", "hybridqa/WikiTables-WithLinks/request_tok"),
        ["2b6359ed"],
        {"table": "dense_table", "text": "dense_text"},
    ),
    "ottqa": (
        "ottqa/dev.json",
        [{key: value for key, value in rows.HYBRIDQA.items() if key != "answer-node"}],
        "",
        linked("ottqa/traindev_tables_tok", "ottqa/traindev_request_tok"),
        ["2b6359ed"],
        {"table": "dense_table", "text": "dense_text"},
    ),
    "r1_router_webqa": ("r1_router/webqa_val.jsonl", [rows.WEBQA], "30323912.jpg", r1_routers, ["1"], R1_ROUTER),
    "r1_router_2wiki": (
        "r1_router/2wikimultihopqa_val.jsonl",
        [{"question": "Who?", "answer": "Kim Ott"}],
        "",
        r1_routers,
        ["1"],
        R1_ROUTER,
    ),
    "fvqa": ("fvqa/fvqa_test.parquet", [FVQA], "", searches, ["fvqa_train_67"], LOOKED_UP),
    "mmsearch": ("mmsearch/end2end.parquet", [MMSEARCH, BLIND], "", searches, ["news_001"], LOOKED_UP),
    "simplevqa": (
        "simplevqa/test.parquet",
        [{**rows.SIMPLEVQA, "image": png("blue")}],
        "",
        searches,
        ["7"],
        LOOKED_UP,
    ),
    "livevqa": (
        "livevqa/News/benchmark.json",
        [rows.LIVEVQA],
        "cnn_1.jpg",
        searches,
        ["0_20250507/level1", "0_20250507/level2"],
        LOOKED_UP,
    ),
    "infoseek_image_search": (
        "infoseek/infoseek_val.jsonl",
        [rows.INFOSEEK],
        "oven_04951567.JPEG",
        searches,
        [ID["infoseek"]],
        LOOKED_UP,
    ),
    "slidevqa": (
        "slidevqa/annotations/qa/test.jsonl",
        [rows.SLIDEVQA],
        "",
        pages("slidevqa/pages"),
        ["17"],
        {"pages": "pages"},
    ),
    "slidevqa_ocr": (
        "slidevqa/slidevqa_refined.json",
        [VRAG_FILE],
        "",
        pages("slidevqa/slidevqa_pdf_document"),
        ["s_1"],
        {"text": "ocr"},
    ),
    "vidoseek": (
        "vidoseek/vidoseek.json",
        [rows.VIDOSEEK],
        "",
        pages("vidoseek/vidoseek_pdf_document"),
        ["04d8_2"],
        {"pages": "pages"},
    ),
    "mmlongbench_doc": (
        "mmlongbench_doc/samples.json",
        [rows.MMLONGBENCH],
        "",
        pages("mmlongbench_doc/documents"),
        ["1"],
        {"pages": "pages"},
    ),
}


def field_of(name: str, data: pathlib.Path | str, **changes: Any) -> PreparedBenchmark:
    (field,) = prepared(dataclasses.replace(GIVEN, benchmarks=(name,), data=str(data), **changes))
    return field


@pytest.mark.parametrize("name", sorted(SETS))
def test_released_files_are_read(name: str, tmp_path: pathlib.Path) -> None:
    """Names and columns as the authors publish them, over knowledge bases of the kinds that the papers have."""
    file, asked, picture, write_knowledge, ids, kinds = SETS[name]
    path = tmp_path / file
    made(path.parent)
    (as_parquet if path.suffix == ".parquet" else as_json)(path, *asked)
    if picture:
        pictured(picture)(path.parent)
    write_knowledge(tmp_path)
    field = field_of(name, tmp_path)
    assert [example.id for example in field.examples] == ids
    assert all(example.answers for example in field.examples)
    assert {kb: spec.kind for kb, spec in field.knowledge.items()} == kinds
    seen = BENCHMARKS.get(name).pictures
    assert all(bool(example.images) == seen for example in field.examples)
    assert field.benchmark.questions == (f"{path}[pictures]" if seen else str(path),) or name == "slidevqa_ocr"
    rows_of = [row.name for row in field.rows]
    assert rows_of[:2] == ["direct", "vanilla_rag" if len(kinds) == 1 else f"vanilla_rag_{next(iter(kinds))}"]


def test_a_question_without_its_picture_is_not_asked(tmp_path: pathlib.Path) -> None:
    as_json(made(tmp_path / "webqa") / "webqa_val.jsonl", rows.WEBQA, {**rows.WEBQA, "image_id": "5"})
    r1_routers(tmp_path)
    with pytest.raises(ValueError, match=r"holds no questions \(2 rows have no picture\)"):
        field_of("webqa", tmp_path)
    pictured("5.png")(tmp_path / "webqa")
    assert [example.id for example in field_of("webqa", tmp_path).examples] == ["2"]


def test_where_an_answer_was_found(tmp_path: pathlib.Path) -> None:
    linked("ottqa/tables_tok", "ottqa/corpus_tok")(tmp_path)
    as_json(
        tmp_path / "ottqa" / "dev.traced.json",
        rows.HYBRIDQA,
        {"question_id": "t", "table_id": "x", "question_postag": ""},
    )
    (example,) = field_of("ottqa", tmp_path).examples  # the test set's rows have no answer
    assert example.metadata == {
        "question_postag": "WP VBZ DT NN",
        "supporting": ["Mills_of_Ems_0"],
        "supporting_passages": ["/wiki/Blue_Mill"],
        "type": "passage+table",
    }


def test_pieces_of_tables_are_gold(tmp_path: pathlib.Path) -> None:
    """pandas' columns, as the authors write both files; the gold piece is the passage's id."""
    split_tables(tmp_path)
    asked = {**rows.OPEN_WIKITABLE, "answer": ["Blue Mill", 2]}
    columns = {name: {"0": value} for name, value in asked.items()}
    (tmp_path / "open_wikitable" / "test.json").write_text(json.dumps(columns))
    field = field_of("open_wikitable", tmp_path)
    (example,) = field.examples
    assert example.answers == ("Blue Mill, 2",)
    assert example.metadata["supporting"] == [table.id for table in read_tables(field.knowledge["table"].source)]
    assert example.metadata["original_table_id"] == "table_1_2_3"
    assert "negative_idx" not in example.metadata


def test_tables_with_links(tmp_path: pathlib.Path) -> None:
    """A table a file, all in one, and what they link to: once, however many tables link to it."""
    linked("tables_tok", "request_tok")(tmp_path)
    (tmp_path / "all_plain_tables.json").write_text(json.dumps({"m_0": PLAIN}))
    (one,) = read_tables(tmp_path / "tables_tok")
    (other,) = read_tables(tmp_path / "all_plain_tables.json")
    assert (one.id, one.header, one.rows) == ("m_0", ("Mill", "Keeper"), (("Blue Mill", "Kim Ott"),))
    assert other == dataclasses.replace(one, section="Ems")
    second = tmp_path / "request_tok" / "Other_0.json"
    second.write_text(json.dumps({"/wiki/Blue_Mill": "It grinds.", "/wiki/M%C3%BChle": "A mill."}))
    found = [(passage.id, passage.title, passage.text) for passage in read_corpus(tmp_path / "request_tok")]
    assert found == [("/wiki/Blue_Mill", "Blue Mill", "It grinds."), ("/wiki/M%C3%BChle", "Mühle", "A mill.")]
    second.write_text(json.dumps({"/wiki/Blue_Mill": "It stands still."}))
    with pytest.raises(
        ValueError, match=r"Other_0.json, item 1: '/wiki/Blue_Mill' has another text than in a file before"
    ):
        list(read_corpus(tmp_path / "request_tok"))
    (tmp_path / "tables_tok" / "Bad_0.json").write_text(json.dumps({**TABLE, "data": [[["a", []]]]}))
    with pytest.raises(
        ValueError, match=r"Bad_0.json, item 1: key 'rows', row 0 has 1 cells, but the header names 2 columns"
    ):
        list(read_tables(tmp_path / "tables_tok"))


def test_candidates_of_mbeir(tmp_path: pathlib.Path) -> None:
    mbeir(tmp_path)
    (pool,) = (tmp_path / "mbeir" / "cand_pool" / "local").iterdir()
    found = list(read_pictures(pool, Problems("raise")))
    picture = tmp_path / "mbeir" / "mbeir_images" / "webqa" / "1.png"
    assert [(one.id, one.text, one.image) for one in found] == [
        ("2:1", "A blue mill.", None),
        ("2:2", "", picture),
        ("2:3", "The mill.", picture),
    ]
    picture.unlink()
    with pytest.raises(ValueError, match=r"line 2: key 'image': .*mbeir_images/webqa/1.png does not exist"):
        list(read_pictures(pool, Problems("raise")))


def test_a_built_search_is_opened_as_it_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text search that is built, of another kind than the benchmark's own; pictures are found with the given encoder."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    searches(tmp_path)
    as_parquet(made(tmp_path / "fvqa") / "fvqa_test.parquet", FVQA)
    corpus = as_json(tmp_path / "own.jsonl", {"id": "b", "title": "Blue Mill", "text": "It grinds most."})
    build_bm25(Bm25Config(corpus=str(corpus)), tmp_path / "text_search", progress=False)
    field = field_of("fvqa", tmp_path, picture_encoder="colours+all-MiniLM-L6-v2", index="exact")
    assert field.knowledge["text"].directory == str(tmp_path / "text_search")
    assert field.knowledge["text"].kind == "bm25"
    assert field.knowledge["image"].encoder == "colours+all-MiniLM-L6-v2"
    tools: Any = open_knowledge_bases(field.knowledge, progress=False)
    (found,) = tools["image"].search([TextAndImage(image=field.examples[0].images[0])], 1)
    assert [passage.title for passage in found] == ["Blue Mill"]
    assert [passage.id for passage in tools["text"].search(["which mill grinds?"], 1)[0]] == ["b"]


def test_what_was_looked_for_is_said(tmp_path: pathlib.Path) -> None:
    as_json(made(tmp_path / "vidoseek") / "vidoseek.json", rows.VIDOSEEK)
    with pytest.raises(
        ValueError, match=r"its knowledge base 'pages' is not there; looked for .*_document or .*/pages\.\*\."
    ):
        located("vidoseek", BENCHMARKS.get("vidoseek"), str(tmp_path))


@pytest.mark.parametrize(
    ("name", "directory", "called"),
    [
        ("infoseek", "infoseek", "infoseek"),
        ("infoseek_image_search", "infoseek", "infoseek"),
        ("dyn_vqa", "dynvqa", "dyn_vqa"),
        ("webqa", "webqa", "webqa"),
        ("fvqa", "fvqa50", "fvqa"),
        ("livevqa", "livevqa", "livevqa"),
        ("open_wikitable", "open_wikitable", "open_wikitable"),
        ("ottqa", "ottqa", "ottqa"),
        ("hybridqa", "hybridqa", "hybridqa"),
        ("mmlongbench_doc", "mmlongbench_doc", "mmlongbench_doc"),
        ("mmlongbench_doc_ocr", "mmlongbench_doc", "mmlongbench_doc"),
        ("vidoseek_ocr", "vrag_demo_pages", "vidoseek"),
    ],
)
def test_real_questions_are_read(
    name: str, directory: str, called: str, shared_data: Any, tmp_path: pathlib.Path
) -> None:
    """Real rows; where a data set's pictures are not at hand, pictures stand in for those of three questions."""
    real = shared_data(f"{directory}/questions_dev.jsonl.gz").parent
    for file in real.iterdir():
        made(tmp_path / called).joinpath(file.name).symlink_to(file)
    (tmp_path / "ottqa").exists() or (tmp_path / "ottqa").symlink_to(shared_data("ottqa"))
    r1_routers(tmp_path) if called != "open_wikitable" else None
    searches(tmp_path)
    stand_in = {
        "dyn_vqa": ["dynvqa_en370", "dynvqa_en615"],
        "webqa": ["30323912", "30057061"],
    }.get(name, [])
    for picture in stand_in:
        pictured(f"{picture}.jpg")(tmp_path / called)
    field = field_of(name, tmp_path)
    least = {"infoseek": 3, "infoseek_image_search": 3, "dyn_vqa": 2, "webqa": 2, "vidoseek_ocr": 3}.get(name, 30)
    assert len(field.examples) >= least
    assert len({example.id for example in field.examples}) == len(field.examples)
    assert all(example.answers for example in field.examples)
    if stand_in:
        assert len(field.examples) == len(stand_in)


def test_files_of_the_hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions keep their name, which the card shows; a knowledge base is built from the file on this machine."""
    asked = as_json(tmp_path / "q.jsonl", {"id": "a", "question": "Who?", "golden_answers": ["x"]})
    corpus = as_json(tmp_path / "c.jsonl", PASSAGE)
    files = {f"{hub.PREFIX}org/set/q.jsonl": str(asked), f"{hub.PREFIX}org/set/c.jsonl": str(corpus)}
    monkeypatch.setattr(hub, "_fetched", lambda name: files[name])
    question, source = files
    own = Benchmark(questions=("no.*", question), knowledge={"text": KnowledgeConfig(source=f"no.*|{source}")})
    field = field_of("mine", tmp_path, own={"mine": own})
    assert field.benchmark.questions == (question,)
    assert field.knowledge["text"].source == str(corpus)
    assert [example.id for example in field.examples] == ["a"]


def test_the_whole_file_of_the_docs_describes_a_benchmark(tmp_path: pathlib.Path) -> None:
    page = (pathlib.Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    page = page[page.index("## A benchmark of one's own") : page.index("## Baselines")]
    [text] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(text, names := {})
    as_json(tmp_path / "questions.jsonl", {"id": "a", "question": "Who?", "golden_answers": ["x"]})
    as_json(tmp_path / "corpus.jsonl", PASSAGE)
    as_json(tmp_path / "tables.jsonl", {"id": "t", **PLAIN})
    config = from_config_dict(ComparisonConfig, names["get_config"]())
    (field,) = prepared(dataclasses.replace(config, data=str(tmp_path)))
    assert {name: spec.kind for name, spec in field.knowledge.items()} == {"text": "dense_text", "table": "dense_table"}
    assert [example.id for example in field.examples] == ["a"]


def test_a_tree_stands_in_the_place_of_passages(tmp_path: pathlib.Path) -> None:
    searches(tmp_path)
    as_parquet(made(tmp_path / "fvqa") / "fvqa_test.parquet", FVQA)
    llm = {"llm": {"model": "m"}}
    field = field_of("fvqa", tmp_path, retriever="tree", retriever_settings=llm)
    assert (field.knowledge["text"].kind, field.knowledge["text"].settings) == ("tree", llm)
    assert field.knowledge["image"].kind == "reverse_image"
    with pytest.raises(ValueError, match=r"retriever_settings say nothing without config\.retriever"):
        dataclasses.replace(GIVEN, retriever_settings=llm)
