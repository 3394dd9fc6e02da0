"""Start runs inside NeMo RL, and check the nodes that they run on."""
