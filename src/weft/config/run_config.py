"""RunConfig: typed settings of one training run. Unknown keys are errors. Every field documents its unit and meaning.

The defaults define a complete run: `weft train` with no arguments trains the `tiny` decoder on the sources of Python's
standard library. `files.py` reads config files and overrides.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.machine_sections import EnergySection, LaunchSection
from weft.config.privacy.section import PrivacySection
from weft.config.sections import (
    AdapterSection,
    AlertSection,
    ChannelSection,
    ColumnPart,
    Count,
    Duration,
    Extent,
    Fraction,
    GrpoSection,
    KernelSection,
    MemorySection,
    MonitorSection,
    Name,
    NonNegative,
    OptimizerGroup,
    OptimizerSection,
    OptionValue,
    PositiveFloat,
    PositiveInt,
    ScheduleSection,
    Section,
    SinkSection,
    StepRange,
    StoreOrFolder,
    TaskName,
    Width,
)
from weft.config.table_section import TableSection

#: A data source that every machine already has: Python's standard library.
STDLIB_SOURCE = "builtin:python-stdlib"


class RunSection(Section):
    name: Name = "quickstart"
    """Name of the run; its folder is `<dir>/<name>`. A command with the same name resumes the run. By default the name
    of the config file: my.toml runs in runs/my."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    mode: Literal["private", "group", "umask"] = "private"
    """Access to a new run folder and to checkpoints of `checkpoint.dir`. private: only you (0700, files 0600); group:
    your group too (0750, 0640); umask: as your umask allows. An existing run folder keeps its permissions, and new
    files in it get the same ones: use chmod to change them. Exported models and prepared data follow your umask."""


class TaskSection(Section):
    """The kind of training; by default a decoder on text, from the sections model, tokenizer, data and sample."""

    name: TaskName | None = None
    """masked_lm, classify_text, classify_tokens, seq2seq, embed, reward, transcribe, or chat for conversations with
    images and audio, with the Hugging Face folder of model.path; prefer, which learns from preferred answers; distill,
    which follows a teacher; grpo, which learns from rewards; classify_images and classify_audio, with images and audio
    clips; recommend, with records of ids and labels; or your own task as package.module:Class, importable from this
    folder, or path/to/file.py:Class. Short form: `task = "classify_text"`. By default a decoder trained on text."""
    options: dict[str, OptionValue] = Field(default={})
    """Arguments of the task's constructor, such as {size = 32}."""


class ModelSection(Section):
    """A named size, with some fields changed."""

    path: str = ""
    """A Hugging Face model to fine-tune: a folder of config.json, safetensors weights and tokenizer, or a name on the
    hub, OWNER/NAME or OWNER/NAME@REVISION, which is downloaded (extra `hub`). Its config sets the shape, so omit the
    other settings of [model] and [tokenizer], except `vocab_size` and `add_tokens`."""
    name: str = "tiny"
    """A built-in size, such as tiny, gpt2, llama3-8b (`weft models` lists them)."""
    family: Literal["llama", "gpt2"] | None = None
    """llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention; gpt2: LayerNorm, learned positions, GELU,
    biases. This setting and those below override single fields of the named size."""
    vocab_size: Extent | None = None
    """Vocabulary size, the rows of the embedding; by default the named size's, or the tokenizer's if the size sets
    none. Of model.path: rows are added up to this number, in the input embedding and the output layer."""
    dim: Width | None = None
    """Width of the hidden state; a multiple of num_heads."""
    num_layers: Width | None = None
    """Number of transformer blocks."""
    num_heads: Width | None = None
    """Query heads of each attention layer."""
    num_kv_heads: Width | None = None
    """Key-value heads; must divide num_heads. Equal to num_heads: no grouping."""
    ffn_dim: Width | None = None
    """Hidden width of the feed-forward layers."""
    max_seq_len: Extent | None = None
    """Longest sequence that the model can read, in tokens; train.seq_len may not exceed it."""
    tied: bool | None = None
    """Share the embedding's weight with the output head."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary position frequencies (llama)."""
    norm_eps: PositiveFloat | None = None
    """Epsilon inside the norms."""
    num_experts: Annotated[int, Field(ge=0, le=10**5)] | None = None
    """Experts in each mixture-of-experts layer; 0: a dense model."""
    top_k: Width | None = None
    """Routed experts per token."""
    expert_ffn_dim: Width | None = None
    """Hidden width of one expert; by default ffn_dim."""
    num_shared_experts: Annotated[int, Field(ge=0, le=10**4)] | None = None
    """Experts that every token visits in addition to its top_k."""
    first_moe_layer: Annotated[int, Field(ge=0, le=10**6)] | None = None
    """Index of the first layer with experts; the layers before it are dense."""
    moe_every: Width | None = None
    """One layer in this many has experts, from first_moe_layer on."""
    router: Literal["softmax", "sigmoid"] | None = None
    """Function that turns router logits into scores."""
    normalise_top_k: bool | None = None
    """Normalize the scores of the chosen experts to sum to 1."""
    route_scale: PositiveFloat | None = None
    """Factor on the scores of the chosen experts."""
    balance: Literal["aux_loss", "bias", "none"] | None = None
    """Balancing of the experts' load. aux_loss: an auxiliary loss per sequence; bias: a routing bias that is adjusted
    after each step; none: no balancing. Of model.path: aux_loss or none, by default aux_loss if its config sets
    output_router_logits."""
    balance_rate: PositiveFloat | None = None
    """Weight of the auxiliary loss, or how much a routing bias changes in one step. Of model.path: by default its
    config's router_aux_loss_coef."""
    capacity_factor: NonNegative | None = None
    """An expert accepts at most this many times its even share of each sequence's tokens and drops the rest; 0 drops no
    token."""


