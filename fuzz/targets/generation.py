"""How texts are generated: generation_config.json of a directory, and options of a caller."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutation
from fuzz.targets import config_json
from polyhead.generation import LanguageModel, load

OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "max_length": 9,
    "min_length": 2,
    "min_new_tokens": 1,
    "num_beams": 2,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[3], [4, 5]],
    "suppress_tokens": [6, 7],
    "begin_suppress_tokens": [8],
    "exponential_decay_length_penalty": [2, 1.1],
    "remove_invalid_values": True,
    "seed": 3,
}
FILE_ONLY: dict[str, Any] = {"do_sample": True, "eos_token_id": [2, 3], "pad_token_id": 0}
folder = Path()
model: LanguageModel


def prepare() -> None:
    global folder, model
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    warnings.simplefilter("ignore")  # keys of the file that nobody knows are left out with one
    config_json.prepare()
    folder = Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(config_json.directory / "0", folder)
    backend = Backend(models.WordLevel({chr(i): i - 64 for i in range(64, 128)}, unk_token="@"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.save(str(folder / "tokenizer.json"))
    model = load(folder, expect=LanguageModel)


def case(random: Random) -> None:
    options = {key: OPTIONS[key] for key in random.sample(list(OPTIONS), random.randrange(1, 6))}
    prompts: Any = random.choice(("abc", ["ab", "abcde"], "a" * 60))
    if random.random() < 0.5:
        known = {key: value for key, value in options.items() if key != "seed"} | FILE_ONLY
        whole = random.random() < 0.3
        text = json.dumps(known).encode() if whole else mutation.json_text(random, known)
        (folder / "generation_config.json").write_bytes(text)
        load(folder, expect=LanguageModel).generate(prompts, **_few(options))
        return
    (folder / "generation_config.json").unlink(missing_ok=True)
    if random.random() < 0.7:
        options = mutation.json_object(random, options)
    model.generate(prompts, **{str(key): value for key, value in _few(options).items()})


def _few(options: dict[str, Any]) -> dict[str, Any]:
    """At most a few texts: more than a hundred rows are slow, and no mistake."""
    rows = options.get("num_return_sequences")
    if isinstance(rows, int) and 100 < rows <= 1 << 16:
        options = options | {"num_return_sequences": 3}
    return options
