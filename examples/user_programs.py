"""Training steps as their users write them, without a job of ours, for `meshwright simulate --build`.

    meshwright simulate --build examples/user_programs.py:hf_llama --ranks 8 --cluster h100-ib400:8

Each builder takes (device, rank, world_size) and returns a step, which takes nothing. Models are as wide as real ones
and a few blocks deep.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Step = Callable[[], None]
VOCAB, WIDTH, SEQ, BATCH, NUM_BLOCKS = 32_000, 2048, 2048, 4, 4
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def hf_llama(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step of a Llama of Hugging Face transformers, sharded by FSDP2, two microbatches and clipping."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  the only program that needs transformers

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).to(device)
    for block in (*model.model.layers, model):
        fully_shard(block, mp_policy=BFLOAT16)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(VOCAB, (BATCH, SEQ), device=device)

    def step() -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp_loader(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step under DDP and autocast whose batches come from a DataLoader with a DistributedSampler."""
    model = DistributedDataParallel(_Decoder().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    texts = TensorDataset(torch.randint(VOCAB, (64 * world_size, SEQ)))
    loader = DataLoader(texts, BATCH, sampler=DistributedSampler(texts, world_size, rank), pin_memory=True)
    batches = iter(loader)

    def step() -> None:
        (tokens,) = next(batches)
        with torch.autocast(device.type, torch.bfloat16):
            loss = _loss(model, tokens.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate_ddp(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step of Hugging Face accelerate: prepare(), backward() and clip_grad_norm_() of its Accelerator."""
    from accelerate import Accelerator  # noqa: PLC0415  the only program that needs accelerate

    accelerator = Accelerator(mixed_precision="bf16")
    model = _Decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(VOCAB, (BATCH, SEQ), device=accelerator.device)

    def step() -> None:
        accelerator.backward(_loss(model, tokens))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_parallel(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step of DTensor: each block's MLP over two ranks by parallelize_module, the rest by FSDP2."""
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("shard", "tensor"))
    model = _Decoder().to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"], mp_policy=BFLOAT16)
    fully_shard(model, mesh=mesh["shard"], mp_policy=BFLOAT16)
    return _training(model, device)


def adapters(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step that trains adapters of low rank in frozen, recomputed blocks that FSDP2 shards."""
    model = _Decoder().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = _Adapted(block.up), _Adapted(block.down)
    model.recompute = True
    for block in (*model.to(device).blocks, model):
        fully_shard(block, mp_policy=BFLOAT16)
    return _training(model, device)


def torch_pipeline(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step of torch.distributed.pipelining: one stage a rank, 1F1B over eight microbatches."""
    layers = [nn.Embedding(VOCAB, WIDTH), *(_Block() for _ in range(world_size - 2)), nn.Linear(WIDTH, VOCAB)]
    module = layers[rank].to(device, torch.bfloat16)
    stage = pipelining.PipelineStage(module, rank, world_size, device)
    schedule = pipelining.Schedule1F1B(stage, 8, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    optimizer = torch.optim.AdamW(module.parameters())
    tokens = torch.randint(VOCAB, (8, SEQ), device=device)

    def step() -> None:
        if rank == 0:
            schedule.step(tokens)
        elif rank == world_size - 1:
            schedule.step(target=tokens)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled_blocks(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step under DDP whose blocks torch.compile() compiles."""
    model = _Decoder().to(device, torch.bfloat16)
    for block in model.blocks:
        block.compile()
    return _training(DistributedDataParallel(model), device)


def fsdp1(device: torch.device, rank: int, world_size: int) -> Step:
    """Return a step under FullyShardedDataParallel, FSDP's first version, which is refused."""
    return _training(FullyShardedDataParallel(_Decoder().to(device)), device)


class _Block(nn.Module):
    """Attention over what came before and an MLP, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query_key_value, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [one.unflatten(-1, (16, -1)).transpose(1, 2) for one in self.query_key_value(self.norm(x)).chunk(3, -1)]
        x = x + self.output(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class _Decoder(nn.Module):
    """Tokens to logits through a few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(_Block() for _ in range(NUM_BLOCKS))
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class _Adapted(nn.Module):
    """A frozen layer and what two thin ones that train add to its output."""

    def __init__(self, frozen: nn.Linear, num_ranks: int = 16) -> None:
        super().__init__()
        self.frozen = frozen
        self.into = nn.Linear(frozen.in_features, num_ranks, bias=False)
        self.out = nn.Linear(num_ranks, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.out(self.into(x))


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def _training(model: nn.Module, device: torch.device) -> Step:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    tokens = torch.randint(VOCAB, (BATCH, SEQ), device=device)

    def step() -> None:
        _loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
