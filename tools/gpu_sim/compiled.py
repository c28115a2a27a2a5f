"""torch.compile on a simulated GPU: inductor chooses the kernels, and the device counts them.

All stages up to code generation are torch's own: dynamo, autograd's joint graph, Weft's partitioner, and inductor's
passes, lowering and scheduler, which fuses operations into kernels. Instead of generating Triton code and compiling it,
the list of kernels is kept. A call to the graph launches them in order: a fused kernel with the bytes that inductor
counts for it, and operations of libraries or Weft as themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._prims import rng_prims
from torch.utils._python_dispatch import TorchDispatchMode

from tools.gpu_sim.counts import line_in
from tools.gpu_sim.device import PaperDevice, leaves
from tools.gpu_sim.mode import PaperMode

#: Functions of torch.cuda that dynamo stores separate references to.
_ASKED = (
    "device", "Event", "Stream", "current_device", "set_device", "device_count", "stream", "current_stream",
    "set_stream", "synchronize", "get_device_properties", "memory_allocated", "is_bf16_supported",
)  # fmt: skip


#: The operator that sets a generator's state, and then calls another operator.
_WITH_RNG_STATE: Any = rng_prims.graphsafe_run_with_rng_state


class Use(NamedTuple):
    """A kernel's access to a node. `share` is the fraction of its elements that inductor counts."""

    node: fx.Node
    share: float
    writes: bool


class Kernel(NamedTuple):
    """One launch. `name` lists the fused operations. `inner_bytes` counts buffers that no node corresponds to."""

    name: str
    line: str
    uses: tuple[Use, ...]
    inner_bytes: int

    def launch(self, device: PaperDevice, value: Callable[[fx.Node], Any]) -> None:
        """Launch the kernel.

        Args:
            device: the simulated GPU.
            value: returns a node's value in this call, whose size may differ from the compiled one.
        """
        used = [(use, x) for use in self.uses for x in leaves(value(use.node))]
        num_bytes = self.inner_bytes + sum(use.share * x.numel() * x.element_size() for use, x in used)
        reads, writes = ([x for use, x in used if use.writes == is_written] for is_written in (False, True))
        device.launch(self.name, reads, writes, num_bytes=round(num_bytes))


class GraphOperation(NamedTuple):
    """A node of the graph that is not part of an inductor kernel."""

    node: fx.Node
    line: str


class Program:
    """A graph's kernels in order. Other operations of the graph run as themselves."""

    def __init__(self, mode: PaperMode, graph: Any):
        self._mode, self._module = mode, graph.module
        self._nodes = list(graph.module.graph.nodes)
        self._steps = _steps_of(graph)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        run = _Run(self._mode, self._module, self._nodes, inputs)
        inputs.clear()
        for step in self._steps:
            line_in_graph = step.line  # read by `counts.line_of`
            if isinstance(step, GraphOperation):
                run.counted(step.node)
                continue
            step.launch(self._mode.device, run.value)
        del line_in_graph
        return run.output()