class TokenizerSection(Section):
    """The tokenizer: trained on the run's own text, read from a file, or bytes."""

    kind: Literal["bpe", "file", "bytes"] = "bpe"
    """bpe: a byte-level BPE trained on the run's own text; file: a saved tokenizer; bytes: one token per byte."""
    vocab_size: Annotated[int, Field(ge=300, le=1_000_000)] = 4096
    """Vocabulary size of a trained tokenizer, including special tokens."""
    path: str = ""
    """For kind="file": a tokenizer.json, or a folder that holds one."""
    template: bool = False
    """For kind="file": render chats with the chat template in the folder of the tokenizer.json, as transformers does.
    False: as ChatML."""
    train_bytes: PositiveInt = 20_000_000
    """Maximum number of bytes of text read to train a tokenizer."""
    add_tokens: tuple[str, ...] = Field(default=(), strict=False, examples=[["<tool>", "</tool>"]])
    """Tokens to add to the tokenizer. Each occurrence in the data, written exactly like this, becomes one token. Rows
    that the embeddings of model.path lack are added. They start from the mean of the other rows."""


class SourceSection(Section):
    """One source of training data: files, folders or globs of one schema."""

    path: str = Field(examples=["data/*.txt"])
    """A file, a folder, a glob, "builtin:python-stdlib", or a data set of the hub as
    hf://OWNER/NAME?split=train&config=NAME&revision=REVISION&columns=text:COLUMN or hf://OWNER/NAME/PATTERN (extra
    `hub`)."""
    weight: PositiveFloat | None = None
    """Share of the training tokens; by default proportional to the source's size."""
    schema_: Annotated[
        Literal["auto", "text", "messages", "instruction", "completion", "ids", "preference", "feedback"],
        Field(alias="schema"),
    ] = "auto"
    """Kind of record. auto detects it from the first records and prints the result. preference and feedback are for
    task.name=prefer."""
    columns: dict[ColumnPart, str] = Field(default={})
    """Column names that differ from the schema's: {text = "body"}, {messages = "chat", role = "from", content =
    "value"}, {instruction = "question", output = "answer"}, {prompt = "start", completion = "rest"}, {ids =
    "input_ids", mask = "loss_mask"}, {chosen = "better", rejected = "worse"}, {label = "liked"}."""


