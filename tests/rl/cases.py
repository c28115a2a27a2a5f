"""Recorded rollouts: steps of the task under any plan, and by formulas with one model, a completion at a time."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch

from tests.full_state import capture
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.optim.build import build_optimizer
from weft.parallel.parallelize import parallelize
from weft.rl import grpo, objective, scored
from weft.rl.collector import RolloutCollector
from weft.rl.grpo import GrpoTask
from weft.rl.prompt_data import PromptRecord, tokenizer_only
from weft.rl.rewards import Rewards
from weft.rl.rollout import Sampled
from weft.rl.scored import Rollout
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import RunFolder
from weft.train.step.evaluation import RankForwards
from weft.train.step.train_step import TrainStep
from weft.train.weights.run_adapter import with_adapter

SPEC = DecoderSpec(family="llama", vocab_size=260, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=24,
                   max_seq_len=64)  # fmt: skip
EXPERTS = DecoderSpec(family="llama", vocab_size=260, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=24,
                      max_seq_len=64, num_experts=4, top_k=2, expert_ffn_dim=12, balance="none")  # fmt: skip
#: Prompts of a step and completions of each. With two ranks and accumulation=2, groups span ranks.
PROMPTS, EACH, STEPS = 2, 6, 3
#: Settings of [grpo], and the adapter's rank.
CASES = {
    "grpo": (["grpo.beta=0.3", "grpo.importance_cap=1.1"], 0),
    "dr_grpo": (["grpo.method=dr_grpo"], 0),
    "rloo": (["grpo.method=rloo", "grpo.temperature=0.7"], 0),
    "tokens": (["grpo.normalize=tokens", "grpo.reward_weights=[0.5, 2.0]"], 0),
    "updates": (["grpo.updates_per_rollout=3", "grpo.clip_low=0.01", "grpo.clip_high=0.03"], 0),
    "sequence": (["grpo.ratio=sequence", "grpo.updates_per_rollout=3", "grpo.clip_low=2e-3", "grpo.clip_high=4e-3"], 0),
    "adapter": (["grpo.beta=0.3", "grpo.normalize=tokens"], 2),
    "distill": (["grpo.method=distill"], 0),
}


def config_of(name: str):
    more, rank = CASES[name]
    return load_config(None, [
        "task=grpo", 'grpo.reward=["a.py:first", "a.py:second"]', f"grpo.completions={EACH}", "grpo.max_tokens=12",
        f"train.global_batch={PROMPTS * EACH}", "train.seq_len=40", "tokenizer.kind=bytes", f"adapter.rank={rank}",
        "optimizer.name=sgd", "optimizer.lr=0.2", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", *more,
    ]).config  # fmt: skip


def recorded(step: int) -> tuple[list[PromptRecord], list[Sampled], list[list[float]]]:
    """Return prompts, completions of unequal lengths with given tokens in between, and rewards of two functions."""
    rng = random.Random(step)
    prompts, samples = [], []
    for number in range(PROMPTS):
        ids = tuple(rng.choices(range(60, 90), k=3 + 9 * number))
        prompts.append(PromptRecord(ids, {"prompt": "?"}))
        for index in range(EACH):
            length = 1 if index == 2 else rng.randint(2, 12)
            trained = tuple(place not in (1, 2) or index % 2 == 0 for place in range(length))
            logs = tuple(rng.uniform(-5.8, -5.2) if one else 0.0 for one in trained)
            samples.append(Sampled(ids, tuple(rng.choices(range(60, 90), k=length)), trained, logs, "stop"))
    rewards = [[rng.gauss(place // EACH, 1) for place in range(len(samples))] for _ in range(2)]
    rewards[1][4] = float("nan")
    return prompts, samples, rewards


def recorded_rollout(collector: RolloutCollector, step: int) -> Rollout:
    """Return the recorded completions with their rewards, as the collector's `_new_rollout`."""
    prompts, samples, rewards = recorded(step)
    functions = mock.Mock(call=lambda values: [Rewards(one) for one in rewards])
    grpo = collector._config.grpo
    return scored.score(collector._forwards, functions, collector._tokenizer, grpo, prompts, samples)


