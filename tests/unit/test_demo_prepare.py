"""demo/prepare.py: lengths, topics and masks, with a tokenizer of words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from demo import prepare


class WordTokenizer:
    """One token for each word, its length in letters; a chat is its contents between markers."""

    model_max_length = 8

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, **options: bool) -> str:
        assert not tokenize
        text = "".join(f"<{m['role']}> {m['content']} </> " for m in messages)
        return text + "<assistant> " if options.get("add_generation_prompt") else text

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}


def test_lengths_run_evenly_from_the_shortest_to_the_longest() -> None:
    assert prepare.choose_lengths(5, 256) == [16, 76, 136, 196, 256]
    assert prepare.choose_lengths(1, 256) == [256]


def test_samples_are_the_same_for_a_seed_and_use_every_topic_once_first() -> None:
    samples = prepare.choose_samples(24, 256, seed=3)
    assert samples == prepare.choose_samples(24, 256, seed=3)
    assert samples != prepare.choose_samples(24, 256, seed=4)
    assert len({name for name, _, _ in samples}) == 24
    assert len(prepare.choose_samples(200, 256, seed=0)) == 200


def test_the_mask_covers_the_answer_and_its_end_of_turn() -> None:
    ids, mask = prepare.chat_sample(WordTokenizer(), "if", "one three", 100)
    assert ids == [8, 3, 6, 7, 2, 3, 11, 3, 5, 3]
    assert mask == [0] * 7 + [1] * 3


def test_a_long_chat_is_cut_and_a_short_wish_still_gets_an_answer() -> None:
    ids, mask = prepare.chat_sample(WordTokenizer(), "if", "word " * 50, 20)
    assert (len(ids), sum(mask)) == (20, 13)
    _, mask = prepare.chat_sample(WordTokenizer(), "if", "word " * 50, 1)
    assert sum(mask) == prepare.SHORTEST_ANSWER


def test_the_file_holds_lengths_up_to_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda _folder: WordTokenizer()))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    out = prepare.write_prepared(tmp_path, tmp_path / "data.jsonl", samples=10, max_tokens=100)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 10
    lengths = [len(row["input_ids"]) for row in rows]
    assert lengths == [len(row["loss_mask"]) for row in rows]
    assert min(lengths) <= 20
    assert max(lengths) == 100
    assert all(0 < sum(row["loss_mask"]) < len(row["loss_mask"]) for row in rows)
    first = out.read_bytes()
    assert prepare.write_prepared(tmp_path, out, samples=10, max_tokens=100).read_bytes() == first
    with pytest.raises(ValueError, match="at least"):
        prepare.write_prepared(tmp_path, out, samples=0)
