"""Which HTTP replies are retried, and when."""

from __future__ import annotations

import email.utils
import time

# Timeouts, overload, and gateway failures (52x: Cloudflare).
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


def retry_after(header: str) -> float | None:
    """Seconds to wait by a Retry-After header, which is a number or a date (RFC 9110, 10.2.3); None if it is neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
