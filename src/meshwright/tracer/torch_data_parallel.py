"""DistributedDataParallel under fake collectives, whose futures hold nothing; checked in torch 2.11 to 2.15.

Its own way to reduce gradients takes what was reduced out of a future that is written in C++. A hook, which is what
torch offers to those who reduce in another way, gives it the bucket instead. The division by the number of ranks, which
is part of a copy otherwise, is an operation of its own then; and buckets stay as they are cut at first.
"""

# No future annotations: torch reads those of a hook.
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as module

from meshwright.tracer.torch_names import replace


def reduce_by_hook() -> None:
    """Have each DistributedDataParallel that is made from now on reduce its gradients by `_reduced`."""
    # It compares its parameters' shapes with those of other ranks, who are not there.
    replace(module, "_verify_param_shape_across_processes", lambda _: lambda *_, **__: None)
    # Ranks agree by numbers on an order of buckets, after a step, that is the order in which gradients came in it.
    replace(dist.Reducer, "_rebuild_buckets", lambda _: lambda *_: False)
    replace(DistributedDataParallel, "__init__", _with_hook)


def _with_hook(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def made(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.register_comm_hook(self.process_group, _reduced)

    return made


def _reduced(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    # When backward is done it waits for all of them.
    torch.autograd.Variable._execution_engine.queue_callback(work.wait)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
