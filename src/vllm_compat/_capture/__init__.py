"""Inside vLLM's workers: taps on the decoder layers, and the rows sorted by request.

Knows the model and the runner; speaks to the engine in plain types and CPU tensors. What differs between releases is in
`_adapters/rows.py` and `_adapters/states.py`.
"""
