"""NeMo RL's keys for what a user brings."""