class DataSection(Section):
    """Where samples come from, and how documents become sequences."""

    train: tuple[SourceSection, ...] = Field(default=(SourceSection(path=STDLIB_SOURCE),), min_length=1, strict=False)
    """Sources of training data, mixed by token weight."""
    eval: tuple[SourceSection, ...] = Field(default=(), strict=False)
    """Sources for evaluation. If empty, Weft holds out the share `holdout` of the training documents."""
    holdout: Fraction = 0.02
    """Share of training documents kept for evaluation when `eval` is empty, chosen by document content."""
    stream: bool = False
    """Tokenize each file of `train` shortly before it is trained on, and delete its tokens afterwards, instead of all
    files before the first step: for data larger than the disk's free space or the patience. Files are shuffled, and
    the sequences inside a file. It needs one source of jsonl, json, csv or parquet files, and train.steps."""
    packing: Literal["concat", "fit", "pad"] | None = None
    """concat: documents end to end, cut every seq_len; fit: whole documents, several to a sequence; pad: one document
    per sequence. By default fit for chats, instructions and completions, concat for text and ids."""
    borders: bool = True
    """Positions restart at each document, and attention does not cross document boundaries."""
    bos: Literal["auto"] | bool = "auto"
    """Begin each document with the tokenizer's beginning-of-sequence token. auto: as the tokenizer does it, by its
    post-processor or add_bos_token in tokenizer_config.json. A chat template writes its own beginning."""
    reasoning: Literal["keep", "mask", "drop"] = "keep"
    """Reasoning of the assistant in conversations: `<think>` in a content, `reasoning_content`, `reasoning` or
    `thinking`. keep: trained as the chat template renders it; mask: rendered, but its tokens have no loss; drop:
    removed before rendering."""
    max_record_bytes: PositiveInt = 64 * 2**20
    """Longest record in bytes; longer ones are quarantined. Plain text files are read in chunks and have no limit."""
    max_bad_fraction: Fraction = 0.01
    """Maximum share of invalid records; a larger share stops the run."""
    check: Literal["refuse", "warn", "off"] = "refuse"
    """What to do before the first step if answers could not be learned; see the fractions below."""
    max_untrained: Fraction = 0.1
    """Maximum share of documents with a loss mask that have no trained token."""
    max_cut: Fraction = 0.25
    """Maximum share of documents with a loss mask whose answers train.seq_len truncates."""
    cache_dir: str = ""
    """Folder for tokenized data; by default the user's cache folder (`weft doctor` prints it, WEFT_HOME changes it)."""
    batching: Literal["fixed", "cost"] = "fixed"
    """fixed: ranks and microbatches have the same number of samples; cost: they have equal computation, so that short
    samples are not padded to long ones. Training results do not differ."""
    microbatch_cost: PositiveFloat | Literal["auto"] = "auto"
    """For batching=cost: maximum cost of a microbatch, in tokens: its FLOPs after padding to the longest sample,
    divided by the FLOPs of a single token. auto: the cost of the plan's microbatches of train.seq_len tokens."""
    workers: Count | None = None
    """Processes of each rank that decode images or audio; 0 decodes in the rank. Results do not depend on it. By
    default one for each core that the machine's ranks do not use, 1 to 8."""
    cache_features: bool = False
    """Compute the outputs of frozen image and audio encoders before the first step, and store them in `cache_dir` for
    later runs and epochs. Results do not change. It requires `lr = 0` for the encoder (optimizer.groups) and no random
    augmentation of the encoder's inputs."""


