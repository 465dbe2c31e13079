"""Which layers of a model the files of anybody's tool hold, found by computing some of them again.

``verify`` proves a run of ours, which says what it holds. Files that scripts, trainers and other tools leave say
nothing: their layer ids, and whether the last state is before or after the final norm, are hearsay until then.
"""

from __future__ import annotations

from vllm_compat.identify.match import Entry, Found, identify

__all__ = ["Entry", "Found", "identify"]
