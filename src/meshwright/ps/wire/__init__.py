"""What tasks say to each other, and how it travels."""
