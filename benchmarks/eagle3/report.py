"""One JSON file, and a table, of what the other scripts of this folder left behind.

python benchmarks/eagle3/report.py --run DIR --trained NAME=DIR ... --acceptance FILE ... --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FOLDERS = ("verifier-name-or-path", "data-path", "save-path")  # options that say nothing about a training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the extraction of the right states")
    parser.add_argument("--trained", action="append", required=True, metavar="NAME=DIR", help="a training's folder")
    parser.add_argument("--acceptance", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    trained = dict(entry.split("=", 1) for entry in arguments.trained)
    result = {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "extraction": extraction(read(arguments.run / "run.json")),
        "training": {name: training(Path(folder)) for name, folder in trained.items()},
        "acceptance": [read(path) for path in arguments.acceptance],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for path in arguments.acceptance:
        found = read(path)
        print(
            f"{found['dtype']}, {found['prompts']} prompts, {found['tokens']} tokens",
            table(found),
            sep="\n\n",
            end="\n\n",
        )


def read(path: Path) -> Json:
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    return content


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def extraction(run: Json) -> Json:
    """What the states are of."""
    identity, summary = run["identity"], run["summary"]
    return {
        "vllm": run["vllm_version"],
        "vllm_compat": run["vllm_compat_version"],
        "model_revision": identity["model_revision"],
        "layer_ids": identity["layer_ids"],
        "generate": identity["generate"],
        "samples": summary["samples"],
        "prompt_tokens": run["input"]["num_tokens"],
        "tokens": summary["tokens"],
        "seconds": round(summary["seconds"], 1),
    }


def training(folder: Path) -> Json:
    """The options, versions and last validation of a training by speculators, out of its best checkpoint."""
    best = folder / "checkpoint_best"
    command = (best / "train_command.txt").read_text(encoding="utf-8").splitlines()
    versions = dict(line[2:].split(": ", 1) for line in command if line.startswith("# ") and ": " in line)
    options = command[-1].split(" --")[1:]
    return {
        "versions": {name: versions[name] for name in ("speculators", "transformers", "torch")},
        "options": [f"--{option}" for option in options if not option.startswith(FOLDERS)],
        "layer_ids_in_config": read(best / "config.json")["eagle_aux_hidden_state_layer_ids"],
        "steps": read(best / "training_state.json")["global_step"],
        "validation": {name: round(value, 4) for name, value in read(best / "val_metrics.json").items()},
    }


def table(acceptance: Json) -> str:
    places = range(1, acceptance["speculative_tokens"] + 1)
    lines = [
        "| head | served with ids | acceptance length | " + " | ".join(f"at {place}" for place in places) + " | same |",
        "|---|---|---|" + "---|" * len(places) + "---|",
    ]
    for name, head in acceptance["heads"].items():
        ids = " ".join(map(str, head["layer_ids_served"]))
        rates = " | ".join(f"{rate:.1%}" for rate in head["acceptance_at"])
        same = f"{head['same_answers']} of {acceptance['prompts']}"
        lines.append(f"| {name} | {ids} | {head['acceptance_length']:.2f} | {rates} | {same} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
