"""Folders with a small tokenizer of bytes and a chat template, as HF transformers loads them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["CHATML", "CUTTING", "MARKED", "write_tokenizer"]

_TURN = "<|im_start|>{{ m.role }}\n"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{{ bos_token }}{% for m in messages %}" + _TURN + "{{ m.content }}<|im_end|>\n{% endfor %}" + _PROMPT
"""Every turn as it is, after one BOS."""
MARKED = (
    "{{ bos_token }}{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}" + _PROMPT
)
"""The same text, with the assistant's turns marked."""
CUTTING = (
    "{{ bos_token }}{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _PROMPT
)
"""Drops what was thought in earlier turns, as several models' templates do."""


def write_tokenizer(folder: Path, template: str | None) -> Path:
    """A tokenizer of 263 tokens into a folder, beside what is there."""
    tokenizers: Any = import_module("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), ("h", "e"), ("l", "l")]  # two line feeds are one token
    names = [*alphabet, *("".join(pair) for pair in pairs)]
    model = tokenizers.models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=pairs)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "</s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", bos)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
