"""Adapters under every layout match one process. A frozen base has no gradients, masters, states or traffic."""

from __future__ import annotations

import pytest
import torch

from tests.parity.adapter_cases import (
    AdapterCase,
    adapter_subjects,
    dropping_subjects,
    extra_subjects,
    packed_subjects,
    stack_subjects,
)
from tests.parity.cases import cases
from tests.parity.compiled import compiled_plan, train_compiled
from tests.parity.plans import BROAD_GROUPS, RTOL, Cell, chosen_cells, differing
from weft.comm.ledger import Ledger
from weft.comm.mesh import Axis, build_mesh
from weft.config.plan import Plan
from weft.models.adapters import adapted
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.precision import Precision
from weft.parallel.tensor.linear import Column, SharedLayer, columns
from weft.train.step.train_step import TrainStep
from weft.verify.parity import microbatches_of_case, train_case, train_plain

ONLY = {"recompute": ("none",), "offload": ((),), "order": ((),), "tp_chunks": (1,)}
#: Plans that pairwise coverage may miss: recompute and offload with frozen weights, deferred weight gradients.
MORE = (
    "dp_shard=2 zero=3 recompute=full offload=params",
    "dp_shard=2 zero=1 recompute=selective offload=optimizer",
    "tp=2 sp=on recompute=full",
    "pp=2 accumulation=2 schedule=zb_h1",
)


def subjects():
    return {**adapter_subjects(), **dropping_subjects()}


def references():
    """Return results of plain PyTorch, and of one process of Weft for cases with dropout or expert balancing."""
    references = {one.case: train_plain(one.case) for name, one in adapter_subjects().items() if name != "experts"}
    ours = [adapter_subjects()["experts"], *dropping_subjects().values()]
    return references | {one.case: train_case("precision=fp64", one.case) for one in ours}


def cells(num_ranks):
    return [Cell(name, plan) for name, one in subjects().items() for plan in one.plans(num_ranks, **ONLY)]


@pytest.fixture(scope="module")
def expected():
    return references()


AXES = ("zero", "tp", "sp", "cp", "cp_mode", "ep", "pp", "schedule", "accumulation")


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([("tp", "subject"), *((axis,) for axis in AXES)], id="each model, each axis"),
        pytest.param([(axis, "subject") for axis in AXES], id="each model on each axis", marks=pytest.mark.full),
    ],
)
def test_adapters_match_one_process_under_chosen_layouts(groups, ranks2, expected):
    chosen = chosen_cells(cells(2), groups=groups)
    more = [Plan.parse(f"{text} precision=fp64") for text in MORE]
    chosen += [Cell(name, plan) for plan in more for name in ("decoder-dora", "drop-dora")]
    found = differing(chosen, subjects(), expected, ranks2)
    assert not found, "\n".join(found)
    assert {cell.subject for cell in chosen} == subjects().keys()


