"""The beginning of scripts that train a Keras model under a launcher: ``strategy, model, x, y``."""

SETTING = """
import meshwright as mw, keras, jax, numpy as np
strategy = mw.Sharded(mw.create_mesh({"batch": -1}))
with strategy.scope():
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x, y = np.ones([64, 8], "float32"), np.ones([64, 4], "float32")
"""
