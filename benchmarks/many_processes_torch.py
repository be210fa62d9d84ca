"""The same in PyTorch's DDP over gloo: ``python many_processes_torch.py JOB SIDE EPOCHS``.

Started with torchrun's variables, on one core each. Rank 0 prints the seconds of each epoch.
"""

from __future__ import annotations

import json
import os
import sys
import time

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % (os.cpu_count() or 1)})

import torch
import torch.distributed as dist
from many_processes_jobs import JOBS, Job
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build(job: Job) -> nn.Module:
    """The job's model; images come with their channel in front, as PyTorch wants them."""
    torch.manual_seed(0)
    layers, size = list[nn.Module](), job.input
    for said in job.layers:
        kind, *rest = said.split(":")
        if kind == "dense":
            layers.append(nn.Linear(size[0], int(rest[0])))
            size = (int(rest[0]),)
            if len(rest) > 1:
                layers.append(nn.ReLU())
        elif kind == "conv":
            layers += [nn.Conv2d(size[2], int(rest[0]), 3, padding="same"), nn.ReLU()]
            size = (*size[:2], int(rest[0]))
        elif kind == "pool":
            layers.append(nn.MaxPool2d(2))
            size = (size[0] // 2, size[1] // 2, size[2])
        else:
            layers.append(nn.Flatten())
            size = (size[0] * size[1] * size[2],)
    return nn.Sequential(*layers)


def main(name: str, side: str, epochs: int) -> None:
    """Train, and print what it took."""
    del side  # there is one
    torch.set_num_threads(1)
    job = JOBS[name]
    processes = int(os.environ["WORLD_SIZE"])
    model: nn.Module = build(job)
    if processes > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    rows, size = job.rows_per_process, job.input
    dims = size if len(size) == 1 else (size[2], *size[:2])
    x = torch.randn(rows * job.steps, *dims)
    y = torch.randint(0, 10, (rows * job.steps,))
    wall_s, cpu_s, loss = [], [], torch.zeros([])
    for _ in range(epochs):
        began, began_cpu = time.perf_counter(), time.process_time()
        order = torch.randperm(rows * job.steps)
        for step in range(job.steps):
            picked = order[step * rows : (step + 1) * rows]
            optimizer.zero_grad()
            loss = loss_of(model(x[picked]), y[picked])
            loss.backward()
            optimizer.step()
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - began_cpu)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "loss": float(loss)}), flush=True)
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
