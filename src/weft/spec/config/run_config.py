"""RunConfig: one training run as typed data. Unknown keys are errors; every field says its unit and meaning.

The defaults are a complete run: `weft train` with no arguments trains the `tiny` decoder on the sources of
Python's standard library. Reading files and overrides lives in `config_file.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.spec.config.setting_types import (
    CodeName,
    ColumnPart,
    Count,
    Duration,
    Extent,
    Fraction,
    Name,
    NonNegative,
    OptionValue,
    PositiveFloat,
    PositiveInt,
    ShareOrSize,
    TaskName,
    Width,
)

#: The source that every machine already has: Python's standard library.
STDLIB_SOURCE = "builtin:python-stdlib"


class Section(BaseModel):
    """Base of all sections: frozen, strict about names, documented by attribute docstrings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # "300" is no number, and true is not 1
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class RunSection(Section):
    name: Name = "quickstart"
    """Name of the run; its folder is `<dir>/<name>`. The same name resumes. Without it, a run from a file is called
    after that file: my.toml runs in runs/my."""
    dir: str = "runs"
    """Folder that holds the run folders."""


class TaskSection(Section):
    """What is trained; by default a decoder on text, of the sections model, tokenizer, data and sample."""

    name: TaskName | None = None
    """A task of your own as package.module:Class, importable from this folder, or path/to/file.py:Class.
    `task = "package.module:Class"` says the same. Absent: a decoder on text."""
    options: dict[str, OptionValue] = {}
    """Options of that class, such as {size = 32}; the class says which there are."""


class ModelSection(Section):
    """A named size, of which single fields may be changed."""

    name: str = "tiny"
    """A size that Weft knows, such as tiny, gpt2, llama3-8b (`weft models` lists them)."""
    family: Literal["llama", "gpt2"] | None = None
    """llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention; gpt2: LayerNorm, learned positions, GELU,
    biases. This setting and those below change single fields of the size; by default they are the size's own."""
    vocab_size: Extent | None = None
    """Rows of the embedding; by default the size's own, or the tokenizer's where the size leaves it open."""
    dim: Width | None = None
    """Width of the hidden state; a multiple of num_heads."""
    num_layers: Width | None = None
    """Transformer blocks."""
    num_heads: Width | None = None
    """Query heads of each attention layer."""
    num_kv_heads: Width | None = None
    """Key-value heads; num_heads must be a multiple of it. Equal to num_heads: no grouping."""
    ffn_dim: Width | None = None
    """Hidden width of the feed-forward layers."""
    max_seq_len: Extent | None = None
    """Longest sequence that the model can read, in tokens; train.seq_len may not exceed it."""
    tied: bool | None = None
    """Whether the output head shares the embedding's weight."""
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
    """Whether the scores of the chosen experts are normalised to sum to 1."""
    route_scale: PositiveFloat | None = None
    """Factor on the scores of the chosen experts."""
    balance: Literal["aux_loss", "bias", "none"] | None = None
    """How the load of experts is balanced. aux_loss: an auxiliary loss per sequence; bias: a routing bias that is
    adjusted after each step; none: no balancing."""
    balance_rate: PositiveFloat | None = None
    """Weight of the auxiliary loss, or the change of a bias in one step."""
    capacity_factor: NonNegative | None = None
    """An expert accepts at most this many times its even share of each sequence's tokens and drops the rest; 0: no
    token is dropped."""


class TokenizerSection(Section):
    """The tokenizer: trained on the run's own text, read from a file, or bytes."""

    kind: Literal["bpe", "file", "bytes"] = "bpe"
    """bpe: a byte-level BPE trained on the run's own text; file: a saved tokenizer; bytes: one token per byte."""
    vocab_size: Annotated[int, Field(ge=300, le=1_000_000)] = 4096
    """Entries of a trained tokenizer, special tokens included."""
    path: str = ""
    """For kind="file": a tokenizer.json, or a folder that holds one."""
    train_bytes: PositiveInt = 20_000_000
    """At most this many bytes of text are read to train a tokenizer."""


class SourceSection(Section):
    """One source of training data: files, folders or globs of one schema."""

    path: str = Field(examples=["data/*.txt"])
    """A file, a folder, a glob, or "builtin:python-stdlib"."""
    weight: PositiveFloat | None = None
    """Share of the trained tokens; by default in proportion to the source's size."""
    schema_: Annotated[
        Literal["auto", "text", "messages", "instruction", "completion", "ids"], Field(alias="schema")
    ] = "auto"
    """Kind of record. auto detects it from the first records and prints the result."""
    columns: dict[ColumnPart, str] = {}
    """Column names that differ from the schema's: {text = "body"}, {messages = "chat", role = "from",
    content = "value"}, {instruction = "question", output = "answer"}, {prompt = "start", completion = "rest"},
    {ids = "input_ids", mask = "loss_mask"}."""


