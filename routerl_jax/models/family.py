"""Model families: how the Hugging Face directories of a family are read and written.

To add a family: one file in models/families that registers a `Family` (docs/extending.md).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from routerl_jax.core.registry import Registry
from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.mapping import Rules

Role = Literal["decoder", "encoder"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one `model_type`.

    Attributes:
      role: the use of its models.
      read: (config.json, its path for errors) -> our configuration. Raises UnsupportedModelError for features that would change
        the results.
      write: (configuration, dtype of the weights) -> config.json.
      create: (configuration, key, param_dtype=, compute_dtype=) -> model with random weights.
      rules: configuration -> which tensor holds which parameter.
      spellings: (prefix of a rule's name, prefix in some checkpoints): of models with or without heads, or of other versions of
        transformers.
      modules: (prefix of a rule's name, prefix of transformers' module), if these differ. Needed for an adapter's tensors,
        which transformers does not rename like a model's.
      complete: (configuration, its directory, config.json) -> the configuration with the settings of the directory's other
        files (pooling, prompts, image processing).
      finish: reads further settings of a directory into the model.
      save: writes these settings.
    """

    role: Role
    read: Callable[[Mapping[str, Any], str], Any]
    write: Callable[[Any, str], dict[str, Any]]
    create: Callable[..., Any]
    rules: Callable[[Any], Rules]
    spellings: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, str] = ("", "")
    complete: Callable[[Any, pathlib.Path, Mapping[str, Any]], Any] = lambda config, directory, config_json: config
    finish: Callable[[Any, pathlib.Path], None] = lambda model, directory: None
    save: Callable[[Any, pathlib.Path], None] = lambda model, directory: None

    def architecture(self, config: Mapping[str, Any], source: str) -> Any:
        """Calls `read`. Raises a ValueError that names the key if config.json lacks one."""
        try:
            return self.read(config, source)
        except KeyError as error:
            raise ValueError(f"{source}: {error} is missing; a {config.get('model_type')} needs it") from error


FAMILIES: Registry[Family] = Registry("model family")


def family_of(config: Mapping[str, Any], source: str) -> Family:
    """The family of a config.json, by its class if that is registered, else by its `model_type`.

    Raises:
      ValueError: it is no JSON object.
      UnsupportedModelError: the family is unknown; the message lists all families.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: holds no JSON object; expected a model's configuration")
    for name in config.get("architectures") or ():
        if name in FAMILIES:
            return FAMILIES.get(name)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        by_role = {
            role: [name for name in FAMILIES if FAMILIES.get(name).role == role] for role in ("decoder", "encoder")
        }
        raise UnsupportedModelError(
            f"{source}: model_type {kind!r} is not supported; decoders: {', '.join(by_role['decoder'])}; "
            f"encoders: {', '.join(by_role['encoder'])}"
        )
    return FAMILIES.get(kind)
