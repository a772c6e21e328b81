"""Programs as people write them for torchrun, for the tracer: (device, rank, world_size) -> step."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Step = Callable[[], None]
WIDTH, CLASSES, SEQ, VOCAB = 48, 5, 24, 96


def _mlp(depth: int = 2, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def _training(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def moved(device: torch.device, rank: int, world_size: int, how: str) -> Step:
    """Move a model whose head is its embedding in one of several ways, after the optimizer got its parameters."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.ones(WIDTH))
            self.register_buffer("order", torch.arange(WIDTH))

        def forward(self, tokens: Tensor) -> Tensor:
            assert self.head.weight is self.embedding.weight
            out: Tensor = self.head((self.embedding(tokens) * self.scale)[..., self.order])
            return out

    with torch.device("meta" if how == "to_empty" else "cpu"):
        model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ways: dict[str, Callable[[], nn.Module]] = {
        "to": lambda: model.to(device),
        "to_dtype": lambda: model.to(device, torch.bfloat16),
        "cuda": lambda: model.cuda().bfloat16(),
        "index": lambda: model.to(int(os.environ["LOCAL_RANK"])),
        "to_empty": lambda: model.to_empty(device=device),
    }
    ways[how]()
    assert all(one.device.type == device.type for one in (*model.parameters(), *model.buffers()))
    tokens = torch.randint(0, VOCAB, (2, SEQ), device=device)

    def step() -> None:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def scalars(device: torch.device, rank: int, world_size: int) -> Step:
    """Make tensors of no and of one number, and mix those of the host with those of the device."""

    def step() -> None:
        x = torch.ones(4, device=device)
        x = torch.cat([torch.tensor([], device=device), torch.as_tensor([1.0], device=device), x])
        x = x * torch.tensor(2.0) + torch.full((), 3, device=device) + torch.tensor(4).to(device)
        assert torch.tensor(7, device=device).item() == 7
        x.sum()

    return step


def mixed_precision(device: torch.device, rank: int, world_size: int) -> Step:
    """Train under autocast with a scaler of gradients."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(device.type)
    x, y = torch.randn(4, WIDTH, device=device), torch.randint(0, CLASSES, (4,), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.float16):
            first = model[0](x)
            assert first.dtype == torch.float16
            assert F.layer_norm(first, (WIDTH,)).dtype == first.softmax(-1).dtype == torch.float32
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def streams(device: torch.device, rank: int, world_size: int) -> Step:
    """Copy on a stream of its own, and wait for it."""
    module = torch.get_device_module(device)
    side = module.Stream()

    def step() -> None:
        x = torch.randn(64, 64).pin_memory()
        with module.stream(side):
            copied = x.to(device, non_blocking=True)
        module.current_stream().wait_stream(side)
        copied.record_stream(module.current_stream())
        copied.sum()

    return step


def by_torchrun(device: torch.device, rank: int, world_size: int) -> Step:
    """Do all that a script for one node with NVIDIA GPUs does by itself."""
    assert torch.cuda.is_available()
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size) == (int(os.environ["RANK"]), world_size)
    torch.cuda.set_device(local)
    here = torch.device(f"cuda:{local}")
    torch.cuda.manual_seed_all(0)
    print(torch.cuda.get_device_name(), torch.cuda.device_count(), torch.cuda.get_device_properties(here).total_memory)
    model = DistributedDataParallel(_mlp().to(here), device_ids=[local])
    x, y = torch.randn(4, WIDTH).cuda(non_blocking=True), torch.randint(0, WIDTH, (4,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def step() -> None:
        begin.record()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(x)
            loss = F.cross_entropy(scores, y.to(here))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        num_right = (scores.argmax(1) == y).sum().item()
        end.record()
        torch.cuda.synchronize()
        print(loss.item() / world_size, f"{num_right / len(y):.1%}", torch.cuda.max_memory_allocated())

    return step


class Images(Dataset[tuple[Tensor, int]]):
    """Noise with labels."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, 16, 16), index % CLASSES


