"""``python -m vllm_compat.verify``: see ``cli``."""

from __future__ import annotations

from vllm_compat.verify.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
