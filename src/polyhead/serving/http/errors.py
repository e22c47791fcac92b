"""What a request is refused with: OpenAI's form of an error, and the status that goes with it.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from starlette.responses import JSONResponse

from polyhead.errors import ContextLengthError, PolyheadError, UnsupportedError
from polyhead.serving.requests import EngineEnding

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""Headers of every answer."""

_REFUSED = "DefaultCPUAllocator: can't allocate memory"
"""torch's words, in a RuntimeError, for memory that a CPU's system refuses."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused, or that failed.

    Args:
        status: HTTP's number.
        message: What is wrong, as a sentence.
        param: The option that is at fault.
        code: A word for programs, such as ``"model_not_found"``.
        retry_after: Seconds after which another try makes sense.
        retry: False tells OpenAI's client not to try again by itself.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _utf8(message), code
        self.param = None if param is None else _utf8(param)
        self.headers = dict(HEADERS)
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after)))
        if not retry:
            self.headers["X-Should-Retry"] = "false"

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = dict(self.headers)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """An option that is wrong or not supported: 400, with its name."""
    return ApiError(400, message, param=param, code=code)


def server_ending() -> ApiError:
    """What a request is told that the server does not wait for."""
    return ApiError(503, "the server is ending", code="shutting_down", retry_after=10)


def api_error(error: Exception) -> ApiError:
    """What became of a request, from the exception that ended it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineEnding):
        return server_ending()
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, UnsupportedError):
        return ApiError(400, str(error), code="unsupported")
    if isinstance(error, PolyheadError | ValueError | TypeError):
        return ApiError(400, str(error))
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _REFUSED in str(error):
        return ApiError(503, "not enough memory for this request", retry_after=5)
    return ApiError(500, "the server failed on this request; its log says more")


def _utf8(text: str) -> str:
    """The text without halves of surrogate pairs, which a request may hold."""
    return text.encode("utf-8", "backslashreplace").decode()
