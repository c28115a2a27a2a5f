"""State of a model's random numbers on one rank, and dropout by position.

A random number is a function of (seed, step, module path, position). A position is (sample of the global batch, token
of the sequence, feature or head). Ranks with the same computation therefore drop the same elements. Ranks with a part
of the tokens, heads or features drop the elements that one process would drop there. Dropout does not depend on how a
batch is split into ranks and microbatches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.data.batches import tensors_in
from weft.data.random_state import preserve_generators, seed_generators
from weft.errors import ModelError
from weft.memory.graph_recorder import send_numbers
from weft.memory.opaque import Handle
from weft.parallel.context.apply import Context
from weft.parallel.context.kernels import AttentionDrop
from weft.parallel.random.draws import drawing_by
from weft.parallel.random.streams import SampleNumbers, ShardPosition, keep_mask_at, key_of, rows_of_samples
from weft.private_torch import graph_task, uncompiled

#: Attribute of a batch's tensors that holds the indices of their samples.
MARK = "_weft_samples"
#: Maximum number of calls to a module per forward of its block that run inside a compiled block. Later calls run
#: outside.
_CALLS = 4


def marked_samples(batch: Any) -> SampleNumbers | None:
    """Return the sample indices of a batch from `run.shard`, or None if its tensors do not have them."""
    return next((found for one in tensors_in(batch) if (found := getattr(one, MARK, None)) is not None), None)


@dataclass
class _Forward:
    """State of the current forward.

    Attributes:
        is_driven: True if a train step chose key and samples.
        key: key of the step's random numbers.
        samples: samples of the microbatch, or None if a rank's samples follow the previous rank's.
        draws: number of random tensors that each module has drawn, by path.
        is_replay: True in a recomputation by backward.
    """

    is_driven: bool = False
    key: int = 0
    samples: SampleNumbers | None = None
    draws: dict[str, int] = field(default_factory=dict)
    is_replay: bool = False


class Drops:
    """State of one model's random numbers on one rank: the step's key and the microbatch's samples.

    part: this rank's position in tp shards, or None if nothing is sharded. context: the model's context parallelism, or
    None without it.
    """

    def __init__(self, mesh: Mesh, seed: int, part: ShardPosition | None, context: Context | None):
        self.part = part or ShardPosition(mesh["tp"])
        self.sites: list[DropSite] = []
        #: Sample indices as a tensor that compiled blocks read. None if they follow from the rank, or if `is_told` is
        #: False: rows are not samples, or there are no samples. Dropout then runs outside compiled blocks.
        self.told_samples: Tensor | None = None
        self.is_told = True
        self._data = mesh.data
        self._cp, self._plan = mesh["cp"], mesh.plan
        self._seed_part = self._cp.rank if context is None or context.shards_samples else 0
        self.device = mesh.device
        self._context, self._seed = context, seed
        self.num_keys = 0  #: number of keys from `next_key`
        self._forward = _Forward()
        self._compiled_key: int | None = None  # the key in compiled blocks
        self._fixed: FixedDraws | None = None
        self._kept: contextlib.ExitStack | None = None  # the loop's generator states, during its forward
        #: True if noise of a sample may depend on its index. Recorded or compiled code draws noise from torch's
        #: generators instead.
        self.may_place_noise = self._cp.size == 1 and not mesh.plan.compile and not mesh.plan.graphs
        self.places_noise = False  #: True if it does in this step, which has no given seeds
        self.model: weakref.ref[nn.Module] | None = None  #: paths of its modules are part of random keys
        self._paths: dict[int, str] = {}  # by id of the module, filled at the first draw
        self._draw_sites: dict[str, DropSite] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Drops:
        return self  # a copy of the model runs on the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def key(self) -> int:
        """Key of this step's random numbers, equal on all ranks."""
        return self._forward.key

    def next_key(self) -> int:
        """Return a key from the seed and a counter, for a step or forward that has no index."""
        self.num_keys += 1
        return key_of(self._seed, self.num_keys)

    @contextlib.contextmanager
    def microbatch(
        self, key: int, samples: SampleNumbers | None, replayed: Mapping[str, int] | None = None
    ) -> Iterator[None]:
        """Set the key and the samples of a forward, or of its recomputation, within the context.

        samples: samples of the microbatch, or None if a rank's samples follow those on the rank before. replayed: for a
        recomputation, the number of random tensors that each module had drawn when forward came to the recomputed part.
        None for a forward.
        """
        before = self._forward
        self._forward = _Forward(True, key, samples, dict(replayed or {}), replayed is not None)
        self._pass_to_compiled()
        if replayed is None:
            self.restart()
        else:
            self.part.is_open = False  # a block begins in front of its sharded layers
        try:
            with drawing_by(self):
                yield
        finally:
            self._forward = before

    @property
    def reads_tensors(self) -> bool:
        """True if keys and samples are read from tensors, because compiled or recorded code would fix ints."""
        return self._fixed is not None or torch.compiler.is_compiling()

    @property
    def is_fixed(self) -> bool:
        """True if keys and samples are read from persistent memory."""
        return self._fixed is not None

    @contextlib.contextmanager
    def stored(self, fixed: FixedDraws) -> Iterator[None]:
        """Read keys and samples from the persistent memory `fixed` within the context."""
        before = self.told_samples, self.is_told, [site.keys for site in self.sites]
        self._fixed, self.told_samples, self.is_told = fixed, fixed.samples, True
        for site, row in zip(self.sites, fixed.keys.unbind(), strict=True):
            site.keys = row
        try:
            yield
        finally:
            self._fixed, (self.told_samples, self.is_told) = None, before[:2]
            for site, row in zip(self.sites, before[2], strict=True):
                site.keys = row

    def travelling(self) -> AbstractContextManager[None]:
        """Return a context for a later recomputation of the current forward, with the same random numbers."""
        return _Replay(self, self._forward.key, self._forward.samples, dict(self._forward.draws))

    def next_draw(self, like: Tensor, modules: Iterable[nn.Module]) -> tuple[Tensor, list[Tensor]]:
        """Return the key of the next random tensor in forward, and the positions of its elements along each dim.

        Raises ModelError if the shape does not determine positions, under graphs=on, or in a recomputation by
        torch.utils.checkpoint.
        """
        if self._plan.graphs:
            raise ModelError("graphs=on: the model draws with weft.randn_like or a similar function. Use graphs=off.")
        if graph_task() != -1 and not self._forward.is_replay:
            raise ModelError(
                "weft.randn_like: it is called in a forward that backward replays, where draws cannot be counted. Use "
                "recompute=full in the plan instead of torch.utils.checkpoint, and compile=off."
            )
        path = self._path_of(modules)
        draws = self._forward.draws
        count = draws[path] = draws.get(path, 0) + 1
        site = self._draw_sites.get(path)
        if site is None:
            site = self._draw_sites[path] = DropSite(self, path)
        key = torch.full((), key_of(self._forward.key, path, "draw", count), dtype=torch.int64, device=like.device)
        return key, site.draw_positions(like)

    def _path_of(self, modules: Iterable[nn.Module]) -> str:
        """Return the path of the innermost module that belongs to the model, or "" if none does."""
        model = None if self.model is None else self.model()
        for module in modules:
            if id(module) not in self._paths and model is not None:
                self._paths = {id(one): path for path, one in model.named_modules()}
            if id(module) in self._paths:
                return self._paths[id(module)]
        return ""

    def draw_rows(self, count: int, device: torch.device) -> Tensor:
        """Return an index for each row, by its sample in the global batch, int64.

        Raises ModelError if it is unknown how many rows each sample has.
        """
        samples = self._forward.samples
        if samples is not None and not samples.is_empty and samples.rows_of_each(count) is None:
            raise ModelError(
                f"weft.randn_like: a tensor of {count} rows in a microbatch of {len(samples.numbers)} samples, so its "
                "numbers cannot follow samples. Give it a tensor whose dim 0 is the samples."
            )
        return self.samples(count, device)

    def check_draw(self, like: Tensor, is_inside: bool, is_cut: bool, is_whole: bool) -> None:
        """Raise ModelError if ranks have parts of a tensor whose shape is not (samples, tokens, features)."""
        in_context = self._context is not None and self._context.in_use and not is_whole
        field = f"tp={self.part.axis.size}" if is_inside or is_cut else f"cp={self._cp.size}" if in_context else ""
        if field and like.ndim != 3:
            raise ModelError(
                f"{field}: weft.randn_like draws a tensor of shape {tuple(like.shape)} where each rank has a part, and "
                f"only (samples, tokens, features) shows which. Draw it in that shape, or use {field[:2]}=1."
            )

    def restart(self) -> None:
        """Begin a forward: reset call counts, and set that the current tensor is not between sharded layers."""
        self.part.is_open = False
        for site in self.sites:
            site.calls = 0

    def before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Set a new key, and the samples of `inputs`, for a training forward of the full model outside train steps.

        Unless the forward is compiled, torch's generators are seeded from both, until `after_forward` restores them.
        """
        if self._forward.is_driven or not model.training:
            return
        forward, self.places_noise = self._forward, True
        forward.key, forward.samples = self.next_key(), marked_samples(inputs)
        self._pass_to_compiled()
        self.restart()
        if self._kept is None and not torch.compiler.is_compiling():
            self._kept = contextlib.ExitStack()
            self._kept.enter_context(preserve_generators(self.device))
            seed_generators(self.seed_at(self._forward.key, self._forward.samples, model))

    def after_forward(self) -> None:
        """Restore torch's generators after a forward that `before_forward` began."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def seed_at(self, key: int, samples: SampleNumbers | None, model: nn.Module) -> int:
        """Return the seed of torch's generators for a microbatch, derived from its step's key and lowest sample index.

        Ranks of tp get the same seed. Ranks of cp have other tokens of the same samples and get different seeds, unless
        every rank gets full samples.
        samples: samples of the microbatch, or None if unknown: the data rank then replaces the sample index.
        """
        numbers = (self._data.rank,) if samples is None else samples.numbers
        first = min(numbers, default=-1 - self._data.rank)
        return key_of(key, type(model).__qualname__, first, self._seed_part) % 2**63

    def _pass_to_compiled(self) -> None:
        """Store keys and samples as tensors for compiled blocks, because ints would be constants of their graphs."""
        if not self._plan.compile or self._fixed is not None or not self.sites:
            return
        samples = self._forward.samples
        self.is_told = samples is None or not (samples.is_empty or samples.rows)
        if samples is not None and self.is_told:
            self.told_samples = samples.row_numbers(len(samples.numbers), self.device)
        else:
            self.told_samples = None
        if self._compiled_key != self._forward.key:
            keys = self.keys_of(self._forward.key, _CALLS)
            for site, row in zip(self.sites, torch.tensor(keys, device=self.device).unbind(), strict=True):
                site.keys = row  # a new tensor: replays of earlier forwards read the old one
            self._compiled_key = self._forward.key

    def keys_of(self, key: int, calls: int) -> list[list[int]]:
        """Return, for each of `sites`, the keys of its first calls, derived from the step's key."""
        return [[site.key(key, call) for call in range(1, calls + 1)] for site in self.sites]

    @property
    def num_calls(self) -> int:
        """Maximum number of calls to one of `sites` in a forward so far, or the fixed limit under compile=on."""
        return _CALLS if self._plan.compile else max((site.most_calls for site in self.sites), default=0)

    def samples(self, count: int, device: torch.device) -> Tensor:
        """Return an index for each row of a tensor, derived from its sample in the global batch."""
        if self.reads_tensors and self.told_samples is not None:
            return rows_of_samples(self.told_samples, count)
        samples = self._forward.samples
        if samples is None:
            return torch.arange(self._data.rank * count, (self._data.rank + 1) * count, device=device)
        # Created for each call: a replay must run the same operations as the forward.
        return samples.row_numbers(count, device)

    def has_samples(self, count: int) -> bool:
        """Return True if the microbatch has `count` samples, and their noise depends on their indices."""
        samples = self._forward.samples
        known = samples is not None and len(samples.numbers) == count
        return known and self.places_noise and self.may_place_noise

    def rows(self, count: int, is_cut: bool, is_whole: bool, device: torch.device) -> Tensor:
        """Return an index for each of a tensor's rows: samples, or the tokens of all sequences. int64, (count,).

        is_cut, is_whole: as in `tokens`.
        """
        context = self._context
        in_context = context is not None and context.in_use and not is_whole
        sequences = 0  # unknown, or not needed
        if is_cut or in_context:
            samples = self._forward.samples
            if self.part.sequences:
                sequences = self.part.sequences
            elif self.reads_tensors and self.told_samples is not None:
                sequences = len(self.told_samples)
            elif samples is not None and not samples.rows:
                sequences = len(samples.numbers)
        if not sequences or count % sequences or (count == sequences and not is_cut):
            return self.samples(count, device)
        here = self.tokens(count // sequences, is_cut, is_whole, device)
        cuts = (self.part.axis.size if is_cut else 1) * (self._cp.size if in_context else 1)
        return self.samples(count * cuts, device).view(sequences, -1)[:, here].flatten()

    def sees_full_sequence(self, path: str) -> bool:
        """Return True if a module gets all tokens of a sequence that cp shards."""
        return self._context is not None and self._context.sees_full_sequence(path)

    def tokens(self, count: int, is_cut: bool, is_whole: bool, device: torch.device) -> Tensor:
        """Return the sequence positions of this rank's tokens. is_cut: tokens are sharded over tp, as under sp.

        is_whole: the tensor has the tokens of the full sequence despite cp.
        """
        tp = self.part.axis
        whole = count * tp.size if is_cut else count
        context = self._context
        if context is not None and context.in_use and not is_whole:
            places = context.token_positions(whole, device)
        else:
            places = torch.arange(whole, device=device)
        return places.narrow(0, tp.rank * count, count) if is_cut else places


class _Replay:
    """Context of a recomputation, which can be entered again. draws: `_Forward.draws` before the recomputed part."""

    def __init__(self, drops: Drops, key: int, samples: SampleNumbers | None, draws: Mapping[str, int]):
        self._drops, self._state = drops, (key, samples, draws)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._drops.microbatch(*self._state)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class DropSite:
    """Random numbers of one module, for dropout or noise. path: the module's path in the model."""

    def __init__(self, drops: Drops, path: str):
        self.calls = self.most_calls = 0
        self.keys: Tensor | None = None  # keys of the first calls, for compiled or recorded code
        self.handle = Handle()  # attention operator for compiled blocks
        self.is_sequence_first = False  # its inputs are (tokens, samples, features)
        self.packed_order: Tensor | None = None  # sample of each row of the current packed sequences
        self._drops = drops  # None after unpickling: the module is then a plain one
        self._path = path
        self._cuts_tokens = drops.part.sees_sharded_tokens(path)  # each tp rank has a part of the tokens
        self._sees_all = drops.part.sees_all(path)
        self._sees_whole = drops.sees_full_sequence(path)

    @property
    def is_plain(self) -> bool:
        """True if the module was unpickled: it has no `Drops`, and behaves like the original class."""
        return self._drops is None

    def key(self, key: int, call: int) -> int:
        """Return the key of one call in a forward of the surrounding block, derived from the step's key."""
        return key_of(key, self._path, call)

    def _next_key(self) -> int:
        if self.calls >= self.most_calls and graph_task() >= 0:
            self.calls = 0  # a replay by torch's checkpoint, which begins no block
        self.calls += 1
        self.most_calls = max(self.most_calls, self.calls)
        if self._drops.is_fixed:
            raise ModelError(
                f"graphs=on: {self._path} drops more often in one forward than in those before, and a graph reads one "
                "key for each call that it has seen. Use graphs=off."
            )
        return self.key(self._drops.key, self.calls)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Return x with elements set to zero with probability `rate`, and the others divided by 1 - rate.

        x: (samples, features), (samples, tokens, features) or (samples, heads, queries, keys), each possibly sharded,
        or 1-D.
        """
        if rate >= 1:
            return x * 0.0
        if x.ndim == 1:
            return self.drop(x[:, None], rate)[:, 0]
        if self.is_sequence_first and x.ndim > 2:
            return self._drop_in_order(x.transpose(0, 1), rate).transpose(0, 1)
        return self._drop_in_order(x, rate)

    def keep(self, shape: Sequence[int], rate: float, device: torch.device) -> Tensor:
        """Return a bool mask of the elements to keep. Not for compiled code. shape: shape of an x as in `drop`."""
        if rate >= 1:
            return torch.zeros(shape, dtype=torch.bool, device=device)
        if len(shape) == 1:
            return self.keep((*shape, 1), rate, device)[:, 0]
        if self._drops.reads_tensors and self.has_stored_key:
            return self._keep(shape, rate, self._passed_key())
        return self._keep(shape, rate, torch.full((), self._next_key(), dtype=torch.int64, device=device))

    def drop_packed(self, values: Tensor, batch_sizes: Tensor, rate: float) -> Tensor:
        """Drop values of packed sequences at the positions at which `drop` would drop them in padded sequences.

        values: data of nn.utils.rnn.PackedSequence, (tokens of all samples, features). batch_sizes: number of samples
        with a token at each position of the sequence.
        """
        sizes = batch_sizes.tolist()
        kept = self.keep((sizes[0], len(sizes), values.shape[1]), rate, values.device)
        places = torch.arange(len(sizes)).repeat_interleave(batch_sizes).to(values.device)
        rows = torch.cat([torch.arange(size) for size in sizes]).to(values.device)
        rows = rows if self.packed_order is None else self.packed_order[rows]
        return torch.where(kept[rows, places], values * (1.0 / (1.0 - rate) if rate < 1 else 0.0), 0.0)

    @property
    def has_stored_key(self) -> bool:
        """True if the next call reads its key from a tensor."""
        return self.keys is not None and self.calls < len(self.keys) and self._drops.is_told

    def _passed_key(self) -> Tensor:
        assert self.keys is not None
        self.calls += 1
        return self.keys[self.calls - 1]

    def _drop_in_order(self, x: Tensor, rate: float) -> Tensor:
        if not self._drops.reads_tensors or not self.has_stored_key:
            return self._drop_by_number(x, rate)
        return self._drop(x, rate, self._passed_key())

    @uncompiled
    def _drop_by_number(self, x: Tensor, rate: float) -> Tensor:
        return self._drop(x, rate, torch.full((), self._next_key(), dtype=torch.int64, device=x.device))

    def _drop(self, x: Tensor, rate: float, key: Tensor) -> Tensor:
        return torch.where(self._keep(x.shape, rate, key), x * (1.0 / (1.0 - rate)), 0.0)

    def _keep(self, shape: Sequence[int], rate: float, key: Tensor) -> Tensor:
        drops, device = self._drops, key.device
        places = [torch.arange(size, device=device) for size in shape]
        is_inside = drops.part.is_open and not self._sees_all
        is_cut = self._cuts_tokens and not is_inside and not drops.part.is_whole
        if len(shape) == 2:
            places[0] = drops.rows(shape[0], is_cut, self._sees_whole, device)
        else:
            places[0] = drops.samples(shape[0], device)
        if is_inside:
            own = 1 if len(shape) > 3 else len(shape) - 1
            places[own] = places[own] + drops.part.axis.rank * shape[own]
        # A dim that all heads share has size 1.
        if len(shape) == 3 or (len(shape) == 4 and shape[1] == 1):
            places[-2] = drops.tokens(shape[-2], is_cut, self._sees_whole, device)
        return keep_mask_at(key, places, rate)

    def key_of_noise(self, shape: Sequence[int]) -> int | None:
        """Count a call that draws noise, and return its key. Return None if rows are not samples, or are sharded."""
        if not shape or not self._drops.has_samples(shape[0]) or self._cuts_tokens or self._drops.part.is_open:
            return None
        return self._next_key()

    def rows(self, count: int, device: torch.device) -> Tensor:
        """Return the indices of the microbatch's samples in the global batch, int64 (count,)."""
        return self._drops.samples(count, device)

    def draw_positions(self, x: Tensor) -> list[Tensor]:
        """Return the positions of a random tensor's elements along each dim. x: (samples, ...)."""
        drops = self._drops
        is_inside = drops.part.is_open and not self._sees_all
        is_cut = self._cuts_tokens and not is_inside and not drops.part.is_whole
        drops.check_draw(x, is_inside, is_cut, self._sees_whole)
        places = [torch.arange(size, device=x.device) for size in x.shape]
        if places:
            places[0] = drops.draw_rows(x.shape[0], x.device)
        if x.ndim == 3:
            places[1] = drops.tokens(x.shape[1], is_cut, self._sees_whole, x.device)
        if is_inside:
            places[-1] = places[-1] + drops.part.axis.rank * x.shape[-1]
        return places

    def attention(self, rate: float, num_samples: int, num_heads: int, device: torch.device) -> AttentionDrop:
        """Count an attention call, and return its dropout. num_heads: heads on this rank."""
        part = self._drops.part
        first_head = part.axis.rank * num_heads if part.is_open else 0
        is_told = self.has_stored_key if self._drops.is_fixed else torch.compiler.is_compiling()
        key = self._passed_key() if is_told else self._next_key()
        return AttentionDrop(rate, key, self._drops.samples(num_samples, device), first_head)


class FixedDraws:
    """Memory from which a CUDA graph of a forward reads its dropout state: keys of dropout calls, and sample indices.

    samples: samples of a microbatch. All replayed microbatches have the same number of samples.
    """

    def __init__(self, drops: Drops, samples: SampleNumbers):
        device, self._calls = drops.device, max(1, drops.num_calls)
        self._drops = drops
        self.keys = torch.zeros((len(drops.sites), self._calls), dtype=torch.int64, device=device)
        self.samples = torch.zeros(len(samples.numbers), dtype=torch.int64, device=device)
        self._sent: int | None = None  # the key in memory

    def fill(self, key: int, samples: SampleNumbers) -> None:
        """Write the keys and samples of a microbatch for the next replay of the CUDA graph."""
        if key != self._sent:
            send_numbers(self._drops.keys_of(key, self._calls), self.keys)
            self._sent = key
        send_numbers(list(samples.numbers), self.samples)
