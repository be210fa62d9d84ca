"""The peer: Keras 3's own ``keras.distribution.DataParallel`` and ``model.fit``."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
from digits import load
from keras_models import Epochs, build_model, start_alike, versions
from protocol import eight_jax_devices, job_from_arguments, report


def main() -> None:
    job = job_from_arguments(__doc__)
    eight_jax_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = build_model(job)
    start_alike(model, job)
    epochs = Epochs()
    x, y = load(job)
    model.fit(x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0, callbacks=[epochs])
    report("keras_data_parallel", job, epochs.clock, **epochs.last, versions=versions())


if __name__ == "__main__":
    main()