class EarlyStopSection(Section):
    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a better loss; by default never."""
    min_delta: NonNegative = 0.0
    """Smallest decrease of the loss that counts as an improvement, in nats per token."""


class TrainSection(Section):
    """Length of the run, its batches, and the numbers of its steps."""

    steps: PositiveInt = 300
    """Optimizer steps of the whole run, including those before a resume."""
    epochs: PositiveFloat | None = None
    """Number of passes over the training data, instead of `steps`."""
    seq_len: Extent = 256
    """Tokens in one sequence."""
    global_batch: Extent = 8
    """Sequences in one optimizer step, over all ranks and microbatches."""
    global_cost: PositiveFloat | None = Field(default=None, examples=[8192.0])
    """For data.batching=cost, instead of global_batch in training: a step takes samples in order up to this total cost,
    in tokens as in data.microbatch_cost, without padding. Evaluation, the planner and rules still count global_batch
    samples."""
    max_bad_steps: Count = 5
    """Consecutive steps that may be skipped for a non-finite loss or gradient before the run stops."""
    on_bad: Literal["stop", "restart", "leave_out"] = "stop"
    """What to do after more than max_bad_steps bad steps, or when data raises an error. stop: end the run; restart: go
    back to the newest good checkpoint and repeat the same steps; leave_out: go back and skip the data of those steps.
    Both need launch.restarts."""
    max_time: Duration | None = None
    """Time limit such as 3h30m or 90s, counted from the start of the command. Before it expires, the run saves and
    stops with exit code 0; the same command resumes it. By default no limit."""
    stop_at: PositiveInt | None = None
    """Evaluate, save and stop after this step, with exit code 0. Schedules keep the length of `steps`, and the same
    command with a later `stop_at`, or without it, continues exactly. By default the run goes on to its last step."""
    collect_every: Count = 50
    """Steps between runs of Python's garbage collector, at the same step on all ranks; 0: Python decides when, on each
    rank independently."""
    compress_after: Count = 100
    """Number of first steps of a run without the compression of plan.compress=powersgd:R, since gradients change fast
    there. Increase it for a longer learning rate warm-up."""
    outer_lr: PositiveFloat = 0.7
    """For plan.sync=diloco:H: learning rate of the outer step (arXiv 2311.08105)."""
    outer_momentum: Fraction = 0.9
    """For plan.sync=diloco:H: Nesterov momentum of the outer step (arXiv 2311.08105)."""
    norm_group: Count = 0
    """Batch norms use statistics of groups of this many samples of the global batch, which do not depend on the plan;
    0: statistics of one microbatch on one rank, which do."""
    neftune_alpha: NonNegative = 0.0
    """NEFTune (arXiv 2310.05914): in training, uniform noise of at most alpha / sqrt(seq_len x width) on the embeddings
    of tokens, by seed, step and position. 0: no noise; 5 is usual."""
    deterministic: bool = False
    """Use only deterministic algorithms of torch, and raise an error for operations without one. Two runs on the same
    machines are then equal bit by bit, at some cost in speed."""
    profile: StepRange | None = Field(default=None, examples=["10-12"])
    """Steps such as 10-12 or 10 in which torch's profiler runs. Traces, and on GPUs memory snapshots, are in the folder
    `profile` of the run, and `weft watch` links them."""
    profile_ranks: tuple[Count, ...] = Field(default=(0,), strict=False, min_length=1)
    """Ranks that `profile` records."""
    check_batch: bool = True
    """In the first step, run a few samples several times and warn if results depend on how the plan divides a batch:
    samples that interact, noise in forward, buffers that forward changes."""
    bf16_layers: tuple[str, ...] = Field(default=(), strict=False, examples=[["first:1", "last:1", "*.down_proj"]])
    """For plan.precision=fp8: linear layers that stay in bf16. Patterns of their paths, and first:N or last:N for the
    layers of the first or last N blocks."""
    fp8_recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    """For plan.precision=fp8: which values share a scale. rowwise: each token, and each output feature of a weight, has
    a scale; tensorwise: each weight, and all tokens of a microbatch on a rank, have one, so that results depend on how
    the plan divides the batch."""
    early_stop: EarlyStopSection = EarlyStopSection()

    @property
    def last_step(self) -> int:
        """Step after which this command stops."""
        return min(self.steps, self.stop_at or self.steps)

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile`, counted from 1."""
        first, _, last = (self.profile or "0").partition("-")
        return range(int(first), int(last or first) + 1) if self.profile else range(0)


class EvalSection(Section):
    every: Count = 50
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: PositiveInt = 8
    """Global batches in one evaluation; fewer if the evaluation data is smaller."""


