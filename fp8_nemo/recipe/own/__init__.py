"""What a user brings: a model, a reward, a cluster."""
