"""What `mkdocs build` does beyond showing docs/*.md: pages from elsewhere in the repository, an API reference, mathematics.

The pages are written for GitHub, where links lead to files of the repository. Here such a link leads to the page that was made
of the file, or to a copy of it.
"""

from __future__ import annotations

import ast
import functools
import html
import os
import pathlib
import posixpath
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "routerl_jax"

# Reading the docstrings is most of a build. Tests also make a short form of the site, whose reference has names alone.
QUICK = bool(os.environ.get("ROUTERL_QUICK"))

# Files of the repository that are pages here.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}

# What the reference has: packages or single modules, in the order of its navigation.
REFERENCE = (
    "core.types",
    "agents",
    "recipes",
    "rewards",
    "knowledge",
    "data.formats",
    "engine.engine",
    "engine.sampling",
    "learning",
    "services",
    "evaluation",
    "training.config",
    "training.knowledge",
    "training.sections",
    "training.loggers",
    "training.rl",
    "models.huggingface",
    "parallel.mesh",
    "extras.baselines",
)

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")
_MATHS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """Puts the reference's pages into the navigation."""
    section = next(entry for entry in config.nav if "Reference" in entry)
    section["Reference"] = [*section["Reference"], "reference/index.md", *_navigation()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of PAGES, those of the reference, and copies of files that pages link to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for source, page in PAGES.items():
        texts[source] = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=texts[source]))
    for page, text in _reference().items():
        files.append(File.generated(config, page, content=text))
    for source, text in texts.items():
        for _, link in _LINK.findall(text):
            target = _in_repository(source, link)
            if target and _page_of(target) is None and not files.get_file_from_path(f"files/{target}"):
                files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Lets links into the repository lead to pages of the site. A link that is called as its file gets the page's title."""
    sources = {made: source for source, made in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def here(match: re.Match[str]) -> str:
        label, link = match.groups()
        target = _in_repository(source, link)
        if target is None:
            return match[0]
        _, hash_, anchor = link.partition("#")
        uri = _page_of(target) or f"files/{target}"
        if posixpath.basename(label) == posixpath.basename(target) and target.endswith(".md"):
            label = _title(files.get_file_from_path(uri).content_string)
        return f"[{label}]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{hash_}{anchor})"

    return _LINK.sub(here, markdown)


def on_page_content(html_: str, page: Any, **_: Any) -> str:
    """Turns formulas into MathML, which browsers draw themselves."""

    def drawn(match: re.Match[str]) -> str:
        formula = re.sub(r"\\texttt\{[^}]*\}", lambda name: name[0].replace(r"\_", "_"), html.unescape(match[2]))
        try:
            return convert(formula, display="block" if match[1] == "div" else "inline")
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: the formula {formula!r} can't be read: {error}") from error

    return _MATHS.sub(drawn, html_)


def _in_repository(source: str, link: str) -> str | None:
    """Path in the repository of a file that a page of it links to; None for addresses, anchors and what does not exist."""
    path = link.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    return target if (ROOT / target).is_file() and not target.startswith("..") else None


def _title(markdown: str) -> str:
    """A page's first heading."""
    return next(line.removeprefix("# ") for line in markdown.splitlines() if line.startswith("# "))


def _page_of(path: str) -> str | None:
    """The site's own file for a file of the repository, None if there is none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    module = path.removesuffix(".py").replace("/", ".").removeprefix(f"{PACKAGE}.")
    return PAGES.get(path) or (_uri(module) if path.endswith(".py") and module in _modules() else None)


# --- the reference ---


@functools.cache
def _modules() -> list[str]:
    """Names in the package of the modules and packages that have a page, in the order of REFERENCE."""
    modules = []
    for name in REFERENCE:
        path = ROOT / PACKAGE / name.replace(".", "/")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        names = [".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts) for file in files]
        modules += [name.removesuffix(".__init__") for name in names]
    return modules


def _is_package(module: str) -> bool:
    return (ROOT / PACKAGE / module.replace(".", "/")).is_dir()


def _uri(module: str) -> str:
    path = module.replace(".", "/")
    return f"reference/{path}/index.md" if _is_package(module) else f"reference/{path}.md"


def _tree(module: str) -> ast.Module:
    """A module or package, parsed; "" is the package itself."""
    path = ROOT / PACKAGE / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _summary(module: str, member: str = "") -> str:
    """First paragraph of the docstring of a module, or of a class or function in it, for a cell of a table."""
    members = {node.name: node for node in _tree(module).body if isinstance(node, _DEFINITIONS)}
    documented = members[member] if member else _tree(module)
    return " ".join((ast.get_docstring(documented) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def _reference() -> dict[str, str]:
    """Source of every page of the reference, by its name."""
    modules = _modules()
    pages = {"reference/index.md": _top(modules)}
    for module in modules:
        text = _names(module) if QUICK else f"::: {PACKAGE}.{module}\n"
        if _is_package(module):
            inside = [name for name in modules if name.rpartition(".")[0] == module]
            text = f"# {PACKAGE}.{module}\n\n{_summary(module)}\n\n{_table(inside, module)}"
        pages[_uri(module)] = text
    return pages


def _names(module: str) -> str:
    """The page of a module in the short form: its name, and an anchor for each class and function in it."""
    names = [f"{PACKAGE}.{module}.{node.name}" for node in _tree(module).body if isinstance(node, _DEFINITIONS)]
    return "\n".join([f"# {PACKAGE}.{module}", "", *(f'<a id="{name}"></a>' for name in names), ""])


def _table(modules: list[str], of: str = "") -> str:
    """A table of modules, with links from the page of the package `of`."""
    here = posixpath.dirname(_uri(of)) if of else "reference"
    rows = [
        f"| [{name.removeprefix(f'{of}.')}]({posixpath.relpath(_uri(name), here)}) | {_summary(name)} |"
        for name in modules
    ]
    return "\n".join(["| module | what is in it |", "|---|---|", *rows, ""])


def _top(modules: list[str]) -> str:
    """The page of `import routerl_jax as rj`: what each of its names is, and a table of the modules that have a page."""
    modules_of_names = next(
        ast.literal_eval(node.value)
        for node in _tree("").body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_MODULES"
    )
    rows = []
    for name, module in modules_of_names.items():
        link, member = posixpath.relpath(_uri(module), "reference"), "" if module.endswith(f".{name}") else name
        anchor = f"#{PACKAGE}.{module}.{member}" if member else ""
        rows.append(f"| [`rj.{name}`]({link}{anchor}) | {_summary(module, member)} |")
    listed = [name for name in modules if name in REFERENCE]
    return "\n".join(
        [
            "# Reference",
            "",
            "Every page is made of the docstrings of one module. `import routerl_jax as rj` gives these names:",
            "",
            "| name | what it is |",
            "|---|---|",
            *rows,
            "",
            "## Modules",
            "",
            _table(listed),
        ]
    )


def _navigation() -> list[Any]:
    """The reference's part of the navigation: packages as sections."""
    modules = _modules()

    def section(package: str) -> list[Any]:
        inside = [name for name in modules if name.rpartition(".")[0] == package]
        return [_uri(package), *(entry(name, name.rpartition(".")[2]) for name in inside)]

    def entry(name: str, title: str) -> dict[str, Any]:
        return {title: section(name) if _is_package(name) else _uri(name)}

    return [entry(name, name) for name in REFERENCE]
