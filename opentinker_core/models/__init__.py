"""Base models: frozen weights, their tokenizer, and how messages become tokens.

Nouns, one a file: `ModelSource` (source.py: where a named model lies), `BundledModel` (bundled.py:
what can be had without a hub), `Placement` (placement.py: device, dtype, threads), `Renderer`
(renderer.py: observations and actions to and from tokens). `loading.py` loads weights and tokenizers.
Only loading.py and placement.py import torch when they are imported.
"""
