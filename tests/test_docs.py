"""What the documents point to exists: files, headings, configurations, programs and error messages."""

import ast
import pathlib
import re

import pytest

import routerl_jax as rj

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted(page for place in (".", "docs", "benchmarks") for page in (ROOT / place).glob("*.md"))


def headings(page):
    """Anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / file if file else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in headings(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_and_configurations_exist(page):
    text = page.read_text()
    for program in re.findall(r"python -m ((?:launch|benchmarks)\.\w+)", text):
        assert (ROOT / f"{program.replace('.', '/')}.py").exists(), program
    for config in re.findall(r"\bconfigs/\w+\.py", text):
        assert (ROOT / config).exists(), config


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            links = (link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", page.read_text()))
            todo += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set((ROOT / "docs").glob("*.md")) <= reached


def test_the_site_has_every_page():
    """The pages of mkdocs.yml's nav are those of docs/, and those that docs/site/hooks.py brings in."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    brought = {"index.md", "changelog.md", "contributing.md", "benchmarks.md"}
    named = re.findall(r"[\w/]+\.md", nav)
    assert sorted(named) == sorted({page.name for page in (ROOT / "docs").glob("*.md")} | brought)


def test_messages_of_the_troubleshooting_page_are_raised():
    """Each quoted message, word for word between its `..`, is a text of the code."""
    files = [file for folder in ("routerl_jax", "launch") for file in (ROOT / folder).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    # %s and the like are where logging puts values
    pieces = (
        re.split(r"%[.\d]*[srdf]", node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and type(node.value) is str
    )
    texts = "\0".join(piece for constant in pieces for piece in constant)
    told = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", told, re.MULTILINE)
    messages = [
        message
        for table in tables
        for row in table.splitlines()
        for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(messages) > 40
    parts = {message: [part for part in message.split("..") if len(part.strip()) > 3] for message in messages}
    assert [message for message in messages if not parts[message]] == []
    assert [(message, part) for message in messages for part in parts[message] if part not in texts] == []


@pytest.mark.parametrize(
    "page", ["search_r1", "r1_searcher", "routerag", "r1_router", "mmsearch_r1", "vrag_rl"], ids=str
)
def test_equations_lead_to_code(page):
    """In the tables of the recipes' pages: a file, then names that are in it."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (table,) = re.findall(r"^\| equation \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    for row in table.splitlines():
        for places in row.rstrip(" |").split(" | ")[-1].split(";"):
            file, *names = re.findall(r"`([^`]+)`", places) or [""]
            if not file.endswith(".py"):
                continue
            source = (ROOT / "routerl_jax" / file).read_text()
            named = names if f"`{file}`: " in places else []
            assert [name for name in named if not re.search(rf"\b{name}\b", source)] == [], row


def test_public_functions_and_classes_have_docstrings():
    """Of modules. Methods that override another may leave the docstring to it."""
    missing = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in sorted((ROOT / "routerl_jax").rglob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert missing == []


def test_docstrings_are_read_as_the_site_reads_them(caplog):
    """`mkdocs build --strict` ends at a docstring in another form; the build itself is a slow test (test_docs_site.py)."""
    griffe = pytest.importorskip("griffe", reason='no griffe: pip install -e ".[docs]"')

    def parse(part):
        for member in part.members.values():
            if member.is_alias:
                continue
            if member.docstring:
                member.docstring.parse("google", warn_unknown_params=False, warn_missing_types=False)
            if member.is_module or member.is_class:
                parse(member)

    parse(griffe.load("routerl_jax", search_paths=[str(ROOT)], allow_inspection=False))
    assert caplog.messages == []


@pytest.mark.parametrize("name", rj.__all__)
def test_names_of_the_library_are_defined_where_it_finds_them(name):
    """The site's page of the library links there."""
    module, member = rj._MODULES[name], getattr(rj, name)
    assert getattr(member, "__module__", f"routerl_jax.{module}") == f"routerl_jax.{module}"
