"""What coordinator, workers and servers have in common."""
