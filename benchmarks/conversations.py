"""Conversations whose turns are samples of their own: what `--share-prefixes` is for.

    python benchmarks/conversations.py make OUT.jsonl [--conversations 24] [--turns 6]
    python benchmarks/conversations.py count RUN_DIR

`make` writes a row of `messages` for each turn: one system prompt, and all turns up to that one. The words are those of
Python's own help texts. `count` says of a run how many tokens its samples have, and how many would have to be forwarded
if every beginning were forwarded once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYSTEM_WORDS, QUESTION_WORDS, ANSWER_WORDS = 120, 12, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("out", type=Path)
    make.add_argument("--conversations", type=int, default=24)
    make.add_argument("--turns", type=int, default=6)
    count = commands.add_parser("count")
    count.add_argument("run", type=Path)
    options = parser.parse_args()
    if options.command == "make":
        rows = list(conversations(options.conversations, options.turns))
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{len(rows)} samples of {options.conversations} conversations")
    else:
        total, distinct = tokens_of(options.run)
        print(f"{total} tokens, {distinct} of them distinct: {total / distinct:.2f} to 1")


def conversations(count: int, turns: int) -> Iterator[dict[str, Any]]:
    """A row for each turn of each conversation."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    system = {"role": "system", "content": " ".join(words[:SYSTEM_WORDS])}
    at = SYSTEM_WORDS
    for number in range(count):
        messages = [system]
        for turn in range(turns):
            for role, length in (("user", QUESTION_WORDS), ("assistant", ANSWER_WORDS)):
                messages.append({"role": role, "content": " ".join(words[at : at + length])})
                at += length
            yield {"id": f"{number}-{turn}", "messages": list(messages)}


def tokens_of(run: Path) -> tuple[int, int]:
    """All tokens of a run's samples, and the nodes of the tree of their beginnings."""
    from safetensors import safe_open

    total, seen = 0, set[int]()
    for path in sorted(run.glob("hs_*.safetensors")):
        with safe_open(path, "np") as file:
            token_ids: list[int] = file.get_tensor("token_ids").tolist()
        total += len(token_ids)
        beginning = 0
        for token in token_ids:
            beginning = hash((beginning, token))
            seen.add(beginning)
    return total, len(seen)


if __name__ == "__main__":
    main()
