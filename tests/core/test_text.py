"""Texts: for strangers, as cells of tables, and their words and plain forms in many scripts."""

import unicodedata

import pytest

from routerl_jax.core.text import (
    folded,
    garbled,
    is_unspaced,
    markdown_cell,
    sentence_ends,
    sentences,
    without_directories,
    words,
)


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


@pytest.mark.parametrize(
    "parts",
    [
        ["It was by J. Lee.", "He wrote it with Robert Downey Jr. and Dr. Who in the U.S. Army."],
        ["C. Robert Cargill wrote it (in 1818).", "So did A. A. Milne!", "Who else?"],
        ["He was born Oct. 5, 1900, in St. Louis.", "No. 5 is alive.", "It left Washington, D.C.", "The end."],
        ["Yahoo! is a firm of Apple Inc. and others.", '"Yes."', "It goes on... and on.", "Then it ended."],
        ["北京是首都。", "它很大。"],
    ],
)
def test_sentences_do_not_end_at_initials_and_abbreviations(parts: list[str]) -> None:
    assert sentences(" ".join(parts)) == parts
    assert sentences(f"1. {parts[0]}\n2. {parts[1]}") == [f"1. {parts[0]}", f"2. {parts[1]}"]


def test_the_end_of_a_text_does_not_tell_whether_an_initial_ends_a_sentence() -> None:
    assert sentence_ends("It was by J. ") == sentence_ends("He left the U.S.") == []
    assert sentence_ends("It was he. ") == [10]


def test_a_cell_ends_no_cell_and_begins_no_html() -> None:
    assert markdown_cell("a|b\n<script>") == "a\\|b &lt;script>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Vitamin C, or 5 of C++/C#?", ["Vitamin", "C", "or", "5", "of", "C++", "C#"]),
        ("Smith's O’Brien didn't", ["Smith", "O", "Brien", "didn"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("한국어 단어", ["한국어", "단어"]),
        ("東京の塔", ["東", "京", "の", "塔"]),
        ("iPhone15手机", ["iPhone15", "手", "机"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("", []),
        ("?! 。", []),
    ],
)
def test_words_of_any_script(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_neighbouring_characters_are_words_of_a_search() -> None:
    assert words("首都 a 北京", pairs=True) == ["首", "首都", "都", "a", "北", "北京", "京"]
    assert words("to be", pairs=True) == ["to", "be"]
    assert [is_unspaced(word) for word in ("北", "ที่", "be", "한국어")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Beyonce\u0301", "Beyonc\u00e9"),
        ("Par\u200bis\ufeff", "Paris"),
        ("\u2018O\u2019Brien\u201d", "'O'Brien\""),
        ("2010\u20132015\u00a0\u2212 5", "2010-2015 - 5"),
        ("\uff21\uff11\uff19\u3000\ufb01n \U0001d400", "A19 fin A"),
        ("\u5df4\u9ece\u3002", "\u5df4\u9ece."),
        ("\uff8a\uff9f\uff98", "\u30d1\u30ea"),
        ("\u0130stanbul", "Istanbul"),
        ("10\u00b2 \u00bd \u2460", "10\u00b2 \u00bd \u2460"),  # they say something else than 102, 12 and 1
    ],
)
def test_what_looks_the_same_is_one_text(text: str, plain: str) -> None:
    assert folded(text) == plain
    assert folded(plain) == plain


def test_every_form_of_every_letter_is_folded_to_one() -> None:
    """Composed and decomposed text is equal, whatever the letter; and ASCII stays as it is."""
    for code in range(0x20, 0x3000):
        letter = chr(code)
        assert folded(unicodedata.normalize("NFD", letter)) == folded(letter)
    ascii_text = "".join(map(chr, range(128)))
    assert folded(ascii_text) == ascii_text


# --- what can't be read in any script, and what can ---


READABLE = [
    "an assistant professor of 3 km², 5 Å², 50 µm ± 2 °C; naïve café, São Tomé, Øresund, Łódź, Þórr",
    "“É”, “BEYONCÉ’s CAFÉ”, « CITÉ », “passé…”, „groß“, IRMÃ”, Úžas, ‘Íš’, IRMÃ…",
    "北京 is 東京's neighbour; 서울; القاهرة; ירושלים; मुंबई; กรุงเทพฯ",
    "Москва, Её дом, Київ, Україна, ТІНІ ЗАБУТИХ ПРЕДКІВ, ЛІНІЇ, Ђорђе, Ὅμηρος, Αθήνα, Ήλιος",
    "1\t2\r\n3 👍🏽 ☂️ 👩‍👩‍👧 ∑ → ℝ ½ zero\u200bwidth \ufeffmark no\u00a0break soft\u00adhyphen",
    "",
]


@pytest.mark.parametrize("text", READABLE)
def test_any_script_can_be_read(text):
    assert not garbled(text)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "cp1251"])
@pytest.mark.parametrize(
    "text", ["東京タワー", "Владимир", "Ελλάδα", "القاهرة", "ירושלים", "मुंबई", "กรุงเทพ", "서울특별시", "’s"]
)
def test_utf_8_read_in_another_encoding(text, encoding):
    wrong = text.encode().decode(encoding, errors="replace")
    if (text, encoding) == ("’s", "cp1251"):
        return  # one character, which three of Cyrillic's might be
    assert garbled(f"It is {wrong}, I think.")


@pytest.mark.parametrize("text", ["é", "ü", "ñ", "ä", "ß", "ó", "è", "°", "£", "í"])
def test_a_western_letter_is_enough(text):
    assert garbled(f"S{text.encode().decode('cp1252', errors='replace')}o")


@pytest.mark.parametrize("text", ["so\ufffdon", "a\x00b", "a\x1b[0m", "\x85", "\ue000", "\ud83d", "锟斤拷"])
def test_characters_that_nobody_can_read(text):
    assert garbled(text)


def test_part_of_a_character():
    """Bytes of a character cut in two, as a policy may sample them one by one."""
    assert garbled("北京".encode()[:4].decode(errors="replace"))
