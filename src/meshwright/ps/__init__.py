"""Parameter servers: asynchronous training with the parameters on servers of their own.

``wire`` and ``server`` need NumPy, ZeroMQ and msgpack alone: a server never loads JAX or Keras.
"""
