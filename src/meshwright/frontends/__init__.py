"""Front ends: each makes Programs from models of one kind."""
