"""One run's directory, code, provenance and queue."""
