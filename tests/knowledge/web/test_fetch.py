"""The fetcher against a server that does everything wrong, and charsets that lie."""

from __future__ import annotations

import asyncio

import pytest

from routerl_jax.knowledge.corpora.documents import decode
from routerl_jax.knowledge.web.config import ReaderConfig
from routerl_jax.knowledge.web.reading import Document, Fetcher, LocalReader, main_text
from routerl_jax.knowledge.web.snapshot import WebError
from tests.web_servers import Server, Web, serving


@pytest.fixture(scope="module")
def pages():
    with serving(Web()) as server:
        yield server


def config(**settings) -> ReaderConfig:
    return ReaderConfig(**{"allow_networks": ("127.0.0.0/8",), **settings})


def fetch(url: str, **settings):
    async def main():
        fetcher = Fetcher(config(**settings))
        try:
            return await fetcher.fetch(url)
        finally:
            await fetcher.close()

    return asyncio.run(main())


def read(url: str, **settings):
    async def main():
        reader = LocalReader(Fetcher(config(**settings)), max_chars=30_000)
        try:
            return await reader.read(url)
        finally:
            await reader.close()

    return asyncio.run(main())


def test_an_article(pages: Server):
    page = read(f"{pages.url}/page/6")
    assert page.title == "Village 6"
    assert "42 metres high" in page.text
    assert "Cookie" not in page.text
    assert "Log in" not in page.text


def test_redirects_are_followed(pages: Server):
    document = fetch(f"{pages.url}/moved")
    assert document.url == f"{pages.url}/page/3"
    assert "21 metres" in document.text


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/loop", "more than 5 redirects"),
        ("/pdf", "application/pdf"),
        ("/binary", "binary content"),
        ("/gone", "HTTP 410"),
        ("/to?url=http://169.254.169.254/latest/meta-data", "refused, 169.254.169.254 is not a public address"),
        ("/to?url=http://10.0.0.1/", "refused"),
        ("/to?url=file:///etc/passwd", "refused, only http and https"),
        ("/to?url=http://[::1]:80/", "refused"),
        ("/to?url=http://2852039166/", "refused"),
    ],
)
def test_what_is_not_read(pages: Server, path: str, reason: str):
    with pytest.raises(WebError, match=r".") as failure:
        fetch(f"{pages.url}{path}")
    assert reason in str(failure.value)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]", "127。0。0。1", "①②⑦.⓪.⓪.①", "127.0.0.1."],
)
def test_private_hosts_are_refused_unless_allowed(pages: Server, host: str):
    before = pages.seen.total()
    with pytest.raises(WebError, match="refused"):
        fetch(f"http://{host}:{pages.port}/page/1", allow_networks=())
    assert pages.seen.total() == before  # nothing was sent


def test_a_name_that_resolves_differently_the_second_time(pages: Server, monkeypatch):
    """DNS rebinding: the first answer is allowed, later ones are not. The connection goes to what was checked."""
    answers = iter(["127.0.0.2", "127.0.0.1", "127.0.0.1"])

    async def rebinding(self, host, port, **_):
        import socket

        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", rebinding)
    before = pages.seen.total()
    with pytest.raises(WebError, match="Cannot connect"):  # to 127.0.0.2, where nobody listens
        fetch(f"http://rebinding.test:{pages.port}/page/1", allow_networks=("127.0.0.2",))
    assert pages.seen.total() == before
    with pytest.raises(WebError, match=r"refused, 127\.0\.0\.1"):
        fetch(f"http://rebinding.test:{pages.port}/page/1", allow_networks=("127.0.0.2",))


@pytest.mark.parametrize("path", ["/never", "/drips"])
def test_a_page_that_never_ends(pages: Server, path: str):
    with pytest.raises(WebError, match=r"not read within 0.5 s"):
        fetch(f"{pages.url}{path}", timeout=0.5)


@pytest.mark.parametrize("path", ["/giant", "/bomb"])
def test_giant_pages_are_cut(pages: Server, path: str):
    document = fetch(f"{pages.url}{path}", max_bytes=200_000)
    assert document.cut
    assert len(document.text) <= 200_000


def test_the_beginning_of_a_giant_page_is_read(pages: Server):
    page = read(f"{pages.url}/giant", max_bytes=200_000)
    assert "begins like any other page" in page.text
    assert len(page.text) <= 30_000


def test_a_page_without_text(pages: Server):
    with pytest.raises(WebError, match="no text was found"):
        read(f"{pages.url}/empty")


def test_wrong_charsets(pages: Server):
    assert "сорок два метра" in read(f"{pages.url}/russian").text  # windows-1251 that says UTF-8
    assert "près de l’église" in read(f"{pages.url}/latin").text  # UTF-8 that says latin-1


@pytest.mark.parametrize(
    ("content", "declared", "expected"),
    [
        ("naïve".encode("utf-16"), None, "naïve"),
        (b"\xef\xbb\xbfna\xc3\xafve", "latin-1", "naïve"),
        ("naïve “quotes”".encode("cp1252"), "iso-8859-1", "naïve “quotes”"),
        (b'<meta charset="shift_jis">' + "日本".encode("shift_jis"), None, '<meta charset="shift_jis">日本'),
        ("日本".encode("iso-2022-jp"), "iso-2022-jp", "日本"),
        ("naïve".encode("utf-16-le"), "utf-16-le", "naïve"),
        ("naïve".encode()[:3], "utf-8", "na"),  # cut inside a letter
        (b"plain", "no-such-charset", "plain"),
        (b"plain", "rot13", "plain"),
        (b"", None, ""),
    ],
)
def test_decoding(content, declared, expected):
    assert decode(content, declared) == expected


def test_a_page_of_tags_is_read_as_far_as_time_allows(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    import trafilatura

    monkeypatch.setattr(trafilatura, "bare_extraction", lambda text, **_: read.append(text))
    for text in ("<html><body>" + "<b>a</b>" * 200_000, "a" * 2_000_000, "<p>a < b</p>" * 1000):
        main_text(Document(url="http://x.example", type="text/html", text=text))
    assert read[0].count("<") == 30_000
    assert [len(text) for text in read[1:]] == [2_000_000, 12_000]
