"""Parts of a model that an adapter trains in addition to its layers: rows of embeddings, and modules in full.

A module with a frozen `weight` of shape (V, D) gets a parameter `token_rows`, (K, D), which replaces K of its rows.
Modules that share a weight share the rows too.

V entries of the vocabulary, D features, K trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.initialize import initialise_parameter
from weft.models.inspect import layers
from weft.models.inspect.blocks import replace_class, revert

#: Name of the parameter within its module.
TOKEN_ROWS = "token_rows"


class TrainedRows(nn.Module):
    """Base of `RowsEmbedding` and `RowsLinear`, which `replace_class` combines with a module's own class."""

    weight: nn.Parameter
    token_rows: nn.Parameter
    #: Ids of the trained tokens in ascending order, (K,).
    token_ids: Tensor
    _weft_is_on: bool
    _weft_tokens: tuple[int, ...]
    _weft_num_rows: int
    _weft_first_row: int
    #: Rows of `token_rows` that belong to this rank's part of the vocabulary, and their rows in `weight`. They are not
    #: buffers, because they differ between ranks.
    _weft_local: tuple[Tensor, Tensor]

    def take_range(self, first: int, count: int) -> None:
        """Record that `weight` has only the rows of token ids `first` to `first + count - 1` on this rank."""
        ids = self.token_ids
        [places] = ((ids >= first) & (ids < first + count)).nonzero(as_tuple=True)
        self._weft_first_row, self._weft_local = first, (places, ids[places] - first)

    @torch.no_grad()
    def fill_adapter(self, parameter: Tensor, name: str, full_name: str, seed: int) -> bool:
        """Fill the full parameter `token_rows` with the weight's rows. Return False for any other parameter.

        If the weight is sharded or on the meta device, its initial values are computed from seed and name.

        Args:
            parameter: a tensor of the full shape.
            name: name within this module.
            full_name: name in the full model.
            seed: seed of the weights.
        """
        if name != TOKEN_ROWS:
            return False
        weight: Tensor = self.weight
        if weight.is_meta or tuple(weight.shape) != (self._weft_num_rows, parameter.shape[1]):
            # If the weight is sharded or not allocated yet, it is computed from seed and name too.
            weight = torch.empty(self._weft_num_rows, parameter.shape[1], dtype=parameter.dtype)
            initialise_parameter(weight, full_name.removesuffix(name) + "weight", self, seed)
        parameter.copy_(weight[self.token_ids.to(weight.device)])
        return True


