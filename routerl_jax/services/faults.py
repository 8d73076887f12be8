"""The kinds of failure of a request to a chat model."""

from __future__ import annotations

import re

BUDGET = "budget"  # the run's budget of money is spent, so the request was not sent
CONTEXT_LENGTH = "context_length"  # the conversation is longer than the endpoint takes
RATE_LIMIT = "rate_limit"  # the endpoint, or the configured rate, let no request through in time
NOT_ALLOWED = "not_allowed"  # the key is missing, wrong, or not good for this model (401, 403)
REQUEST = "request"  # the endpoint rejects the request (other 4xx), for example because there is no such model
SERVER = "server"  # 5xx at every attempt
NO_REPLY = "no_reply"  # no connection, or no whole reply in time
HALF_REPLY = "half_reply"  # a reply that breaks the protocol or ends early
EMPTY = "empty"  # a reply without text
REFUSED = "refused"  # the model refused, as the reply's `refusal` says
FILTERED = "filtered"  # the endpoint's filter withheld the reply
PICTURE = "picture"  # a picture can't be read
OTHER = "other"  # none of these

# These failures say nothing about the question: asked again later, it may be answered.
PASSING = (BUDGET, RATE_LIMIT, NOT_ALLOWED, REQUEST, SERVER, NO_REPLY, HALF_REPLY, EMPTY, OTHER)

_TOO_LONG = re.compile(
    r"(?i)context[ _](length|window|size)|maximum context|too many (input )?tokens|prompt is too long|input is too long"
    r"|exceeds? the (model's )?(max|limit|available)[^.]*(token|context|length)"
)


def of_status(status: int, message: str) -> str:
    """The kind of failure of a reply with this HTTP status and message. Status 0: there was no reply."""
    if status in (400, 413, 422, 500) and _TOO_LONG.search(message):  # llama.cpp's server gave 500
        return CONTEXT_LENGTH
    if status == 429 or (status == 0 and "rate limit" in message):
        return RATE_LIMIT
    if status in (401, 403):
        return NOT_ALLOWED
    if status == 0 or status == 408:
        return NO_REPLY
    return SERVER if status >= 500 else REQUEST