def test_quantized_base_matches_one_process(ranks2):
    """Check ZeRO stages, tp, sp, cp and pp, recompute and deferred weight gradients with a quantized base."""
    texts = {
        "nf4": ("zero=1 dp_shard=2", "zero=3 dp_shard=2 recompute=full", "tp=2", "tp=2 sp=on", "pp=2 accumulation=2"),
        "int8": ("dp_shard=2", "zero=2 dp_shard=2", "zero=3 dp_shard=2", "tp=2 sp=on recompute=full", "cp=2",
                 "pp=2 accumulation=2 schedule=zb_h1"),
        "nf4-experts": ("dp_shard=2 ep=2", "dp_shard=2 ep=2 zero=3", "tp=2 sp=on"),
        "nf4-stacks": ("dp_shard=2 zero=1", "dp_shard=2 zero=3", "dp_shard=2 ep=2",
                       "dp_shard=2 ep=2 zero=3", "pp=2 accumulation=2"),
        "int8-stacks-oss": ("dp_shard=2 zero=3", "dp_shard=2 ep=2"),
        "int8-stacks-own": ("dp_shard=2 ep=2 zero=2 recompute=selective", "dp_shard=2 zero=3"),
    }  # fmt: skip
    assert not _differing_packed(texts, ranks2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3", "tp=2 sp=on"])
def test_compiled_quantized_base_matches_one_process(name, plan, ranks2):
    assert not _differing_packed({name: (f"compile=on {plan}",)}, ranks2)


#: Subjects with Weft's experts, whose loads a step balances.
_BALANCED = ("nf4-experts", "int8-stacks-own")


def _differing_packed(texts, ranks):
    """Return the differences as lines. The reference with experts is one process of Weft, which balances them."""
    chosen = [Cell(name, Plan.parse(f"{text} precision=fp64")) for name, some in texts.items() for text in some]
    subjects = {name: packed_subjects()[name] for name in texts}
    references = {
        one.case: train_case("precision=fp64", one.case) if name in _BALANCED else train_plain(one.case)
        for name, one in subjects.items()
    }
    return differing(chosen, subjects, references, ranks)


EXTRA_PLANS = {
    "rows-tied": ("dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2", "tp=2 sp=on",
                  "pp=2 accumulation=2", "cp=2"),
    "rows-untied": ("dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2", "tp=2 sp=on", "pp=2 accumulation=2"),
    "rows-gpt2": ("dp_shard=2 zero=3", "tp=2", "pp=2 accumulation=2 schedule=zb_h1"),
    "saved-tied": ("dp_replicate=2", "dp_shard=2 zero=3 recompute=full", "tp=2 sp=on", "pp=2 accumulation=2"),
    "saved-untied": ("dp_shard=2 zero=1", "dp_shard=2 zero=3", "tp=2", "pp=2 accumulation=2"),
}  # fmt: skip


def test_trained_rows_and_saved_modules_match_one_process(ranks2):
    subjects = extra_subjects()
    chosen = [Cell(name, Plan.parse(f"{text} precision=fp64")) for name, some in EXTRA_PLANS.items() for text in some]
    references = {one.case: train_plain(one.case) for one in subjects.values()}
    found = differing(chosen, subjects, references, ranks2)
    assert not found, "\n".join(found)


STACK_PLANS = {
    "stacks": ("dp_shard=2 zero=1", "dp_shard=2 zero=3", "dp_shard=2 ep=2", "dp_shard=2 ep=2 zero=3", "tp=2",
               "tp=2 sp=on", "pp=2 accumulation=2", "cp=2", "dp_shard=2 zero=3 offload=params+optimizer"),
    "stacks-dora": ("dp_shard=2 zero=2", "dp_shard=2 zero=3 offload=activations",
                    "dp_shard=2 ep=2", "tp=2 sp=on", "pp=2 accumulation=2"),
    "stacks-oss": ("dp_shard=2 zero=3", "dp_shard=2 ep=2", "tp=2"),
    "stacks-own": ("dp_replicate=2", "dp_shard=2 ep=2 zero=2 recompute=full", "tp=2 sp=on", "pp=2 accumulation=2"),
}  # fmt: skip


def test_adapters_of_stacked_experts_match_one_process(ranks2):
    subjects = stack_subjects()
    chosen = [Cell(name, Plan.parse(f"{text} precision=fp64")) for name, some in STACK_PLANS.items() for text in some]
    references = {
        one.case: train_case("precision=fp64", one.case) if name == "stacks-own" else train_plain(one.case)
        for name, one in subjects.items()
    }
    found = differing(chosen, subjects, references, ranks2)
    assert not found, "\n".join(found)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3", "dp_shard=2 ep=2", "dp_shard=2 zero=3 recompute=full"])
def test_compiled_adapters_of_stacked_experts_match_one_process(plan, ranks2):
    case = stack_subjects()["stacks-own"].case
    want = train_case("precision=fp64", case)
    for found in ranks2.run(train_compiled, compiled_plan(plan), case):
        assert found.result.largest_difference(want) < RTOL


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_adapters_match_one_process_under_every_layout(num_ranks, expected, request):
    chosen = cells(2) if num_ranks == 2 else chosen_cells(cells(4), groups=BROAD_GROUPS[4])
    found = differing(chosen, subjects(), expected, request.getfixturevalue(f"ranks{num_ranks}"))
    assert not found, "\n".join(found)


FEW = AdapterCase(cases()["decoder"], targets=("blocks.1.attn.q",))


@pytest.mark.parametrize("plan", ["pp=2", "pp=2 accumulation=2 schedule=zb_h1", "dp_shard=2 zero=3", "tp=2 sp=on"])
def test_stages_and_units_without_trainable_parameters(plan, ranks2):
    reference = train_plain(FEW)
    for result in ranks2.run(train_case, f"{plan} precision=fp64", FEW):
        assert result.largest_difference(reference) < RTOL


def measure(plan_text, case):
    """Train two steps on this rank. Return bytes of states, masters, gradients, frozen weights and communication."""
    ledger = Ledger()
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan, record=ledger.record)
    model = case.model()
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    numels = {name: param.numel() for name, param in model.named_parameters()}
    parallelize(model, mesh)
    optimizer = case.optimizer_of(model)
    step = TrainStep(model, optimizer, case.loss, mesh, forward=case.forward, max_grad_norm=1.0)
    step(microbatches_of_case(case, 0, plan, mesh.data.rank))
    before = {row[:2]: row[2].num_bytes for row in ledger.rows()}
    step(microbatches_of_case(case, 1, plan, mesh.data.rank))
    sent = {row[:2]: row[2].num_bytes - before.get(row[:2], 0) for row in ledger.rows()}
    engine = data_parallel(model)
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    frozen = [one for one in engine.model_slices() if one.name not in names]
    return {
        "states": sum(value.nbytes for value in states),
        "masters": sum(value.nbytes for value in engine.local_weights().values()),
        "grads": sum(value.nbytes for value in engine.local_gradients()),
        "names": sorted(engine.local_weights().keys() - names),
        "frozen": sum(one.flat.nbytes for one in frozen),
        "format": {str(one.flat.dtype) for one in frozen if one.flat.numel()},
        "sent": {f"{axis} {operation}": number for (axis, operation), number in sent.items()},
        "trained": sum(numels[name] for name in names),
        "frozen_numel": sum(numels.values()) - sum(numels[name] for name in names),
        "master": Precision.of(plan).master.itemsize,
    }


