"""The batch: train_batch_size = micro batch x accumulation x data-parallel ranks, with any of them left open."""

from __future__ import annotations

from dataclasses import dataclass

from weft.deepspeed.reading import MOST, Reading

TOTAL, MICRO, PASSES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(slots=True)
class _Batch:
    """The four numbers; None is not known."""

    total: int | None
    micro: int | None
    passes: int | None
    ranks: int | None


def read_batch(reading: Reading, world_size: int | None) -> int | None:
    """Read the batch into train.global_batch and the passes per step; returns the number of data-parallel ranks.

    world_size: all ranks, where that is known. The three numbers together say the data-parallel ranks themselves.
    """
    batch = _Batch(reading.whole(TOTAL), reading.whole(MICRO), reading.whole(PASSES), _data_ranks(reading, world_size))
    broken = any(problem.field in (TOTAL, MICRO, PASSES) for problem in reading.problems)
    if broken:
        return batch.ranks
    if batch.passes is None and PASSES not in reading.values and (batch.total is None or batch.micro is None):
        batch.passes = 1  # as in DeepSpeed; "auto" stays open
    _complete(reading, batch)
    _say_passes(reading, batch)
    _say_total(reading, batch)
    _say_micro(reading, batch)
    return batch.ranks


def _data_ranks(reading: Reading, world_size: int | None) -> int | None:
    others = 1
    for axis in ("tp", "cp", "pp"):
        size = reading.plan.get(axis, 1)
        others *= size if isinstance(size, int) else 1
    if world_size is None:
        return None
    if world_size % others:
        key = next(line.key for line in reading.lines.values() if {"plan.tp", "plan.cp", "plan.pp"} & {*line.fields})
        rule = f"tensor, sequence and pipeline groups need a multiple of {others} ranks, and there are {world_size}"
        reading.wrong(key, rule, f"Use a multiple of {others} ranks")
        return None
    return world_size // others


def _complete(reading: Reading, batch: _Batch) -> None:
    """Find the number that the others decide; say it where they contradict each other."""
    total, micro, passes, ranks = batch.total, batch.micro, batch.passes, batch.ranks
    if total is None:
        if micro and passes and ranks and micro * passes * ranks <= MOST:
            batch.total = micro * passes * ranks
        elif micro and passes and micro * passes * (ranks or 1) > MOST:
            reading.wrong(
                MICRO, f"with {PASSES}={passes} and {ranks or 1} ranks the batch is above {MOST}", "Lower one"
            )
        return
    unit = (micro or 1) * (passes or 1) * (ranks or 1)
    if total % unit or (micro and passes and ranks and total != unit):
        known = (("micro batch", micro), ("accumulation", passes), ("ranks", ranks))
        product = " x ".join(f"{number} ({name})" for name, number in known if number)
        fits = f"{product} = {unit}"
        rule = f"it must be {fits}" if micro and passes and ranks else f"it must be a multiple of {fits}"
        below = unit if micro and passes and ranks else max(1, total // unit) * unit
        reading.wrong(TOTAL, rule, f"Use {TOTAL}={below}, or change the others")
    elif micro and passes and not ranks:
        batch.ranks = total // unit
        reading.notes.append(f"The three numbers of the batch imply {batch.ranks} data-parallel ranks.")
    elif micro and ranks and not passes:
        batch.passes = total // unit
    elif ranks and not micro:
        batch.micro = total // unit if passes else None


def _say_passes(reading: Reading, batch: _Batch) -> None:
    pp = reading.plan.get("pp", 1)
    field = "microbatches" if isinstance(pp, int) and pp > 1 else "accumulation"
    if batch.passes is not None and batch.passes > 1:
        reading.plan[field] = batch.passes
    if PASSES not in reading.values or (batch.passes is None and reading.is_auto(PASSES)):
        return
    if not reading.is_auto(PASSES):
        reading.became(PASSES, f"plan {field}={batch.passes}", f"plan.{field}")
    else:
        reading.open.remove("plan.accumulation")
        reading.follows(PASSES, f"the batch and the ranks: plan {field}={batch.passes}")


def _say_total(reading: Reading, batch: _Batch) -> None:
    setting = "train.global_batch"
    if batch.total is not None:
        reading.settings[setting] = batch.total
        if reading.is_auto(TOTAL):
            reading.follows(TOTAL, f"micro batch x accumulation x ranks: {setting}={batch.total}")
        elif TOTAL in reading.values:
            reading.became(TOTAL, f"{setting}={batch.total}", setting)
        while setting in reading.open:
            reading.open.remove(setting)
    elif batch.micro is not None:
        passes = "" if batch.passes == 1 else f" x {batch.passes or 'accumulation'}"
        reading.notes.append(
            f"{setting} is {batch.micro}{passes} x the data-parallel ranks; "
            f"give the number of ranks (--world-size), or set it."
        )
        if setting not in reading.open:
            reading.open.append(setting)


def _say_micro(reading: Reading, batch: _Batch) -> None:
    if MICRO not in reading.values:
        return
    total_typed = TOTAL in reading.values and not reading.is_auto(TOTAL)
    if total_typed and batch.passes is None and batch.micro is not None:
        reading.open.append("plan.accumulation")
        reading.notes.append(
            f"plan.accumulation is {batch.total} / ({batch.micro} x the data-parallel ranks); "
            f"give the number of ranks (--world-size), or set it."
        )
        reading.follows(MICRO, "the batch and the ranks: it decides plan.accumulation once the ranks are known")
    elif total_typed and PASSES not in reading.values and batch.micro is not None:
        reading.became(MICRO, f"plan accumulation={batch.passes}", "plan.accumulation")
    elif total_typed:
        reading.follows(MICRO, "the batch, its passes and the ranks")
    elif reading.is_auto(MICRO):
        return  # said with the default of train.global_batch
    elif batch.total is not None:
        reading.became(MICRO, f"train.global_batch={batch.total}", "train.global_batch")
    else:
        reading.follows(MICRO, "train.global_batch, once the ranks are known")
