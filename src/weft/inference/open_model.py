"""A run or a Hugging Face folder as a model for inference, under a plan on this rank."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoint.load import Checkpoint, load_checkpoint
from weft.comm.mesh import Mesh, SubMesh, build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check_plan
from weft.config.rules.rule import Facts
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.data.text.tokenizer import Tokenizer, import_tokenizer
from weft.errors import CheckpointError
from weft.generation.stages import keep_stage
from weft.hub import local_folder
from weft.inference.ranks import inference_plan
from weft.models.adapters import adapted, merge_adapter
from weft.models.decoder import as_shapes
from weft.models.inspect import hugging_face
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.parallel.state.flat_slices import StateSource
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero.magnitudes import load_base
from weft.train.folder import RunFolder
from weft.train.states.model_state import load_model, packed_source, restore_model
from weft.train.states.state_io import on_first
from weft.train.tasks.generation import find_checkpoint, longest_text, open_run, refuse_lone_adapter
from weft.train.weights.decoder_files import base_of, decoder_of, tokenizer_of
from weft.train.weights.published_weights import ADDED_ROWS, load_pretrained, pretrained_source
from weft.train.weights.run_adapter import with_adapter


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A causal language model on one rank.

    Attributes:
        model: a transformers model or a `Decoder`, in evaluation mode, sharded by the mesh's plan.
        tokenizer: the model's tokenizer.
        config: the transformers config, or the `DecoderSpec` of a Weft decoder.
        max_positions: maximum number of tokens of a text, or 2**20 if the model sets none.
        num_ids: number of token ids that the model reads.
        mesh: the ranks.
        step: step of the run's checkpoint, or None for a Hugging Face folder.
    """

    model: nn.Module
    tokenizer: Tokenizer
    config: Any
    max_positions: int
    num_ids: int
    mesh: Mesh
    step: int | None = None


