"""Real English of given lengths: Python's own documentation of its language, cut into pieces that are all different."""

from __future__ import annotations

from typing import Any

__all__ = ["make_prompts"]


def make_prompts(model: str, count: int, length: int) -> list[list[int]]:
    """Token ids, no two prompts the same: samples with the same tokens are extracted only once.

    Args:
        model: a folder with a tokenizer.
        count: how many prompts.
        length: tokens of each.

    Raises:
        ValueError: the text is too short for so many.
    """
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids: list[int] = []
    for topic in sorted(topics):
        ids += tokenizer(topics[topic], add_special_tokens=False, verbose=False)["input_ids"]
    room = len(ids) - length
    # Another round through the text begins elsewhere.
    starts = [(i * length) % room + (i * length // room) * 7 for i in range(count)] if room > 0 else []
    found = [ids[start : start + length] for start in starts]
    if not found or min(map(len, found)) < length or len(set(map(tuple, found))) < count:
        raise ValueError(f"{len(ids)} tokens of text give no {count} prompts of {length} tokens that all differ")
    return found
