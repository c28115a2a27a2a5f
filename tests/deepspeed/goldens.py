"""The corpus of DeepSpeed configs in this folder, and the import report of each.

`python -m tests.deepspeed.goldens` rewrites the reports. Read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

from weft.config.files import format_config
from weft.config.rules.config_rules import config_problems
from weft.interop.deepspeed import Imported, import_deepspeed

FOLDER = Path(__file__).parent
#: Number of ranks for reading each config; None leaves it open.
RANKS = {
    "trainer_zero2_auto": None,
    "trainer_zero3_auto": 8,
    "zero3_offload_both": 4,
    "zero3_offload_nvme": 4,
    "old_style_2021": None,
    "all_three_numbers": None,
    "warmup_cosine": None,
    "warmup_decay_own_values": 2,
    "one_cycle_adam": 1,
    "sgd_plain": 4,
    "pipeline": None,
    "autotp": 16,
    "removed_features": 16,
    "mics_groups": 16,
    "typos": None,
    "accelerate_written": None,
    "every_tool": 1,
}

#: The keys that users set, most used first, each with the most frequent values (from 138 public files).
USED = {
    "zero_optimization.stage": (3, 2, 1, 0),
    "fp16.enabled": ("auto", True, False),
    "train_batch_size": ("auto", 32),
    "train_micro_batch_size_per_gpu": ("auto", 4),
    "gradient_accumulation_steps": ("auto", 1),
    "gradient_clipping": ("auto", 1.0),
    "fp16.min_loss_scale": (1,),
    "fp16.loss_scale": (0,),
    "zero_optimization.overlap_comm": (True, False),
    "fp16.loss_scale_window": (1000,),
    "steps_per_print": (2000, 1, "inf"),
    "fp16.hysteresis": (2,),
    "zero_optimization.reduce_bucket_size": ("auto", 5e8),
    "zero_optimization.contiguous_gradients": (True,),
    "wall_clock_breakdown": (False,),
    "bf16.enabled": ("auto", True),
    "fp16.initial_scale_power": (16, 32),
    "optimizer.type": ("AdamW", "Adam"),
    "optimizer.params.lr": ("auto", 1e-5),
    "zero_optimization.allgather_bucket_size": (5e8, 2e8),
    "zero_optimization.reduce_scatter": (True,),
    "zero_optimization.sub_group_size": (1e9, 0, 1e12),
    "optimizer.params.weight_decay": ("auto", 0.01),
    "zero_optimization.stage3_param_persistence_threshold": ("auto",),
    "zero_optimization.stage3_prefetch_bucket_size": ("auto",),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
    "optimizer.params.betas": ("auto", [0.9, 0.999]),
    "zero_optimization.stage3_max_reuse_distance": (1e9,),
    "zero_optimization.stage3_max_live_parameters": (1e9,),
    "optimizer.params.eps": (1e-8, "auto"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True,),
    "zero_optimization.offload_optimizer.pin_memory": (True,),
    "scheduler.type": ("WarmupDecayLR", "WarmupLR"),
    "scheduler.params.warmup_num_steps": ("auto", 100),
    "scheduler.params.warmup_max_lr": ("auto", 1e-4),
    "scheduler.params.warmup_min_lr": ("auto", 0),
    "zero_optimization.offload_param.device": ("cpu",),
    "fp16.auto_cast": (False, True),
    "zero_optimization.offload_param.pin_memory": (True,),
    "zero_allow_untested_optimizer": (True,),
    "scheduler.params.total_num_steps": ("auto", 1000),
    "optimizer.params.torch_adam": (True,),
    "optimizer.params.adam_w_mode": (True,),
    "zero_force_ds_cpu_optimizer": (True, False),
    "zero_optimization.gather_16bit_weights_on_model_save": (True,),
    "zero_optimization.round_robin_gradients": (True,),
}


def read(name: str) -> Imported:
    """Read one config of the corpus, assuming that everything is built. Other tests cover unsupported settings."""
    return import_deepspeed((FOLDER / f"{name}.json").read_text(), RANKS[name], not_built=())


def report_of(imported: Imported) -> str:
    lines = [f"plan: {imported.plan}"]
    lines += [f"{setting}: {value}" for setting, value in imported.overrides.items()]
    lines += ["", *(str(line) for line in imported.lines), ""]
    lines += [f"open: {', '.join(imported.open)}"] if imported.open else []
    lines += [f"note: {note}" for note in imported.notes]
    return "\n".join(lines).rstrip() + "\n"


def refused(imported: Imported) -> list[str]:
    return [problem.message for problem in config_problems(imported.config())]


if __name__ == "__main__":
    for name in RANKS:
        imported = read(name)
        (FOLDER / f"{name}.txt").write_text(report_of(imported))
        print(f"== {name} ({RANKS[name]} ranks)\n{report_of(imported)}")
        format_config(imported.config())
        print(*(f"refused: {text}" for text in refused(imported)), sep="\n")
