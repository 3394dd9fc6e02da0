"""Mismatch of rollout and train -> multiplier of a token's loss; health."""
