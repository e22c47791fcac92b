"""GGUF files of models that transformers has no class for give llama.cpp's probabilities.

The same files are compared with transformers' model of the equal family in ``test_families.py``;
here llama.cpp says that the family is equal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_files import write
from harness import SIZES, all_cases

from polyhead.checkpoints import load_checkpoint
from polyhead.lab.benchmarks.peers import installed

pytestmark = pytest.mark.skipif(not installed("llama.cpp"), reason="pip install xllamacpp")

_ALONE = (
    "baichuan",
    "bailingmoe",
    "codeshell",
    "deci",
    "maincoder",
    "minicpm",
    "orion",
    "pangu-embedded",
    "xverse",
)
_FORMS = {
    f"{form.arch}-{number}": (case, form)
    for case in all_cases().values()
    for number, form in enumerate(case.more_gguf)
    if form.arch in _ALONE
}
_MARK = "answer: "
_ASK = f"""
import json, sys, xllamacpp

asked = xllamacpp.CommonParams()
asked.model.path, asked.n_ctx, asked.n_parallel, asked.verbosity = sys.argv[1], 256, 1, -1
asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
# Both round keys and values to float16 by default.
asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
asked.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
prompt, count = json.loads(sys.argv[2]), int(sys.argv[3])
options = dict(temperature=0, max_tokens=1, logprobs=count)
answer = xllamacpp.Server(asked).handle_completions(dict(prompt=prompt, **options))
found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print({_MARK!r} + json.dumps([[each["id"], each["logprob"]] for each in found]), flush=True)
"""


def test_every_architecture_has_its_file() -> None:
    assert {form.arch for _, form in _FORMS.values()} == {*_ALONE}


@torch.no_grad()
@pytest.mark.parametrize("name", _FORMS)
def test_llama_cpp_gives_the_same(name: str, tmp_path: Path) -> None:
    case, form = _FORMS[name]
    path = write(tmp_path / "tiny.gguf", form, case.build(form.options or {}))
    ids, count = case.ids(batch=1), SIZES["vocab_size"]
    command = [sys.executable, "-c", _ASK, str(path), json.dumps(ids[0].tolist()), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((each for each in done.stdout.splitlines() if each.startswith(_MARK)), None)
    assert line is not None, done.stderr[-2000:]
    theirs = dict(json.loads(line.removeprefix(_MARK)))
    assert theirs.keys() == {*range(count)}
    ours = load_checkpoint(path).model(ids)[0, -1].log_softmax(-1)
    # llama.cpp looks GELU up in a table of float16 numbers.
    error = 1e-3 if form.arch == "codeshell" else 1e-5
    assert ours.tolist() == pytest.approx([theirs[i] for i in range(count)], abs=error)
