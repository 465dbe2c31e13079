"""A Ray cluster of two CPUs on this machine, as a process of its own that ends when its input does.

Prints ``address HOST:PORT``. Ray gives a start 30 seconds, which are too few for a machine that does much else: it is
tried again.
"""

from __future__ import annotations

import sys
from typing import Any

ATTEMPTS = 5


def main() -> None:
    """Start, say where, and wait."""
    import ray

    module: Any = ray
    for attempt in range(ATTEMPTS):
        try:
            module.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            module.shutdown()
            if attempt == ATTEMPTS - 1:
                raise
    print("address", module.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
