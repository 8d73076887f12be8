"""The fields of a request: each is read once and checked; fields that have not been read are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.extras.policy_server.errors import invalid

# Fields that do not change the reply.
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    }
)
# Fields that are not supported, with the values that ask for nothing and so are accepted.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "skip_special_tokens": (False,),
}


class Fields:
    """The fields of a request's JSON object. A field that is null counts as absent.

    The methods that read a field raise ApiError if its value has another type or is out of bounds.
    """

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise invalid(f"the body must be a JSON object, got {type(body).__name__}")
        self._unread: dict[str, Any] = {key: value for key, value in body.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """A value of any type."""
        return self._unread.pop(name, default)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(f"{name}={value!r} must be true or false", name)
        return value

    def string(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.take(name, default)
        if not isinstance(value, str):
            raise invalid(f"{name} must be a string, got {type(value).__name__}", name)
        return value

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        """An integer within bounds."""
        value = self.take(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise invalid(f"{name}={value!r} must be a whole number from {least} to {most}", name)
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number within bounds."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise invalid(f"{name}={value!r} must be a number from {least:g} to {most:g}", name)
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; {} if it is not there."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise invalid(f"{name} must be an object, got {type(value).__name__}", name)
        return value

    def end(self) -> None:
        """Raises ApiError if a field is left that asks for something."""
        for name, value in self._unread.items():
            if name in _IGNORED or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise invalid(
                    f"{name}={str(value)[:100]} is not supported here; leave it out", name, "unsupported_parameter"
                )
            raise invalid(f"there is no field {name!r} in this request", name, "unknown_parameter")
