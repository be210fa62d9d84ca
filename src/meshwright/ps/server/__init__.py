"""A parameter server: its variables, their optimizers, and who may change them.

The core is pure, and answers messages; the loop beside it is a process. Neither loads JAX or Keras.
"""
