"""NeMo RL's keys and limits by theme: a loss, a layout, an engine that this package changes."""
