"""Bring checkpoints in and out."""
