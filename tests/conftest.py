"""For all tests that need no vLLM: a slow machine is no failure."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any-machine")