@pytest.mark.parametrize(
    ("plan", "shards", "frozen_shards"),
    [
        ("dp_replicate=2 precision=bf16", 1, 1),
        ("dp_shard=2 zero=1 precision=bf16", 2, 1),
        ("dp_shard=2 zero=2 precision=bf16", 2, 1),
        ("dp_shard=2 zero=3 precision=bf16", 2, 2),
        ("dp_shard=2 zero=3 precision=fp64", 2, 2),
    ],
)
def test_frozen_base_has_no_states_masters_or_gradient_traffic(plan, shards, frozen_shards, ranks2):
    found = ranks2.run(measure, plan, AdapterCase(cases()["decoder"]))
    for one in found:
        trained, master = one["trained"] * one["master"], one["master"]
        slack = 64 * master * 20  # padding of rows that do not divide evenly
        assert abs(one["states"] - 2 * trained // shards) <= slack, one
        assert abs(one["masters"] - trained // shards) <= slack, one
        assert one["grads"] <= trained + slack, one
        assert not one["names"], one
        element_bytes = 8 if "fp64" in plan else 2
        assert abs(one["frozen"] - one["frozen_numel"] * element_bytes // frozen_shards) <= slack, one
        assert one["format"] == {"torch.float64" if element_bytes == 8 else "torch.bfloat16"}
        # Only the adapter's gradients are reduced, once, plus a few totals of the step.
        reduced = sum(number for name, number in one["sent"].items() if "reduce" in name)
        assert trained <= reduced <= trained + 1024, one


def test_adapter_record_survives_parallelize(ranks2):
    assert ranks2.run(_layers, "pp=2", AdapterCase(cases()["decoder"])) == [14, 14]


def _layers(plan, case):
    model = parallelize(case.model(), build_mesh(Plan.parse(plan)))
    assert torch.is_grad_enabled()
    record = adapted(model)
    return len(record.layers) if record else 0


@pytest.mark.parametrize("trained", [False, True])
def test_frozen_sharded_layer_saves_no_input(trained):
    layer, saved_shapes = SharedLayer(Axis("tp", 1, 0, (0,))), []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        saved_shapes.append(tuple(saved.shape))
        return saved

    x = torch.randn(2, 3, 4, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(5, 4), requires_grad=trained)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        (product,) = columns(x, x, layer, [Column(weight, None, False)], None)
    assert ((2, 3, 4) in saved_shapes) == trained
    (grad,) = torch.autograd.grad(product.sum(), x)
    torch.testing.assert_close(grad, weight.detach().sum(0).expand(2, 3, 4))
