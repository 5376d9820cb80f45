"""What the HTTP surface answers when it says no: OpenAI's error object, all four keys always present."""

from __future__ import annotations

import math
from collections.abc import Mapping

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 256


class ApiError(Exception):
    """A request that is refused or failed, with the HTTP status and the body the client gets.

    `param` names the field at fault ("messages.0.content"), `code` is a short machine-readable word or None,
    `headers` are extra response headers (Retry-After). Message and param may quote the client: both are cut.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message, MAX_MESSAGE_CHARS)
        self.type = type
        self.param = param and _cut(param, MAX_PARAM_CHARS)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body; the same object is sent inside a stream that has already begun."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}…"


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the request is wrong, and `param` says where."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, what: str | None = None) -> ApiError:
    """400: a field (or a value of it) of the API that this version does not have yet."""
    return ApiError(400, f"{what or param} is not supported yet.", param=param, code="not_supported")


def model_not_found(name: str) -> ApiError:
    """404: no such model is served here."""
    return ApiError(404, f"The model {name!r:.200} does not exist.", param="model", code="model_not_found")


def unavailable(message: str, code: str, retry_after_s: float = 1.0) -> ApiError:
    """503: nobody can serve it now."""
    return ApiError(503, message, type="service_unavailable", code=code, headers=retry_after(retry_after_s))


def queue_full(why: str, retry_after_s: float) -> ApiError:
    """429."""
    headers = retry_after(retry_after_s)
    return ApiError(429, f"The queue is full: {why}.", type="rate_limit_error", code="queue_full", headers=headers)


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(math.ceil(seconds), 1))}


def bad_grammar(field: str, detail: str) -> ApiError:
    """400: `field` asks for texts that a worker cannot hold an answer to."""
    return invalid(f"{field}: {detail}", field or None, "bad_grammar")


def too_long(detail: str) -> ApiError:
    """400: it could never fit, as a worker says."""
    return invalid(f"The request is too long: {detail}.", None, "context_length_exceeded")


def failed(message: str, code: str) -> ApiError:
    """500: ours."""
    return ApiError(500, message, type="server_error", code=code)
