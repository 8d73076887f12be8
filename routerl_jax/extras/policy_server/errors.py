"""Errors as the OpenAI protocol writes them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.services.asgi import Refusal


class ApiError(Refusal):
    """A refused request. `kind` is the protocol's `code`; `param` the field that is wrong, "" where it is none."""

    def __init__(
        self, status: int, kind: str, message: str, param: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, kind, message, headers)
        self.param = param


def invalid(message: str, param: str = "", kind: str = "invalid_value") -> ApiError:
    """The error for a field with an invalid value."""
    return ApiError(400, kind, message, param)


def error_body(refusal: Refusal) -> dict[str, Any]:
    """The reply to a refused request."""
    code = {"unauthorized": "invalid_api_key"}.get(refusal.kind, refusal.kind)
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "error": {"message": str(refusal), "type": kind, "param": getattr(refusal, "param", "") or None, "code": code}
    }