def task_of(name: str, folder: Path, spec) -> GrpoTask:
    found = GrpoTask()
    found.config = config_of(name)
    found.config = found.config.model_copy(
        update={"grpo": found.config.grpo.model_copy(update={"reward_errors": "count"})}
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(asdict(spec)))
    found.text.prepared, found.text.folder = tokenizer_only(found.config, None), RunFolder(folder)
    found.prompts._tables = mock.Mock(train=[None] * 4)
    return found


def results_under(plan_text: str, names: tuple[str, ...], folder: Path, spec=SPEC, fault: str = "") -> dict:
    """Return losses and gradient norms of steps by case, and the change of all weights."""
    torch.set_num_threads(1)
    plan, found = Plan.parse(f"{plan_text} precision=fp64"), {}
    mesh = build_mesh(plan)
    for name in names:
        one = task_of(name, folder / f"{name}-{plan_text.replace(' ', '_')}", spec)
        with planted(fault), mock.patch.object(RolloutCollector, "_new_rollout", recorded_rollout):
            batches = one.batches(Share(PROMPTS * EACH, plan.microbatches_per_step, mesh.reader.rank, mesh.reader.size))
            model = with_adapter(decoder(spec), one.config)
            parallelize(model, mesh, seed=0)
            second = None
            if one.reference.which == "second":
                second = decoder(spec, seed=1).requires_grad_(False)
                parallelize(second, mesh, seed=0)
            optimizer = build_optimizer(model.named_parameters(), one.config.optimizer, 0)
            step = TrainStep(model, optimizer, one.loss, mesh, forward=one.forward, nominal_tokens=one.nominal_count())
            events: list = []
            one.begin(RankForwards(model, mesh, one, second, events.append))
            done = []
            for number in range(STEPS):
                done.append(step(Microbatches(one.before_step(batches.batches(number)))))
                one.after_step(number + 1)
        weights = capture(model, optimizer)["model"]
        found[name] = {
            "steps": [(each.loss, each.grad_norm, each.num_tokens) for each in done],
            "weights": {key: value.double().numpy() for key, value in weights.items()},
            "metrics": [event["figures"] for event in events],
        }
    return found


