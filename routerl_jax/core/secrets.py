"""Keys, tokens and passwords: read from the environment or from files, refused in configurations, masked in what is shown.

A configuration is written down and passed on (config.json, model cards, loggers). So it names the variable that holds a secret:
`$NAME`, or `${NAME}` within a text. Its value, or the content of the file that `NAME_FILE` names, is read where it is used.
"""

from __future__ import annotations

import os
import pathlib
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

MASK = "***"
_LEAST = 6  # characters of a secret; shorter ones are in any text

_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Z_][A-Z0-9_]*)(?![A-Za-z0-9_]))")
_NAME = re.compile(r"[A-Za-z_]\w*")
# Names of settings, arguments and headers whose text is a secret ("query_key" and "max_tokens" are none); those of environment
# variables, which stand in a tool's `env`; and those of parameters in URLs.
_WORD = (
    r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|authorization|cookie"
    r"|(?:api|access|secret|private|subscription|account)[-_]?key)"
)
_SECRET_NAME = re.compile(
    rf"(?:.*[-_.])?(?:{_WORD}|pwd)|.*(?:[a-z](?:Token|Secret|Password|ApiKey)|apikey)", re.IGNORECASE
)
_VARIABLE = re.compile(r"(?:[A-Z0-9]+_)*(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PWD|AUTH|CREDENTIALS)")
_MARK = re.compile(
    r"(?:bos|eos|pad|unk|sep|cls|mask|image|special|stop|begin|end|query|document)[-_]?token", re.IGNORECASE
)
_HELD = "\0"  # stands for a variable in the texts that are judged
_PARAMETER = (
    r"(?<=[?&;])((?:[\w.-]{0,40}[-_.])?(?:token|api_?key|key|secret|passw(?:or)?d|pwd|signature|sig|credential)=)"
    r"[^\0\s&;#'\"<>]+"
)
# Forms of keys that services give out, of headers and arguments with one, and of user names and passwords in URLs.
_FORMS = (
    r"(?<![\w-])(?:sk-|tvly-|glpat-|npm_|pypi-|jina_|hf_|gh[pousr]_|github_pat_|xox[abprs]-|ya29\.|AIza|[srp]k_(?:live|test)_)"
    r"[A-Za-z0-9_-]{16,}",
    r"(?<![A-Za-z0-9])A[KS]IA[0-9A-Z]{16}(?![A-Za-z0-9])",
    r"(?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?",
    r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[^-]*",
)
_HEADER = r"((?<![A-Za-z])(?:Bearer|Basic) {1,4})[A-Za-z0-9._~+/=-]{8,}"
_ARGUMENT = rf"((?<!\S)--?(?:[a-z]{{1,20}}-){{0,3}}{_WORD}[= ])[^\0\s'\"]+"
_PART = r"[^\0\s/?#@:'\"<>]"
_USER = rf"(?:(?<=http://)|(?<=https://)){_PART}+(?=@)|(?<=://){_PART}*:(?:{_PART}|:)+(?=@)"
_FIELD = rf"((?<![\w-])[\"']?(?:[\w.-]{{0,40}}[-_.])?{_WORD}[\"']?\s{{0,4}}[:=]\s{{0,4}}[\"'])[^\"'\n]+(?=[\"'])"
_MASKED = tuple(
    (re.compile(pattern, flags), replacement)
    for pattern, flags, replacement in (
        *((form, re.NOFLAG, MASK) for form in _FORMS),
        (_USER, re.NOFLAG, MASK),
        (_HEADER, re.IGNORECASE, rf"\1{MASK}"),
        (_PARAMETER, re.IGNORECASE, rf"\1{MASK}"),
        (_ARGUMENT, re.IGNORECASE, rf"\1{MASK}"),
        (_FIELD, re.IGNORECASE, rf"\1{MASK}"),
    )
)
_MIXED = re.compile(r"[A-Za-z0-9+]{32,}={0,2}")

_known: set[str] = set()  # secrets that this process has read, in the forms in which they may be shown


# --- reading ---