class DataSection(Section):
    """Where samples come from, and how documents become sequences."""

    train: tuple[SourceSection, ...] = Field(default=(SourceSection(path=STDLIB_SOURCE),), min_length=1, strict=False)
    """Sources of training data, mixed by token weight."""
    eval: tuple[SourceSection, ...] = Field(default=(), strict=False)
    """Sources for evaluation. Without any, `holdout` of the training documents is kept for it."""
    holdout: Fraction = 0.02
    """Share of training documents kept for evaluation when `eval` is empty, chosen by document content."""
    packing: Literal["concat", "fit", "pad"] | None = None
    """concat: documents end to end, cut every seq_len; fit: whole documents, several to a sequence; pad: one each.
    By default fit for chats, instructions and completions, concat for text and ids."""
    borders: bool = True
    """Positions restart at each document and attention does not cross from one document to another."""
    max_record_bytes: PositiveInt = 64 * 2**20
    """Longest record in bytes; longer ones are quarantined. Plain text files are read in pieces and have no limit."""
    max_bad_fraction: Fraction = 0.01
    """Largest share of broken records; more stop the run."""
    cache_dir: str = ""
    """Folder for tokenised data; by default the user's cache folder, which `weft doctor` prints and WEFT_HOME moves."""


class OptimizerGroup(Section):
    """Parameters with a learning rate or weight decay of their own, chosen by name."""

    match: str = Field(min_length=1, examples=["embed.*"])
    """Names of parameters, such as "embed.*"; `*` stands for any text. The first group that fits decides."""
    lr: NonNegative | None = None
    """Peak learning rate of these parameters; 0 freezes them. By default optimizer.lr."""
    weight_decay: NonNegative | None = None
    """Decay of these parameters, vectors too. By default optimizer.weight_decay for matrices and 0 for vectors."""


class OptimizerSection(Section):
    """The optimizer, its learning rate over the steps, and its groups of parameters."""

    name: Literal["adamw", "sgd", "muon"] | CodeName = "adamw"
    """Muon updates the matrices between embedding and head, AdamW all other parameters. A class of your own or of a
    library is named package.module:Class."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """AdamW: decay rates of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the denominator of the update."""
    states: Literal["fp32", "bf16", "fp8"] = "fp32"
    """AdamW: format of its two running means. bf16 takes half the memory, fp8 (floats of one byte, without scales) a
    quarter, and both more time; each mean is rounded at random, by seed, step and place in the parameter, so every plan
    rounds alike."""
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices. Norms and biases are not decayed."""
    momentum: Fraction | None = None
    """SGD (default 0.9) and Muon (default 0.95): momentum."""
    nesterov: bool = False
    """SGD: Nesterov momentum."""
    options: dict[str, OptionValue] = {}
    """Further arguments of a package.module:Class, such as {rho = 0.9}."""
    groups: tuple[OptimizerGroup, ...] = Field(default=(), strict=False)
    """Parameters with settings of their own; the first group whose `match` fits a parameter decides."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this global norm; 0: no clipping."""

    @property
    def is_foreign(self) -> bool:
        """Whether the optimizer is a class that Weft does not know."""
        return ":" in self.name


