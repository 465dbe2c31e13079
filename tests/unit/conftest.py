"""Puts the checkout on the module path, so that tests can share helpers as ``tests.unit.vllm_tree``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
