"""Train a Hugging Face model under any plan and save it for transformers. Needs weft's extra "hf".

python examples/06_hugging_face.py
torchrun --nproc-per-node 2 examples/06_hugging_face.py      cuts its layers over two ranks

For your own model: AutoModelForCausalLM.from_pretrained(FOLDER) in the place of the random weights.
"""

import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.env import rank_env

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
torch.manual_seed(0)
texts = torch.randint(64, (8, 4, 16))  # 8 steps of 4 texts


def loss_fn(output, batch):
    labels = batch["labels"][:, 1:].flatten()
    loss_sum = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum")
    return loss_sum, (labels != -100).sum()


place = rank_env()
with weft.init("tp=2 sp=on" if place and place.world_size == 2 else "") as run:
    model = run.parallelize(LlamaForCausalLM(config))  # its layout is found from the model
    step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=1e-2, max_grad_norm=1.0)
    for ids in texts:
        metrics = step({"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory() as folder:
        run.save_pretrained(model, folder)  # whole tensors, whatever the plan
        if run.is_first:
            again = LlamaForCausalLM.from_pretrained(folder)
            print(f"loss {metrics.loss:.4f}; from_pretrained reads {again.num_parameters():,} parameters back")
    del model, step
