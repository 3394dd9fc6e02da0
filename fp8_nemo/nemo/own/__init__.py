"""A user's own reward as an environment of NeMo RL."""
