"""Run the layers of transformers' models in the formats of a precision."""
