"""Real prompts for a small EAGLE-3 run: what people say first in the English dialogues of `chatterbot-corpus`.

    python benchmarks/eagle3/prompts.py OUT_DIR [--train 400] [--held-out 40]

Writes OUT_DIR/train.jsonl and OUT_DIR/held-out.jsonl, a row of `messages` each. Prompts that differ in case, spaces or
closing punctuation alone are one. Which are taken, and in which order, follows from a hash of their text: the same
release of the corpus gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path

FEWEST_WORDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=40)
    arguments = parser.parse_args()
    prompts = distinct(openings(corpus_folder()))
    wanted = arguments.train + arguments.held_out
    if len(prompts) < wanted:
        parser.error(f"the corpus has {len(prompts)} prompts, and {wanted} are wanted")
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "held-out.jsonl", prompts[: arguments.held_out])
    write(arguments.out / "train.jsonl", prompts[arguments.held_out : wanted])
    print(f"{arguments.train} prompts to train on and {arguments.held_out} held out, of {len(prompts)}")


def corpus_folder() -> Path:
    """The English files of the installed package, which is not imported."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise SystemExit("chatterbot-corpus is not installed")
    return Path(folders[0]) / "data" / "english"


def openings(folder: Path) -> list[str]:
    """The first line of each dialogue, its spaces made single."""
    import yaml

    lines: list[str] = []
    for path in sorted(folder.glob("*.yml")):
        dialogues = yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
        lines += [" ".join(str(dialogue[0]).split()) for dialogue in dialogues]
    return lines


def distinct(lines: Iterable[str]) -> list[str]:
    """One of each of the lines that are long enough, in the order of their hashes."""
    first: dict[str, str] = {}
    for line in lines:
        if len(line.split()) >= FEWEST_WORDS:
            first.setdefault(line.casefold().rstrip(" ?!."), line)
    return [first[key] for key in sorted(first, key=lambda key: hashlib.sha256(key.encode()).hexdigest())]


def write(path: Path, prompts: Iterable[str]) -> None:
    rows = [{"id": f"{path.stem}-{i}", "messages": [{"role": "user", "content": p}]} for i, p in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
