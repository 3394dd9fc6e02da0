"""Keep one run's directory, code, provenance and queue."""
