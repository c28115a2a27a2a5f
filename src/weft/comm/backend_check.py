"""One collective of one rank with a device's backend, for `weft doctor`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.comm.private_torch import all_reduce
from weft.devices import access


def try_backend(device: torch.device) -> None:
    """Start a process group of this process alone, and sum a tensor of the device with the device's backend.

    Raises RuntimeError or ValueError if the backend cannot do this.
    """
    here = torch.device("cpu") if access.kind_of(device).through_host else device
    dist.init_process_group(access.group_backend(device), store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage] - documented by torch
    try:
        numbers = torch.arange(4.0, device=here)
        group = dist.group.WORLD
        assert group is not None, "the group was started above"
        all_reduce(numbers, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
        found = [float(number) for number in numbers]
        if found != [0.0, 1.0, 2.0, 3.0]:
            raise RuntimeError(f"the sum of one rank's numbers is {found}")
    finally:
        dist.destroy_process_group()
