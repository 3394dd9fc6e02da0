"""Rewards to take or to start from, by `data.reward=recipes/rewards/FILE.py`."""
