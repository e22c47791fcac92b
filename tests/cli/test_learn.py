"""``polyhead learn``: the lesson as a file, and what it says where it cannot be written."""

from __future__ import annotations

from pathlib import Path

from process import Run


def test_learn_writes_one_file_that_loads_nothing(run: Run, tmp_path: Path) -> None:
    result = run("learn", "--lang", "zh", BROWSER="false %s")
    place = tmp_path / "polyhead-lesson.html"
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        f"课程：{place}",
        "没有找到浏览器：请用浏览器打开该文件。",
    ]
    assert [path.name for path in tmp_path.iterdir()] == [place.name]
    page = place.read_text(encoding="utf-8")
    assert '"chosen":"zh"' in page
    assert "src=" not in page
    assert "default-src 'none'" in page
    opened = run("learn", "--out", "mine.html", BROWSER="true %s")
    assert opened.out == f"The lesson: {tmp_path / 'mine.html'}\n"
    run("learn", "--lang", "xx").refused(2, "--lang must be en or zh")
    run("learn", "--no-open", "-o", "missing/lesson.html").refused(1, "missing")
