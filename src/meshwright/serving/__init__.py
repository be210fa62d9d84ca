"""Serving: the forward pass of any model on any mesh, behind a queue that makes batches."""
