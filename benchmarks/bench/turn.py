"""One turn of one case, in a process of its own: ``python -m benchmarks.bench.turn CASE FOLDER``.

``FOLDER`` has ``settings.json`` and ``prompts.json``; ``turn.json`` is left in it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.bench.cases import NotAvailableError, Work, get_case
from benchmarks.bench.settings import Settings

RESULT = "turn.json"


def main(name: str, folder: Path) -> None:
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    files = folder / "files"
    files.mkdir()
    found: dict[str, Any]
    try:
        work = Work(prompts["timed"], prompts["warmup"], files)
        figures = get_case(name)(Settings.read(folder / "settings.json"), work)
        found = dataclasses.asdict(figures)
    except NotAvailableError as error:
        found = {"not_available": str(error)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(files)
    (folder / RESULT).write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
