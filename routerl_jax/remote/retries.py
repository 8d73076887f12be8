"""Which replies are worth another attempt, and when."""

from __future__ import annotations

import email.utils
import time

# Timeouts, overload, and failures of gateways (52x: Cloudflare's).
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


def retry_after(header: str) -> float | None:
    """Seconds of a Retry-After header, which holds a number or a date (RFC 9110, 10.2.3); None if it holds neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
