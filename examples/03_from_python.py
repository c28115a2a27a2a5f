"""A whole run from Python: prepare the folder, train in this process, let the model write.

python examples/03_from_python.py
"""

import tempfile
from pathlib import Path

from weft.config.files import load_config
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.tasks.generation import generate_text

with tempfile.TemporaryDirectory() as folder:
    text = Path(folder) / "rhyme.txt"
    text.write_text("the shuttle flies, the weft goes through, the cloth grows on the loom anew.\n" * 400)
    (Path(folder) / "held_out.txt").write_text("the weft goes through, the cloth grows on.\n" * 20)
    config = load_config(
        None,
        [
            f"data.train={text}",
            f"data.eval={folder}/held_out.txt",
            f"run.dir={folder}",
            "tokenizer.kind=bytes",
            "model.dim=64",
            "model.num_layers=2",
            "model.num_heads=4",
            "model.num_kv_heads=2",
            "model.ffn_dim=128",
            "train.seq_len=64",
            "train.global_batch=8",
            "train.steps=40",
            "eval.every=20",
            "launch.device=cpu",
            "sample.prompt=",
        ],
    ).config
    run = prepare_run(config, world_size=1)
    result = run_rank(run)
    print(f"{result.step} steps: {result.reason}")
    print(generate_text(run, "the shuttle ", max_tokens=40, temperature=0.5))
