"""Real digits under three parallelisms: the models stay, only mesh and layouts change.

    python examples/mnist_any_mesh.py [path/to/mnist.npz]

Runs on eight virtual CPU devices. `meshwright demo` is the same job with a table and a picture.
"""

import sys

import meshwright as mw  # before Keras, whose backend it settles
from meshwright.data.datasets import mnist

# isort: split
import keras

mw.virtual_devices(8)  # leave it out where there are eight real devices

digits = mnist(*sys.argv[1:2])
x_train, x_test = digits.x_train.astype("float32") / 255, digits.x_test.astype("float32") / 255
print("Digits:", digits.origin)

# Two models, as for one device.


def mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([28, 28]),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="output"),
        ]
    )


def convnet() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([28, 28]),
            keras.layers.Reshape([28, 28, 1]),
            keras.layers.Conv2D(8, 5, strides=2, padding="same", activation="relu"),
            keras.layers.Conv2D(16, 5, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(7),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


# Beside them, which dim of which tensor lies on which axis of which mesh.

dense_layers_in_two = mw.LayoutMap()
dense_layers_in_two["hidden.*kernel"] = [mw.UNSHARDED, "model"]
dense_layers_in_two["hidden.*bias"] = ["model"]
dense_layers_in_two["output.*kernel"] = ["model", mw.UNSHARDED]

data = mw.Sharded(mw.create_mesh({"batch": 8}))
data_and_model = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), dense_layers_in_two)
data_and_space = mw.Sharded(
    mw.create_mesh({"batch": 2, "rows": 2, "cols": 2}), inputs=["batch", "rows", "cols"]
)

# The same training for all.

for build, strategy in ((mlp, data), (mlp, data_and_model), (convnet, data_and_space)):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
        model.compile(
            keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    print(f"\n{build.__name__} on {strategy.mesh}")
    strategy.fit(model, x_train, digits.y_train, batch_size=128, epochs=3)
    reached = strategy.evaluate(
        model, x_test, digits.y_test, batch_size=128, verbose=0, return_dict=True
    )
    print(f"{reached['accuracy']:.2%} of {len(x_test):,} test digits are read right.")
    print(strategy.explain(model))