class RowsEmbedding(TrainedRows):
    """Embedding with a frozen weight, in which `token_rows` replaces the rows of some token ids."""

    #: `inspect.layers.is_linear` ignores this class when it looks up the module's own forward.
    is_adapter = True

    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., D) of ids (...)."""
        out: Tensor = super().forward(ids)
        if not self._weft_is_on:
            return out
        first, pad = self._weft_first_row, self.padding_idx
        is_trained = pad is not None and pad + first in self._weft_tokens
        pad = self._weft_tokens.index(pad + first) if pad is not None and is_trained else None
        ids = ids + first
        places = torch.searchsorted(self.token_ids, ids).clamp(max=self.token_ids.shape[0] - 1)
        rows = F.embedding(places, self.token_rows, pad).to(out.dtype)
        if (scale := getattr(self, "embed_scale", None)) is not None:  # such as Gemma's
            rows = rows * (scale.to(out.dtype) if isinstance(scale, Tensor) else scale)
        return torch.where((self.token_ids[places] == ids)[..., None], rows, out)


class RowsLinear(TrainedRows):
    """Output layer with a frozen weight, in which `token_rows` replaces the rows of some token ids."""

    is_adapter = True

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer: (..., D) to (..., V)."""
        return self.times_weight(x, layers.bias_of(self))

    def times_weight(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x times the transposed `unpacked_weight()`, plus the bias."""
        return F.linear(x, self.unpacked_weight().to(x.dtype), bias)

    def unpacked_weight(self) -> Tensor:
        """Return the weight (V, D), in which `token_rows` replaces the frozen rows of its tokens. Differentiable.

        If the module's rows are switched off, this is the frozen weight.
        """
        if not self._weft_is_on:
            return self.weight
        places, here = (one.to(self.weight.device) for one in self._weft_local)
        if not self.weight.is_meta:  # a trace on the meta device must not lose the values
            self._weft_local = (places, here)
        return self.weight.index_copy(0, here, self.token_rows[places].to(self.weight.dtype))


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows to train in one weight.

    Attributes:
        ids: token ids in ascending order.
        sharing: the modules that have the weight, by path.
    """

    ids: tuple[int, ...]
    sharing: Mapping[str, nn.Module]


def find_rows(
    model: nn.Module, tokens: Mapping[str, Sequence[int]] | Sequence[int], saved: Iterable[str] = ()
) -> dict[str, TokenRows]:
    """Return the rows to train, by the path of the first module that has their weight.

    Args:
        model: a model without trained rows.
        tokens: token ids for the input embedding and the modules that share its weight. Or a mapping from modules to
            ids, in which a key is the path of a module or the end of its path.
        saved: paths of modules that are trained in full.

    Raises:
        ModelError: if the input embedding is unknown, a key does not match exactly one module, a module cannot have
            trained rows or is in `saved`, ids of modules that share a weight differ, or an id is beyond the rows or
            given twice.
    """
    every, table = dict(model.named_modules()), layers.input_embeddings(model)
    if not isinstance(tokens, Mapping):
        if tokens and table is None:
            raise ModelError(
                f"trainable_tokens: {type(model).__name__} does not name its input embedding. Give the ids by module, "
                'such as {"embed": [5]}.'
            )
        tokens = {path: tokens for path, module in every.items() if tokens and module is table}
    found: dict[str, TokenRows] = {}
    for pattern, ids in tokens.items():
        if not ids:
            continue
        hits = [path for path in every if path == pattern or path.endswith(f".{pattern}")]
        if len(hits) != 1:
            what = f"{hits[0]} and {hits[1]} have such an ending" if hits else "no module has such a path or ending"
            tables = [path for path, module in every.items() if isinstance(module, nn.Embedding)]
            raise ModelError(f"trainable_tokens={pattern}: {what}. Use one path, such as {' or '.join(tables[:2])}.")
        weight = getattr(every[hits[0]], "weight", None)
        sharing = {path: one for path, one in every.items() if one is every[hits[0]] or _weight_is(one, weight)}
        for path, module in sharing.items():
            _expect_rows(pattern, path, module)
        first, one = next(iter(sharing)), TokenRows(tuple(sorted(ids)), sharing)
        _check_ids(ids, layers.stored_weight(sharing[first]).shape[0], first)
        if first in found and found[first].ids != one.ids:
            raise ModelError(f"trainable_tokens={pattern}: it shares its weight with {first}. Give equal ids for both.")
        if any(f"{path}.".startswith(f"{other}.") for path in sharing for other in saved):
            raise ModelError(f"trainable_tokens={pattern}: modules_to_save trains all of {first}. Use one of the two.")
        found[first] = one
    return found


def add_rows(found: Mapping[str, TokenRows]) -> None:
    """Add the parameter `token_rows` to the modules of `found` in place, with the values of the weight's rows.

    found: as returned by `find_rows`. Weights on the meta device give parameters without values.
    """
    for path, one in found.items():
        weight = layers.stored_weight(one.sharing[path])
        dtype, here = torch.promote_types(weight.dtype, torch.float32), "cpu" if weight.is_meta else weight.device
        rows = nn.Parameter(torch.empty(len(one.ids), weight.shape[1], dtype=dtype, device=weight.device))
        if not rows.is_meta:
            rows.data.copy_(weight.detach()[list(one.ids)])
        for module in one.sharing.values():
            kind = RowsEmbedding if isinstance(module, nn.Embedding) else RowsLinear
            replace_class(module, kind, is_on=True, num_rows=len(weight), first_row=0, tokens=one.ids)
            assert isinstance(module, TrainedRows)
            module.token_rows = rows
            # A buffer needs its values, even if the weight is still on the meta device.
            module.register_buffer("token_ids", torch.tensor(one.ids, device=here), persistent=False)
            module.take_range(0, len(weight))


def remove_rows(module: nn.Module) -> None:
    """Remove `token_rows` from a module, and restore its class unless a later subclass replaced it."""
    kind = RowsEmbedding if isinstance(module, RowsEmbedding) else RowsLinear
    for name in (TOKEN_ROWS, "token_ids"):
        delattr(module, name)
    for name in ("is_on", "num_rows", "first_row", "tokens", "local"):
        delattr(module, f"_weft_{name}")
    revert(module, kind)


def with_rows(weight: Tensor, ids: Sequence[int], rows: Tensor) -> Tensor:
    """Return a copy of a weight (V, D) in which `rows` (K, D) replace the rows of `ids`, in the weight's dtype."""
    index = torch.tensor(ids, dtype=torch.int64, device=weight.device)
    return weight.index_copy(0, index, rows.to(weight.device, weight.dtype))


def _weight_is(module: nn.Module, weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and getattr(module, "weight", None) is weight


def _expect_rows(pattern: str, path: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        usual = type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
        is_known = usual and module.max_norm is None
    else:
        is_known = layers.is_linear(module) and not layers.is_transposed(module)
    if not is_known or not isinstance(module.weight, nn.Parameter):
        raise ModelError(
            f"trainable_tokens={pattern}: {path} is a {type(module).__name__}, and only embeddings and output layers "
            "have a row for each token. Name one of those."
        )
    if not isinstance(module, nn.Embedding) and layers.bias_of(module) is not None:
        rule = f"{path} has a bias, which peft omits for trained rows"
        raise ModelError(f"trainable_tokens={pattern}: {rule}. Use modules_to_save={path}.")


def _check_ids(ids: Sequence[int], num_rows: int, path: str) -> None:
    known: set[int] = set()
    for token in ids:
        if token in known:
            raise ModelError(f"trainable_tokens={token}: the id is given twice. Give each id once.")
        known.add(token)
        if not 0 <= token < num_rows:
            raise ModelError(
                f"trainable_tokens={token}: {path} has {num_rows} rows, with ids from 0 to {num_rows - 1}. Use one of "
                "these, or add rows first (model.vocab_size, or resize_token_embeddings in a script)."
            )


# Modules that are trained in full (peft's modules_to_save).


def fits(path: str, pattern: str) -> bool:
    """Return True if a pattern with wildcards matches a path, or the part of it after one of its dots."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def saved_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the modules that patterns match, and the modules that share weights with them.

    The result maps the path of each module to a dict from its state_dict names to the model's first name of the same
    tensor.

    Raises:
        ModelError: if a pattern matches no module, or one without parameters; or if a module shares only some of its
            parameters.
    """
    every = dict(model.named_modules())
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {path for path in every if path and fits(path, pattern)}
        if not hits:
            ends = dict.fromkeys(path.rpartition(".")[2] for path in every if path and ".0" not in path)
            raise ModelError(
                f"modules_to_save={pattern}: no module has such a path or ending. Use some of "
                f"{', '.join([end for end in ends if not end.isdecimal()][:12])}."
            )
        if empty := [path for path in sorted(hits) if not any(True for _ in every[path].parameters())]:
            raise ModelError(f"modules_to_save={pattern}: {empty[0]} has no parameters to train. Leave it out.")
        chosen |= hits
    chosen = {path for path in chosen if not any(path.startswith(f"{other}.") for other in chosen)}
    params = {id(param) for path in chosen for param in every[path].parameters()}
    for path, module in every.items():
        own = [id(param) for param in module.parameters(recurse=False)]
        if not params.isdisjoint(own) and not any(f"{path}.".startswith(f"{one}.") for one in chosen):
            if not params.issuperset(own):
                raise ModelError(
                    f"modules_to_save={patterns[0]}: {path} shares a weight with it and has other parameters too. Add "
                    f"{path} to modules_to_save."
                )
            chosen.add(path)
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
    return {
        path: {name: first[id(tensor)] for name, tensor in every[path].state_dict(keep_vars=True).items()}
        for path in every
        if path in chosen
    }
