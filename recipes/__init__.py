"""Offer the verbs: one file, one command. Nouns live in `fp8_nemo/`."""
