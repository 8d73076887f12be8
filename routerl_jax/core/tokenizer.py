"""A thin wrapper of a tokenizer: lossless ids and text, chat templates, and the bytes of every token."""

from __future__ import annotations

import array
import collections
import copy
import functools
import inspect
import itertools
import json
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from absl import logging
from jaxtyping import Bool

from routerl_jax.core.files import read_json
from routerl_jax.core.types import Message

ReplyRole = Literal["user", "tool"]

# Bytes of texts and ids that are cached: agents check that a text fits before they feed it, and samples share prompts.
_REMEMBERED = 64 << 20
# Letters of the longest text that is encoded, as encoding takes some 170 bytes of memory a letter. No context holds more.
_MOST_LETTERS = 4 << 20
# Of a text with more letters a token than this, a beginning is encoded first. It has this many tokens more than are asked for,
# because its last ones may be others than in the whole text.
_LETTERS, _MARGIN = 8, 64
# The date for chat templates that write one (Llama 3's): Llama 3.1's own default. A prompt must not change overnight.
_DATE = "26 Jul 2024"
# Files of which transformers makes a tokenizer.
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "*.model", "tokenizer_config.json")
_MAKE = (
    "copy tokenizer.json from the base model, or make it: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) "
    "of transformers, with sentencepiece installed for a *.model, and with the right tokenizer_class in tokenizer_config.json"
)
# Parts of tokenizer.json that put a space before every text that is encoded, or take spaces from every text that is decoded.
_SPACES: Mapping[str, Mapping[str, Mapping[str, Any] | None]] = {
    "normalizer": {"Prepend": None},
    "pre_tokenizer": {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}},
    "decoder": {"Metaspace": {"prepend_scheme": "never"}, "Strip": {"start": 0, "stop": 0}},
}
# Text as it is fed and written; a tokenizer that doesn't give it back is no good for a policy.
_PIECES = (
    "The  answer is 27.5 m",
    " </search>\n\n<information>Doc 1 (Title: A\u2013B)",
    " Gr\u00f6\u00dfe \u6771\u4eac \U0001f642\t ",
)
_NO_TURNS = "this tokenizer's chat template does not write one turn after the other; continue with text"


class DoesNotFit(ValueError):
    """A conversation has no room for the tokens fed to it, or for a turn; or a text is longer than any conversation.

    The driver ends such an episode there, without an answer (`truncated`), and continues the others. An agent may catch this
    error, or check `Conversation.room` first.
    """


def check_length(text: str) -> None:
    """Raises DoesNotFit for a text that is longer than any context."""
    if len(text) > _MOST_LETTERS:
        raise DoesNotFit(f"a text of {len(text):,} letters is too long to be encoded ({text[:40]!r} ..): shorten it")


