"""RunConfig: one training run as typed data. Unknown keys are errors; every field says its unit and meaning.

The defaults are a complete run: `weft train` with no arguments trains the `tiny` decoder on the sources of
Python's standard library. Reading files and overrides lives in `config_file.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

# TOML has 64-bit integers; sizes have limits far above sense, so that a slip of the hand is refused at once.
PositiveInt = Annotated[int, Field(gt=0, le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Extent = Annotated[int, Field(gt=0, le=10**9)]
Width = Annotated[int, Field(gt=0, le=10**6)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
            "x-rule": "a name of at most 100 letters, digits, '.', '_' and '-' that starts with a letter or digit",
        }
    ),
]

_SHARE_OR_SIZE = r"^([1-9][0-9]?%|([1-9][0-9]{0,8}(\.[0-9]{1,3})?|0?\.[0-9]{0,2}[1-9])([KMGT]i?|k)B)$"
ShareOrSize = Annotated[
    str,
    StringConstraints(pattern=_SHARE_OR_SIZE),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _SHARE_OR_SIZE,
            "x-rule": "a size such as 64GiB, or a share of the machine's memory from 1% to 99%",
        }
    ),
]

ColumnPart = Literal[
    "text", "messages", "role", "content", "instruction", "input", "output", "system", "prompt", "completion", "ids",
    "mask",
]  # fmt: skip

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
    """Name of the run; its folder is `<dir>/<name>`. The same name resumes."""
    dir: str = "runs"
    """Folder that holds the run folders."""


class ModelSection(Section):
    """A named size, of which single fields may be changed."""

    name: str = "tiny"
    """A size that Weft knows, such as tiny, gpt2, llama3-8b (`weft models` lists them)."""
    family: Literal["llama", "gpt2"] | None = None
    vocab_size: Extent | None = None
    """Rows of the embedding; by default the size's own, or the tokenizer's where the size leaves it open."""
    dim: Width | None = None
    num_layers: Width | None = None
    num_heads: Width | None = None
    num_kv_heads: Width | None = None
    ffn_dim: Width | None = None
    max_seq_len: Extent | None = None
    """Longest sequence that the model can read, in tokens."""
    tied: bool | None = None
    """Whether the head shares the embedding's weight."""
    rope_theta: PositiveFloat | None = None
    norm_eps: PositiveFloat | None = None
    num_experts: Annotated[int, Field(ge=0, le=10**5)] | None = None
    """Experts of each layer that has them; 0: a dense model."""
    top_k: Width | None = None
    """Experts that each token visits."""
    expert_ffn_dim: Width | None = None
    """Hidden width of one expert; by default ffn_dim."""
    num_shared_experts: Annotated[int, Field(ge=0, le=10**4)] | None = None
    """Experts that every token visits besides."""
    first_moe_layer: Annotated[int, Field(ge=0, le=10**6)] | None = None
    """Layers before this one are dense."""
    moe_every: Width | None = None
    """From there on, every how manyth layer has experts."""
    router: Literal["softmax", "sigmoid"] | None = None
    """How scores are made of the router's products."""
    normalise_top_k: bool | None = None
    """Whether the chosen experts' scores are divided by their sum."""
    route_scale: PositiveFloat | None = None
    """What the chosen scores are multiplied with."""
    balance: Literal["aux_loss", "bias", "none"] | None = None
    """How experts get alike many tokens: a loss for each sequence, a bias that moves after each step, or not at all."""
    balance_rate: PositiveFloat | None = None
    """Weight of the auxiliary loss, or how far a bias moves in one step."""
    capacity_factor: NonNegative | None = None
    """An expert takes at most this many times its even share of a sequence; 0: no token is dropped."""


class TokenizerSection(Section):
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

    path: str
    """A file, a folder, a glob, or "builtin:python-stdlib"."""
    weight: PositiveFloat | None = None
    """Share of the trained tokens; by default in proportion to the source's size."""
    schema_: Annotated[
        Literal["auto", "text", "messages", "instruction", "completion", "ids"], Field(alias="schema")
    ] = "auto"
    """What a record is; auto looks at the first records and prints what it found."""
    columns: dict[ColumnPart, str] = {}
    """Names of the columns where they differ: {text = "body"}, {messages = "chat", role = "from", content = "value"},
    {instruction = "question", output = "answer"}, {prompt = "start", completion = "rest"},
    {ids = "input_ids", mask = "loss_mask"}."""


