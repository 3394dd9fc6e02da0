"""Layers of transformers' models in the formats of a precision."""
