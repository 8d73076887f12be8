"""What can't be read in any script, and what can."""

import pytest

from routerl_jax.core.text import garbled

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
