"""Pipelines of an unchanged model: stages, tick tables, and the step that runs them."""