class DataSection(Section):
    train: tuple[SourceSection, ...] = Field(default=(SourceSection(path=STDLIB_SOURCE),), min_length=1, strict=False)
    """Sources of training data, mixed by token weight."""
    eval: tuple[SourceSection, ...] = Field(default=(), strict=False)
    """Sources for evaluation; where none is given, `holdout` of the training documents is kept aside."""
    holdout: Fraction = 0.02
    """Share of training documents kept for evaluation when `eval` is empty, chosen by document content."""
    packing: Literal["concat", "fit", "pad"] | None = None
    """concat: documents end to end, cut every seq_len; fit: whole documents, several to a sequence; pad: one each.
    By default fit for chats, instructions and completions, concat for text and ids."""
    borders: bool = True
    """Positions restart at each document and attention does not cross from one document to another."""
    max_record_bytes: PositiveInt = 64 * 2**20
    """A record longer than this is quarantined (plain text files are read in pieces and have no limit)."""
    max_bad_fraction: Fraction = 0.01
    """More broken records than this share stops the run."""
    cache_dir: str = ""
    """Where tokenised data is kept; by default the user's cache folder (see `weft doctor`)."""


class OptimizerSection(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.1
    """Decay of matrices; vectors (norms, biases) are not decayed."""
    momentum: Fraction = 0.9
    """Of SGD."""
    nesterov: bool = False
    """Of SGD."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""


class ScheduleSection(Section):
    """Learning rate as a factor of optimizer.lr, by step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """linear and cosine fall to `final` at the last step; wsd is warm-up, stable, decay."""
    warmup_steps: Count | None = None
    """Steps over which the rate rises to its peak; by default a twentieth of all steps, at most 1000."""
    decay_steps: PositiveInt | None = None
    """Of wsd: length of the decay at the end; by default a fifth of all steps."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the last step."""

    def warmup(self, num_steps: int) -> int:
        """Steps of the warm-up in a run of `num_steps`."""
        return min(1000, num_steps // 20) if self.warmup_steps is None else self.warmup_steps

    def decay(self, num_steps: int) -> int:
        """Steps of the wsd schedule's decay in a run of `num_steps`."""
        return self.decay_steps or max(1, num_steps // 5)


class EarlyStopSection(Section):
    patience: PositiveInt | None = None
    """Stop after this many evaluations without a better loss; absent: never."""
    min_delta: NonNegative = 0.0
    """A loss counts as better when lower by more than this, in nats per token."""


class TrainSection(Section):
    steps: PositiveInt = 300
    """Optimizer steps of the whole run."""
    epochs: PositiveFloat | None = None
    """Passes over the training data, in the place of `steps`: the steps follow from the sequences that the data gives.
    """
    seq_len: Extent = 256
    """Tokens in one sequence."""
    global_batch: Extent = 8
    """Sequences in one optimizer step, over all ranks and microbatches."""
    max_bad_steps: Count = 5
    """Steps in a row that may be skipped for a non-finite loss or gradient before the run stops."""
    early_stop: EarlyStopSection = EarlyStopSection()


class EvalSection(Section):
    every: Count = 50
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: PositiveInt = 8
    """Global batches in one evaluation (fewer where the evaluation data is smaller)."""


class CheckpointSection(Section):
    every: Count = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """The checkpoint with the lowest evaluation loss stays too."""


class MemorySection(Section):
    pinned_limit: ShareOrSize = "60%"
    """Host memory that all ranks of one machine may pin together for what the plan offloads: a size, or a share of what
    the machine or container has."""


class SampleSection(Section):
    prompt: str = "def "
    """Text that the sample at the end of the run continues; empty: no sample."""
    max_tokens: PositiveInt = 120
    temperature: NonNegative = 0.7
    """0 takes the likeliest token each time."""
    top_k: PositiveInt = 50


class LogSection(Section):
    every: PositiveInt = 10
    """Steps between the lines that a log (not a terminal) shows; events.jsonl has every step."""


class LaunchSection(Section):
    ranks: Literal["all"] | Width = "all"
    """Ranks that a '*' in the plan stands for on this machine; all: one per GPU, or two on a CPU with two cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs where there are any, else the CPU."""


class RunConfig(Section):
    """One training run."""

    plan: str = "dp_replicate=*"
    """How the model is laid over the ranks, as text or as a table; '*' takes the ranks that the other axes leave.
    "auto" lets the planner choose; words after it, as in "auto zero=3", are decided."""
    layout: str = ""
    """How tensor parallelism cuts the model: pattern=style words, or a file of them (`weft layout MODEL --save FILE`
    writes one to edit); by default found from the model."""
    seed: Count = 0
    """Decides initial weights, order of data and sampling."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    memory: MemorySection = MemorySection()
    sample: SampleSection = SampleSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()