def decoder(spec, seed: int = 0) -> torch.nn.Module:
    """Return a decoder whose weights are large enough that tokens matter."""
    model = build_decoder(spec, seed=seed).double()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(3.0)
    return model


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one of the usual faults of such a loss."""
    own = objective.group_advantages
    losses = objective.policy_losses

    def per_rank(rewards, method):
        # With two ranks and accumulation=2, a rank has every second run of three completions.
        return own(rewards.view(-1, EACH // 2), method).view(rewards.shape)

    def shifted(self, *arguments):
        batch = rows(self, *arguments)
        return {**batch, "labels": batch["labels"].roll(1, 1)}

    def negative(log_probs, batch, *arguments):
        return losses(log_probs, {**batch, "reference": 2 * log_probs.detach() - batch["reference"]}, *arguments)

    def longest(lengths, settings):
        return [1 / max(lengths)] * len(lengths)

    rows = Rollout.rows
    patches = {
        "statistics per rank": lambda: mock.patch.object(scored, "group_advantages", per_rank),
        "length bias": lambda: mock.patch.object(scored, "token_weights", longest),
        "mask shifted": lambda: mock.patch.object(Rollout, "rows", shifted),
        "stale log probabilities": lambda: mock.patch.object(Rollout, "stored", return_value={}),
        "KL sign": lambda: mock.patch.object(grpo, "policy_losses", negative),
    }  # fmt: skip
    if not fault:
        yield
        return
    with patches[fault]():
        yield


# The same by formulas.


def plain_results(name: str, spec=SPEC) -> dict:
    """Return losses, gradient norms and weights of one model that reads one completion at a time."""
    config = config_of(name)
    grpo = config.grpo
    model = with_adapter(decoder(spec), config).double()
    base = copy.deepcopy(model)
    other = base if config.adapter.rank else decoder(spec, seed=1)
    params = [(key, param) for key, param in model.named_parameters() if param.requires_grad]
    steps, stored = [], []
    for number in range(STEPS):
        first = number - number % grpo.updates_per_rollout
        _, samples, rewards = recorded(first)
        if number == first:
            with torch.no_grad():
                stored = [log_probs(model, one, grpo.temperature) for one in samples]
        total = plain_loss(model, other, samples, advantages(rewards, grpo), stored, grpo)
        grads = torch.autograd.grad(total, [param for _, param in params])
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        with torch.no_grad():
            for (_, param), grad in zip(params, grads, strict=True):
                param -= config.optimizer.lr * grad
        steps.append((total.item(), norm.item(), len(samples)))
    return {"steps": steps, "weights": {key: param.detach().numpy() for key, param in params}}


def log_probs(model, one: Sampled, temperature: float) -> torch.Tensor:
    whole = torch.tensor([[*one.prompt_ids, *one.ids]])
    logits = model(whole[:, :-1])[0] / temperature
    return logits.log_softmax(-1)[torch.arange(whole.shape[1] - 1), whole[0, 1:]][len(one.prompt_ids) - 1 :]


def advantages(rewards: list[list[float]], grpo) -> list[float]:
    weights = grpo.reward_weights or (1.0, 1.0)
    total = [sum(w * one for w, one in zip(weights, each, strict=True)) for each in zip(*rewards, strict=True)]
    found = []
    for start in range(0, len(total), EACH):
        known = [one for one in total[start : start + EACH] if one == one]
        mean = sum(known) / len(known)
        std = (sum((one - mean) ** 2 for one in known) / (len(known) - 1)) ** 0.5
        for one in total[start : start + EACH]:
            if one != one:
                found.append(0.0)
            elif grpo.method == "rloo":
                found.append(one - (sum(known) - one) / (len(known) - 1))
            else:
                found.append(one - mean if grpo.method == "dr_grpo" else (one - mean) / (std + 1e-4))
    return found


def plain_loss(model, other, samples, gains, stored, grpo) -> torch.Tensor:
    sums, lengths = [], []
    for one, gain, before in zip(samples, gains, stored, strict=True):
        now, mask = log_probs(model, one, grpo.temperature), torch.tensor(one.trained)
        old = before if grpo.updates_per_rollout > 1 else now.detach()
        with torch.no_grad():
            reference = log_probs(other, one, grpo.temperature)
        if grpo.method == "distill":
            gain = reference - old
        ratio = torch.exp(now - old)
        if grpo.ratio == "sequence":
            ratio = torch.exp((now - old)[mask].mean()).expand(len(now))
        losses = -torch.min(ratio * gain, ratio.clamp(1 - grpo.clip_low, 1 + grpo.clip_high) * gain)
        if grpo.importance_cap:
            losses = (
                losses
                * torch.exp(old - torch.tensor(one.log_probs, dtype=torch.float64))
                .clamp(max=grpo.importance_cap)
                .detach()
            )
        if grpo.beta:
            losses = losses + grpo.beta * (torch.exp(reference - now) - (reference - now) - 1)
        sums.append(losses[mask].sum())
        lengths.append(int(mask.sum()))
    kind = {"grpo": "sequence", "dr_grpo": "constant", "rloo": "sum", "distill": "tokens"}[grpo.method]
    kind = kind if grpo.normalize == "auto" else grpo.normalize
    if kind == "tokens":
        return torch.stack(sums).sum() / sum(lengths)
    each = {"sequence": lengths, "constant": [grpo.max_tokens] * len(sums), "sum": [1] * len(sums)}[kind]
    return torch.stack([one / length for one, length in zip(sums, each, strict=True)]).mean()


def write_prompts(path: Path, number: int = 8) -> Path:
    """Write prompts with a column for the reward."""
    letters = "abcd"
    rows = [{"prompt": f"say {letters[one % 4]}{one}:", "letter": letters[one % 4]} for one in range(number)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
