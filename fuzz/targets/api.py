"""Requests to OpenAI's API as ``polyhead serve`` has it. No answer may be a 500."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import torch

from fuzz import mutation
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.errors import InputError
from polyhead.generation import LanguageModel
from polyhead.models import Transformer
from polyhead.serving.grammars import installed
from polyhead.serving.http.api import Api
from polyhead.serving.http.body import json_object
from polyhead.serving.http.errors import api_error
from polyhead.serving.http.jobs import CHAT_PATH, COMPLETIONS_PATH
from polyhead.serving.http.served import Models, Served

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<tool_call>"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
DRAWN = {
    "model": "tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
    "seed": 1, "n": 2, "stop": ["a", "bc"], "logit_bias": {"65": 2, "66": -1.5},
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2,
}  # fmt: skip
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS_PATH, {"prompt": ["ab", "c"], "logprobs": 2, **DRAWN}),
    (COMPLETIONS_PATH, {"prompt": [[65, 66], [67]], "echo": False, "best_of": 1, **DRAWN}),
    (
        CHAT_PATH,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "c", "tool_call_id": "1"},
            ],
            "tools": [TOOL], "tool_choice": "required", "logprobs": True, "top_logprobs": 2,
            "store": False, "metadata": {"a": "b"}, **DRAWN,
        },
    ),
    (
        CHAT_PATH,
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, **DRAWN,
        },
    ),
)  # fmt: skip
api: Api


def prepare() -> None:
    global api
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    from polyhead.checkpoints import Tokenizer

    backend = Backend(models.WordLevel({chr(i): i for i in (10, *range(32, 127))}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "~"}, chat_template=TEMPLATE)
    layer = LayerConfig(AttentionConfig(2, 2, 8), FeedForwardConfig(16))
    torch.manual_seed(0)
    config = TransformerConfig("decoder", 128, 16, 256, (layer, layer))
    model = LanguageModel(Transformer(config), tokenizer, "tiny").eval()
    served = Models(Served.of("tiny", model, max_tokens=2048))
    served.start()
    api = Api(served)
    for path, body in REQUESTS if installed() else REQUESTS[:2]:
        assert asyncio.run(answer(path, json.dumps(body).encode())) == 200


async def answer(path: str, content: bytes) -> int | str:
    """The status 200, or what a request is refused with."""
    try:
        await api.answer(path, json_object(content))
    except Exception as error:
        if hasattr(error, "detail"):
            return str(error.detail)  # it is no JSON object
        refusal = api_error(error)
        if refusal.status >= 500:
            raise
        return json.dumps(refusal.body())
    return 200


def case(random: Random) -> None:
    path, body = random.choice(REQUESTS)
    said = asyncio.run(answer(path, mutation.json_text(random, body)))
    if said != 200:
        raise InputError(f"{said} is a sentence")
