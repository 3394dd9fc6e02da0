"""What a plan's description is made from."""