class ScheduleSection(Section):
    """Learning rate as a factor of optimizer.lr, by step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """linear and cosine fall to `final` at the last step; wsd: warm-up, stable, decay."""
    warmup_steps: Count | None = None
    """Steps over which the learning rate rises to its peak; by default 5 % of all steps, at most 1000."""
    decay_steps: PositiveInt | None = None
    """wsd: steps of the decay at the end; by default 20 % of all steps."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a factor of optimizer.lr."""

    def warmup(self, num_steps: int) -> int:
        """Return the number of steps of the warm-up in a run of `num_steps`."""
        return min(1000, num_steps // 20) if self.warmup_steps is None else self.warmup_steps

    def decay(self, num_steps: int) -> int:
        """Return the number of steps of the wsd schedule's decay in a run of `num_steps`."""
        return self.decay_steps or max(1, num_steps // 5)


class EarlyStopSection(Section):
    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a better loss; by default never."""
    min_delta: NonNegative = 0.0
    """Least improvement that counts, in nats per token."""


class TrainSection(Section):
    steps: PositiveInt = 300
    """Optimizer steps of the whole run, those before a resume included."""
    epochs: PositiveFloat | None = None
    """Passes over the training data, in place of `steps`."""
    seq_len: Extent = 256
    """Tokens in one sequence."""
    global_batch: Extent = 8
    """Sequences in one optimizer step, over all ranks and microbatches."""
    max_bad_steps: Count = 5
    """Steps in a row that may be skipped for a non-finite loss or gradient before the run stops."""
    on_bad: Literal["stop", "restart", "leave_out"] = "stop"
    """After more bad steps than that, or when data raises an error. restart: go back to the newest good checkpoint and
    do the same steps again; leave_out: go back, and pass over the data of those steps. Both need launch.restarts."""
    max_time: Duration | None = None
    """Time such as 3h30m or 90s, from the start of the command: before it is over, the run saves and stops with exit
    code 0, and the same command goes on. Absent: no limit."""
    early_stop: EarlyStopSection = EarlyStopSection()


class EvalSection(Section):
    every: Count = 50
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: PositiveInt = 8
    """Global batches in one evaluation; fewer if the evaluation data is smaller."""


class CheckpointSection(Section):
    every: Count = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Whether to keep the checkpoint with the lowest evaluation loss too."""
    keep_every: Count = 0
    """Keep the checkpoints of steps that are a multiple of this for good; 0: none."""
    background: bool = True
    """Whether training goes on while a checkpoint is written: it waits for a copy in host memory only."""
    busy: Literal["wait", "skip"] = "wait"
    """What a save does that is due while the one before is still being written."""
    retries: Count = 2
    """How often a save that failed is tried again, with growing pauses; training goes on meanwhile."""
    on_failure: Literal["stop", "hold"] = "stop"
    """After the last try: stop the run, or hold training and try on until it works."""


class ResumeSection(Section):
    step: PositiveInt | None = None
    """Go back to the checkpoint of this step; newer ones are set aside. Give it once: the next command would go back
    again. Absent: the newest valid checkpoint."""


class MemorySection(Section):
    pinned_limit: ShareOrSize = "60%"
    """Most host memory that the ranks of one machine pin together for offload: a size, or a share of the memory of the
    machine or container."""


class SampleSection(Section):
    """The text that the trained model writes at the end of a run."""

    prompt: str = "def "
    """Prompt of the sample at the end of the run; empty: no sample."""
    max_tokens: PositiveInt = 120
    """Longest sample, in tokens."""
    temperature: NonNegative = 0.7
    """Sampling temperature; 0 takes the likeliest token each time."""
    top_k: PositiveInt = 50
    """Sample from this many likeliest tokens."""


class LogSection(Section):
    every: PositiveInt = 10
    """Steps between lines when the output is no terminal; events.jsonl has every step."""


class LaunchSection(Section):
    ranks: Literal["all"] | Width = "all"
    """Ranks to start on this machine, which a '*' in the plan stands for; all: one per GPU, or up to two on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPUs if there are any, else the CPU."""
    timeout: Duration = "30m"
    """How long a rank waits for another before the run ends, as a number and s, m, h or d."""
    warn_after: Duration = "1m"
    """A wait as long as this is reported: which rank is missing, where, since when. From `timeout` on: never."""
    restarts: Count = 0
    """How often in a row `weft train` starts the ranks again from the newest good checkpoint after a rank died, hung or
    failed; a new checkpoint starts the count anew. Not for ranks that torchrun or srun started."""
    restart_pause: Duration = "5s"
    """Pause before the first restart in a row; each further pause is twice as long, up to 5 minutes."""
    min_ranks: Width | None = None
    """When the same rank fails twice in a row, go on without it, with at least this many ranks: the planner makes a
    plan for them, and the global batch stays. Absent: always all ranks."""
    on_failure: Literal["stop", "hold"] = "stop"
    """After the last restart: stop, or wait with the folder held and the devices free until a file `go_on` appears in
    the run folder."""


class RunConfig(Section):
    """One training run."""

    plan: str = "dp_replicate=*"
    """How the model is laid out over the ranks, as text or as a table; '*' takes the ranks that the other axes leave.
    With "auto" the planner chooses; words after it, as in "auto zero=3", are fixed."""
    layout: str = ""
    """How tensor parallelism cuts the model: pattern=style words, or a file of them. `weft layout MODEL --save FILE`
    writes a file to edit. By default Weft derives the layout from the model."""
    seed: Count = 0
    """Seed of initial weights, data order and sampling."""
    run: RunSection = RunSection()
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resume: ResumeSection = ResumeSection()
    memory: MemorySection = MemorySection()
    sample: SampleSection = SampleSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()
