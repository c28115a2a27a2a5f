"""Replicas that meet only every H steps: what each trains by itself, and the outer step that joins them.

Between two meetings a replica is a world of its own (`Mesh.replica`). At a meeting, with w_r the weights of
replica r, R replicas, and the anchor that all of them started from:

    d       = mean over r of (anchor - w_r)         what travels, encoded where the plan's `compress` says so
    average: anchor -= d                            which is the mean of the weights
    diloco:  m = mu m + d;  anchor -= lr (d + mu m)  SGD with Nesterov momentum
    w_r     = anchor

Anchor and momentum lie as the masters do: a rank has those of its part alone. Optimizer states stay each replica's own.
Buffers that training moves, as running statistics, are averaged.

Method: Douillard et al. 2023, arXiv 2311.08105 (DiLoCo; its outer step has lr 0.7 and momentum 0.9); Stich 2019,
arXiv 1805.09767 (averages of weights).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.comm.collectives import all_gather, all_reduce, broadcast, start_all_reduce
from weft.comm.mesh import Axis, Mesh
from weft.comm.pending import Pending
from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.wire_format import find_wire
from weft.config.plan import Plan
from weft.errors import CommError
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import DataParallel

#: Elements that travel at once: more would need as much memory again beside the masters.
_AT_ONCE = 2**24
_ATTRIBUTE = "_weft_rare_sync"


@dataclass(slots=True)
class Bundle:
    """Tensors that travel together. anchor: theirs, one after another. momentum: of the outer step; None: it has none.

    places: of each among all tensors that are held. sizes: of each. name: the same on all ranks that hold the same.
    fragment: which one of the model's, where these meet one after another. owed: what replicas of a
    checkpoint left out, which goes with the next meeting.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor | None
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    name: str
    fragment: int = 0
    owed: torch.Tensor | None = None

    def with_carried_residual(self, delta: torch.Tensor) -> torch.Tensor:
        """Return a change of the weights and what is owed before; `delta` is spent."""
        return delta if self.owed is None else delta.add_(self.owed)

    def among(self, held: Sequence[FlatSlice]) -> list[FlatSlice]:
        """Those of what is held that are its own."""
        return [held[place] for place in self.places]


