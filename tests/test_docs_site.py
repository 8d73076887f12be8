"""The documentation site builds without a warning, its links lead somewhere, and its pages ask nothing of other machines."""

from __future__ import annotations

import html.parser
import pathlib
import re
import urllib.parse

import pytest

import routerl_jax as rj
from tests.programs import ROOT, finish, start

pytestmark = pytest.mark.slow
for package in ("latex2mathml", "material", "mkdocstrings"):
    pytest.importorskip(package, reason=f'no {package}: pip install -e ".[docs]"')


class Page(html.parser.HTMLParser):
    """What a page links to (`links`), what a browser fetches for it (`fetched`), its anchors and the text of its paragraphs."""

    def __init__(self, file: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.paragraphs: list[str] = []
        self._in_paragraph = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(values["href"])
        if "src" in values:
            self.fetched.append(values["src"])
        if tag == "p":
            self._in_paragraph = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_paragraph = self._in_paragraph and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    finish(start("mkdocs", "build", "--strict", "--site-dir", folder, NO_MKDOCS_2_WARNING="1"))
    return folder


@pytest.fixture(scope="module")
def pages(site: pathlib.Path) -> dict[pathlib.Path, Page]:
    """By file. A server shows 404.html at any address, so its links are those of the server's root."""
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_every_document_is_a_page(site: pathlib.Path, pages: dict[pathlib.Path, Page]) -> None:
    made = {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}
    names = {made.get(file.name, file.stem) for folder in (ROOT, ROOT / "docs") for file in folder.glob("*.md")}
    assert {site / f"{name}.html" for name in names} <= set(pages)


def test_links_lead_somewhere(pages: dict[pathlib.Path, Page]) -> None:
    lost = []
    for file, page in pages.items():
        for link in page.links + page.fetched:
            address = urllib.parse.urlsplit(link)
            if address.scheme:
                continue
            target = (file.parent / urllib.parse.unquote(address.path)).resolve() if address.path else file
            anchor = urllib.parse.unquote(address.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                lost.append((file.name, link))
    assert lost == []


def test_a_page_is_shown_without_a_network(site: pathlib.Path, pages: dict[pathlib.Path, Page]) -> None:
    elsewhere = [(file.name, link) for file, page in pages.items() for link in page.fetched if "//" in link]
    assert elsewhere == []
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", styles) == []


def test_lists_tables_and_formulas_are_read_as_such(site: pathlib.Path, pages: dict[pathlib.Path, Page]) -> None:
    """What GitHub's Markdown takes for one and the site's does not would stand in a paragraph as it is written."""
    written = [
        (file.name, text[:80])
        for file, page in pages.items()
        if file.parent == site
        for text in page.paragraphs
        if re.search(r"^(?:- |\d+\. |\| |\$\$|```)", text, re.MULTILINE)
    ]
    assert written == []
    assert (site / "algorithms.html").read_text(encoding="utf-8").count("<math") > 50
    assert "arithmatex" not in (site / "algorithms.html").read_text(encoding="utf-8")


def test_the_reference_has_what_the_package_exports(site: pathlib.Path, pages: dict[pathlib.Path, Page]) -> None:
    top = site / "reference" / "index.html"
    anchors = {}
    for link in pages[top].links:
        path, _, anchor = link.partition("#")
        anchors[anchor.rpartition(".")[2] or pathlib.Path(path).stem] = link
    assert set(rj.__all__) <= set(anchors)  # that the links lead there is tested above
    types = (site / "reference" / "core" / "types.html").read_text(encoding="utf-8")
    assert "One question with its accepted answers." in types