class Tokenizer:
    """Wraps a Hugging Face fast tokenizer.

    `encode` never adds special tokens, and `decode` never drops or cleans anything. So text -> ids -> text is lossless for
    byte-level vocabularies and SentencePiece's, and exactly what the policy sampled is parsed. SentencePiece's tokenizers put a
    space before a text; here only `begin`, `encode_prompt` and `chat` do, because other texts go on after earlier ones.
    """

    def __init__(self, hf) -> None:
        if not getattr(hf, "is_fast", False):
            raise TypeError(f"{type(hf).__name__} is not a fast tokenizer (tokenizer.json is missing)")
        self.hf = hf
        hf.chat_template = hf.chat_template or None
        self._backend = hf.backend_tokenizer
        self._backend.no_padding()  # some files (MiniLM's) switch on padding and truncation
        self._backend.no_truncation()
        self._inner = _without_spaces(self._backend)  # for texts that go on after others
        self._ids = _Remembered(self._encode)
        self._begun = _Remembered(lambda text: _fast(self._backend, text))
        self._prepared: dict[str, tuple[int, ...]] = {}

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Tokenizer:
        """Loads from a directory or hub id, with the chat template that transformers' processor or tokenizer has.

        Raises:
          ValueError: there is no fast tokenizer, its files lack the vocabulary or make another tokenizer than it is of, or two
            files of templates exclude each other.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = cls(AutoTokenizer.from_pretrained(str(path)))
            tokenizer.encode("".join(_PIECES))  # one of another class than its files may fail only here
        except Exception as error:  # transformers and tokenizers raise many classes, bare Exception included
            raise ValueError(
                f"{path}: no usable tokenizer ({error}). Expected tokenizer.json beside config.json: {_MAKE}"
            ) from error
        directory = pathlib.Path(path)
        if directory.is_dir():
            tokenizer._check_parts(directory)
            _take_processors_template(tokenizer.hf, directory)
        return tokenizer

    def _check_parts(self, directory: pathlib.Path) -> None:
        """transformers makes an empty tokenizer, or another one, of parts that are not its class's, and says nothing."""
        if (directory / "tokenizer.json").is_file():
            return
        parts = sorted(file.name for name in VOCABULARIES for file in directory.glob(name))
        bytes_of_bpe = (directory / "vocab.json").is_file()
        if self.hf.get_vocab().keys() <= set(self.hf.all_special_tokens) or (bytes_of_bpe and not self.lossless):
            raise ValueError(
                f"{directory}: no usable tokenizer can be made of {', '.join(parts)} as a {type(self.hf).__name__}; {_MAKE}"
            )

    @functools.cached_property
    def lossless(self) -> bool:
        """True if a few texts, encoded one after the other, are decoded to the same texts: together and one by one."""
        ids = [self.encode(piece) for piece in _PIECES]
        return self.decode(itertools.chain(*ids)) == "".join(_PIECES) and tuple(map(self.decode, ids)) == _PIECES

    def check(self, rows: int, source: str, *, policy: bool = False) -> None:
        """Checks that every id has one of a model's rows.

        Args:
          rows: of the embedding.
          source: what the error names.
          policy: the model writes and is fed text; a line says if that changes the text.

        Raises:
          ValueError: there are ids beyond the rows.
        """
        if len(self) > rows:
            last = self.hf.convert_ids_to_tokens(len(self) - 1)
            raise ValueError(
                f"{source}: the tokenizer has ids up to {len(self) - 1} ({last!r}), the model {rows} rows: resize the "
                f"embedding (resize_token_embeddings of transformers), or take the tokenizer that belongs to the weights"
            )
        if policy and not self.lossless:
            logging.warning(
                "%s: this tokenizer does not give back the text that it encodes, so that the policy reads another one. Take a "
                "byte-level tokenizer, or SentencePiece's with byte_fallback",
                source,
            )

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes tokenizer files that `AutoTokenizer.from_pretrained` of transformers 4 and 5 loads."""
        self.hf.save_pretrained(str(directory))
        path = pathlib.Path(directory) / "tokenizer_config.json"
        config = read_json(path)
        # transformers 4 does not know the names that 5 writes, and 5 knows those of 4.
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        if named := config.pop("model_specific_special_tokens", None):
            config["extra_special_tokens"] = named
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of `text` after an earlier one. Special tokens in the text are recognised, and none are added.

        Raises:
          DoesNotFit: the text has more than four million letters; so do the other methods that encode.
        """
        return self._ids(text)

    def begin(self, text: str) -> list[int]:
        """Ids of a text that is the beginning, without special tokens: SentencePiece's tokenizers put a space before it."""
        if self._inner is self._backend:
            return self.encode(text)
        return self._begun(text)

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a long text surely has more than this number of tokens. Only a beginning of it is encoded. For a text that
        is as short as one with so many tokens may be, it is False without a look."""
        return len(text) > _MOST_LETTERS or _head(self._inner, text, tokens) is not text

    def prepare(self, texts: Iterable[str]) -> None:
        """Encodes texts together, on all cores, so that `encode` has them at once. What it was not asked for until the next
        call of `prepare` is forgotten."""
        distinct = [text for text in dict.fromkeys(texts) if len(text) <= _MOST_LETTERS]
        encodings = self._inner.encode_batch_fast(distinct, add_special_tokens=False)
        self._prepared = {text: tuple(encoding.ids) for text, encoding in zip(distinct, encodings, strict=True)}

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of the beginning of a conversation: the model's begin-of-text token, if it has one, and then `text`.

        Llama 3 and Mistral have such a token (`<|begin_of_text|>`, `<s>`); Qwen has none. A text that already begins with it
        gets no second one, because chat templates write it themselves.
        """
        ids = self.begin(text)
        return ids if ids[: len(self._beginning)] == self._beginning else [*self._beginning, *ids]

    @functools.cached_property
    def _beginning(self) -> list[int]:
        """The begin-of-text token, if the tokenizer's own post-processor puts it before a text."""
        bare, with_special = self.begin("x"), self._backend.encode("x", add_special_tokens=True).ids
        bos = self.hf.bos_token_id
        return [bos] if with_special != bare and with_special[:1] == [bos] else []

    def plain(self, text: str, keep: Collection[str] = ()) -> str:
        """Breaks up the `marks` in a foreign text (a question, a page, a tool's reply), by a space after their first letter.

        A text without marks is returned unchanged.

        Args:
          keep: marks that stay, such as the tags of the protocol in which the text is written.
        """

        def broken(match: re.Match[str]) -> str:
            mark = match[0]
            return mark if mark in keep else f"{mark[:1]} {mark[1:]}"

        return self._marks.sub(broken, text) if self.marks else text

    @functools.cached_property
    def marks(self) -> frozenset[str]:
        """Strings that begin or end texts, turns and pictures: special tokens, and others that the chat template writes."""
        special = {str(token) for token in self.hf.all_special_tokens}
        try:  # a chat up to a user's message, without the tag that opens the assistant's thoughts, because that is no mark
            around = (
                self._rendered_turns("assistant", "user", add_generation_prompt=False) if self.has_chat_template else ""
            )
        except Exception:  # templates raise various errors for chats of a form that they do not support
            around = ""
        for token in self.hf.added_tokens_decoder.values():
            if token.special or token.content in around:
                special.add(token.content)
        return frozenset(mark for mark in special if len(mark.strip()) > 1)  # a single letter can't be broken up

    @functools.cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(mark) for mark in sorted(self.marks, key=lambda mark: (-len(mark), mark))))

    def _encode(self, text: str) -> tuple[int, ...]:
        if (ids := self._prepared.pop(text, None)) is not None:
            return ids
        return _fast(self._inner, text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens and a space at the beginning included."""
        return self._inner.decode(list(map(int, ids)), skip_special_tokens=False)

    def encode_for_model(self, text: str, max_length: int) -> list[int]:
        """Ids with the special tokens that an encoder was trained with ([CLS] ... [SEP]), at most `max_length` of them."""
        text = _head(self._backend, text[:_MOST_LETTERS], max_length)
        ids = self._backend.encode(text, add_special_tokens=True).ids
        if len(ids) <= max_length:
            return ids
        extra = self._backend.num_special_tokens_to_add(False)
        body = self._backend.encode(text, add_special_tokens=False)
        body.truncate(max_length - extra)
        return self._backend.post_process(body).ids

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final: bool = False,
        settings: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Ids of a chat rendered with the model's template, ready for the assistant to continue.

        Args:
          messages: mappings are passed to the template unchanged.
          tools: JSON schemas of functions that the assistant may call, for templates that show tools.
          continue_final: the assistant continues the last message, which is its own.
          settings: further variables of the template (`enable_thinking`, ..).
          most: of a chat that surely has more tokens, only a beginning is encoded, and the error follows.

        Raises:
          DoesNotFit: the chat surely has more than `most` tokens.
          ValueError: there is no template, the last message can't be continued, or a name in `settings` is reserved.
        """
        mappings = [
            {"role": message.role, "content": message.content} if isinstance(message, Message) else message
            for message in messages
        ]
        if continue_final:
            text = self.render(
                mappings, tools, add_generation_prompt=False, continue_final_message=True, settings=settings
            )
        else:
            text = self.render(mappings, tools, settings=settings)
        if most is not None and self.exceeds(text, most):
            raise DoesNotFit(f"a chat of {len(text):,} letters has more than {most:,} tokens")
        return self.begin(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat in the model's template. A template that writes a date always gets the same one.

        Raises:
          ValueError: there is no template, or a name in `settings` is an argument of `apply_chat_template`. Templates raise
            errors of their own for chats of a form that they do not support.
        """
        if self.hf.chat_template is None:
            raise ValueError("this tokenizer has no chat template: give the prompt as text instead of messages")
        reserved = inspect.signature(self.hf.apply_chat_template).parameters.keys() - {"add_generation_prompt"}
        if clashes := reserved & (settings or {}).keys():  # a client must not choose another template
            raise ValueError(f"{min(clashes)!r} is no variable of a chat template")
        fixed = {"add_generation_prompt": add_generation_prompt, "date_string": _DATE}
        conversation = [
            {**message, "content": [{"type": "text", "text": content}]}
            if isinstance(content := message.get("content"), str) and self._wants_parts
            else dict(message)
            for message in messages
        ]
        return self.hf.apply_chat_template(
            conversation,
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            continue_final_message=continue_final_message,
            **{**fixed, **(settings or {})},
        )

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """True if the chat template leaves out a message that is a text, and writes one that is a list of parts."""
        text = "routerl-user"
        for content in (text, [{"type": "text", "text": text}]):
            try:
                chat = self.hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            except Exception:  # templates raise various errors for chats of a form that they do not support
                chat = ""
            if text in chat:
                return content != text
        return False

    @property
    def takes_tools(self) -> bool:
        """True if the chat template writes descriptions of tools."""
        template = self.hf.chat_template
        return "tools" in (template if isinstance(template, str) else str(template or ""))

    def reply(self, text: str, last: int | None = None, role: ReplyRole = "user") -> list[int]:
        """Ids between two turns of the assistant, as the model's template writes them: the end of its turn, a message of a user
        or a tool, and the beginning of its next turn.

        Args:
          text: the message.
          last: the assistant's last id. If it already ends the turn, the end token is not repeated.
          role: whose message it is.

        Raises:
          ValueError: as `reply_text`.
        """
        written = self.reply_text(text, role)
        ids = self.encode(written)
        if self._inner is not self._backend:  # within a chat, whose template may put spaces after special tokens
            before, whole = self.begin("x"), self.begin(f"x{written}")
            ids = whole[len(before) :] if whole[: len(before)] == before else ids
        return ids[1:] if last is not None and last in self.eos_ids and ids[0] in self.eos_ids else ids

    def reply_text(self, text: str, role: ReplyRole = "user") -> str:
        """The text that `reply` encodes.

        Without a template, a user's message is text: `User: `, the message, and `Assistant: `, each on a line of its own.

        Raises:
          ValueError: the template does not write one turn after the other, or there is none for a tool's message.
        """
        if role == "tool":  # a template may write a tool's text in another form, such as JSON
            return self._after_turn(text, "tool")
        before, after = self._between_turns
        return f"{before}{text}{after}"

    @functools.cached_property
    def turn_end(self) -> int:
        """The id with which the chat template ends an assistant's turn.

        Raises:
          ValueError: as `reply`, or generation does not end at this id.
        """
        end = self.reply("x")[0]
        if end not in self.eos_ids:
            raise ValueError(
                f"the chat template ends a turn with {self.decode([end])!r}, at which generation does not end"
            )
        return end

    @functools.cached_property
    def _between_turns(self) -> tuple[str, str]:
        """The template's text between an assistant's and a user's message, and between a user's and an assistant's."""
        placeholder = "routerl-user"
        if self.hf.chat_template is None:
            return "\nUser: ", "\nAssistant: "
        before, second, after = self._after_turn(placeholder, "user").partition(placeholder)
        if not second:
            raise ValueError(_NO_TURNS)
        return before, after

    def _after_turn(self, text: str, role: ReplyRole) -> str:
        """The template's text after an assistant's message, if the next message is `text` by `role`."""
        placeholder = "routerl-assistant"
        _, first, tail = self._rendered_turns(placeholder, text, role).partition(placeholder)
        if not first or not tail:
            raise ValueError(_NO_TURNS)
        return tail

    def _rendered_turns(
        self, assistant_text: str, next_text: str, role: ReplyRole = "user", *, add_generation_prompt: bool = True
    ) -> str:
        """A chat in the model's template: a question, `assistant_text`, and the user's or the tool's `next_text`."""
        chat = [("user", "q"), ("assistant", assistant_text), (role, next_text)]
        messages = [{"role": speaker, "content": content} for speaker, content in chat]
        return self.render(messages, add_generation_prompt=add_generation_prompt)

    @property
    def has_chat_template(self) -> bool:
        """True if `chat` can be used."""
        return self.hf.chat_template is not None

    @functools.cached_property
    def instructs_in_chats(self) -> bool:
        """True if prompts with instructions are chats. Without a chat template they are plain text, which is said once."""
        if not self.has_chat_template:
            logging.warning(
                "the tokenizer has no chat template: instructions are given as plain text (User: .. Assistant: ..). For a "
                "model that was trained on chats, put its chat_template.jinja beside tokenizer.json"
            )
        return self.has_chat_template

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn: the tokenizer's eos and, where the vocabulary has them, the usual end-of-turn tokens."""
        ids = {self.hf.eos_token_id} if self.hf.eos_token_id is not None else set()
        vocabulary = self.hf.get_vocab()
        ids |= {
            vocabulary[token]
            for token in ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
            if token in vocabulary
        }
        return frozenset(ids)

    @property
    def pad_id(self) -> int:
        """An id for padding. It is only used where masks hide it."""
        for candidate in (self.hf.pad_token_id, self.hf.eos_token_id):
            if candidate is not None:
                return int(candidate)
        return 0

    @functools.cached_property
    def _used(self) -> np.ndarray:
        return np.unique([*self.hf.get_vocab().values(), *self.hf.added_tokens_decoder])

    def __len__(self) -> int:
        """All ids are below this. Some ids may have no token."""
        return int(self._used[-1]) + 1

    def used_rows(self, rows: int) -> Bool[np.ndarray, " rows"]:
        """For every row of a model's embedding, whether a token has it."""
        used = np.zeros(rows, bool)
        used[self._used] = True
        return used

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id contributes to decoded text, [V]. Special tokens give their literal text."""
        added, lifts_added = self.hf.added_tokens_decoder, str.encode
        lift = _byte_level
        if not _is_byte_level(json.loads(self._backend.to_str())):
            lift = lifts_added = _metaspace  # its decoder treats added tokens as others
        pieces = self.hf.convert_ids_to_tokens(list(range(len(self))))
        return [
            lifts_added(added[i].content) if i in added else (b"" if piece is None else lift(piece))
            for i, piece in enumerate(pieces)
        ]


class _Remembered:
    """Encodes texts, and remembers the ids of the latest ones, in `_REMEMBERED` bytes. Safe to use from several threads."""

    def __init__(self, encode: Callable[[str], Iterable[int]]) -> None:
        self._encode = encode
        self._ids: collections.OrderedDict[str, array.array[int]] = collections.OrderedDict()
        self._bytes, self._lock = 0, threading.Lock()

    def __call__(self, text: str) -> list[int]:
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
        if ids is None:
            check_length(text)
            ids = array.array("i", self._encode(text))
            self._remember(text, ids)
        return ids.tolist()

    def _remember(self, text: str, ids: array.array[int]) -> None:
        size = _size(text, ids)
        if size > _REMEMBERED // 2:  # it would drive out all others
            return
        with self._lock:
            if text not in self._ids:
                self._ids[text] = ids
                self._bytes += size
            while self._bytes > _REMEMBERED:
                self._bytes -= _size(*self._ids.popitem(last=False))


def _size(text: str, ids: array.array[int]) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids)


def _head(backend: Any, text: str, tokens: int) -> str:
    """The text itself; or, if that surely has more than this number of tokens, a beginning of it that has more, too."""
    letters = _LETTERS * max(tokens, 0) + 1024
    while letters < len(text):
        if len(_fast(backend, text[:letters])) > tokens + _MARGIN:
            return text[:letters]
        letters *= 2
    return text


def _fast(backend: Any, text: str) -> tuple[int, ...]:
    """Ids without offsets of tokens; recording these takes three quarters of the time of `encode`."""
    return tuple(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _without_spaces(backend: Any) -> Any:
    """The tokenizer without `_SPACES`: a copy, or the same one if it has none."""
    parts = {name: getattr(backend, name) for name in _SPACES}
    states = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    edited = {name: _edited(state, _SPACES[name]) for name, state in states.items()}
    if edited == states:
        return backend
    return type(backend).from_str(json.dumps(json.loads(backend.to_str()) | edited))


def _edited(part: Any, changes: Mapping[str, Mapping[str, Any] | None]) -> Any:
    """A part of tokenizer.json with other settings of some types, or without them (None)."""
    if isinstance(part, list):
        return [left for item in part if (left := _edited(item, changes)) is not None]
    if not isinstance(part, dict):
        return part
    change = changes.get(part.get("type", ""), {})
    return None if change is None else {key: _edited(value, changes) for key, value in part.items()} | change


def _take_processors_template(hf: Any, directory: pathlib.Path) -> None:
    """Gives a tokenizer the chat template that transformers' AutoProcessor reads and its AutoTokenizer does not.

    Of a model with a processor, the processor's counts; of another one, the tokenizer's own if it has one.
    """
    for path in (directory / "processor_config.json", directory / "chat_template.json"):
        content = read_json(path) if path.is_file() else {"chat_template": None}
        if path.name == "chat_template.json" and isinstance(content, dict) and "chat_template" not in content:
            raise ValueError(f"{path} has no key chat_template; write the Jinja template under it, as a string")
        template = content.get("chat_template") if isinstance(content, dict) else content
        if template is not None:
            break
    else:
        return
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if not isinstance(template, (str, dict)):
        raise ValueError(f"{path}: chat_template is no text; write the Jinja template as a string")
    if path.name == "chat_template.json" and any((directory / "additional_chat_templates").glob("*.jinja")):
        raise ValueError(
            f"{path} and additional_chat_templates exclude each other; write it as chat_template.jinja instead"
        )
    processed = any((directory / f"{name}_config.json").is_file() for name in ("processor", "preprocessor"))
    if hf.chat_template not in (None, template):
        taken, other = ("the tokenizer's", path.name) if not processed else (path.name, "the tokenizer's")
        logging.warning("%s: two chat templates differ; %s is used, not %s", directory, taken, other)
        if not processed:
            return
    hf.chat_template = template


def _is_byte_level(spec: dict) -> bool:
    decoder = spec.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    table.update({chr(256 + i): b for i, b in enumerate(unprintable)})
    return table


def _byte_level(piece: str) -> bytes:
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else piece.encode()


def _metaspace(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


# --- chat templates ----------------------------------------------------------------------------------------------------
# Chat templates for models that have none, or one that shows no tools.

# ChatML with tools as Hermes, Qwen2.5 and Qwen3 write them: schemas within <tools> in the system's message, a call as JSON
# within <tool_call>, a tool's reply within <tool_response> in a user's message. Earlier turns never change.
HERMES = """\
{%- set own = messages[0].role == 'system' -%}
{%- if own or tools -%}
<|im_start|>system
{% if own %}{{ messages[0].content }}{% if tools %}{{ '\\n\\n' }}{% endif %}{% endif -%}
{%- if tools -%}
# Tools

These are the signatures of functions that you may call, within <tools></tools>:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools>

To call a function, write its name and its arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{%- endif -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.content %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}{{ function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif not (loop.first and own) -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

TEMPLATES = {"hermes": HERMES}


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """A copy of the tokenizer with another chat template, which `Tokenizer.save` writes.

    Args:
      template: a name in TEMPLATES, or the path of a Jinja file.

    Raises:
      ValueError: there is no such name or file, or generation would not end where the template ends a turn.
    """
    text = TEMPLATES.get(template)
    if text is None:
        path = pathlib.Path(template).expanduser()
        if not path.is_file():
            raise ValueError(f"{template!r} is neither one of {', '.join(TEMPLATES)} nor a file of a chat template")
        text = path.read_text("utf-8")
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = text
    changed = Tokenizer(hf)
    try:
        changed.turn_end  # noqa: B018
    except ValueError as error:
        raise ValueError(f"{template!r}: {error}; take a template of the model's own family") from error
    return changed
