"""Which vLLM is installed, and what of it we rely on: found by reading files, never by importing it."""
