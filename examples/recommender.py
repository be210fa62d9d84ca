"""A recommender on parameter servers, on data that it makes itself, so that the answer is known.

    python examples/recommender.py [--workers 2] [--ps 2] [--users 1000] [--items 300]

Every user and every item has a hidden taste: a few numbers. A user likes an item as far as the two
agree. The model is shown some of the likings. Its tables lie on the servers and travel by the rows
of a batch; the items' table is on the servers alone, and makes a row when an item is first seen.

In the end everybody is recommended one item that the model has not seen with them. As the hidden
tastes are known here, it can be counted how often it is one that the user likes best.
"""

import argparse

import meshwright as mw  # before Keras, whose backend it settles
from meshwright.launch.local import LocalCluster
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import Embedding, table_of

# isort: split
import keras
import numpy as np

TASTES = 4  # hidden numbers of each user and item
SHOWN = 0.3  # of all pairs
KEY = 1_000_003  # items are known by large numbers, as in a shop


def build(num_users: int) -> keras.Model:
    """A Keras model as any other."""
    user = keras.Input([], dtype="int32", name="user")
    item = keras.Input([], dtype="int32", name="item")
    of_user = keras.layers.Embedding(num_users, TASTES, name="users")(user)
    of_item = Embedding("items", TASTES, "hash")(item)
    liked = keras.layers.Dot(axes=1)([of_user, of_item])
    model = keras.Model({"user": user, "item": item}, liked, name="recommender")
    model.compile(keras.optimizers.Adam(0.03), "mse")
    return model


def main() -> None:
    """Make the data, train, recommend, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"workers": 2, "ps": 2, "users": 1000, "items": 300, "epochs": 8}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    asked = parser.parse_args()

    # What is hidden, and what is shown.
    rng = np.random.default_rng(0)
    users = rng.normal(size=[asked.users, TASTES])
    items = rng.normal(size=[asked.items, TASTES])
    likes = users @ items.T
    shown = rng.random(likes.shape) < SHOWN
    user, item = (part.astype("int32") for part in np.nonzero(shown))
    noisy = likes[user, item] + rng.normal(scale=0.1, size=len(user))
    x, y = {"user": user, "item": item * KEY}, noisy[:, None].astype("float32")

    keras.utils.set_random_seed(0)
    model = build(asked.users)
    cluster = LocalCluster(workers=asked.workers, ps=asked.ps)
    with cluster, ParameterServer(cluster) as strategy:
        by_rows = mw.ps.Tables(["users"])
        strategy.fit(model, x, y, batch_size=1024, epochs=asked.epochs, tables=by_rows)
        found_users = table_of(strategy, model, "users").read()
        found_items = table_of(strategy, model, "items").lookup(np.arange(asked.items) * KEY)

    # Recommend what was not shown, and ask the hidden tastes.
    scores = np.where(shown, -np.inf, found_users @ found_items.T)
    truth = np.where(shown, -np.inf, likes)
    recommended = scores.argmax(axis=1)
    places = (truth > truth[np.arange(asked.users), recommended][:, None]).sum(axis=1)
    among = 0.05
    right = np.mean(places < among * (~shown).sum(axis=1))
    print(
        f"{right:.1%} of {asked.users:,} users are recommended one of the {among:.0%} of items "
        f"that they like best (by chance: {among:.0%})."
    )
    print("It found the hidden tastes." if right >= 0.95 else "It did not find the hidden tastes.")


if __name__ == "__main__":
    print(f"Meshwright {mw.__version__}")
    main()
