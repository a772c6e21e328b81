"""WAYS: what is measured next to what."""

from __future__ import annotations

from dataclasses import dataclass

_OWN, _RANKS = "meshwright", "benchmarks.peers.ranks"


@dataclass(frozen=True)
class Way:
    """One program that trains the task on two ranks."""

    name: str
    module: str
    """Of one rank; started like torchrun starts it, with the folder of the task and `arguments`."""
    environment: str | None
    """Of environments.py; None is the one that runs the benchmark."""
    packages: tuple[str, ...]
    """Whose versions its row carries."""
    arguments: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Return whether it is not a peer."""
        return self.packages[0] == _OWN


def _own(name: str, *arguments: str) -> Way:
    return Way(f"ours, {name}", f"{_RANKS}.own_rank", None, (_OWN, "torch"), arguments)


def _hf(name: str, module: str, *arguments: str) -> Way:
    return Way(name, f"{_RANKS}.{module}", "hf", ("transformers", "accelerate", "torch"), arguments)


def _litgpt(name: str, *arguments: str) -> Way:
    return Way(name, f"{_RANKS}.litgpt_rank", "litgpt", ("litgpt", "lightning", "torch"), arguments)


_DDP, _FSDP = "layout.dp_replicate=2", "layout.dp_shard=2"
_CHUNKS = ("layout.loss_chunks=8", "layout.compile_optimizer=true")
_ALL_COMPILED = ("layout.compile=true", "layout.compile_loss=true", "layout.compile_optimizer=true")
WAYS = {
    way.name: way
    for way in (
        _own("DDP", _DDP),
        _own("FSDP2", _FSDP),
        _own("DDP, compiled", _DDP, "layout.compile=true"),
        _own("FSDP2, compiled", _FSDP, "layout.compile=true"),
        _own("DDP, compiled with loss", _DDP, "layout.compile=true", "layout.compile_loss=true"),
        _own("DDP, all compiled", _DDP, *_ALL_COMPILED),
        _own("FSDP2, all compiled", _FSDP, *_ALL_COMPILED),
        _own("DDP, blocks compiled, loss in chunks", _DDP, "layout.compile=true", *_CHUNKS),
        _own("DDP, model compiled, loss in chunks", _DDP, "layout.compile=model", *_CHUNKS),
        _hf("accelerate, DDP", "accelerate_rank"),
        _hf("transformers, FSDP2", "fsdp2_rank"),
        _hf("HF Trainer, DDP", "hf_trainer_rank"),
        _litgpt("litgpt, DDP"),
        _hf("accelerate, DDP, compiled", "accelerate_rank", "compiled"),
        _hf("transformers, FSDP2, compiled", "fsdp2_rank", "compiled"),
        _litgpt("litgpt, DDP, compiled", "compiled"),
    )
}
"""By name. HF Trainer could compile the same model, as one graph, which takes minutes on two cores."""