class CheckpointSection(Section):
    """Settings of checkpoints."""

    dir: StoreOrFolder | None = Field(default=None, examples=["s3://bucket/prefix"])
    """Where checkpoints go, each run's below its name: a folder that all machines share, or a URL of an object store,
    such as s3://bucket/prefix or gs://bucket/prefix. Absent: `checkpoints` in the run's folder."""
    every: Count = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation too."""
    best_by: str = "loss"
    """Quantity that selects the best evaluation: loss, or one of the task's metrics by name."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Which value of `best_by` is the best."""
    keep_every: Count = 0
    """Never delete checkpoints whose step is a multiple of this; 0: off."""
    verify: Literal["auto", "start", "background"] = "auto"
    """When to check the digests of the checkpoint that a run resumes from (sizes are always checked first): before the
    first step, or in the background before the first save. auto: at the start up to 256 MiB per rank."""
    background: bool = True
    """Write checkpoints in the background: training waits only for a copy in host memory."""
    busy: Literal["wait", "skip"] = "wait"
    """If a save is due while the previous one is still being written: wait for the previous one, or skip this save."""
    retries: Count = 2
    """Number of retries of a failed save, with increasing pauses; training continues meanwhile."""
    peer_every: Count = 0
    """Steps between copies of the state in memory, on each machine and the next one; 0: none. If ranks or a machine are
    lost, a restart resumes from the newest copy: at most this many steps are repeated, plus those done while a copy or
    a checkpoint was being written. The copies end with the command."""
    on_failure: Literal["stop", "hold"] = "stop"
    """After the last retry: stop the run, or hold training and keep retrying until the save succeeds."""


class ResumeSection(Section):
    step: PositiveInt | None = None
    """Resume from the checkpoint of this step and set newer ones aside. Omit it in the next command, which would
    otherwise go back again. By default the newest valid checkpoint."""


class SampleSection(Section):
    """The text that the trained model writes at the end of a run, and during it."""

    every: Count = 0
    """Steps between samples, which are written to samples/ of the run folder. 0: only at the end of the run."""
    prompt: str | None = None
    """Prompt of the sample; by default the first one of the held-out data. Empty: no sample."""
    max_tokens: PositiveInt = 120
    """Maximum length of the sample, in tokens."""
    temperature: NonNegative = 0.7
    """Sampling temperature; 0 always takes the most likely token."""
    top_k: PositiveInt = 50
    """Sample from this many most likely tokens."""


class LogSection(Section):
    every: PositiveInt = 10
    """Steps between lines when the output is not a terminal; events.jsonl has every step."""


class RunConfig(Section):
    """One training run."""

    plan: str = "dp_replicate=*"
    """How the model is distributed over the ranks, as text or as a table; an axis set to '*' takes the remaining ranks.
    With "auto" the planner chooses; "auto zero=3" fixes zero and leaves the rest to the planner."""
    balance: Literal["tell", "apply"] = "tell"
    """Action if a data-parallel rank becomes slow. tell: log an event with faster shares of the samples (plan.shares).
    apply: train with these shares from the next step on. The run's shares.json and its checkpoints record each change,
    and a resumed run repeats it in the same step. Results do not change."""
    layout: str = ""
    """How tensor parallelism shards the model: pattern=style items, or a file of them. `weft layout MODEL --save FILE`
    writes a file to edit. By default Weft derives the layout from the model. Or styles of embedding tables over the
    data ranks, as in "user=rows item=columns genre=replicate": rows, columns, one (on a single rank), replicate."""
    seed: Count = 0
    """Seed of initial weights, data order and sampling."""
    run: RunSection = RunSection()
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    adapter: AdapterSection = AdapterSection()
    grpo: GrpoSection = GrpoSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    tables: TableSection = TableSection()
    privacy: PrivacySection = PrivacySection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resume: ResumeSection = ResumeSection()
    memory: MemorySection = MemorySection()
    kernels: KernelSection = KernelSection()
    sample: SampleSection = SampleSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()
    monitor: MonitorSection = MonitorSection()
    energy: EnergySection = EnergySection()
    alerts: Literal["none", "standard"] = "none"
    """standard: the standard alerts (`weft alerts list` shows them), sent to all channels."""
    alert: tuple[AlertSection, ...] = Field(default=(), strict=False)
    """Alerts of your own, each as a table [[alert]]."""
    channel: tuple[ChannelSection, ...] = Field(default=(), strict=False)
    """Recipients of alerts, each as a table [[channel]]."""
    sink: tuple[SinkSection, ...] = Field(default=(), strict=False)
    """Destinations of metrics in addition to events.jsonl, each as a table [[sink]]."""

    @property
    def full_optimizer(self) -> OptimizerSection:
        """The optimizer's settings. For LoRA+, a last group with the learning rate of the B matrices is added."""
        own, ratio = self.optimizer, self.adapter.lora_plus_ratio
        if ratio == 1:
            return own
        return own.model_copy(update={"groups": (*own.groups, OptimizerGroup(match="*.lora_B", lr=own.lr * ratio))})