def open_model(
    source: Path | str | RunFolder, plan: Plan, mesh: Mesh, step: int | None = None, dtype: str | None = None
) -> OpenedModel:
    """Open the model of a run or of a Hugging Face folder on this rank. All ranks of the mesh call it.

    The model is built without weights, and each rank reads only its part of them. An adapter is merged into its base on
    one rank, and applied in each forward on several.

    Args:
        source: a run, the path of its folder, or a folder with config.json, weights and tokenizer.
        plan: the plan; what matters only in training is ignored (`inference_plan`).
        mesh: the ranks. A mesh of another plan is replaced.
        step: step of the run's checkpoint; None for the newest valid one.
        dtype: precision of weights and forward, such as "bf16"; None for the plan's.

    Raises:
        CheckpointError: if there is no such checkpoint, or the weights cannot be read.
        ConfigError: if the run's task is not a text decoder, or the folder has only an adapter.
        PlanError, ModelError, LayoutError: if the plan does not fit the model.
    """
    plan, _ = inference_plan(plan, dtype)
    if plan != mesh.plan:
        mesh = build_mesh(plan, mesh.device)
    facts = read_facts(source)
    if facts.run is None:
        model, weights = _folder_model(Path(str(source)), facts.config)
        return OpenedModel(_lay_out(model, mesh, None, weights), *facts.shared(), mesh)
    if step is None:  # the run may be training, and ranks may see different files
        run = facts.run
        step = on_first(mesh, lambda: load_checkpoint(find_checkpoint(run, None)).step)
    checkpoint = load_checkpoint(find_checkpoint(facts.run, step))
    if isinstance(facts.config, DecoderSpec):
        check_plan(plan, Facts(model=facts.config, world_size=plan.world_size))
    model = _run_model(facts.run, checkpoint, mesh, facts.config)
    return OpenedModel(model, *facts.shared(), mesh, checkpoint.step)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Tokenizer and sizes of a model, from the files of a run or a Hugging Face folder, as in `OpenedModel`.

    run: the run, or None for a Hugging Face folder.
    """

    tokenizer: Tokenizer
    config: Any
    max_positions: int
    num_ids: int
    run: RunFolder | None

    def shared(self) -> tuple[Tokenizer, Any, int, int]:
        """Return the attributes that `OpenedModel` has too."""
        return self.tokenizer, self.config, self.max_positions, self.num_ids


def read_facts(source: Path | str | RunFolder) -> SourceFacts:
    """Read the tokenizer and the sizes of a model, without its weights.

    Raises:
        ConfigError: if the run's task is not a text decoder, or the folder has only an adapter.
        DataError, ModelError: if the tokenizer or the config cannot be read.
    """
    run = open_run(source, "be opened")
    if run is not None and not base_of(run).is_dir():
        spec = decoder_of(run)
        return SourceFacts(Tokenizer.load(tokenizer_of(run)), spec, spec.max_seq_len, spec.vocab_size, run)
    folder = base_of(run) if run is not None else Path(str(source))
    refuse_lone_adapter(folder)
    config = hugging_face.load_model_config(folder)
    if run is not None:
        tokenizer = Tokenizer.load(tokenizer_of(run))
    else:
        with tempfile.TemporaryDirectory() as draft:
            tokenizer = import_tokenizer(Path(draft) / "tokenizer", str(folder), template=True)
    return SourceFacts(tokenizer, config, longest_text(config), hugging_face.vocab_size(config) or 2**31, run)


def _folder_model(folder: Path, config: Any) -> tuple[nn.Module, StateSource]:
    with as_shapes(vectors=True):
        model = hugging_face.causal_model(config)
    return model, pretrained_source(model, folder)[0]


def _run_model(run: RunFolder, checkpoint: Checkpoint, mesh: Mesh, config: Any) -> nn.Module:
    """Return a run's model under the mesh's plan. config: as in `SourceFacts`."""
    settings = run.config()
    base, has_adapter = None if isinstance(config, DecoderSpec) else base_of(run), bool(settings.adapter.rank)
    layout = Layout.read(settings.layout) if settings.layout else None
    if has_adapter and mesh.world_size == 1:
        model = hugging_face.causal_model(config) if base else build_decoder(decoder_of(run), seed=settings.seed)
        if base is not None:
            load_pretrained(model, local_folder(settings.model.path), base / ADDED_ROWS)
        restore_model(with_adapter(model, settings, base), checkpoint)
        if mesh.plan.precision == "fp64":  # before merging, which rounds to the weights' dtype
            model.double()
        return _lay_out(merge_adapter(model), mesh, layout)
    if base is not None:
        with as_shapes(vectors=True):
            model = hugging_face.causal_model(config)
    else:  # the base of an adapter on a Weft decoder is in no file: it follows from the seed
        model = build_decoder(decoder_of(run), seed=settings.seed, device=None if has_adapter else "meta")
    weights = _base_weights(model, settings.model.path, base) if has_adapter and base is not None else None
    with_adapter(model, settings, base)
    if weights is not None:
        weights = packed_source(model, weights)
    _lay_out(model, mesh, layout, weights, seed=settings.seed)
    load_model(model, checkpoint, is_part=mesh.plan.pp > 1)
    data_parallel(model).wait_for_weights()
    return model


def _base_weights(model: nn.Module, path: str, base: Path) -> StateSource:
    folder = local_folder(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"model.path={path}: there is no such folder, and an adapter's checkpoints do not contain the base. "
            "Restore the folder."
        )
    return pretrained_source(model, folder, added=base / ADDED_ROWS)[0]


def _lay_out(
    model: nn.Module,
    mesh: Mesh,
    layout: Layout | None = None,
    weights: StateSource | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Shard a model, and read this rank's part of `weights`, if they are set.

    seed: seed of the adapter, if the caller loads a checkpoint afterwards.
    """
    choose_experts: Any = getattr(model, "set_experts_implementation", None)
    if mesh.plan.precision == "fp64" and choose_experts is not None:
        choose_experts("eager")  # torch's grouped products lack float64
    if adapted(model) is None:  # no masters and gradients for weights that do not change
        model.requires_grad_(False)
    if mesh.plan.pp > 1:
        keep_stage(model, mesh)
        mesh = SubMesh(mesh, "pp")
    parallelize(model, mesh, layout=layout, seed=seed, filled_later=weights is not None or seed is not None)
    if weights is not None:
        load_base(model, weights)
    data_parallel(model).wait_for_weights()
    return model.eval()
