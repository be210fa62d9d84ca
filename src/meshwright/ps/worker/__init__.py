"""What runs on a worker: scheduled functions, and what they find around them."""
