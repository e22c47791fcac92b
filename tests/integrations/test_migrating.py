"""The snippets of docs/migrating.md run, and what they import stays out of ``import polyhead``."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_has_a_snippet_for_every_library():
    assert len(SNIPPETS) == 5


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number, monkeypatch):
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(SNIPPETS[number], {})
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        sys.modules.pop(name, None)


def test_importing_polyhead_or_its_integrations_imports_no_peer():
    code = (
        "import sys, polyhead, polyhead.integrations as i\n"
        "assert 'transformers' not in sys.modules and 'flash_attn' not in sys.modules\n"
        "i.torch.replace, i.flash_attn.flash_attn_func\n"
        "assert 'transformers' not in sys.modules\n"
        "import torch\n"
        "assert i.torch is not torch and sorted(dir(i)) == ['flash_attn', 'torch', 'transformers']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_integration_is_named():
    import polyhead.integrations as integrations

    with pytest.raises(AttributeError, match="jax"):
        _ = integrations.jax