def secret(variable: str) -> str:
    """The secret in an environment variable, or in the file that `VARIABLE_FILE` names; "" if no variable is named.

    Raises:
      ValueError: neither is set, the file can't be read, or what should be the name of a variable looks like the secret itself.
    """
    if not variable:
        return ""
    if suspicion("_env", variable):
        raise ValueError(
            "what should name an environment variable looks like a key itself: export it, and give its name"
        )
    value = os.environ.get(variable, "").strip()
    if not value and (file := os.environ.get(f"{variable}_FILE", "")):
        try:
            value = pathlib.Path(file).expanduser().read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"{variable}_FILE={file}: can't be read ({error})") from error
    if not value:
        raise ValueError(f"the environment variable {variable} is not set: export {variable}=... before you start")
    # A place is none, and of a URL `masked` hides what is secret in it. A plain word under another name stands in many texts.
    word = value.isalpha() and not (_VARIABLE.fullmatch(variable) or _SECRET_NAME.fullmatch(variable))
    if not (word or "://" in value or os.path.exists(os.path.expanduser(value))):
        remember(value)
    return value


def resolved(value: Any, key: str) -> Any:
    """A setting with the secrets that it names as `$VARIABLE`, in texts at any depth.

    Raises:
      ValueError: a variable is not set; names the setting.
    """
    if isinstance(value, Mapping):
        return {name: resolved(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(resolved(item, f"{key}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, str):
        return value
    try:
        return _REFERENCE.sub(lambda reference: secret(reference[1] or reference[2]), value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def remember(*secrets: str) -> None:
    """From now on, `masked` hides these texts wherever they stand."""
    for text in secrets:
        if len(text) >= _LEAST:
            _known.update({text, urllib.parse.quote(text, safe=""), repr(text)[1:-1]})


# --- refusing ---


def suspicion(key: str, value: str) -> str:
    """Why a setting's text looks like a secret, such as "it has the form of a key"; "" if it does not.

    A text that names a variable (`$NAME`) is none.
    """
    rest = _REFERENCE.sub(_HELD, value)
    name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
    if not rest.strip(f"{_HELD} "):
        return ""
    if name.endswith("_env"):
        wrong = not _NAME.fullmatch(value) or _random(value) or _formed(value)
        return "it is the key itself, and should be the name of a variable" if wrong else ""
    named = (_SECRET_NAME.fullmatch(name) and not _MARK.search(name)) or _VARIABLE.fullmatch(name)
    file = "credential" in name.lower() and value.startswith(("/", "~", "."))
    if named and rest == value and value[0] not in "<[" and not file:
        return f"of its name {name!r}"
    if _random(rest) or _formed(rest):
        return "it has the form of a key, or of a URL or an argument with one"
    return ""


def _formed(text: str) -> bool:
    """Whether a key of a known form stands in a text, or a URL, header or argument with one."""
    return any(re.search(pattern, text) for pattern in _FORMS) or any(
        re.search(pattern, text, re.IGNORECASE) for pattern in (_USER, _HEADER, _PARAMETER, _ARGUMENT)
    )


def _random(text: str) -> bool:
    """Whether a text is one long run of letters of both cases and digits, as keys are and words are not."""
    counts = [sum(map(kind, text)) for kind in (str.isdigit, str.isupper, str.islower)]
    return _MIXED.fullmatch(text) is not None and min(counts) >= 4 and not re.search(r"[a-z]{6}", text)


# --- masking ---


def masked(text: str) -> str:
    """A text in which `***` stands for secrets: those that this process has read, and whatever has the form of one."""
    text = masked_known(text)
    for pattern, replacement in _MASKED:
        text = pattern.sub(replacement, text)
    return text


def masked_known(text: str) -> str:
    """A text in which `***` stands for the secrets that this process has read, and nothing else is changed."""
    for known in sorted(_known, key=len, reverse=True):
        text = text.replace(known, MASK)
    return text


def without_secrets(value: Any, key: str = "") -> Any:
    """A configuration, in the form of JSON, as it may be shown: `***` for what looks like a secret."""
    if isinstance(value, Mapping):
        return {name: without_secrets(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return MASK if suspicion(key, value) else masked(value)
