"""Contracts: bytes of a request to arrays, and an answer to bytes. Pure, without a server."""
