"""How fast states are extracted, against vLLM's own prefill of the same prompts: ``python -m benchmarks.bench``."""