class _Run:
    """One call to a program. Nodes are computed on first use, and only `counted` counts them."""

    def __init__(self, mode: PaperMode, module: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[Any]):
        self._mode, self._module, self._nodes = mode, module, nodes
        given = iter(inputs)
        self._values: dict[fx.Node, Any] = {node: next(given) for node in nodes if node.op == "placeholder"}

    def value(self, node: fx.Node) -> Any:
        if node not in self._values:
            for one in _before(node, self._values):
                self._values[one] = self._made(one, quiet=True)
        return self._values[node]

    def counted(self, node: fx.Node) -> None:
        if node not in self._values:
            for one in node.all_input_nodes:
                self.value(one)
            self._values[node] = self._made(node, quiet=False)

    def output(self) -> list[Any]:
        for node in self._nodes[:-1]:
            self.value(node)
        returned: Any = self._nodes[-1].args[0]
        return [self.value(one) if isinstance(one, fx.Node) else one for one in returned]

    def _made(self, node: fx.Node, quiet: bool) -> Any:
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        target: Any = node.target
        args: Any = fx.map_arg(node.args, self._values.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, self._values.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if node.target is _WITH_RNG_STATE:  # an operation that draws the same random numbers in forward and backward
            target, *args = args
            kwargs = {name: value for name, value in kwargs.items() if name != "rng_state"}
        with self._mode.quietly(quiet):
            return target(*args, **kwargs)


def _before(node: fx.Node, known: dict[fx.Node, Any]) -> list[fx.Node]:
    """Return the node and its missing inputs in topological order."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting[-1]
        missing = [x for x in one.all_input_nodes if x not in known and x not in found]
        waiting += missing
        if not missing:
            found[waiting.pop()] = None
    return list(found)


def _steps_of(graph: Any) -> list[Kernel | GraphOperation]:
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    place = {node: index for index, node in enumerate(graph.module.graph.nodes)}
    buffers = _Buffers(graph, place)
    steps: list[Kernel | GraphOperation] = []
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        if not isinstance(node, ExternKernelSchedulerNode):
            steps.append(buffers.kernel(node))
        elif not isinstance(node.node, ir.MultiOutput):
            steps.append(buffers.operation(node.node))
    return steps


class _Buffers:
    """Maps inductor's buffers to nodes of the lowered graph."""

    def __init__(self, graph: Any, place: dict[fx.Node, int]):
        self._graph, self._place = graph, place
        given = [node for node in place if node.op == "placeholder"]
        returned: Any = next(reversed(place)).args[0]
        self._ends = {name: node for name, node in zip(graph.get_output_names(), returned, strict=True) if node}
        self._ends |= {node.name: node for node in given}
        self._ends |= dict(zip(graph.graph_input_names, given, strict=True))

    def node(self, name: str) -> fx.Node | None:
        """Return the node whose value a buffer holds; None for other buffers, such as half of a reduction."""
        buffer = self._graph.name_to_buffer.get(name)
        found = None if buffer is None else buffer.get_origin_node()
        return found if found in self._place else self._ends.get(name)

    def operation(self, buffer: Any) -> GraphOperation:
        node = self._in_order(buffer.origins)[-1]
        return GraphOperation(node, line_in(node.stack_trace))

    def kernel(self, node: Any) -> Kernel:
        seen = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
        wrote = {dep.name for dep in node.read_writes.writes}
        changed = {name for out in node.get_outputs() for name in out.get_mutations()}
        uses, inner_bytes = [], 0
        for name in dict.fromkeys((*seen, *changed)):
            one = self.node(name)
            if one is None:
                inner_bytes += seen.get(name, 0)
            else:
                uses.append(Use(one, seen.get(name, 0) / max(1, _bytes_of(one)), name in wrote | changed))
        origins = self._in_order(o for one in node.get_nodes() for o in one.node.origins)
        called: list[Any] = [o.target for o in origins if o.op == "call_function"]
        names = dict.fromkeys(one.__name__.partition(".")[0] for one in called)
        lines = [line for o in origins if (line := line_in(o.stack_trace))]
        return Kernel("joined " + " ".join(names), lines[-1] if lines else "", tuple(uses), inner_bytes)

    def _in_order(self, origins: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted((node for node in set(origins) if node in self._place), key=self._place.__getitem__)


def _bytes_of(node: fx.Node) -> int:
    """Return a node's bytes as inductor counts them, with the sizes of the compiled call for dynamic shapes."""
    value = node.meta["val"]
    numel = value.numel() if isinstance(value, torch.Tensor) else 0
    return int(numel.node.hint if isinstance(numel, torch.SymInt) else numel) * getattr(value, "itemsize", 1)


class _OnHost(TorchDispatchMode):
    """A mode for constants that inductor evaluates while compiling, which need values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def count_compiled(mode: PaperMode) -> None:
    """Make torch.compile in this process produce programs for the device of `mode`."""
    import torch._functorch.config
    import torch._inductor.config
    import torch._inductor.scheduler
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering

    def to_program(graph: Any) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        return SimpleNamespace(call=Program(mode, graph), runner=None)

    for name in _ASKED:
        value = getattr(torch.cuda, name)  # dynamo stored torch's original before
        setattr(CudaInterface, name, value if isinstance(value, type) else staticmethod(value))
    learn = joint_graph.lazy_init
    # Patterns are traced from examples, which may be on the host, because patterns are independent of the device.
    joint_graph.lazy_init = lambda device=None: learn(torch.device("cpu"))
    folder: Any = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def on_host(self: Any, node: fx.Node) -> Any:
        with _OnHost():
            return deduce(self, node)

    folder._deduce_value = on_host
    # The caches store generated code, which does not exist here.
    torch._inductor.config.fx_graph_cache = torch._inductor.config.fx_graph_remote_cache = False
    torch._functorch.config.enable_autograd_cache = False
    scheduler: Any = torch._inductor.scheduler
    scheduler.has_triton = lambda: True
    lowering: Any = GraphLowering
    lowering.compile_to_module = to_program
