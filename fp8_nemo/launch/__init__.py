"""Start NeMo RL, and look at nodes."""
