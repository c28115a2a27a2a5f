"""Analysis of the tensors that each pipeline stage receives, from one forward of the full model without values.

The model is copied before it is split, with its modules on the meta device. Its forward runs on the batch, and the
modules return remote tensors. Each stage must receive these tensors, found from the recorded calls and the dependencies
between remote tensors:

- the arguments of its first call that depend on earlier stages (`StageRoute.entry`): usually only the hidden states;
- other outputs of earlier stages' modules that it reads (`StageRoute.values`), such as a skip connection.

All ranks compute the same result, so nothing is communicated. If a stage needs the values of any other remote tensor,
an error is raised.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.data.batches import host_values, map_tensors, parts_of, tensors_in
from weft.devices import access
from weft.errors import ModelError, WeftError
from weft.models.inspect import blocks
from weft.models.inspect.chain import Chain
from weft.parallel.layers.index_check import StandIn
from weft.parallel.pipeline.probe import Probe
from weft.parallel.pipeline.remote import RemoteTensor, is_remote, local
from weft.parallel.random.draws import drawing_by
from weft.parallel.state.precision import Precision, cast_inputs, formats

#: (index of the call, index of the tensor among the call's outputs).
Value = tuple[int, int]
#: (model, batch) -> output.
ForwardFn = Callable[[nn.Module, Any], Any]


@dataclass(slots=True)
class _Call:
    """A recorded call to a module: the module's index in the chain, its tensor arguments, and its creation order."""

    site: int
    tensors: list[torch.Tensor]
    created: int


@dataclass(frozen=True, slots=True)
class EntryCall:
    """First call of a stage that depends on earlier stages. `leaves`: indices of its received tensor arguments."""

    call: int
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageRoute:
    """Tensors that cross stage boundaries in a forward.

    Attributes:
        calls: module index of each call.
        entry: for each stage, its first call with received arguments.
        values: for each stage, the other outputs of earlier stages that it receives, for itself or for later stages.
        last: last call of each stage.
    """

    calls: tuple[int, ...]
    entry: Mapping[int, EntryCall]
    values: Mapping[int, tuple[Value, ...]]
    last: Mapping[int, int]