class RareSync:
    """The meetings of one model's replicas, on one rank.

    since: steps since the last meeting. meetings: how many there were. replicas: their number. place: which one this
    rank is part of. outer_lr, outer_momentum: of `diloco`. meets_now: the step under way ends with a meeting, whatever
    the plan says: it is the last. differs: weights may be others than the anchor, since this replica has trained.

    Args:
        model: parallelized.
        engine: of the model, on the mesh of its replica.
        mesh: of all replicas; of one alone where each is a world of its own.
        plan: of all replicas; None: the mesh's.
    """

    #: Whether each replica is a world of its own, which hears of the others at meetings alone.
    is_apart = False

    def __init__(self, model: nn.Module, engine: DataParallel, mesh: Mesh, plan: Plan | None = None):
        plan = plan or mesh.plan
        self.plan, self.way, self.every = plan, plan.sync_method, plan.sync_every
        self.outer_lr, self.outer_momentum = 0.7, 0.9
        self.since = self.meetings = 0
        self.meets_now = self.differs = False
        self.mesh, self._axis, self._engine = mesh, mesh["dp_replicate"], engine
        self.replicas, self.place = self._axis.size, self._axis.rank
        self._coders = None if plan.compress == "none" else Coders(find_wire(plan.compress))
        buffers = {engine.axes.saved_name(name) for name, one in model.named_buffers() if one.is_floating_point()}
        trained = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
        self._buffers = buffers - trained
        self._names: frozenset[str] | None = None
        self._runs: list[Bundle] = []
        self._is_away = False  # the anchor is in the model, and its weights are here

    @property
    def is_due(self) -> bool:
        """Whether the step under way ends with a meeting."""
        return self.meets_now or self.since + 1 >= self.every

    @torch.no_grad()
    def begin(self) -> None:
        """Let all replicas start from the first one's weights. All ranks call it, once the optimizer is adopted."""
        if self._runs:
            return
        held = self.held()
        self._check_identical(held)
        for one in held:
            broadcast(one.flat, self._axis)
            _bring_home(one)
        self._engine.publish()
        self.take_anchor()

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Let the weights as they are be what replicas started from; the outer momentum starts at zero."""
        held = self.held()
        self._runs, self.differs = [], False
        for places in self._split_part(held):
            run = [held[place] for place in places]
            anchor = torch.cat([one.flat for one in run])
            has_momentum = self.way == "diloco" and not self._is_buffer(run)
            momentum = torch.zeros_like(anchor) if has_momentum else None
            sizes = tuple(one.flat.numel() for one in run)
            fragment = self._fragment_of(run[0].name)
            self._runs.append(Bundle(anchor, momentum, tuple(places), sizes, run[0].name, fragment))

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step, and meet where that is due. All ranks call it after the weights are published.

        Raises:
            CommError: where weights are not finite: nothing was exchanged then.
        """
        is_due, self.meets_now = self.is_due, False
        self.since, self.differs = self.since + 1, True
        if is_due:
            self._sync()

    def _sync(self) -> None:
        self._engine.arrive()
        held = self.held()
        self._refuse_unfit(held)
        if self._coders is not None:
            self._coders.take_turn(self.meetings)
        for run in self._runs:
            here = run.among(held)
            delta = run.with_carried_residual(run.anchor - torch.cat([one.flat for one in here]))
            all_reduce(delta, self._axis, wire=self._coder(run, here))
            run.owed = None
            self._step(run, delta.div_(self.replicas), averages=self._is_buffer(here))
            self._put(here, run)
        if self._coders is not None:
            self._coders.commit()
        self._engine.publish()
        self.since, self.meetings, self.differs = 0, self.meetings + 1, False

    def _coder(self, run: Bundle, here: Sequence[FlatSlice]) -> Coder | None:
        """Return how a run travels; None: as it is."""
        return None if self._coders is None or self._is_buffer(here) else self._coders[f"sync {run.name}"]

    def _step(self, run: Bundle, delta: torch.Tensor, *, averages: bool) -> None:
        """The outer step; `delta` is spent."""
        if averages or run.momentum is None:
            run.anchor.sub_(delta)
            return
        run.momentum.mul_(self.outer_momentum).add_(delta)
        run.anchor.sub_(delta.add_(run.momentum, alpha=self.outer_momentum), alpha=self.outer_lr)

    def _put(self, here: Sequence[FlatSlice], run: Bundle) -> None:
        """Let the weights of a run be its anchor."""
        _put(here, run.anchor, run.sizes)

    def held(self) -> list[FlatSlice]:
        """Return what this rank trains, masters, and buffers that training moves, in its own memory; no collective."""
        engine = self._engine
        names = frozenset(map(engine.axes.saved_name, engine.local_weights())) | self._buffers
        return [one for one in engine.stretches() if one.name in names and one.flat.is_floating_point()]

    def anchors(self) -> list[FlatSlice]:
        """Return the anchor of what `held` gives."""
        return self._placed((run, run.anchor) for run in self._runs)

    def momenta(self) -> list[FlatSlice]:
        """Return the outer momentum of what has one."""
        return self._placed((run, run.momentum) for run in self._runs if run.momentum is not None)

    def owed(self) -> list[FlatSlice]:
        """Return what this replica left out of what it sent, and owes to the next meeting."""
        found: list[tuple[Bundle, torch.Tensor]] = []
        for run in self._runs:
            debt = run.owed
            if debt is None and self._coders is not None and self._coders.has_residual:
                kept = dict(self._coders[f"sync {run.name}"].states())
                debt = next((one.view(-1) for name, one in kept.items() if name.endswith("/residual")), None)
            if debt is not None:
                found.append((run, debt))
        return self._placed(found)

    @torch.no_grad()
    def load_residual(self, source: StateSource, whose: Sequence[str], replicas: int) -> None:
        """Let what replicas of a checkpoint owed go with the next meeting. All ranks call it.

        Args:
            source: the checkpoint's tensors.
            whose: what names of the debts begin with that this replica takes.
            replicas: by how many its share is divided, since meetings take means.
        """
        held = self.held()
        for run in self._runs:
            total = torch.zeros_like(run.anchor)
            parts = zip(run.among(held), total.split(list(run.sizes)), strict=True)
            for one, part in parts:
                for start in whose:
                    if start + one.name in source.entries:
                        like = replace(one, name=start + one.name, flat=torch.empty_like(part), home=None)
                        like.fill(source)
                        part.add_(like.flat)
            run.owed = total.div_(replicas) if total.any() else None

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Let the model be the anchor while inside, for evaluation and export. All ranks call it."""
        if not self.differs or self._is_away:
            yield
            return
        self._swap()
        self._is_away = True
        try:
            yield
        finally:
            self._is_away = False
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._engine.arrive()
        held = self.held()
        for run in self._runs:
            here = run.among(held)
            own = torch.cat([one.flat for one in here])
            _put(here, run.anchor, run.sizes)
            run.anchor.copy_(own)
        self._engine.publish()

    def _placed(self, tensors: Iterable[tuple[Bundle, torch.Tensor]]) -> list[FlatSlice]:
        held, found = self.held(), list[FlatSlice]()
        for run, flat in tensors:
            parts = zip(run.among(held), flat.split(list(run.sizes)), strict=True)
            found += [replace(one, flat=part, home=None) for one, part in parts]
        return found

    def _fragment_of(self, name: str) -> int:
        """With which fragment of the model a tensor meets, by its name in checkpoints; alike on all its ranks."""
        del name
        return 0

    def _is_buffer(self, run: Sequence[FlatSlice]) -> bool:
        return run[0].name in self._buffers

    def _split_part(self, held: Sequence[FlatSlice]) -> Iterator[list[int]]:
        """Places of what travels together: of one format, and held by the same ranks.

        What several ranks of a replica hold must be encoded alike on all of them, or their copies would part: a scale
        covers neighbours, and ranks of tp have other parts of what is cut beside what they share.
        """
        kinds: dict[tuple[object, ...], list[int]] = {}
        for place, one in enumerate(held):
            fragment, ranks = self._fragment_of(one.name), frozenset(one.deal.ranks)
            kind = fragment, one.flat.dtype, one.flat.device, one.name in self._buffers, ranks
            kinds.setdefault(kind, []).append(place)
        for places in kinds.values():
            run, numel = list[int](), 0
            for place in sorted(places, key=lambda place: held[place].name):
                if run and numel + held[place].flat.numel() > _AT_ONCE:
                    yield run
                    run, numel = [], 0
                run.append(place)
                numel += held[place].flat.numel()
            yield run

    def _refuse_unfit(self, held: Sequence[FlatSlice]) -> None:
        """CommError on all ranks, before anything travels, where weights of some are not finite."""
        bad = sum(not bool(one.flat.isfinite().all()) for one in held)
        total = all_reduce(torch.tensor([float(bad)], dtype=torch.float64, device=self.mesh.device), self.mesh.world)
        if float(total):
            own = torch.tensor([int(bad > 0)], device=self.mesh.device)
            said = all_gather(own, self.mesh.world).tolist()
            ranks = [str(rank) for rank, one in zip(self.mesh.world.ranks, said, strict=True) if one]
            raise CommError(
                f"sync={self.plan.sync}: weights of rank {', '.join(ranks)} are not finite, and nothing was "
                "exchanged. Resume from the last checkpoint with a lower learning rate."
            )

    def _check_identical(self, held: Sequence[FlatSlice]) -> None:
        """CommError on all ranks where replicas do not hold the same tensors."""
        device = self.mesh.device
        count = torch.tensor([len(held), sum(one.flat.numel() for one in held)], device=device)
        most, least = (all_reduce(count.clone(), self._axis, op=op) for op in ("max", "min"))
        unlike = (most != least).any().to(torch.float64).reshape(1)
        if float(all_reduce(unlike, self.mesh.world)):
            raise CommError(
                f"sync={self.plan.sync}: replicas built different models. Build the same model on every rank."
            )


def _put(here: Sequence[FlatSlice], flat: torch.Tensor, sizes: Sequence[int]) -> None:
    for one, part in zip(here, flat.split(list(sizes)), strict=True):
        one.flat.copy_(part)
        _bring_home(one)


def move(here: Sequence[FlatSlice], by: torch.Tensor, sizes: Sequence[int]) -> None:
    """Add to what is here.

    Args:
        here: stretches of tensors.
        by: what to add, one after another, 1-D, of their format.
        sizes: elements of each.
    """
    for one, part in zip(here, by.split(list(sizes)), strict=True):
        one.flat.add_(part)
        _bring_home(one)


def _bring_home(one: FlatSlice) -> None:
    if one.home is not None:
        one.home.copy_(one.flat.view(one.home.shape))


class _Kept:
    """Keeps it with its module, but out of copies and pickles of that."""

    def __init__(self, sync: RareSync):
        self.sync = sync

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def keep_sync(model: nn.Module, sync: RareSync) -> None:
    """Keep with a model how its replicas meet, in the place of what it had."""
    setattr(model, _ATTRIBUTE, _Kept(sync))


def rare_sync(model: nn.Module) -> RareSync | None:
    """Return how a model's replicas meet; None where they do so in every step."""
    kept = getattr(model, _ATTRIBUTE, None)
    return None if kept is None else kept.sync


