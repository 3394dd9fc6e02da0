"""NeMo RL's configuration in our words; imports no NeMo RL."""
