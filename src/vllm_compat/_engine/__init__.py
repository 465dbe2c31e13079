"""Drives vLLM's scheduler and executor. With `_adapters` and `_capture`, the only place that knows vLLM."""
