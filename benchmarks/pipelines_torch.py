"""The same in torch.distributed.pipelining over gloo: ``python pipelines_torch.py SIDE STEPS``.

Started with torchrun's variables, on one core each. Rank 0 prints the seconds of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})

import pipelines_jobs as jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

SCHEDULES = {"torch gpipe": ScheduleGPipe, "torch 1f1b": Schedule1F1B}


class Block(nn.Module):
    """Attention and two products, each on normed values and added."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(jobs.WIDTH, eps=1e-6) for _ in range(2)])
        self.qkv = nn.Linear(jobs.WIDTH, 3 * jobs.WIDTH, bias=False)
        self.out = nn.Linear(jobs.WIDTH, jobs.WIDTH, bias=False)
        self.up = nn.Linear(jobs.WIDTH, 4 * jobs.WIDTH, bias=False)
        self.down = nn.Linear(4 * jobs.WIDTH, jobs.WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).view(x.shape[0], jobs.TOKENS, 3, jobs.HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.relu(self.up(self.norms[1](x))))


def part(rank: int, parts: int) -> nn.Sequential:
    """The layers of a stage."""
    torch.manual_seed(rank)
    layers: list[nn.Module] = [Block() for _ in range(jobs.BLOCKS // parts)]
    if rank == 0:
        layers.insert(0, nn.Embedding(jobs.WORDS, jobs.WIDTH))
    if rank == parts - 1:
        layers.append(nn.Linear(jobs.WIDTH, jobs.WORDS, bias=False))
    return nn.Sequential(*layers)


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main(side: str, steps: int) -> None:
    """Train, and print what it took."""
    torch.set_num_threads(1)
    rank, parts = int(os.environ["RANK"]), jobs.STAGES if side in SCHEDULES else 1
    model = part(rank, parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=jobs.LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, jobs.WORDS, (jobs.ROWS, jobs.TOKENS), generator=generator)
    y = x.roll(-1, 1)
    schedule = None
    if parts > 1:
        dist.init_process_group("gloo")
        stage = PipelineStage(model, rank, parts, torch.device("cpu"))
        schedule = SCHEDULES[side](stage, jobs.MICRO_BATCHES, loss_fn=loss_of)
    wall_s, cpu_s = [], []
    for _ in range(steps):
        began, began_cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        if schedule is None:
            for rows, wanted in zip(
                x.chunk(jobs.MICRO_BATCHES), y.chunk(jobs.MICRO_BATCHES), strict=True
            ):
                (loss_of(model(rows), wanted) / jobs.MICRO_BATCHES).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - began_cpu)
    if rank == 0:
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s}), flush=True)
    if parts > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
