"""Model families: how their Hugging Face directories are read and written, and which tensor holds which parameter.

`FAMILIES` is the table of them. To add one of your own: one file that registers a `Family` (docs/models.md).
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from routerl_jax.core.registry import Registry
from routerl_jax.models.config import DECODER_TYPES, UnsupportedModelError

# Layouts: for each axis of their tensor, the axes of ours that it runs over, the last one fastest.
VECTOR = ((0,),)
MATRIX = ((0,), (1,))
TRANSPOSED = ((1,), (0,))
TO_HEADS = ((1, 2), (0,))  # ours [embed, heads, width], theirs [heads * width, embed]
FROM_HEADS = ((2,), (0, 1))  # ours [heads, width, embed], theirs [embed, heads * width]
HEADS_BIAS = ((0, 1),)


Axes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of our parameters is stored by Hugging Face.

    Attributes:
      name: tensor name; `{}` stands for the layer number, a second one for the expert's. Several names (joined by `|`) fill our
        second axis.
      axes: for each axis of their tensor, the axes of ours (of one layer) that it runs over, the last one fastest.
      layers: the numbers of the layers that have the parameter; empty: all.
      copies: other names under which a checkpoint may hold the same tensor again; it must be equal.
    """

    name: str
    axes: Axes
    layers: tuple[int, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return self.name.split("|")

    @property
    def outer(self) -> int:
        """The number of our first axes that run over tensors."""
        return self.names[0].count("{}") + (len(self.names) > 1)

    def name_at(self, index: Sequence[int]) -> str:
        """The name of the tensor at an index of those axes."""
        layer = index[:1] if not self.layers else (self.layers[index[0]],)
        if len(self.names) > 1:
            return self.names[index[-1]].format(*layer)
        return self.name.format(*layer, *index[1:])

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of their tensor, from ours."""
        return tuple(math.prod(shape[axis] for axis in merged) for merged in self.axes)

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """Which axis of ours their rows (their first axis) run over slowest, and how many rows each of its entries takes."""
        first, *inner = self.axes[0]
        return first, math.prod(shape[axis] for axis in inner)

    def to_ours(self, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Their tensor, or whole entries of the axis that its rows run over, in our shape: a view."""
        order = sum(self.axes, ())
        return tensor.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """Our parameter (of one layer) in their shape."""
        return value.transpose(sum(self.axes, ())).reshape(self.their_shape(value.shape))


Rules = dict[Any, Rule]  # by our parameter path, as flax.nnx gives it
# by our path of a weight: its module in theirs, and the weight's axes
Modules = dict[tuple[str, ...], tuple[str, Axes]]


def with_biases(modules: Modules) -> Rules:
    """The rules of weights and of the biases beside them, which are called `.._bias` here."""
    rules: Rules = {}
    for path, (names, axes) in modules.items():
        weights, biases = ("|".join(f"{name}.{part}" for name in names.split("|")) for part in ("weight", "bias"))
        rules[path] = Rule(weights, axes)
        rules[(*path[:-1], f"{path[-1]}_bias")] = Rule(biases, (tuple(range(len(axes[0]))),))
    return rules


NEEDED = object()
# Our fields that a config.json has under a key of its own: the key, and its value where it is absent (NEEDED: an error).
Keys = Mapping[str, tuple[str, Any]]


def read_keys(config: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The values of our fields in a config.json. Raises KeyError for a key that is needed."""
    return {
        ours: config[theirs] if default is NEEDED else config.get(theirs, default)
        for ours, (theirs, default) in keys.items()
    }


def write_keys(config: Any, keys: Keys) -> dict[str, Any]:
    """The entries of a config.json for our fields."""
    return {theirs: getattr(config, ours) for ours, (theirs, _) in keys.items()}


def spelled(name: str, spellings: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The possible names of a stored tensor: its own, then those with another prefix of `spellings`."""
    for old, new in (("", ""), *spellings):
        if name.startswith(old):
            yield new + name[len(old) :]


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


# By `model_type`, or by the class that config.json names. A family's module is imported when one of its models is read.
_MODULES = {
    "llama:FAMILY": DECODER_TYPES,
    "qwen_vl:QWEN2": ("qwen2_vl", "qwen2_5_vl"),
    "qwen_vl:QWEN3": ("qwen3_vl",),
    "bert:ENCODERS": ("bert", "roberta", "xlm-roberta"),
    "bert:CROSS_ENCODERS": tuple(f"{name}ForSequenceClassification" for name in ("Bert", "Roberta", "XLMRoberta")),
    "clip:FAMILY": ("clip",),
    "colqwen:FAMILY": ("colqwen2", "ColQwen2", "ColQwen2_5"),  # the latter two are colpali-engine's classes
    "nv_embed:FAMILY": ("nvembed",),
}
FAMILIES: Registry[Family] = Registry(
    "model family",
    {name: f"routerl_jax.models.families.{place}" for place, names in _MODULES.items() for name in names},
)


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


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file as Hugging Face's tools do."""
    path.write_text(json.dumps(value, indent=2) + "\n")
