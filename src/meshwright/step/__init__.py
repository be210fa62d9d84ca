"""The pure training step: gradients, updates, and what keeps it right on a mesh."""
