"""An engine whose policy writes given texts, for tests of what becomes of them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.data.vocabulary import train_tokenizer
from tests.agents.scripted import ScriptedEngine


class ScriptedWriter(ScriptedEngine):
    """Writes one text after the other, whoever asks; `prompts` is what it was asked."""

    def __init__(self, texts: Sequence[str], template: str) -> None:
        self.prompts: list[str] = []
        super().__init__(lambda *_: texts[len(self.prompts) - 1], canonical=True)
        self.tokenizer: Tokenizer = train_tokenizer(["some words to read"] * 3, 320, (), context=256)
        self.tokenizer.hf.chat_template = template
        self.config = types.SimpleNamespace(vocab_size=320)

    def open(self, prompt: Sequence[int], example_id: str = "", sample: int = 0, images: Sequence[Any] = ()) -> Any:
        self.prompts.append(self.tokenizer.decode(prompt))
        return super().open(prompt, example_id, sample, images)

    def request(self, stream: Any, *, top: int = 0, **settings: Any) -> None:  # type: ignore[override]
        super().request(stream, **settings)
