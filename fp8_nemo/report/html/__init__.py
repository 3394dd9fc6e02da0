"""Make the HTML page of a comparison: its elements and its style."""
