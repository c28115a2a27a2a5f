"""Replicas that meet fragment by fragment: what travels does so while the next step computes.

Of N fragments the k-th (from 1) leaves after step k H / N, rounded down, of each H steps. With w_r(t) its weights on
replica r after step t, when it leaves:

    d       = mean over r of (anchor - w_r(t))      on its way during step t + 1
    anchor  = outer step of d                       as where all meet at once
    w_r     = anchor + (w_r(t + 1) - w_r(t))        what the replica learnt meanwhile is kept

So a step waits for one fragment at most, and as many bytes travel in H steps as where all meet at once. After the last
step of a run all fragments meet, and weights are the anchor.

Method: Douillard et al. 2025, arXiv 2501.18512 (Streaming DiLoCo). Its replicas mix what they have with the anchor;
here they keep what they learnt on the way and nothing else, so that nothing is lost and nothing is counted twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.comm import Pending, all_gather, all_reduce, start_all_reduce
from weft.mesh import Axis, Mesh
from weft.parallel.local_tensors import StateSource, Stretch
from weft.parallel.placement import DataParallel
from weft.parallel.zero.meetings.rare_sync import Bundle, RareSync, keep_sync, move


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
            self._meet()
        elif self.since in self._leaves:
            self._send(self._leaves.index(self.since))
        self.since %= self.every

    def sent(self) -> list[Stretch]:
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

    def _start(self, run: Bundle, own: torch.Tensor, held: list[Stretch]) -> None:
        if self._coders is not None:
            self._coders.take_turn(self.meetings)
        coder = self._coder(run, run.among(held))
        self._sent.append(_Sent(run, own, start_all_reduce(run.with_debt(own.clone()), self._over, wire=coder)))

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


def meet_rarely(model: nn.Module, engine: DataParallel, mesh: Mesh) -> None:
    """Keep with a model how its replicas meet, where the plan says that they do so rarely.

    Args:
        model: parallelized.
        engine: of the model.
        mesh: of all replicas.
    """
    if mesh.plan.sync != "step":
        kind = StreamedSync if mesh.plan.sync_fragments else RareSync
        keep_sync(model, kind(model, engine, mesh))
