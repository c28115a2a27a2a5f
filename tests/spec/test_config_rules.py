"""Rules between config keys: error texts and reported lines."""

from __future__ import annotations

import pytest

from weft.config.cluster import device
from weft.config.expected_values import node_at
from weft.config.files import load_config
from weft.config.rules.config_rules import CONFIG_RULES, config_problems
from weft.config.run_config import RunConfig
from weft.errors import ConfigError

PRIVATE = ["privacy.epsilon=8", "privacy.delta=1e-5"]
CASES = [
    ("model-path-decides", ["model.path=base", "model.dim=64"],
     "model.path=base: the folder sets model.dim. Leave it out, or leave model.path out."),
    ("task-has-its-folder", ["task.name=embed"],
     'model.path="": task.name=embed trains the model of a Hugging Face folder. Set model.path to the folder.'),
    ("adapter-has-a-rank", ["adapter.kind=dora"],
     "adapter.rank=0: there is no adapter, and other settings of [adapter] are set. Use adapter.rank=16, or leave "
     "them out."),
    ("added-tokens-are-new", ['tokenizer.add_tokens=["<a>", ""]'],
     'tokenizer.add_tokens="": a token has at least one character. Leave the empty one out.'),
    ("added-tokens-are-new", ['tokenizer.add_tokens=["<a>", "<b>", "<a>"]'],
     "tokenizer.add_tokens=<a>: the token is listed twice. List each token once."),
    ("added-tokens-are-new", ["tokenizer.kind=bytes", 'tokenizer.add_tokens=["<a>"]'],
     "tokenizer.add_tokens=<a>: tokenizer.kind=bytes has one token per byte. Use tokenizer.kind=bpe or file."),
    ("added-tokens-are-new", [f"tokenizer.add_tokens={[f'<{number}>' for number in range(100_001)]}"],
     "tokenizer.add_tokens=100001 tokens: at most 100000 are added. Train a tokenizer instead (tokenizer.kind=bpe)."),
    ("packed-base-has-a-folder", ["adapter.rank=4", "adapter.base=nf4"],
     "adapter.base=nf4: weights are quantized while a folder is read, and model.path is not set. Set model.path to a "
     "Hugging Face folder, or use adapter.base=stored."),
    ("reference-has-no-started-adapter", ["adapter.rank=4", "adapter.start=sft", "task.name=prefer", "model.path=base"],
     "adapter.start=sft: the reference of task=prefer is the model without an adapter. Merge the adapter into "
     "model.path first (weft export RUN FOLDER --merge), and leave adapter.start out."),
    ("packed-base-has-no-dora", ["adapter.rank=4", "adapter.base=int8", "adapter.kind=dora", "model.path=base"],
     "adapter.base=int8: adapter.kind=dora divides by norms of unquantized weights. Use adapter.kind=lora, or "
     "adapter.base=stored."),
    ("warmup-fits", ["train.steps=10", "schedule.warmup_steps=20"],
     "schedule.warmup_steps=20: warm-up must end before train.steps=10. Use schedule.warmup_steps=1, or more steps."),
    ("one-warmup", ["schedule.warmup_ratio=0.1", "schedule.warmup_steps=3"],
     "schedule.warmup_ratio=0.1: schedule.warmup_steps is set too. Keep one of them."),
    ("optimizer-classes-have-options", ["optimizer.name=lion", "optimizer.betas=[0.9, 0.98]"],
     "optimizer.betas=[0.9, 0.98]: optimizer.name=weft.optim.lion:Lion does not read betas, eps and states. Set "
     "optimizer.options, such as {betas = [0.9, 0.99]}, or leave them out."),
    ("one-set-of-weights", ["optimizer.name=schedulefree:AdamWScheduleFree"],
     "optimizer.name=schedulefree:AdamWScheduleFree: it evaluates an average of the weights that it trains, and Weft "
     "evaluates and saves the trained ones. Use optimizer.name=schedule_free, which is Weft's."),
    ("averages-need-no-decay", ["optimizer.name=schedule_free"],
     "schedule.kind=cosine: optimizer.name=schedule_free averages the weights of a constant rate. Use "
     "schedule.kind=constant, with warmup if wanted."),
    ("averages-are-of-one-set-of-weights",
     ["optimizer.name=schedule_free", "schedule.kind=constant", "plan=dp_replicate=2 sync=average:4"],
     "optimizer.name=schedule_free: sync=average:4 averages the replicas' weights, and each replica would evaluate "
     "another average. Use sync=step, or optimizer.name=adamw."),
    ("measured-kernels-vary", ["train.deterministic=true", "kernels.convolutions=measured"],
     "train.deterministic=true: kernels.convolutions=measured may choose other algorithms in each run. Use "
     "kernels.convolutions=guessed."),
    ("profiled-steps-exist", ["train.profile=9-3"],
     "train.profile=9-3: 1 to 50 steps up to train.steps=300 can be profiled. Use 10-12."),
    ("decay-fits", ["schedule.kind=wsd", "schedule.decay_steps=290"],
     "schedule.decay_steps=290: with schedule.warmup_steps=15 that is more than train.steps=300. "
     "Use at most 285, a shorter warm-up, or more steps."),
    ("decay-fits", ["schedule.kind=wsd", "schedule.warmup_steps=280"],
     "schedule.decay_steps=60: with schedule.warmup_steps=280 that is more than train.steps=300. "
     "Use at most 20, a shorter warm-up, or more steps."),
    ("decay-belongs-to-wsd", ["schedule.decay_steps=10"],
     "schedule.decay_steps=10: only schedule.kind=wsd has a separate decay, and schedule.kind is cosine. Leave it "
     "out, or use schedule.kind=wsd."),
    ("stream-without-epochs", ["data.stream=true", "train.epochs=2"],
     "data.stream=true: train.epochs=2 needs the number of samples, which a stream does not have before its end. Use "
     "train.steps."),
    ("stream-of-one-source", ["data.stream=true", 'data.train=[{path="a.jsonl"},{path="b.jsonl"}]'],
     "data.stream=true: data.train has 2 sources, and a stream reads one. Give one folder or glob, or leave "
     "data.stream out."),
    ("tokenizer-path-given", ["tokenizer.kind=file"],
     'tokenizer.path="": tokenizer.kind=file needs a saved tokenizer. '
     "Set tokenizer.path to a tokenizer.json or its folder."),
    ("tokenizer-path-used", ["tokenizer.path=x"],
     "tokenizer.path='x': tokenizer.kind=bpe does not read a file. Use tokenizer.kind=file, or leave the path out."),
    ("layout-reads", ["layout=none.layout"],
     "layout=none.layout: this file cannot be read (No such file or directory). Use pattern=style entries, or a "
     "file that `weft layout MODEL --save FILE` wrote."),
    ("momentum-is-of-sgd-and-muon", ["optimizer.momentum=0.5", "optimizer.name=lion"],
     "optimizer.momentum=0.5: optimizer.name=weft.optim.lion:Lion does not read it. Leave it out, or use "
     "optimizer.name=sgd or muon."),
    ("nesterov-is-of-sgd", ["optimizer.nesterov=true"],
     "optimizer.nesterov=true: it is a variant of SGD with momentum, and here optimizer.name=adamw. "
     "Use false, or optimizer.name=sgd with momentum=0.9."),
    ("nesterov-is-of-sgd", ["optimizer.nesterov=true", "optimizer.name=sgd", "optimizer.momentum=0"],
     "optimizer.nesterov=true: it is a variant of SGD with momentum, and here optimizer.name=sgd with "
     "optimizer.momentum=0. Use false, or optimizer.name=sgd with momentum=0.9."),
    ("options-are-of-a-class", ["optimizer.options={rho = 0.9}"],
     "optimizer.options={rho = 0.9}: only an optimizer set as package.module:Class has options, and optimizer.name "
     "is adamw. Set optimizer.betas, eps or momentum instead, or use a class."),
    ("task-options-are-of-a-class", ["task.options={side = 16}"],
     "task.options={side = 16}: only a task with a task.name has options. Set task.name=package.module:Class, or "
     "leave them out."),
    ("bf16-states-are-of-adamw", ["optimizer.states=bf16", "optimizer.name=muon"],
     "optimizer.states=bf16: only AdamW's moments can be stored in bf16 or fp8, and optimizer.name is muon. Use "
     "fp32, or optimizer.name=adamw."),
    ("jax-needs-a-plan", ["launch.engine=jax", "plan=auto"],
     "launch.engine=jax: the planner does not know its plans. Write the plan, such as plan='dp_shard=2 zero=2', or "
     "launch.engine=torch."),
    ("jax-trains-the-default-task", ["launch.engine=jax", "task=classify", "data.train=a.jsonl", "model.path=a"],
     "launch.engine=jax: only the default task is built. Leave task.name out, or launch.engine=torch."),
    ("jax-has-no-adapters", ["launch.engine=jax", "adapter.rank=4"],
     "launch.engine=jax: adapters are not built. Use adapter.rank=0, or launch.engine=torch."),
    ("jax-has-one-process", ["launch.engine=jax", "launch.restarts=2"],
     "launch.engine=jax: one process trains and nothing restarts it. Use launch.restarts=0 and "
     "checkpoint.peer_every=0, or launch.engine=torch."),
    ("jax-has-two-optimizers", ["launch.engine=jax", "optimizer.name=muon"],
     "launch.engine=jax: adamw and sgd with fp32 states are built. Use optimizer.name=adamw, or launch.engine=torch."),
    ("jax-has-even-batches", ["launch.engine=jax", "data.batching=cost", "train.global_cost=100"],
     "launch.engine=jax: steps have one shape. Leave data.batching out, or launch.engine=torch."),
    ("jax-evaluates-itself", ["launch.engine=jax", "launch.evaluate_on=cpu"],
     "launch.engine=jax: evaluation in another process is not built. Use launch.evaluate_on=ranks, or "
     "launch.engine=torch."),
    ("jax-draws-no-noise", ["launch.engine=jax", "train.neftune_alpha=5"],
     "launch.engine=jax: no random numbers are drawn in a step. Leave train.neftune_alpha out, or "
     "launch.engine=torch."),
    ("patience-needs-evaluations", ["train.early_stop.patience=3", "eval.every=0"],
     "train.early_stop.patience=3: eval.every=0 evaluates only at the end. Use eval.every=50."),
    ("cpu-evaluates-checkpoints", ["launch.evaluate_on=cpu", "eval.every=20", "checkpoint.every=50"],
     "launch.evaluate_on=cpu: it evaluates checkpoints, and checkpoint.every=50 does not save each step of "
     "eval.every=20. Use checkpoint.every=20."),
    ("cpu-evaluation-stops-no-run", ["launch.evaluate_on=cpu", "train.early_stop.patience=3"],
     "launch.evaluate_on=cpu: its results arrive while training goes on, and train.early_stop.patience=3 would stop at "
     "a step that depends on the CPU's speed. Use launch.evaluate_on=ranks, or leave train.early_stop.patience out."),
    ("cpu-evaluates-one-model", ["launch.evaluate_on=cpu", "plan=dp_replicate=2 sync=average:4"],
     "launch.evaluate_on=cpu: the plan 'dp_replicate=2 sync=average:4' synchronizes replicas every H steps, and a "
     "checkpoint between two synchronizations has no single model. Use launch.evaluate_on=ranks, or sync=step."),
    ("patience-needs-evaluation-data", ["train.early_stop.patience=3", "data.holdout=0"],
     "train.early_stop.patience=3: there is no evaluation data (data.holdout=0 and no data.eval). Use "
     "data.holdout=0.02, or set data.eval."),
    ("separate-replicas-need-sync", ["launch.replicas_apart=true", "plan=dp_replicate=2"],
     "launch.replicas_apart=true: the plan 'dp_replicate=2' has no replicas that synchronize every H steps. Use e.g. "
     "dp_replicate=2 sync=diloco:50 in the plan, or leave launch.replicas_apart out."),
    ("separate-replicas-need-a-plan", ["launch.replicas_apart=true", "plan=auto"],
     "launch.replicas_apart=true: the planner cannot plan separate replicas. Write the plan, such as "
     'plan="dp_replicate=2 dp_shard=4 zero=1 sync=diloco:50".'),
    ("separate-replicas-keep-all-ranks",
     ["launch.min_ranks=1", "launch.replicas_apart=true", "plan=dp_replicate=2 sync=diloco:5"],
     "launch.min_ranks=1: under launch.replicas_apart=true a replica has all ranks of its plan or is lost, and the "
     "others continue without it. Leave launch.min_ranks out."),
    ("rendezvous-needs-a-key",
     ["launch.replica=0", "launch.meet_at=a:1", "launch.replicas_apart=true", "plan=dp_replicate=2 sync=diloco:5"],
     "launch.meet_at=a:1: other machines can reach this address, so replicas must authenticate. Put the same secret "
     "into WEFT_MEETING_KEY on all machines, and add launch.meeting_key=env:WEFT_MEETING_KEY."),
    ("separate-replicas-without-fragments", ["launch.replicas_apart=true", "plan=dp_replicate=2 sync=diloco:5/2"],
     "launch.replicas_apart=true: the plan 'dp_replicate=2 sync=diloco:5/2' streams fragments, and separate replicas "
     "synchronize the full model together. Leave the number of fragments out of sync, or leave launch.replicas_apart "
     "out."),
    ("separate-replicas-without-feedback",
     ["launch.replicas_apart=true", "plan=dp_replicate=2 compress=top:0.02 sync=diloco:5"],
     "launch.replicas_apart=true: the plan 'dp_replicate=2 compress=top:0.02 sync=diloco:5' adds its compression "
     "error to the next synchronization, which a separate replica may miss. Use compress=int8, which has no error "
     "feedback, or leave launch.replicas_apart out."),
    ("replica-needs-separate-replicas",
     ["launch.replica=1", "plan=dp_replicate=2 sync=diloco:5", "launch.meet_at=127.0.0.1:1"],
     "launch.replica=1: launch.replica and launch.meet_at are for separate replicas. Add launch.replicas_apart=true, "
     "or leave them out."),
    ("replica-needs-an-address",
     ["launch.replica=1", "launch.replicas_apart=true", "plan=dp_replicate=2 sync=diloco:5"],
     "launch.replica=1: it needs the rendezvous address. Add launch.meet_at=HOST:PORT, with the address of the "
     "machine that starts replica 0."),
    ("replica-needs-an-address",
     ["launch.meet_at=127.0.0.1:1", "launch.replicas_apart=true", "plan=dp_replicate=2 sync=diloco:5"],
     "launch.replica=none: launch.meet_at=127.0.0.1:1 is set without the number of this machine's replica. Add "
     "launch.replica=0 on the machine of that address, launch.replica=1 on the next."),
    ("replica-is-in-the-plan",
     ["launch.replica=2", "launch.meet_at=127.0.0.1:1", "launch.replicas_apart=true",
      "plan=dp_replicate=2 sync=diloco:5"],
     "launch.replica=2: the plan 'dp_replicate=2 sync=diloco:5' has replicas 0 to 1. Use one of these."),
    ("replica-plan-is-closed",
     ["launch.replica=1", "launch.meet_at=127.0.0.1:1", "launch.replicas_apart=true",
      "plan=dp_replicate=2 dp_shard=* zero=1 sync=diloco:5"],
     "launch.replica=1: the plan 'dp_replicate=2 dp_shard=* zero=1 sync=diloco:5' has an axis '*', and this machine "
     "has only one replica. Write the number of ranks instead of '*'."),
    ("device-runs-plan", ["launch.device=cpu", "plan=graphs=on"],
     "launch.device=cpu: the plan has graphs=on, and graphs are recorded on cuda and rocm only. Use graphs=off."),
    ("device-runs-plan", ["launch.device=npu", "plan=precision=fp64"],
     "launch.device=npu: the plan has precision=fp64, and this kind computes in fp32, bf16, fp16. Use precision=fp32."),
    ("device-runs-plan", ["launch.device=hpu", "plan=compile=on"],
     "launch.device=hpu: the plan has compile=on, and torch.compile generates code for cpu, cuda, rocm and xpu only. "
     "Use compile=off."),
    ("shard-shares-divide-matrices", ["plan=dp_shard=2 zero=1 shard_shares=3+1", "optimizer.name=muon"],
     "optimizer.name=muon: it needs full matrices, and shard_shares divide them. Use optimizer.name=adamw or sgd, or "
     "leave shard_shares out."),
    ("balance-needs-a-plan", ["balance=apply", "plan=auto"],
     "balance=apply: the planner may choose a plan without shares. Write the plan, such as plan='dp_replicate=*'."),
    ("balance-fits-the-plan", ["balance=apply", "plan=dp_replicate=2 sync=average:4"],
     "balance=apply: unequal shares are not built with sync=average:4 yet. Use sync=step, or balance=tell."),
    ("shares-have-known-tasks", ["plan=dp_replicate=2 shares=3+1", "task.name=embed", "model.path=base"],
     "task.name=embed: unequal shares of ranks are not built with it yet. Use masked_lm, classify_text, "
     "classify_tokens, seq2seq or the default task, or leave shares out."),
    ("shares-have-no-norm-groups", ["balance=apply", "train.norm_group=4"],
     "train.norm_group=4: unequal shares of ranks are not built with it yet. Use train.norm_group=0, or leave "
     "balance=apply out."),
    ("shares-need-torch", ["plan=dp_replicate=2 shares=3+1", "launch.engine=jax"],
     "launch.engine=jax: unequal shares of ranks are not built with it yet. Use launch.engine=torch, or leave shares "
     "out."),
    ("shares-have-no-tables", ["balance=apply", "layout=user=rows"],
     "layout=user=rows: unequal shares of ranks are not built with it yet. Leave rows, columns and one out of layout, "
     "or leave balance=apply out."),
    ("tables-fit-the-plan", ["layout=user=rows", "plan=dp_shard=2 zero=3"],
     "layout=user=rows: plan.zero=3: embedding tables of a layout are not built with it yet. Use zero=0, 1 or 2, or "
     "leave the tables out of layout."),
    ("tables-fit-the-plan", ["layout=user=rows", "plan=tp=*"],
     "layout=user=rows: plan.tp=2: embedding tables of a layout are not built with it yet. Leave tp out, or leave "
     "the tables out of layout."),
    ("tables-need-a-plan", ["layout=user=rows", "plan=auto"],
     "layout=user=rows: it shards embedding tables, and the planner does not count them. Price the tables with weft "
     "plan CLUSTER --tables FILE and write the plan, such as plan='dp_replicate=*', or leave the tables out of "
     "layout."),
    ("tables-need-torch", ["layout=user=one", "launch.engine=jax"],
     "layout=user=one: it shards embedding tables, and the JAX engine does not know them. Use launch.engine=torch, or "
     "leave the tables out of layout."),
    ("tables-have-no-adapter", ["layout=user=columns", "adapter.rank=4"],
     "layout=user=columns: it shards embedding tables, and an adapter would freeze them. Use adapter.rank=0, or leave "
     "the tables out of layout."),
    ("tables-have-no-averages", ["layout=user=rows", "optimizer.name=schedule_free", "schedule.kind=constant"],
     "layout=user=rows: it shards embedding tables, and averages of schedule_free would change rows that a step does "
     "not read. Use optimizer.name=adamw, or leave the tables out of layout."),
    ("tables-are-in-the-layout", ["tables.lr=0.1"],
     "tables.optimizer=rowwise_adagrad: settings of [tables] are set, and layout shards no embedding table. Set "
     "layout, such as 'user=rows', or leave them out."),
    ("tables-on-the-host", ["layout=user=rows", "tables.cache=0.1"],
     "tables.cache=0.1: tables.cache and tables.folder are for tables with style host, and layout has none. Set "
     "layout, such as 'user=host', or leave them out."),
    ("privacy-fits-the-plan", [*PRIVATE, "plan=dp_replicate=2 recompute=full"],
     "privacy.epsilon=8: plan.recompute=full: with privacy, the recorder does not see a forward that runs again in "
     "backward. Use recompute=none."),
    ("privacy-needs-torch", [*PRIVATE, "launch.engine=jax"],
     "privacy.epsilon=8: the JAX engine has no private steps. Use launch.engine=torch."),
    ("privacy-needs-delta", ["privacy.epsilon=8", "privacy.delta=0"],
     "privacy.delta=0: it is a probability below 1 / number of records. Use privacy.delta=1e-5."),
    ("privacy-draws-by-record", [*PRIVATE, "data.batching=cost"],
     "privacy.epsilon=8: records are drawn independently, not by cost. Leave data.batching out."),
    ("privacy-fits-the-plan", [*PRIVATE, "plan=dp_replicate=2 shares=3+1"],
      "privacy.epsilon=8: plan.shares=3+1: with privacy, it is not tested. Use shares=none."),
    ("privacy-keeps-shares", [*PRIVATE, "plan=dp_replicate=2", "balance=apply"],
      "privacy.epsilon=8: private steps are not tested with shares that change. Use balance=tell."),
    ("privacy-has-no-tables", [*PRIVATE, "layout=user=rows"],
      "privacy.epsilon=8: the rows of sharded tables are not clipped by sample. Leave the tables out of layout."),
    ("privacy-is-on", ["privacy.epsilon=0", "privacy.clip=0.5"],
     "privacy.epsilon=0: settings of [privacy] are set, and neither epsilon nor noise is. Set privacy.epsilon=8, or "
     "leave them out."),
    ("tables-decay-lazily", ["layout=user=rows", "tables.weight_decay=0.1"],
     "tables.weight_decay=0.1: tables.optimizer=rowwise_adagrad does not decay rows. Use 0, or "
     "tables.optimizer=lazy_adamw."),
]  # fmt: skip
OTHERS = [
    (["energy.grid=frence"],
     "energy.grid=frence: it is neither grams of CO2 per kWh above 0 nor a known grid. Did you mean 'france'?"),
    (["energy.grid=0"],
     "energy.grid=0: it is neither grams of CO2 per kWh above 0 nor a known grid. Use a number, or one of world, "
     "australia, austria, belgium, brazil, bulgaria, canada, china, croatia, czechia, denmark, estonia, finland, "
     "france, germany, greece, hungary, india, ireland, norway, us."),
    (["energy.price=cheap"],
     "energy.price=cheap: a price is a number and a currency, for one kWh. Use such as 0.25eur."),
    (["energy.budget=3", "energy.meter=false"],
     "energy.budget=3: energy.meter=false measures nothing. Use energy.meter=true, or leave energy.budget out."),
    (["train.global_batch=10", "plan=dp_replicate=4"],
     "train.global_batch=10: 4 data-parallel ranks x 1 microbatch "
     "need a multiple of 4 sequences. Use train.global_batch=8 or 12."),
    (["train.global_batch=10", "plan=dp_replicate=* accumulation=4"],
     "train.global_batch=10: 1 data-parallel rank x 4 microbatches "
     "need a multiple of 4 sequences. Use train.global_batch=8 or 12."),
    (["train.seq_len=4096"],
     "train.seq_len=4096: the model reads at most 1024 tokens (model.max_seq_len). Use train.seq_len=1024 or less."),
    (["model.name=tinny"], "model.name=tinny: no size has this name. Did you mean 'tiny'?"),
    (["model.num_heads=7", "model.num_kv_heads=7"],
     "model.num_heads=7: it must divide model.dim=256. Use 4 or 8."),
    (["plan.sp=on"],
     "plan.sp=on: sequence parallelism needs tp of at least 2, and tp is 1. Use sp=off, or tp=2 or more."),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), [*(case[1:] for case in CASES), *OTHERS])