def anchored(model: nn.Module) -> AbstractContextManager[None]:
    """Let a model be what its replicas had at their last meeting while inside; itself where they meet in every step."""
    sync = rare_sync(model)
    return nullcontext() if sync is None else sync.anchored()


# Replicas that meet fragment by fragment: what travels does so while the next step computes.


@dataclass(slots=True)
class _Sent:
    """A run on its way. own: (anchor - weights) of this replica when it left. pending: the sum over replicas."""

    run: Bundle
    own: torch.Tensor
    pending: Pending


class StreamedSync(RareSync):
    """The meetings of one model's replicas, of which fragments meet one after another.

    since: steps since the last round of H steps ended.

    Args:
        model: parallelized.
        engine: of the model, on the mesh of its replica.
        mesh: of all replicas.
    """

    def __init__(self, model: nn.Module, engine: DataParallel, mesh: Mesh):
        super().__init__(model, engine, mesh)
        self.fragments = self.plan.sync_fragments
        self._places = _places(model, engine, mesh, self.fragments)
        #: After which step of a round each fragment leaves.
        self._leaves = [(number + 1) * self.every // self.fragments for number in range(self.fragments)]
        self._sent: list[_Sent] = []
        self._is_under_way = False  # a fragment, of which this rank may hold nothing

    @property
    def is_due(self) -> bool:
        """Whether a fragment leaves after the step under way."""
        return self.meets_now or self.since + 1 in self._leaves

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Let the weights as they are be what replicas started from; nothing is on its way."""
        self._finish()
        super().take_anchor()

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step, take what arrived, and send what is due. All ranks call it after the weights are published.

        Raises:
            CommError: where weights are not finite: nothing was exchanged then.
        """
        meets_now, self.meets_now = self.meets_now, False
        self.since, self.differs = self.since + 1, True
        self._engine.arrive()
        self._receive()
        if meets_now:
            self._sync()
        elif self.since in self._leaves:
            self._send(self._leaves.index(self.since))
        self.since %= self.every

    def sent(self) -> list[FlatSlice]:
        """Return this replica's weights of the fragment that is on its way, as they were when it left."""
        return self._placed((one.run, one.run.anchor - one.own) for one in self._sent)

    @torch.no_grad()
    def send_again(self, source: StateSource, start: str) -> None:
        """Let the fragment leave again that was on its way when a checkpoint was made. All ranks call it.

        Args:
            source: the checkpoint's tensors.
            start: of the names that this replica's have there.
        """
        held = self.held()
        self._is_under_way = any(name.startswith(start) for name in source.entries)
        for run in self._runs:
            here = run.among(held)
            if not all(start + one.name in source.entries for one in here):
                continue  # another one, or it was cut otherwise: what it learnt goes with the next time
            weights = torch.empty_like(run.anchor)
            for one, part in zip(here, weights.split(list(run.sizes)), strict=True):
                replace(one, name=start + one.name, flat=part, home=None).fill(source)
            self._start(run, run.anchor - weights, held)

    def _send(self, fragment: int) -> None:
        held = self.held()
        self._refuse_unfit([one for one in held if self._fragment_of(one.name) == fragment])
        self._is_under_way = True
        for run in self._runs:
            if run.fragment == fragment:
                self._start(run, run.anchor - torch.cat([one.flat for one in run.among(held)]), held)

    def _start(self, run: Bundle, own: torch.Tensor, held: list[FlatSlice]) -> None:
        if self._coders is not None:
            self._coders.take_turn(self.meetings)
        coder = self._coder(run, run.among(held))
        self._sent.append(
            _Sent(run, own, start_all_reduce(run.with_carried_residual(own.clone()), self._over, wire=coder))
        )

    @property
    def _over(self) -> Axis:
        # A list of its own: whatever begins next on the mesh must not wait for the first half of this.
        return replace(self._axis, staged=[])

    def _receive(self) -> None:
        """Take the outer step of what arrived, and add to it what this replica learnt meanwhile."""
        if not self._is_under_way:
            return
        held = self.held()
        for one in self._sent:
            run, here = one.run, one.run.among(held)
            before = run.anchor - one.own
            self._step(run, one.pending.wait().div_(self.replicas), averages=self._is_buffer(here))
            move(here, run.anchor - before, run.sizes)
            run.owed = None
        if self._coders is not None:
            self._coders.commit()
        self._sent.clear()
        self._engine.publish()
        self.meetings, self._is_under_way = self.meetings + 1, False

    def _finish(self) -> None:
        """Wait for what is on its way, and forget it."""
        for one in self._sent:
            one.pending.wait()
        if self._coders is not None:
            self._coders.discard()
        self._sent.clear()
        self._is_under_way = False

    def _fragment_of(self, name: str) -> int:
        return self._places.get(name, 0)


def _places(model: nn.Module, engine: DataParallel, mesh: Mesh, fragments: int) -> dict[str, int]:
    """The fragment of each tensor, by its name in checkpoints: neighbours, and about as many elements in each.

    Each stage of a pipeline is cut into all fragments, so that its ranks send as much at a time. What two stages have
    is in the fragment of the first.
    """
    axes, own = engine.axes, dict[str, int]()
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        own.setdefault(axes.saved_name(name), torch.Size(axes.whole_shape(name, one.shape)).numel())
    found: dict[str, int] = {}
    for sizes in _of_stages(own, mesh["pp"], mesh.device):
        total, before = sum(sizes.values()), 0
        for name, numel in sizes.items():
            middle = before + numel / 2
            found.setdefault(name, min(int(middle / max(total, 1) * fragments), fragments - 1))
            before += numel
    return found


def _of_stages(own: dict[str, int], stages: Axis, device: torch.device) -> Iterator[dict[str, int]]:
    text = json.dumps(own).encode()
    length = int(all_reduce(torch.tensor([len(text)], device=device), stages, op="max"))
    padded = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8).to(device)
    for row in all_gather(padded, stages).view(stages.size, -1).cpu():
        yield json.loads(bytes(row.tolist()))


def attach_local_sgd(model: nn.Module, engine: DataParallel, mesh: Mesh) -> None:
    """Keep with a model how its replicas meet, where the plan says that they do so rarely.

    Args:
        model: parallelized.
        engine: of the model.
        mesh: of all replicas.
    """
    if mesh.plan.sync != "step":
        kind = StreamedSync if mesh.plan.sync_fragments else RareSync
        keep_sync(model, kind(model, engine, mesh))
