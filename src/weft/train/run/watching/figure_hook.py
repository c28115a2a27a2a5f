"""Every rank's observer: hands a step's numbers to the thread of figures, which reports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from weft.env import RankEnv
from weft.mesh import members_of
from weft.monitor import StepRecord
from weft.monitor.figures import Collector, GpuSource, HostSource, StepFigures, host_name
from weft.spec.figures import series
from weft.train.engine import Engine
from weft.train.loop import Hook

#: The class of a rank's memory that is its peak, and what of the peak no other class has.
_PEAK, _REST = series("memory.bytes", "peak"), series("memory.bytes", "rest")


class FigureHook(Hook):
    """Starts a rank's `Collector` with what its engine, its machine and its GPU tell.

    Args:
        engine: of this rank.
        place: of this process among the ranks; None: a single rank.
        folder: of the run.
        every_s: seconds between reports.
        publish: on the first rank, takes the event of all ranks; None on the others.
        on_slow: on the first rank, takes an event of a rank that became slow, or is no longer.
    """

    def __init__(
        self,
        engine: Engine,
        place: RankEnv | None,
        folder: Path,
        every_s: float,
        publish: Callable[[Mapping[str, object]], None] | None,
        on_slow: Callable[[Mapping[str, object]], None] | None = None,
    ):
        measures, plan = engine.measures(), engine.plan
        host = HostSource(folder, with_machine=place is None or place.local_rank == 0)
        gpu = [GpuSource(measures.gpu).read] if measures.gpu else []
        self._measures, self._on_gpu = measures, measures.gpu is not None
        self._memory: dict[str, float] = {}
        self._peak = 0
        self._num_steps = 0
        self.collector = Collector(
            engine.rank,
            host_name(),
            measures.board,
            every_s,
            of_rank=[host.of_process, *gpu, self._memory_now],
            of_host=[host.of_machine],
            totals=measures.traffic,
            publish=publish,
            # Stages of a pipeline do different work, and cannot be compared. Only the first rank compares.
            groups=[members_of(plan, rank, ("pp",)).index(rank) for rank in range(plan.world_size if publish else 0)],
            on_slow=on_slow,
        )

    def on_start(self, start_step: int) -> None:
        self.collector.start()

    def on_step(self, record: StepRecord) -> str | None:
        self._num_steps += 1
        self._peak = record.memory_bytes
        if self._num_steps == 2:
            # The first step has made what there is to hold. Asked here: between two steps nothing of it changes.
            self._memory = dict(self._measures.memory())
        self.collector.put(
            StepFigures(record.step, record.seconds, record.exposed, record.busy_s, record.data_s, record.own)
        )
        return None

    def on_end(self, step: int, reason: str) -> None:
        self.collector.close()

    def _memory_now(self) -> Mapping[str, float]:
        """Bytes by class; what is left of a GPU's peak are activations and buffers."""
        found, peak = self._memory, float(self._peak)
        if not peak:
            return found
        # On a CPU the peak is the whole process, libraries included, and a rest would say nothing.
        rest = {_REST: max(0.0, peak - sum(found.values()))} if found and self._on_gpu else {}
        return {**found, **rest, _PEAK: peak}
