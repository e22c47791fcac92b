"""One file of texts per language: the same keys and places in all, and none that pages lack."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import polyhead
from polyhead._utils.texts import LANGUAGES, Texts, every, language_of
from polyhead.errors import InputError

ROOT = Path(polyhead.__file__).parent
PLACE = re.compile(r"\{(\w+)\}")
USED = re.compile(r"""data-t(?:-label|-title|-hint|-role)?="([^"]+)"|\bt\("([\w.]+)"[,)]""")
FILES = {
    code: json.loads((ROOT / "_utils/texts" / f"{code}.json").read_text(encoding="utf-8"))
    for code in LANGUAGES
}


@pytest.mark.parametrize("code", LANGUAGES)
def test_languages_have_the_same_keys_and_places(code: str) -> None:
    assert FILES[code].keys() == FILES["en"].keys()
    for part, entries in FILES["en"].items():
        assert FILES[code][part].keys() == entries.keys(), part
        for key, text in entries.items():
            other = FILES[code][part][key]
            assert other.strip(), (part, key)
            assert sorted(PLACE.findall(other)) == sorted(PLACE.findall(text)), (part, key)


def test_chinese_is_chinese_with_the_terms_of_the_field() -> None:
    said = json.dumps(FILES["zh"], ensure_ascii=False)
    assert LANGUAGES == {"en": "English", "zh": "中文"}
    terms = (
        "缩放点积注意力",
        "多头注意力",
        "查询",
        "键",
        "值",
        "因果掩码",
        "KV 缓存",
        "低秩潜变量",
    )
    for term in terms:
        assert term in said
    alike = [
        (part, key)
        for part, entries in FILES["zh"].items()
        for key, text in entries.items()
        if text == FILES["en"][part][key] and re.search(r"[a-z]{3,} [a-z]{3,}", text)
    ]
    assert alike == []


@pytest.mark.parametrize(
    ("folder", "parts"),
    [
        ("viewer/page", ("page",)),
        ("viewer/lesson/page", ("lesson",)),
        ("viewer/load", ("load",)),
    ],
)
def test_pages_use_keys_that_there_are(folder: str, parts: tuple[str, ...]) -> None:
    known = every("common", "statistics", *parts)["en"].keys()
    used = {
        found[1] or found[2]
        for path in (ROOT / folder).iterdir()
        if path.suffix in (".html", ".js")
        for found in USED.finditer(path.read_text(encoding="utf-8"))
    }
    assert len(used) > 10
    assert used <= known | {"notable.none", "notable"}


def test_the_language_is_asked_for_or_the_locales(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    assert language_of(None) == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert language_of(None) == "zh"
    assert language_of("en") == "en"
    assert language_of("zh") == "zh"
    assert every("common", "learn")["zh"]["head"] == "头 {name}"
    assert every("common", "learn")["en"]["written"]
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert language_of(None) == "en"
    with pytest.raises(InputError, match="--lang must be en or zh: got 'fr'"):
        language_of("fr")


def test_places_are_filled() -> None:
    assert Texts("zh", "common")("head", name="18.6") == "头 18.6"
    with pytest.raises(KeyError):
        Texts("en", "common")("head")
