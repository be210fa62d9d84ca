"""Machines that need not be present: kinds and numbers of devices, and what is known of a chip."""
