"""Our side: ``strategy.fit`` of a Keras model under ``Sharded``."""

from __future__ import annotations

from digits import load
from keras_models import Epochs, build_model, start_alike, versions
from protocol import job_from_arguments, report
from settings import DEVICES, Job

import meshwright as mw


def make_strategy(job: Job) -> mw.Sharded:
    mesh = mw.create_mesh(list(job.mesh))
    layouts = mw.LayoutMap()
    for path, spec in job.layouts:
        layouts[path] = [mw.UNSHARDED if axis is None else axis for axis in spec]
    return mw.Sharded(mesh, layouts, batch="batch", zero=job.zero)


def main() -> None:
    job = job_from_arguments(__doc__)
    mw.virtual_devices(DEVICES)
    strategy = make_strategy(job)
    with strategy.scope():
        model = build_model(job)
    start_alike(model, job)
    epochs = Epochs()
    x, y = load(job)
    strategy.fit(
        model, x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0, callbacks=[epochs]
    )
    own = {"meshwright": mw.__version__}
    report("ours", job, epochs.clock, **epochs.last, versions=own | versions())


if __name__ == "__main__":
    main()
