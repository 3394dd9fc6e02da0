"""What one run will do, decided before anything starts."""
