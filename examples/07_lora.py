"""Fine-tune adapters of a Hugging Face model with peft. Needs weft's extra "hf" and `pip install peft`.

python examples/07_lora.py
torchrun --nproc-per-node 2 examples/07_lora.py      frozen weights are sharded too
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import weft

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
torch.manual_seed(0)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
texts = torch.randint(64, (8, 4, 16))


def loss_fn(output, batch):
    labels = batch["labels"][:, 1:].flatten()
    loss_sum = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum")
    return loss_sum, labels.numel()


with weft.init("dp_shard=* zero=3") as run:
    model = run.parallelize(model)
    step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=1e-2)
    rows = slice(run.mesh.data.rank * 4 // run.mesh.data.size, (run.mesh.data.rank + 1) * 4 // run.mesh.data.size)
    for ids in texts:
        metrics = step({"input_ids": ids[rows], "labels": ids[rows]})
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with tempfile.TemporaryDirectory() as folder:
        run.save_pretrained(model, folder)  # the adapter alone, as peft writes it
        if run.is_first:
            print(f"loss {metrics.loss:.4f}, {trained:,} trained parameters on this rank")
    del model, step
