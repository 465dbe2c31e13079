"""A copy of an EAGLE-3 head that claims other layers than those it was trained on: what a mistake in them costs.

    python benchmarks/eagle3/relabel.py HEAD OUT --layer-ids 4 17 29

The ids are in vLLM's convention, where id k is what enters decoder layer k (0-based). Without ``--layer-ids`` the copy
claims none at all, and vLLM serves it with its own default.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

KEY = "eagle_aux_hidden_state_layer_ids"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, metavar="HEAD", help="folder of a checkpoint that speculators wrote")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the copy")
    parser.add_argument("--layer-ids", type=int, nargs="+", metavar="ID")
    arguments = parser.parse_args()
    relabel(arguments.head, arguments.out, arguments.layer_ids)


def relabel(head: Path, out: Path, layer_ids: list[int] | None) -> None:
    """Copy the weights, and the configuration with other ids, or none."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    claimed = config.pop(KEY)
    if layer_ids and len(layer_ids) != len(claimed):
        raise SystemExit(f"the head takes {len(claimed)} layers: {claimed}")
    if layer_ids:
        config[KEY] = layer_ids
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy2(head / "model.safetensors", out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
