"""Call a function on several ranks of this machine, from a notebook or a script."""

from __future__ import annotations

import importlib
import io
import math
import multiprocessing
import pickle  # noqa: TID251 (of calls and results between this program and the ranks that it starts)
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from weft import env
from weft.devices.access import find_device, group_backend
from weft.errors import ConfigError, LaunchError, MissingExtra
from weft.train.script.script_errors import report_user_errors
from weft.verify.rank_pool import RankError, RankPool


def launch(function: Callable[..., Any], *args: Any, ranks: int, **kwargs: Any) -> list[Any]:
    """Call a function on new ranks of this machine, and return their results in order of rank.

    The function calls `weft.init(plan)` as a script does. It may be defined in a notebook's cell; values that it uses
    from the notebook are copied to the ranks. In a script, put the call under `if __name__ == "__main__":`. For several
    machines, and for restarts after a fault, start a script with torchrun, or a config with `weft train`.

        losses = weft.launch(train, "dp_shard=2 zero=3", ranks=2)

    Args:
        function: called as `function(*args, **kwargs)` on each rank.
        *args: positional arguments, the same on each rank.
        ranks: number of processes. With CUDA GPUs, each rank uses one of them.
        **kwargs: keyword arguments, the same on each rank.

    Raises:
        ConfigError: if `ranks` is not a positive integer, or the function uses a value that cannot be copied.
        LaunchError: if a rank that is starting calls it, because the call is not under `if __name__ == "__main__":`.
        MissingExtra: if the function is defined in a notebook or script, and cloudpickle is not installed.
        PlanError: if the machine has fewer accelerators than ranks.
        RankError: if a rank raises an error, with its traceback, or dies.
    """
    report_user_errors()
    # Python sets this while a process that it starts imports the script.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            'weft.launch: a rank called it while it imported this script. Put the call under if __name__ == "__main__":'
        )
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ConfigError(f"ranks={ranks!r}: it is the number of processes. Use a positive integer.")
    device = find_device("auto", ranks - 1)  # raises PlanError if there are fewer devices
    call = _pickled(function, args, kwargs)
    with RankPool(ranks, timeout_s=math.inf, backend=group_backend(device)) as pool:
        try:
            return [pickle.loads(result) for result in pool.run(_run, call)]  # of this program's own ranks
        except RankError as error:
            name = getattr(function, "__name__", "the function")
            text = str(error).replace(f"failed in {_run.__name__}:", f"failed in {name}:", 1)
            raise RankError(text, error.said, error.refusal) from None


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    call, name = (function, args, kwargs), getattr(function, "__name__", "the function")
    if getattr(function, "__module__", None) != "__main__":
        return pickle.dumps(call)
    try:
        return _pickled_by_value(call)
    except ImportError:
        raise MissingExtra("cloudpickle", "notebook", "weft.launch with a function of a notebook or script") from None
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"weft.launch: {name} uses a value that cannot be copied to the ranks ({error}). Create it in the function."
        ) from error


def _pickled_by_value(value: object) -> bytes:
    """Return a value as bytes, with the code of functions and classes of a notebook or script."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            # Modules of other types, such as torch.classes and torch.ops. A function may seem to use them, because it
            # has a variable of that name.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def _run(call: bytes) -> bytes:
    """Call the function, and return its result as bytes, which may refer to classes of the function's notebook."""
    import torch.distributed as dist

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # `weft.init` reads these variables, and uses the process group that the pool has started.
    env.export_rank(env.RankEnv(rank, num_ranks, rank, num_ranks, env.LOOPBACK, 1, "weft"))
    function, args, kwargs = pickle.loads(call)  # written by the program that started this rank
    result = function(*args, **kwargs)
    return _pickled_by_value(result) if function.__module__ == "__main__" else pickle.dumps(result)
