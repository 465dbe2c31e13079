"""The turns of a conversation, as chat templates take them."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from vllm_compat.extract.rows import name_of

__all__ = ["Message", "messages_of"]

Message: TypeAlias = dict[str, Any]

_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""``from`` of ShareGPT's ``conversations`` -> ``role``."""


def messages_of(kind: str, value: Any, problems: list[str]) -> list[Message]:
    """The messages of ``messages`` or ``conversations``; what is wrong is added to the problems.

    Other keys of a message, such as ``tool_calls`` or ``reasoning_content``, are the template's to know.
    """
    if not isinstance(value, list):
        problems.append(f"{kind} is {name_of(value)}, not a list of messages")
        return []
    if not value:
        problems.append(f"{kind} is empty")
    read = _sharegpt if kind == "conversations" else _message
    return [read(f"{kind}[{at}]", each, problems) for at, each in enumerate(value)]


def _message(name: str, value: Any, problems: list[str]) -> Message:
    if not isinstance(value, dict):
        problems.append(f"{name} is {name_of(value)}, not an object with role and content")
        return {}
    message = cast("Message", value)
    if type(role := message.get("role")) is not str:
        problems.append(f"{name} has no role" if "role" not in message else f"{name}.role is {name_of(role)}, not text")
    if type(content := message.get("content")) is not str and not (content is None and message.get("tool_calls")):
        found = f"{name} has no content" if "content" not in message else f"{name}.content is {name_of(content)}"
        problems.append(f"{found}, text is wanted")
    return message


def _sharegpt(name: str, value: Any, problems: list[str]) -> Message:
    if not isinstance(value, dict):
        problems.append(f"{name} is {name_of(value)}, not an object with from and value")
        return {}
    turn = cast("dict[str, Any]", value)
    speaker, text = turn.get("from"), turn.get("value")
    role = _SHAREGPT.get(speaker) if type(speaker) is str else None
    if role is None:
        problems.append(f"{name}.from is {speaker!r}, not one of {', '.join(_SHAREGPT)}")
    if type(text) is not str:
        problems.append(f"{name}.value is {name_of(text)}, text is wanted")
    return {**{key: each for key, each in turn.items() if key not in ("from", "value")}, "role": role, "content": text}
