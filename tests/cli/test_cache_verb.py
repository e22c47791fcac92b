"""``polyhead cache``: what lies in the cache directory, and how it goes."""

from __future__ import annotations

import json
from pathlib import Path

from process import Run

DIGEST = "0123456789ab"


def test_the_cache_is_listed_by_model_and_cleared(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    here = {"POLYHEAD_CACHE": str(folder)}
    empty = run("cache", **here)
    assert (empty.code, empty.out) == (0, f"nothing is kept in {folder}\n")
    (folder / "joined").mkdir(parents=True)
    gemma = folder / "joined" / f"gemma-3-270m-q4_k_m-{DIGEST}.gguf"
    other = folder / "joined" / f"other-{DIGEST}.gguf"
    mine = folder / "joined" / "mine.gguf"
    gemma.write_bytes(b"x" * 2_000_000)
    other.write_bytes(b"x")
    mine.write_bytes(b"x")
    listed = run("cache", **here)
    assert listed.code == 0, listed.err
    assert "gemma3-270m" in listed.out
    assert "joined from parts" in listed.out
    assert f"2.0 MB in {folder}" in listed.out
    assert "mine" not in listed.out
    data = json.loads(run("cache", "--json", **here).out)
    assert data["directory"] == str(folder)
    assert [(e["model"], e["kind"], e["bytes"]) for e in data["files"]] == [
        ("gemma3-270m", "joined", 2_000_000),
        ("other", "joined", 1),
    ]
    run("cache", "clear", "gemma", **here).refused(2, "'gemma'", "holds gemma3-270m, other")
    cleared = run("cache", "clear", "gemma3-270m", **here)
    assert cleared.out == f"removed {gemma}\n2.0 MB freed\n"
    assert not gemma.exists()
    assert other.exists()
    assert json.loads(run("cache", "clear", "--json", **here).out)["removed"][0]["model"] == "other"
    assert [*folder.rglob("*.gguf")] == [mine]
