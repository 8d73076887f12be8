"""What the documents point to exists: files, headings, configurations and programs."""

import pathlib
import re

import pytest

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
