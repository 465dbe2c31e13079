"""A prepared file of real English: the help topics that ship with Python, as chats.

    python demo/prepare.py MODEL OUT [--samples 24] [--max-tokens 256] [--seed 0]

Each line of OUT is one JSON object: ``id`` (text), ``input_ids`` (token ids) and ``loss_mask`` (one 0 or 1 for each
token, 1 on the assistant's). The same Python release, tokenizer and arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

SHORTEST = 16  # tokens; a prompt that is longer than this still gets SHORTEST_ANSWER tokens after it
SHORTEST_ANSWER = 4


def choose_lengths(samples: int, max_tokens: int) -> list[int]:
    """Wanted lengths in tokens, evenly from ``SHORTEST`` (or only ``max_tokens``) up to ``max_tokens``, rising."""
    steps = max(samples - 1, 1)
    return [max_tokens - (max_tokens - SHORTEST) * i // steps for i in range(samples)][::-1]


def choose_samples(samples: int, max_tokens: int, seed: int) -> list[tuple[str, str, int]]:
    """Help topics in a random order: name, text and wanted length in tokens.

    All topics are used once before one comes again, and the longer texts get the greater lengths.
    """
    from pydoc_data.topics import topics

    rng = random.Random(seed)
    names = sorted(topics)
    rng.shuffle(names)
    chosen = sorted(((name, topics[name].strip()) for name in islice(cycle(names), samples)), key=_text_length)
    rows = [(name, text, n) for (name, text), n in zip(chosen, choose_lengths(samples, max_tokens), strict=True)]
    rng.shuffle(rows)
    return rows


def _text_length(topic: tuple[str, str]) -> int:
    return len(topic[1])


def chat_sample(tokenizer: Any, topic: str, text: str, length: int) -> tuple[list[int], list[int]]:
    """One chat about a topic, cut to ``length`` tokens.

    Args:
        tokenizer: a HF tokenizer with a chat template.
        topic: what the user asks about.
        text: the assistant's answer.
        length: tokens of the whole chat; a chat that is shorter stays whole, and a cut one has no end of turn.

    Returns:
        ``input_ids`` and ``loss_mask``, of equal length. The mask is 1 on the answer, its end of turn included.
    """
    # An empty system turn keeps out the template's own, which alone is longer than the shortest sample.
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": f"Explain {topic}"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": text}], tokenize=False)
    if not chat.startswith(prompt):
        raise ValueError("the chat template does not put the answer right after its generation prompt")
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(chat.removeprefix(prompt), add_special_tokens=False)["input_ids"]
    answer_ids = answer_ids[: max(length - len(prompt_ids), SHORTEST_ANSWER)]
    return prompt_ids + answer_ids, [0] * len(prompt_ids) + [1] * len(answer_ids)


def write_prepared(model_dir: Path, out: Path, samples: int = 24, max_tokens: int = 256, seed: int = 0) -> Path:
    """Write a prepared file for a model.

    Args:
        model_dir: a HF folder with a tokenizer and its chat template.
        out: the JSONL file to write.
        samples: how many lines.
        max_tokens: tokens of the longest line.
        seed: chooses the topics and which of them gets which length.

    Returns:
        ``out``.

    Raises:
        ValueError: no samples are wanted, or ``max_tokens`` leaves no room for an answer.
    """
    if samples < 1 or max_tokens < 2 * SHORTEST:
        raise ValueError(f"{samples} samples of {max_tokens} tokens: at least 1 of {2 * SHORTEST} is needed")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.model_max_length = sys.maxsize  # whole topics are tokenised before the cut; silences that warning
    lines = []
    for row, (topic, text, length) in enumerate(choose_samples(samples, max_tokens, seed)):
        input_ids, loss_mask = chat_sample(tokenizer, topic, text, length)
        lines.append(json.dumps({"id": f"{row:03d}-{topic}", "input_ids": input_ids, "loss_mask": loss_mask}))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return out


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description="Write a prepared file from Python's help topics.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="HF folder with the tokenizer")
    parser.add_argument("out", type=Path, metavar="OUT", help="JSONL file to write")
    parser.add_argument("--samples", type=int, default=24, help="lines to write (default: 24)")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of the longest line (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="which topics get which lengths (default: 0)")
    args = parser.parse_args(argv)
    try:
        print(write_prepared(args.model, args.out, args.samples, args.max_tokens, args.seed))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