def test_config_rule_errors(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value) == f"command line: {message}"


def test_every_rule_has_a_case_and_reads_existing_keys():
    names = [rule.name for rule in CONFIG_RULES]
    assert {case[0] for case in CASES} == set(names)
    assert len(set(names)) == len(names)
    for rule in CONFIG_RULES:
        assert rule.reason.endswith(".")
        for key in rule.keys:
            assert node_at(tuple(key.split("."))) is not None, key
    for name, overrides, message in CASES:
        rule = next(rule for rule in CONFIG_RULES if rule.name == name)
        assert message.startswith(f"{rule.keys[0]}=")
        assert any(override.partition("=")[0] in rule.keys for override in overrides)


def test_default_config_breaks_no_rule():
    assert config_problems(RunConfig()) == []


def test_error_line_is_that_of_the_user_set_key(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text("[train]\n\nseq_len = 5000\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.problems[0].origin == f"{path}:3"


def test_rules_skip_keys_that_are_already_invalid():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.steps=-1", "schedule.warmup_steps=1000", "train.seq_len=9999", "model.name=tinny"])
    assert [problem.field for problem in caught.value.problems] == ["train.steps", "model.name"]


def test_model_rule_skips_an_invalid_tokenizer():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["tokenizer.vocab_size=3", "model.vocab_size=3000"])
    assert [problem.field for problem in caught.value.problems] == ["tokenizer.vocab_size"]


def test_rules_are_checked_again_with_the_world_size():
    loaded = load_config(None, ["train.global_batch=6"])
    loaded.check(world_size=3)
    with pytest.raises(ConfigError) as caught:
        loaded.check(world_size=4)
    assert str(caught.value).startswith("command line: train.global_batch=6: 4 data-parallel ranks")
    with pytest.raises(ConfigError, match="has no bf16 arithmetic"):
        load_config(None, ["plan.precision=bf16"]).check(world_size=1, device=device("v100"))
    with pytest.raises(ConfigError, match="world_size=4: the plan needs 2 ranks"):
        load_config(None, ["plan=dp_replicate=2"]).check(world_size=4)
