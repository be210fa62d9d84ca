"""Compiled programs, read from their text: what they compute, hold, move and wait for."""
