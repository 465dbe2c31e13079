"""``doctor``: what can be done here, for the installed vLLM and speculators and for one model, each with its evidence.

Everything is read from files, as ``detect()`` does: neither vLLM nor torch nor a model is loaded.
"""
