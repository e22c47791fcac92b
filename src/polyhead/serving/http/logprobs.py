"""Log-probabilities of tokens in the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhead.checkpoints import Tokenizer
from polyhead.generation import TokenLogprobs


def chat_logprobs(tokenizer: Tokenizer, told: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Tokens of a chat: text, bytes, log-probability, and the likeliest in its place."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = tokenizer.token_bytes(token)
        return {
            "token": content.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(content),
        }

    return [
        entry(each.token, each.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
        for each in told
    ]


def completion_logprobs(
    tokenizer: Tokenizer, told: Sequence[TokenLogprobs], offset: int
) -> tuple[dict[str, Any], int]:
    """Tokens of a completion as four lists, and where the next token's text begins.

    Args:
        offset: Characters of the text before the first token.
    """
    found: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for each in told:
        text = tokenizer.token_bytes(each.token).decode("utf-8", "replace")
        found["tokens"].append(text)
        found["token_logprobs"].append(each.logprob)
        likeliest: dict[str, float] = {}
        for token, logprob in each.top:
            likeliest.setdefault(tokenizer.token_bytes(token).decode("utf-8", "replace"), logprob)
        found["top_logprobs"].append(likeliest)
        found["text_offset"].append(offset)
        offset += len(text)
    return found, offset
