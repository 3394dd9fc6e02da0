"""Hold what a user may say: options, checks, the command line, problems, a model's folder."""
