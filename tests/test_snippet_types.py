"""Every Python snippet of README and docs/, and every example, passes mypy --strict and pyright.

pyright runs as basedpyright, which needs no network: pyright's own package downloads itself.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from translations import pages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(english for english, _ in pages())]  # Chinese ones: the same code
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
UNTYPED = "torch, transformers"  # some of their functions have no types; calls of them pass
SETTINGS = f"""[mypy]
strict = true
python_version = 3.11
untyped_calls_exclude = {UNTYPED}
[mypy-flash_attn.*]
ignore_missing_imports = true
[mypy-triton.*]
ignore_missing_imports = true
follow_imports = skip
# make lint checks the package, where untyped calls are not excluded
[mypy-polyhead.*]
ignore_errors = true
"""


def modules(folder):
    """A module for each page, its snippets in order, at the lines where the page has them."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [""] * text.count("\n")
        for found in SNIPPET.finditer(text):
            code, first = found[1].splitlines(), text.count("\n", 0, found.start(1))
            lines[first : first + len(code)] = code
        if any(lines):
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
            (folder / f"{name}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
            yield folder / f"{name}.py"
    yield from sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
def test_snippets_and_examples_pass_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    files = list(modules(tmp_path))
    assert len(files) > 15
    command = [sys.executable, "-m", "mypy", "--config-file", settings, *files]
    command += ["--cache-dir", ROOT / ".mypy_cache"]
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT / "src", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_snippets_and_examples_pass_pyright(tmp_path):
    pytest.importorskip("basedpyright")
    files = [str(file) for file in modules(tmp_path)]
    settings = {
        "include": files,
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
        "reportMissingImports": "none",  # flash_attn
        "reportPossiblyUnboundVariable": "none",  # pages use what their last loop made
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "No source files found" not in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
