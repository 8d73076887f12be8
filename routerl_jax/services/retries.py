"""What an HTTP reply asks of its client: to try again, when, at another path, or to read an error under status 200."""

from __future__ import annotations

import email.utils
import re
import time
import urllib.parse
from collections.abc import AsyncIterable, Mapping
from typing import Any, NamedTuple

# Timeouts, overload, and gateway failures (52x: Cloudflare).
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
LONGEST_PAUSE = 60.0  # seconds; if a server asks for a longer pause, it is still asked again after this
MOST_REDIRECTS = 3  # of one request

# What errors are called in `code`, `type` or `status`, and the HTTP status that each stands for. The first that fits counts.
_NAMES = (
    (402, r"insufficient.?(quota|credit|balance|fund)|not enough credit|payment|billing.(hard|not|err)"),
    (429, r"rate.?limit|too.?many.?requests|throttl|resource.?exhausted|quota.?exceeded"),
    (401, r"api.?key|unauthori[sz]ed|unauthenticated|authentication"),
    (403, r"permission|forbidden|access.?denied"),
    (404, r"not.?found"),
    (503, r"overload|unavailable|capacity|busy|time.?d?.?out|server.?error|internal|gateway|api.?error|upstream"),
    (400, r"invalid|bad.?request|unsupported|context.?length|content.?(policy|filter)|too.?(long|large)|validation"),
)
_UNNAMED = 502  # an error without a name that is known: it may be passing
_CODES = ("type", "code", "status", "status_code", "statusCode")
_BESIDE = ("error", "errors", "detail", "metadata")  # keys that hold no results


class ReplyError(NamedTuple):
    """An error that a reply carries. `status`: the HTTP status that it stands for."""

    status: int
    message: str


def retry_after(header: str) -> float | None:
    """Seconds to wait by a Retry-After header, which is a number or a date (RFC 9110, 10.2.3), at most LONGEST_PAUSE; None if
    it is neither."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(0.0, seconds), LONGEST_PAUSE)


def may_pass(status: int, message: str) -> bool:
    """Whether the same request may succeed later. Spent money has the status of a rate limit at OpenAI, but does not pass."""
    return status in RETRIED and not re.search("insufficient.?quota", message, re.IGNORECASE)


def error_of(reply: Any) -> ReplyError | None:
    """The error of a parsed JSON reply whose HTTP status says success; None if it carries none.

    That is a value under `error`; or, if nothing else in the reply holds anything, one under `errors` or `detail`, or a
    `message` beside a code of 400 or more, an error's name, or another sign of failure. A list around the one object is
    ignored. An error counts as 502, which is tried again, if its code and name say nothing that is known.
    """
    if isinstance(reply, list) and len(reply) == 1:
        reply = reply[0]
    if not isinstance(reply, dict):
        return None
    error = reply.get("error")
    if not error and not any(
        value and isinstance(value, list | dict) and key not in _BESIDE for key, value in reply.items()
    ):
        failed = (
            "error" in (reply.get("status"), reply.get("object"), reply.get("type")) or reply.get("success") is False
        )
        said, code = reply.get("message") or reply.get("msg"), reply.get("code")
        failed |= (_number(reply) or 0) >= 400 or (isinstance(code, str) and _stands_for(code) is not None)
        error = reply.get("errors") or reply.get("detail") or (said if failed else None)
    if error is True:
        error = reply.get("message") or "an error without a message"
    while isinstance(error, list) and error:
        error = error[0]
    if not error:
        return None
    fields = error if isinstance(error, dict) else {"message": str(error)}
    text = str(next((fields[key] for key in ("message", "msg", "detail") if fields.get(key)), fields))
    message = " ".join(text.split())[:300]
    fields = {**{key: reply.get(key) for key in _CODES}, **fields}
    names = " ".join(str(fields[key]) for key in _CODES if isinstance(fields.get(key), str))
    number = _number(fields) or 0
    if number >= 400 and may_pass(429, names):
        return ReplyError(number, message)
    return ReplyError(_stands_for(names) or _stands_for(text) or _UNNAMED, message)


def _stands_for(text: str) -> int | None:
    """The HTTP status of an error's name."""
    return next((status for status, pattern in _NAMES if re.search(pattern, text, re.IGNORECASE)), None)


def _number(fields: Mapping[str, Any]) -> int | None:
    """The HTTP status among the codes of an error, as a number or a string of digits."""
    codes = (str(fields.get(key)) for key in _CODES)
    return next((int(code) for code in codes if re.fullmatch(r"[1-5]\d\d", code)), None)


def redirect_target(url: str, status: int, location: str) -> str:
    """Where a redirect leads, as a whole URL; "" if the reply is none."""
    return urllib.parse.urljoin(url, location) if 300 <= status < 400 and location else ""


def may_follow(url: str, status: int, target: str) -> bool:
    """Whether a redirect keeps method and body (307, 308) and scheme, host and port, so that no key is sent elsewhere."""
    return status in (307, 308) and _origin(url) == _origin(target) is not None


def _origin(url: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


async def bounded(chunks: AsyncIterable[bytes], most: int) -> bytes:
    """The chunks of a reply's body, together. Raises ValueError at once if they are more than `most` bytes."""
    content = bytearray()
    async for chunk in chunks:
        content += chunk
        if len(content) > most:
            raise ValueError(f"the reply is larger than {most} bytes")
    return bytes(content)