class _AnyPositions:
    """Dummy positions for `weft.randn_like` and similar functions. The numbers that they draw are not used."""

    def next_draw(self, like: torch.Tensor, modules: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        del modules
        key = torch.zeros((), dtype=torch.int64, device=like.device)
        return key, [torch.arange(size, device=like.device) for size in like.shape]


class ValueSurvey:
    """Finds and stores the `StageRoute` of a model for each structure of batches.

    Args:
        model: the model before it is split. It is not modified.
        chain: modules of the model, in the order of their calls.
        stops: for each stage, the index of the block after its last one.
        precision: dtypes in which the stages will run, or None if they keep the model's.
    """

    def __init__(self, model: nn.Module, chain: Chain, stops: Sequence[int], precision: Precision | None = None):
        self.stages = stages_of_sites(chain, stops)
        self.paths = [site.path for site in chain.sites]
        self._towers = chain.towers
        self._model, self._local = _copied(model, chain, precision)
        sites = [_same_site(self._model, site) for site in chain.sites]
        self.probes = [Probe(site.module, site.path) for site in sites]
        self._calls: list[_Call] = []
        for number, site in enumerate(sites):
            blocks.children(site.parent)[site.key] = Surveyed(site.module, site.path, number, self)
        self._routes: dict[Any, StageRoute] = {}

    def route(self, forward: ForwardFn, batch: Any, *, training: bool) -> StageRoute:
        """Return the tensors that cross stages for a batch of this structure.

        Raises ModelError if a stage needs a value that cannot be received, if forward fails, draws random numbers
        outside blocks, or never calls a block.
        """
        key = _structure(batch), full_masks(batch), training
        if key not in self._routes:
            self._routes[key] = self._survey(forward, batch, training)
        return self._routes[key]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the recorded outputs of module calls after the context."""
        known = [{name: value.copy() if isinstance(value, dict | set) else value for name, value in vars(probe).items()}
                 for probe in self.probes]  # fmt: skip
        try:
            yield
        finally:
            for probe, values in zip(self.probes, known, strict=True):
                vars(probe).update(values)

    def _survey(self, forward: ForwardFn, batch: Any, training: bool) -> StageRoute:
        device = next((tensor.device for tensor in tensors_in(batch)), torch.device("cpu"))
        for module in (self._model, *(probe.module for probe in self.probes)):
            module.train(training)
        for each in self._local:
            each.real_device = device
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    setattr(module, name, buffer.to(device))
        self._calls.clear()
        drawn = random.getstate()
        handle = self._model.register_forward_pre_hook(self._without_towers, with_kwargs=True)
        try:
            with access.forked_generators(device), torch.no_grad(), drawing_by(_AnyPositions()):
                state = access.rng_states(device)
                output = self._forward(forward, batch)
                after = access.rng_states(device)
        finally:
            handle.remove()
            was_drawn = random.getstate() != drawn
            random.setstate(drawn)
        if was_drawn or not all(map(torch.equal, state, after)):
            raise ModelError(
                f"pp: forward of {type(self._model).__name__} draws random numbers outside its blocks, and each "
                f"stage would draw others. Draw them in the data or in a block, or use pp=1."
            )
        route = self._routed(list(tensors_in(output)))
        self._calls.clear()
        return route

    def _forward(self, forward: ForwardFn, batch: Any) -> Any:
        try:
            return forward(self._model, batch)
        except (WeftError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the model's code may raise any exception
            told = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200].rstrip(".: ")
            raise ModelError(
                f"pp: forward of {type(self._model).__name__} fails on a stage that has only some of its modules "
                f"({told}). If one process can train this model, use pp=1."
            ) from error

    def _without_towers(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return without_towers(model, self._towers, args, kwargs)

    def called(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call to a module, and return remote tensors instead of its outputs."""
        args, kwargs = map_tensors(local, args), map_tensors(local, kwargs)
        tensors = list(tensors_in((args, kwargs)))
        number, device = len(self._calls), device_of(tensors)
        marker = RemoteTensor.of(torch.empty(0, device="meta"), device, "")
        self._calls.append(_Call(site, tensors, marker.created))
        drawn = random.getstate()
        try:
            return remote_outputs(self.probes[site], args, kwargs, number, device, {})
        finally:
            random.setstate(drawn)  # a block may draw random numbers, but only its own stage runs it

    def _routed(self, outputs: list[torch.Tensor]) -> StageRoute:
        of_call = [self.stages[call.site] for call in self._calls]
        num_stages = 1 + max(self.stages, default=0)
        walk = _Walk(self._calls, of_call, self.paths)
        entry = {stage: found for stage in range(1, num_stages) if (found := walk.entry(stage)) is not None}
        needs: dict[int, set[Value]] = {}
        for stage in range(num_stages):
            walk.begin(stage, entry.get(stage))
            following = entry.get(stage + 1)
            if following is not None:
                walk.need([self._calls[following.call].tensors[leaf] for leaf in following.leaves])
            if stage == num_stages - 1:
                walk.need(outputs)
            needs[stage] = walk.found
        values = {
            stage: tuple(sorted({
                value for later in range(stage, num_stages) for value in needs[later] if of_call[value[0]] < stage
            }))
            for stage in range(1, num_stages)
        }  # fmt: skip
        last = {stage: call for call, stage in enumerate(of_call)}
        self._check_blocks(of_call, num_stages)
        return StageRoute(tuple(call.site for call in self._calls), entry, values, last)

    def _check_blocks(self, of_call: list[int], num_stages: int) -> None:
        missing = set(range(num_stages)) - set(of_call)
        if missing:
            path = next(path for path, stage in zip(self.paths, self.stages, strict=True) if stage in missing)
            raise ModelError(
                f"pp: forward never calls {path!r}, so a stage of the pipeline would have nothing to do. Call every "
                f"block, or use pp=1."
            )


class _Walk:
    """Finds the outputs of earlier stages on which a stage's tensors depend."""

    def __init__(self, calls: list[_Call], of_call: list[int], paths: list[str]):
        self._calls, self._of_call, self._paths = calls, of_call, paths
        self._stage, self._entered, self._received = 0, 0, set[int]()
        self.found: set[Value] = set()

    def entry(self, stage: int) -> EntryCall | None:
        """Return the first call of a stage whose arguments depend on earlier stages, or None."""
        for number, call in enumerate(self._calls):
            if self._of_call[number] != stage:
                continue
            leaves: list[int] = []
            for leaf, tensor in enumerate(call.tensors):
                self._stage, self._received, self.found = stage, set(), set()
                self.need([tensor])
                if self.found:
                    leaves.append(leaf)
            if leaves:
                return EntryCall(number, tuple(leaves))
        return None

    def begin(self, stage: int, entry: EntryCall | None) -> None:
        """Begin a stage: find the values that its calls need in addition to the arguments of the first call."""
        self._stage, self.found = stage, set()
        self._received, self._entered = set(), 0
        if entry is not None:
            call = self._calls[entry.call]
            self._received = {id(call.tensors[leaf]) for leaf in entry.leaves}
            self._entered = call.created
        for number, call in enumerate(self._calls):
            if self._of_call[number] == stage:
                entering = entry.leaves if entry is not None and number == entry.call else ()
                self.need([each for leaf, each in enumerate(call.tensors) if leaf not in entering], number)

    def need(self, tensors: Iterable[torch.Tensor], reader: int | None = None) -> None:
        """Add the outputs of earlier stages on which these tensors depend.

        Raises ModelError if they depend on a weight of another stage, or on an output of a later stage.
        """
        waiting = [(each, True) for each in tensors if is_remote(each)]
        seen: set[tuple[int, bool]] = set()
        while waiting:
            tensor, is_late = waiting.pop()
            assert isinstance(tensor, RemoteTensor)
            if (id(tensor), is_late) in seen or (is_late and id(tensor) in self._received):
                continue
            seen.add((id(tensor), is_late))
            if tensor.value is not None:
                self._need_value(tensor.value, reader)
            elif tensor.source and not tensor.parents:
                raise ModelError(
                    f"pp: forward reads a weight of {tensor.source!r} without calling that module, and it is on one "
                    "stage only. Call the module, or use pp=1."
                )
            waiting += [(parent, tensor.created > self._entered) for parent in tensor.parents]

    def _need_value(self, value: Value, reader: int | None) -> None:
        stage = self._of_call[value[0]]
        if stage > self._stage:
            source = self._paths[self._calls[value[0]].site]
            what = "its output" if reader is None else repr(self._paths[self._calls[reader].site])
            again = " again" if reader is not None and reader > value[0] else ""
            raise ModelError(
                f"pp: {what} is computed{again} on stage {self._stage}, from the output of {source!r} on a later "
                "one. A block must run once, or only in sequence with blocks of its own stage. Use a split that "
                "keeps these blocks on one stage, or pp=1."
            )
        if stage < self._stage:
            self.found.add(value)


class Surveyed(StandIn):
    """Placeholder for a module of the chain in the copied model. It records calls."""

    def __init__(self, module: nn.Module, path: str, number: int, survey: ValueSurvey):
        super().__init__(module, path)
        self.__dict__["_survey"] = number, survey

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - isinstance asks for it
        return kind_of(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        number, survey = self.__dict__["_survey"]
        return survey.called(number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        number, survey = self.__dict__["_survey"]
        probe = survey.probes[number]
        return remote_attribute(probe, probe.module, "", name)


class InnerModule(StandIn):
    """Placeholder for a submodule of a module in another stage: it has attributes but cannot be called."""

    def __init__(self, probe: Probe, inner: str):
        super().__init__(probe.module.get_submodule(inner), f"{probe.path}.{inner}")
        self.__dict__["_part"] = probe, inner

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - isinstance asks for it
        return kind_of(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise ModelError(
            f"pp: forward calls {self.path!r} without calling the block around it, and it is on one stage only. Call "
            "the block, or use pp=1."
        )

    def __getattr__(self, name: str) -> Any:
        probe, inner = self.__dict__["_part"]
        return remote_attribute(probe, self.stands_for, inner, name)


def kind_of(stand_in: StandIn) -> type:
    """Return the class that isinstance checks: the class of the replaced module."""
    return type(stand_in.stands_for) if "_for" in stand_in.__dict__ else type(stand_in)


def remote_attribute(probe: Probe, module: nn.Module, inner: str, name: str) -> Any:
    """Return an attribute of a module on another stage: weights as remote tensors, modules as `InnerModule`.

    Args:
        probe: calls the module of the chain.
        module: that module or a submodule of it, which has the attribute.
        inner: path of `module` in the probe's module; "" for the module itself.
        name: name of the attribute.

    Raises:
        ModelError: if the module's calls change the attribute, or its value is unknown.
    """
    value = getattr(module, name)
    if (inner, name) in probe.state:
        path = ".".join(filter(None, (probe.path, inner, name)))
        raise ModelError(
            f"pp: forward reads {path!r}, which that module "
            f"changes when it runs on another stage. Return the value from the block, or use pp=1."
        )
    if probe.guesses and (value is None or isinstance(value, float)):
        raise ModelError(
            f"pp: forward reads {name!r} of {probe.path!r}, which is on another stage and cannot be called without "
            "values, so its value is unknown. Return it from the block, or use pp=1."
        )
    if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, RemoteTensor):
        return RemoteTensor.of(value, torch.device("cpu"), probe.path)
    if not isinstance(value, nn.Module):
        return value
    path = blocks.join_path(inner, name)
    if path not in probe.inner_modules:
        probe.inner_modules[path] = InnerModule(probe, path)
    return probe.inner_modules[path]


def remote_outputs(
    probe: Probe, args: Any, kwargs: Any, call: int, device: torch.device, received: Mapping[Value, torch.Tensor]
) -> Any:  # fmt: skip
    """Return a module's outputs as remote tensors, except for the received ones.

    Also set the attributes with tensors that the module's forward would set.
    """
    returned = probe.returned(args, kwargs)
    count = iter(range(2**31))

    def remote(meta: torch.Tensor) -> torch.Tensor:
        value = call, next(count)
        if value in received:
            return received[value]
        made = RemoteTensor.of(meta, device, probe.path)
        made.value = value
        return made

    output = map_tensors(remote, returned.value)
    for (path, name), found in returned.set_tensors:
        setattr(probe.module.get_submodule(path), name, map_tensors(remote, found))
    return output


def without_towers(
    model: nn.Module, towers: Sequence[str], args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the forward arguments with None for those in `towers`, such as images.

    These are read only before the first block, and their features are already part of the hidden states.
    """
    names = inspect.signature(model.forward).parameters
    placed = [None if name in towers else each for name, each in zip(names, args, strict=False)]
    return (*placed, *args[len(placed) :]), {name: None if name in towers else each for name, each in kwargs.items()}


def stages_of_sites(chain: Chain, stops: Sequence[int]) -> list[int]:
    """Return the stage index of each module in `chain.sites`."""
    last = len(stops) - 1
    found = [0] * len(chain.before)
    first = 0
    for stage, stop in enumerate(stops):
        found += [stage] * len(chain.upto(stop, first))
        first = stop
    return found + [last] * len(chain.after)


def device_of(tensors: list[torch.Tensor]) -> torch.device:
    """Return the device of the first tensor, or the CPU if the list is empty."""
    first = tensors[0] if tensors else None
    if isinstance(first, RemoteTensor):
        return first.real_device if first.received is None else first.received.device
    return torch.device("cpu") if first is None else first.device


def _structure(batch: Any) -> Any:
    """Return a hashable description of a batch's structure and dtypes, without sizes."""
    if isinstance(batch, torch.Tensor):
        return batch.dim(), batch.dtype
    parts = parts_of(batch)
    if parts is None:
        return type(batch)
    return type(batch), tuple(map(str, batch)) if isinstance(batch, Mapping) else (), *map(_structure, parts)


def full_masks(batch: Any) -> tuple[bool, ...]:
    """Return, for each tensor of a batch with "mask" in its name, whether it masks nothing.

    Transformers drops such a mask, so blocks get other arguments, and position biases that include the mask have no
    dimension of samples.
    """
    if isinstance(batch, torch.Tensor) or (parts := parts_of(batch)) is None:
        return ()
    found: list[bool] = []
    for name, part in zip(batch if isinstance(batch, Mapping) else ("",) * len(parts), parts, strict=True):
        if "mask" in str(name) and type(part) is torch.Tensor and not part.is_meta:
            values = host_values(part)
            found.append(bool((part if values is None else values).all()))
        found += full_masks(part)
    return tuple(found)


def _same_site(model: nn.Module, site: blocks.Site) -> blocks.Site:
    parent = site.path.rpartition(".")[0]
    return blocks.Site(model.get_submodule(parent) if parent else model, site.key, site.path)


def _copied(
    model: nn.Module, chain: Chain, precision: Precision | None
) -> tuple[nn.Module, list[RemoteTensor]]:  # fmt: skip
    """Return a copy of a model with the chain's modules on the meta device, and its other weights as remote tensors.

    Its weights and inputs have the dtypes of `precision`, as in the stages: modules fail on inputs of another dtype.
    Raises ModelError if the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for site in chain.sites:
        for part in site.module.modules():
            attributes = (value for value in vars(part).values() if isinstance(value, torch.Tensor))
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False), *attributes):
                memo.setdefault(id(tensor), _on_meta(tensor))
    for param in model.parameters():
        memo.setdefault(id(param), _on_meta(param))
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # the model's own attributes
        raise ModelError(
            f"pp: {type(model).__name__} cannot be copied ({str(error)[:80]}), and its forward is first followed in a "
            f"copy. Keep what cannot be copied out of the model, or use pp=1."
        ) from error
    if precision is not None:
        cast_inputs(copied, precision)
        for param, dtype in formats(copied, precision).items():
            if param.dtype != dtype:
                param.data = param.data.to(dtype)
    sites = [_same_site(copied, site) for site in chain.sites]
    return copied, _make_local(copied, {part for site in sites for part in site.module.modules()})


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    return torch.empty_like(tensor, device="meta")


def _make_local(model: nn.Module, inside: set[nn.Module]) -> list[RemoteTensor]:
    """Replace weights and meta-device buffers of modules that are not in `inside` by remote tensors without a source.

    Every stage has these weights. Return the remote tensors.
    """
    found: list[RemoteTensor] = []
    for module in model.modules():
        if module in inside:
            continue
        params = dict(module.named_parameters(recurse=False))
        params |= {name: each for name, each in module.named_buffers(recurse=False) if each.is_meta}
        for name, param in params.items():
            delattr(module, name)
            module.__dict__[name] = RemoteTensor.of(param, torch.device("cpu"), "")
            found.append(module.__dict__[name])
    return found
