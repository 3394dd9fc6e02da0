"""NeMo RL's keys for what a user brings, and for an engine that this package changes."""
