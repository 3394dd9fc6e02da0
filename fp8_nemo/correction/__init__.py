"""Turn the mismatch of rollout and train into a multiplier of a token's loss; judge health."""