def images(device: torch.device, rank: int, world_size: int, num_workers: str) -> Step:
    """Read images by worker processes, and normalize over ranks."""
    sampler: DistributedSampler[Tensor] = DistributedSampler(Images(), world_size, rank, shuffle=True)
    loader = DataLoader(Images(), 8, sampler=sampler, num_workers=int(num_workers), pin_memory=True, drop_last=True)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, CLASSES)
    )
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            yield from loader

    read = batches()

    def step() -> None:
        x, y = (one.to(device, non_blocking=True) for one in next(read))
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    return step


def characters(device: torch.device, rank: int, world_size: int) -> Step:
    """Draw random windows of a file of tokens, and accumulate gradients without reducing them."""
    data = np.arange(4096).astype(np.uint16) % VOCAB
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)).to(device)[0]
    )
    head = nn.Linear(WIDTH, VOCAB, device=device)

    def batch() -> tuple[Tensor, Tensor]:
        places = torch.randint(len(data) - SEQ, (4,))
        x = torch.stack([torch.from_numpy(data[at : at + SEQ].astype(np.int64)) for at in places])
        y = torch.stack([torch.from_numpy(data[at + 1 : at + 1 + SEQ].astype(np.int64)) for at in places])
        return x.to(device), y.to(device)

    def step() -> None:
        for number in range(3):
            model.require_backward_grad_sync = number == 2
            x, y = batch()
            (F.cross_entropy(head(model(x)).flatten(0, 1), y.flatten()) / 3).backward()

    return step


def evaluated(device: torch.device, rank: int, world_size: int) -> Step:
    """Train and evaluate a sharded model in one step."""
    model = _mlp().to(device)
    for block in (*model, model):
        fully_shard(block)
    x = torch.randn(4, WIDTH, device=device)

    def step() -> None:
        model(x).sum().backward()
        with torch.no_grad():
            model(x)

    return step


def sharded(device: torch.device, rank: int, world_size: int, how: str) -> Step:
    """Shard without a mesh, or built on meta over a mesh with replicas."""
    mesh = (
        init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        if how == "hybrid"
        else None
    )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta" if how == "hybrid" else "cpu"):
        model = _mlp()
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if how == "hybrid":
        model.to_empty(device=device)
        for block in model:
            block[0].reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(4, WIDTH, device=device)

    def step() -> None:
        model(x).sum().backward()
        print(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()

    return step


def adapted(device: torch.device, rank: int, world_size: int) -> Step:
    """Train a few of the parameters, not all of which are found, and keep an average of all."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = _mlp().requires_grad_(False)
            self.down, self.up, self.spare = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.up(self.down(x))
            return out

    model = Adapted().to(device)
    average = copy.deepcopy(model)
    train = _training(DistributedDataParallel(model, find_unused_parameters=True), torch.randn(4, WIDTH, device=device))

    def step() -> None:
        train()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)

    return step


def compiled(device: torch.device, rank: int, world_size: int) -> Step:
    """Compile a model by torch.compile()."""
    return _training(torch.compile(_mlp().to(device), mode="max-autotune"), torch.randn(4, WIDTH, device=device))


class _Scaled(nn.Sequential):
    """Layers whose result is scaled by a constant that forward makes, as caches of transformers make theirs."""

    def forward(self, x: Tensor) -> Tensor:
        nothing = torch.tensor([], dtype=x.dtype, device=x.device)
        scale = torch.tensor([0.5], dtype=x.dtype, device=x.device)
        return super().forward(x) * scale + nothing.sum()


def compiled_dropout(device: torch.device, rank: int, world_size: int) -> Step:
    """Compile a model that drops elements."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)).to(device)
    return _training(torch.compile(model), torch.randn(4, WIDTH, device=device))


def compiled_whole(device: torch.device, rank: int, world_size: int) -> Step:
    """Compile a whole model whose blocks are sharded, and which makes constants on the device."""
    model = _Scaled(*_mlp()).to(device)
    for block in (*model, model):
        fully_shard(block)
    return _training(torch.compile(model), torch.randn(4, WIDTH, device=device))


def compiled_and_reduced(device: torch.device, rank: int, world_size: int) -> Step:
    """Reduce the gradients of a compiled model; those of its biases are sums that take two kernels each."""
    width = 512
    parts = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)]
    model = torch.compile(nn.Sequential(*parts).to(device))
    return _training(DistributedDataParallel(model), torch.randn(2, 256, width, device=device))


