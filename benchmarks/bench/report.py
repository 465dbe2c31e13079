"""The result as a table in Markdown."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]


def markdown(result: dict[str, Any]) -> str:
    machine, settings, versions = result["machine"], result["settings"], result["versions"]
    device = ", ".join(machine["devices"]) or f"{machine['processor']}, {machine['cores']} cores"
    lines = [
        f"vLLM {versions['vllm_version']} on {device}: {settings['prompts']} prompts of {settings['length']} tokens, "
        f"{result['model']}, layers {' '.join(map(str, settings['layers']))}; at most {settings['max_num_seqs']} "
        f"requests and {settings['max_num_batched_tokens']} tokens in a step. {result['turns_asked']} turns, median "
        f"(range). 1 is `{result['baseline']}` of the same turn.",
        "",
        "| case | tokens/s | ratio | MB/s | engine waited for files, s |",
        "|---|---|---|---|---|",
    ]
    for name, found in result["cases"].items():
        cells = [
            _cell(found.get("tokens_per_second"), 0),
            _cell(found.get("ratio"), 3),
            _cell(found.get("mb_per_second"), 0),
            _cell(found.get("stalled_seconds"), 2),
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += [f"| `{name}` | not available: {_one_line(why)} | | | |" for name, why in result["not_available"].items()]
    lines += [f"| `{name}` | failed: {_one_line(why)} | | | |" for name, why in result["failed"].items()]
    notes = [f"- `{name}`: {'; '.join(words)}." for name, words in result["notes"].items()]
    if result["note"]:
        notes.append(f"- {result['note']}")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _cell(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return ""
    low, high = f"{spread['min']:,.{digits}f}", f"{spread['max']:,.{digits}f}"
    middle = f"{spread['median']:,.{digits}f}"
    return middle if low == high else f"{middle} ({low}-{high})"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]
