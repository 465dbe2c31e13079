"""The model's own tokenizer and chat template, through HF transformers; and which tokens are the assistant's."""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
from importlib import import_module
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.extract.inputs.messages import Message
from vllm_compat.extract.inputs.tokenizer import TokenizerSource

__all__ = ["ChatError", "Tokenizer", "load_tokenizer"]

_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = re.compile(r"""strftime_now\(\s*(["'])([^"'\\]*)\1\s*\)""")
_ASKS_DATE = re.compile(r"strftime_now\s*\(")
_INSTEAD = "give input_ids and loss_mask instead"


class ChatError(Exception):
    """A conversation of which no tokens, or no loss mask, can be made; worded for a person."""


class Tokenizer:
    """A tokenizer and its chat template."""

    def __init__(self, source: TokenizerSource) -> None:
        """Load it.

        Raises:
            UsageError: transformers is not installed, or does not load it.
        """
        self._name = source.name
        self._templates: dict[bool, str] = {}
        self._date = datetime.datetime.fromisoformat(source.date)
        try:
            self._hf: Any = import_module("transformers").AutoTokenizer.from_pretrained(
                source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
            )
        except ImportError as error:
            raise UsageError(
                f"rows of text or messages take the package transformers ({error}): pip install 'vllm-compat[chat]'"
            ) from error
        except Exception as error:  # it reads whatever is in the folder, and the errors are of every kind
            raise UsageError(
                f"the tokenizer of {source.name} cannot be loaded: {type(error).__name__}: {error}. "
                "--engine-option tokenizer='\"NAME\"' takes another, --trust-remote-code lets it bring its own code"
            ) from error
        self._hf.model_max_length = sys.maxsize  # the cut is ours, and so is the word about it

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts around any.

        Raises:
            ChatError: the tokenizer does not take it.
        """
        return self._encode(text, special=True)

    def encode_chat(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[int], list[int]]:
        """The tokens of a conversation, and 1 for those that the assistant says, the end of its turn included.

        A template that marks the assistant's turns itself is believed. With others, a turn is what a conversation up to
        it has more than the prompt for it; both must be beginnings of the whole, in text and in tokens.

        Raises:
            ChatError: the template does not take it, or which tokens are the assistant's cannot be told.
        """
        text = self._render(messages, tools)
        if self._marks_turns(tools):
            return self._marked(messages, tools, text)
        ids = self._encode(text, special=False)
        mask = [0] * len(ids)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = self._beginning(text, ids, messages[:at], tools, at, prompt=True)
                last = at + 1 == len(messages)
                end = len(ids) if last else self._beginning(text, ids, messages[: at + 1], tools, at, prompt=False)
                mask[begin:end] = [1] * (end - begin)
        return ids, mask

    def _marked(self, messages: list[Message], tools: list[Any] | None, text: str) -> tuple[list[int], list[int]]:
        found = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
        if len(mask) != len(ids) or ids != self._encode(text, special=False):
            raise ChatError(f"transformers marks other tokens than there are in this conversation; {_INSTEAD}")
        if 1 not in mask and any(m["role"] == "assistant" and m.get("content") for m in messages):
            raise ChatError(f"the chat template marks the assistant's turns, and here it marks no token; {_INSTEAD}")
        return ids, mask

    def _beginning(
        self, text: str, ids: list[int], messages: list[Message], tools: list[Any] | None, at: int, *, prompt: bool
    ) -> int:
        """How many tokens a part of the conversation has, which must be its beginning."""
        if not messages:
            raise ChatError(f"it begins with the assistant's turn, which has no prompt before it; {_INSTEAD}")
        part = self._render(messages, tools, prompt=prompt)
        which = f"message {at + 1}, the assistant's"
        if not text.startswith(part):
            raise ChatError(
                f"the chat template rewrites earlier turns: what it makes of the messages "
                f"{'before' if prompt else 'up to'} {which}, is not how it begins the whole; {_INSTEAD}"
            )
        tokens = self._encode(part, special=False)
        if ids[: len(tokens)] != tokens:
            raise ChatError(f"a token runs over the {'beginning' if prompt else 'end'} of {which}; {_INSTEAD}")
        return len(tokens)

    def _marks_turns(self, tools: list[Any] | None) -> bool:
        return bool(self._hf.is_fast and _MARKS_TURNS.search(self._template(tools)))

    def _template(self, tools: list[Any] | None) -> str:
        """The template for a conversation with or without tools, with the date of the run in the place of today's."""
        found = self._templates.get(bool(tools))
        if found is None:
            found = self._templates[bool(tools)] = _DATE.sub(self._as_literal, self._own_template(tools))
            if _ASKS_DATE.search(found):
                raise UsageError(
                    f"the chat template of {self._name} asks for the date in a way that is not known here, and samples "
                    "must be the same tomorrow. Give input_ids"
                )
        return found

    def _as_literal(self, call: re.Match[str]) -> str:
        return json.dumps(self._date.strftime(call[2]), ensure_ascii=False)

    def _own_template(self, tools: list[Any] | None) -> str:
        try:
            return str(self._hf.get_chat_template(tools=tools))
        except ValueError as error:
            raise UsageError(
                f"the tokenizer of {self._name} has no chat template for rows of messages: {error}. Give input_ids, "
                "or text"
            ) from error

    def _render(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt))

    def _apply(self, messages: list[Message], tools: list[Any] | None, **how: Any) -> Any:
        template = self._template(tools)
        try:
            return self._hf.apply_chat_template(messages, tools=tools, chat_template=template, **how)
        except Exception as error:  # templates raise what they like
            raise ChatError(f"the chat template does not take it: {type(error).__name__}: {error}") from error

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            return list(self._hf(text, add_special_tokens=special)["input_ids"])
        except Exception as error:  # as for half of a surrogate pair
            raise ChatError(f"the tokenizer does not take it: {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=2)
def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """A tokenizer, once for the process.

    Raises:
        UsageError: it cannot be loaded.
    """
    return Tokenizer(source)