NUM_MICROBATCHES = 8


def pipelined(device: torch.device, rank: int, world_size: int, name: str) -> Step:
    """Run one of torch's own pipeline schedules, which finds out what its stages receive."""
    num_stages = world_size * (2 if name.startswith("ScheduleInterleaved") else 1)
    places = range(rank, num_stages, world_size)
    parts = [_mlp(1, WIDTH).to(device) for _ in places]
    stages = [PipelineStage(part, place, num_stages, device) for part, place in zip(parts, places, strict=True)]
    what = stages if len(stages) > 1 else stages[0]
    schedule = getattr(pipelining, name)(what, n_microbatches=NUM_MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW([one for part in parts for one in part.parameters()])
    x = torch.randn(2 * NUM_MICROBATCHES, SEQ, WIDTH, device=device)

    def step() -> None:
        losses = list[Tensor]()
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": x, "losses": losses} if rank == world_size - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


BUCKET_WIDTH, BUCKET_DEPTH = 512, 6


def bucketed(device: torch.device, rank: int, world_size: int, cap_mb: str) -> Step:
    """Reduce the gradients of a model of several buckets."""
    model = _mlp(BUCKET_DEPTH, BUCKET_WIDTH).to(device)
    reduced = DistributedDataParallel(model, bucket_cap_mb=float(cap_mb) if cap_mb else None)
    return _training(reduced, torch.randn(4, BUCKET_WIDTH, device=device))


def scaled(device: torch.device, rank: int, world_size: int) -> Step:
    """Train with a scaler whose flag the host reads, and look for numbers that are not finite in all usual ways."""
    model = _mlp().to(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(device.type)
    x, lowest = torch.randn(4, WIDTH, device=device), torch.full((), math.inf, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert torch.isfinite(loss)
        assert not norm.isnan()
        assert math.isfinite(loss.item())
        assert loss < lowest
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        assert torch.stack([one.isfinite().all() for one in gradients]).all()
        num_bad = sum(one.isnan().sum() for one in gradients)
        dist.all_reduce(num_bad)
        assert num_bad.item() == 0
        num_fine = torch.isfinite(loss).float()
        dist.all_reduce(num_fine)
        assert num_fine.item() == world_size
        assert scaler.get_scale() == 2.0**16
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def guessing(device: torch.device, rank: int, world_size: int) -> Step:
    """Decide by numbers that only real tensors hold, and print others."""
    x = nn.init.trunc_normal_(torch.empty(4, WIDTH, device=device))

    def step() -> None:
        mean = x.mean()
        print(f"{mean.item() / 2:.3f}", float(mean), mean.item() + 1.0)
        if mean.item() / 4 > 100.0:
            raise AssertionError("not with 1 / 4")
        if torch.allclose(x, x.relu()):
            x.sum()
        counts = torch.ones(3, device=device)
        dist.all_reduce(counts)
        if counts.tolist() != [world_size] * 3 or (counts / 2)[1].item() != world_size / 2:
            raise AssertionError("what the program put there is no guess")

    return step


def strided(device: torch.device, rank: int, world_size: int) -> Step:
    """Read numbers through views, in whose order they do not lie in memory."""
    table, one = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device), torch.tensor([5], device=device)

    def step() -> None:
        read = [table.t().tolist(), table[:, 1].tolist(), one.expand(3).tolist()]
        if read != [[[1.0, 3.0], [2.0, 4.0]], [2.0, 4.0], [5, 5, 5]]:
            raise AssertionError(f"not in the order of memory: {read}")

    return step


def gathered(device: torch.device, rank: int, world_size: int) -> Step:
    """Decide by what collectives brought into tensors that held zeros."""

    def step() -> None:
        counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
        dist.all_gather(counts, torch.full((1,), 3, dtype=torch.int64, device=device))
        own = torch.zeros(1, device=device)
        dist.reduce_scatter_tensor(own, torch.ones(world_size, device=device))
        if [one.item() for one in counts] != [3] * world_size or own.item() != world_size:
            raise AssertionError("zeros are no longer there")
        arrived = torch.zeros(1, device=device)
        dist.recv(arrived, rank - 1)
        if arrived.tolist()[0] < 0:
            raise AssertionError("a message is not known, and reads as 1")

    return step


def guessing_wrong(device: torch.device, rank: int, world_size: int) -> Step:
    """Stop where a number that only real tensors hold is not what it should be."""
    x = torch.randn(4, WIDTH, device=device)

    def step() -> None:
        if (x - x.mean()).abs().max().item() > 0.5:
            raise ValueError("too far from the mean")

    return step


def buffered(device: torch.device, rank: int, world_size: int) -> Step:
    """Send buffers to all ranks before each forward, and join ranks that have no more inputs."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)).to(device)
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    x = torch.randn(4, WIDTH, device=device)

    def step() -> None:
        with model.join():
            model(x).sum().backward()

    return step


def hooked(device: torch.device, rank: int, world_size: int, name: str) -> Step:
    """Reduce gradients in 16 bits, by a hook of torch's."""
    model = DistributedDataParallel(_mlp().to(device), device_ids=[device.index])
    model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
    return _training(model, torch.randn(4, WIDTH, device=device))


def coalesced(device: torch.device, rank: int, world_size: int) -> Step:
    """Reduce several tensors as one, in both of torch's ways, and multiply them by TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    parts = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(3)]
    shards = [torch.empty(WIDTH // world_size, WIDTH, device=device) for _ in parts]

    def step() -> None:
        with dist._coalescing_manager(device=device):
            for part in parts:
                dist.all_reduce(part)
        with dist._coalescing_manager(device=device, async_ops=True) as pending:
            for part, shard in zip(parts, shards, strict=True):
                dist.reduce_scatter_tensor(shard, part)
        pending.wait()
        shards[0] @ parts[0]
        dist.barrier(device_ids=[device.index])

    return step


def by_address(device: torch.device, rank: int, world_size: int) -> Step:
    """Tell parameters from each other by where they are."""
    model = _mlp().to(device)
    places = {one.data_ptr(): one for one in model.parameters()}
    first = model[0][0].weight
    assert len(places) == len(list(model.parameters()))
    assert first.detach().data_ptr() == first.data_ptr()
    assert first[1:].data_ptr() == first.data_ptr() + WIDTH * first.element_size()
    return _training(model, torch.randn(4, WIDTH, device=device))


def grouped_in_full(device: torch.device, rank: int, world_size: int) -> Step:
    """Multiply groups of rows in float32, for which CUDA has no kernel."""
    experts = torch.randn(2, WIDTH, WIDTH, device=device, requires_grad=True)
    ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
    x = torch.randn(32, WIDTH, device=device, requires_grad=True)
    return lambda: F.grouped_mm(x, experts, offs=ends).sum().backward()


def saved(device: torch.device, rank: int, world_size: int) -> Step:
    """Write a checkpoint."""
    model = _mlp().to(device)
    return lambda: torch.save(model.state_dict(), "checkpoint.pt")


def lazy(device: torch.device, rank: int, world_size: int) -> Step:
    """Leave a layer's sizes to its first input."""
    return _training(nn.LazyLinear(WIDTH), torch.randn(4, WIDTH, device=device))


def flat(device: torch.device, rank: int, world_size: int) -> Step:
    """Shard by FSDP1."""
    return _training(FullyShardedDataParallel(_mlp().to(device)), torch.randn(4, WIDTH, device=device))


def optimizer_shards(device: torch.device, rank: int, world_size: int) -> Step:
    """Share the optimizer's states out over the ranks, by a module that torch compiles as it is imported."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  programs import it once they are traced

    model = DistributedDataParallel(_mlp().to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    x = torch.randn(4, WIDTH, device=device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def decided_by_a_number(device: torch.device, rank: int, world_size: int) -> Step:
    """Cut a tensor where another's largest element is."""
    x = torch.randn(8, 8, device=device)

    def step() -> None:
        longest = x.argmax(1).max().item()
        x[:, :longest].sum()

    return step
