"""The HTTP face of a server: contracts that platforms and clients speak, in one ASGI app.

Each contract is a file of pure functions between bytes and arrays; the app routes.
"""
