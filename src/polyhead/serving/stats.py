"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine.

    Attributes:
        live: Requests that are being computed.
        queued: Requests that wait.
        used_tokens: Tokens that live requests have room for, in whole pages.
        free_tokens: Tokens that there is room for beside them.
        pool_bytes: Bytes of all that room.
        prompt_tokens: Tokens of prompts that were read so far.
        output_tokens: Tokens that were written so far.
        cached_tokens: Tokens of prompts that had been read before.
        preemptions: Requests that were queued again.
        guessed_tokens: Tokens that were guessed and checked.
        accepted_tokens: Of these, tokens that were right.
    """

    live: int
    queued: int
    used_tokens: int
    free_tokens: int
    pool_bytes: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class RequestStats:
    """A request that is being computed.

    Attributes:
        id: As ``Request.id``.
        adapter: Its adapter, or None.
        share_with: As it was submitted.
        prompt_tokens: Tokens of its prompt.
        read_tokens: Of these, tokens in its cache.
        cached_tokens: Of these, tokens that had been read before.
        output_tokens: Tokens that it has written.
        limit: Tokens that it writes at most.
        seconds: Since it was submitted.
    """

    id: str
    adapter: str | None
    share_with: str
    prompt_tokens: int
    read_tokens: int
    cached_tokens: int
    output_tokens: int
    limit: int
    seconds: float


@dataclass
class Counts:
    """What is counted since the beginning; the fields are those of ``EngineStats``."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
