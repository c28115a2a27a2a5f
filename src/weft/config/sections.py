"""Sections of a run's config, and their common base."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema, model_validator

# Largest integer of TOML (64 bits). Sizes have generous limits that still catch typing errors.
PositiveInt = Annotated[int, Field(gt=0, le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Extent = Annotated[int, Field(gt=0, le=10**9)]
Width = Annotated[int, Field(gt=0, le=10**6)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _text(pattern: str, rule: str, **more: bool) -> Any:
    return Field(pattern=pattern, json_schema_extra={"x-rule": rule, **more})


Name = Annotated[
    str,
    _text(
        r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        "a name of at most 100 letters, digits, '.', '_' and '-' that starts with a letter or digit",
    ),
]
ShareOrSize = Annotated[
    str,
    _text(
        r"^([1-9][0-9]?%|([1-9][0-9]{0,8}(\.[0-9]{1,3})?|0?\.[0-9]{0,2}[1-9])([KMGT]i?|k)B)$",
        "a size such as 64GiB, or a share of the machine's memory from 1% to 99%",
    ),
]
_CODE_NAME = "[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*"
#: Named tasks; `find_task` maps them to classes. These tasks train the model in a Hugging Face folder.
FOLDER_TASKS = ("masked_lm", "classify_text", "classify_tokens", "seq2seq", "embed", "reward")
#: These tasks train the text decoder with another loss.
TEXT_TASKS = ("prefer", "distill", "grpo")
#: These tasks train networks for images, audio and text, with new weights or from a folder.
MEDIA_TASKS = ("classify", "classify_images", "classify_audio", "caption", "transcribe", "contrast", "chat")
TASK_NAMES = (*FOLDER_TASKS, *TEXT_TASKS, *MEDIA_TASKS, "recommend")
#: The model that each named task trains: the model of a Hugging Face "folder", or the text "decoder".
TRAINS = {**dict.fromkeys((*FOLDER_TASKS, "chat"), "folder"), **dict.fromkeys(TEXT_TASKS, "decoder")}
TaskName = Annotated[
    str,
    _text(
        rf"^(({'|'.join(TASK_NAMES)})|([A-Za-z_][A-Za-z0-9_.]*|[^:]+\.py):[A-Za-z_][A-Za-z0-9_]*)$",
        f"{', '.join(TASK_NAMES)}, or a class as package.module:Class or path/to/file.py:Class",
    ),
]
OptionValue = Annotated[
    bool | int | float | str | Annotated[tuple[float, ...], Strict(False)] | Annotated[tuple[str, ...], Strict(False)],
    WithJsonSchema({"x-rule": "true, false, a number, a string, or a list of numbers or of strings"}),
]
TokenList = Annotated[
    Literal["added"] | Annotated[tuple[int | str, ...], Strict(False)],
    WithJsonSchema({"x-rule": 'added, or a list of token ids and tokens such as [5, "<tool>"]'}),
]
StoreOrFolder = Annotated[
    str,
    _text(
        r"^([^:?#@]|:[^/?#@])[^?#@]*$",
        "a folder, or a URL of bucket and prefix alone (credentials belong in the environment)",
    ),
]
_DURATION = "^(" + "|".join(
    "[1-9][0-9]{0,5}" + unit + "".join(f"([0-9]{{1,5}}{smaller})?" for smaller in "dhms"["dhms".index(unit) + 1 :])
    for unit in "dhms"
) + ")$"  # fmt: skip
Duration = Annotated[str, _text(_DURATION, "a time such as 3h30m, 90s or 1d12h")]
StepRange = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    _text(r"^[1-9][0-9]{0,8}(-[1-9][0-9]{0,8})?$", "steps such as 10-12 or 10, counted from 1"),
]
HostPort = Annotated[
    str,
    _text(
        r"^[^\s:/]([^\s/]{0,250}[^\s:/])?:[1-9][0-9]{0,4}$", "the name or address of a machine and a port: HOST:PORT"
    ),
]
_SECRET_REF = r"env:[A-Za-z_][A-Za-z0-9_]{0,99}|file:/?[^/\x00][^\x00]{0,3999}"
_SECRET_RULE = "env:NAME or file:PATH, with the secret (a config must not contain it)"
SecretRef = Annotated[str, _text(rf"^({_SECRET_REF})$", _SECRET_RULE, **{"x-secret": True})]
Address = Annotated[
    str,
    _text(
        rf"^(https?://[^/?#@\s]+(/[^?#@\s]*)?|{_SECRET_REF})$",
        "an http(s) URL without user, password and query, or for a secret one env:NAME or file:PATH,",
        **{"x-secret": True},
    ),
]
ColumnPart = Literal[
    "text", "messages", "role", "content", "instruction", "input", "output", "system", "prompt", "completion", "ids",
    "mask", "tools", "chosen", "rejected", "label",
]  # fmt: skip


# Differences between two configs, by dotted key.


def value_at(tables: Any, key: str) -> Any:
    """Return the value under a dotted key."""
    for part in key.split("."):
        tables = tables[part]
    return tables


def changed_keys(key: str, old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return (old, new) for all values below `key` that differ, by dotted key.

    Args:
        key: dotted key of both values.
        old: a value, or nested dicts of them.
        new: the same for the new config. A value that only one of them has is None in the other.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {key: (old, new)}
    before, now = cast(dict[str, Any], old), cast(dict[str, Any], new)
    found: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*before, *now]):
        found |= changed_keys(f"{key}.{name}", before.get(name), now.get(name))
    return found


class Section(BaseModel):
    """Base of all sections: frozen, strict about names, documented by attribute docstrings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # "300" is not a number, and true is not 1
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


# [adapter]: training an adapter instead of all weights.


class AdapterSection(Section):
    """An adapter on frozen weights: low-rank matrices A and B for each of the chosen linear layers."""

    rank: Annotated[int, Field(ge=0, le=10**4)] = 0
    """Rank of A and B. 0: no adapter, all weights are trained."""
    alpha: PositiveFloat | None = None
    """The product of B and A is multiplied by alpha / rank, or by alpha / sqrt(rank) for rslora. By default twice the
    rank."""
    targets: tuple[str, ...] = Field(default=(), strict=False, examples=[["attn.q", "attn.v"]])
    """Layers with an adapter: patterns of paths or of their ends, such as "attn.q" or "blocks.0.*"; `*` matches any
    text. By default all linear layers but the head and the routers of experts."""
    dropout: Fraction = 0.0
    """Dropout rate of the adapter's inputs in training. The mask depends on the position, so it is the same under every
    plan."""
    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora; rslora: scaled by the root of the rank; dora: with a trained magnitude for each output."""
    start: str = Field(default="", examples=["sft/adapter"])
    """Folder of an adapter in peft's format, such as `weft export` writes, whose values the adapter starts from. Its
    rank, alpha, kind and layers must be those of this section. By default B is zero."""
    lora_plus_ratio: Annotated[float, Field(ge=1)] = 1.0
    """LoRA+ (arXiv 2402.12354): factor on the learning rate of B. 16 is usual; 1: the rate of A."""
    base: Literal["stored", "int8", "nf4"] = "stored"
    """Storage of frozen linear weights. stored: in the plan's precision; int8, nf4: quantized in blocks of 64, to 1.06
    and 0.56 bytes per weight, and dequantized for each matmul (QLoRA)."""
    modules_to_save: tuple[str, ...] = Field(default=(), strict=False, examples=[["embed_tokens", "lm_head"]])
    """Modules that are trained in full and saved with the adapter: patterns as for `targets`. Their layers get no
    adapter."""
    trainable_tokens: TokenList = "added"
    """Tokens whose rows of the input embedding, and of an output layer that shares its weight, are trained: ids, and
    tokens as text. added: those of `tokenizer.add_tokens`, also in an output layer with its own weight."""


# [grpo]: learning from rewards.

CodeName = Annotated[str, _text(
    r"^([A-Za-z_][A-Za-z0-9_.]*|[^:]+\.py):[A-Za-z_][A-Za-z0-9_]*$",
    "a function as path/to/file.py:function or package.module:function",
)]  # fmt: skip
DeviceName = Annotated[str, _text(r"^[a-z][a-z0-9_]{0,30}$", "auto, cpu, cuda or another kind of device,")]
CodeNames = Annotated[
    tuple[CodeName, ...], Strict(False), BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


class GrpoSection(Section):
    """Learning from rewards: settings of task.name=grpo."""

    method: Literal["grpo", "dr_grpo", "rloo", "distill"] = "grpo"
    """Advantage of a completion, from the rewards of its group, the completions of one prompt. grpo: reward minus mean,
    divided by the standard deviation (arXiv 2402.03300); dr_grpo: reward minus mean (2503.20783); rloo: reward minus
    the mean of the others (2402.14740). distill: no group; each token's advantage is the teacher's log probability
    minus the model's, whose mean is the negative reverse KL divergence."""
    reward: CodeNames = Field(default=(), examples=["rewards.py:correct"])
    """Reward functions. Each gets lists by name: prompts, completions (texts), completion_ids, and all columns of the
    data; it returns a number for each completion. It runs in a separate process."""
    reward_weights: tuple[float, ...] = Field(default=(), strict=False, examples=[[1.0, 0.2]])
    """Weight of each function in the sum of rewards; by default 1."""
    reward_timeout: Duration = "1m"
    """Time limit of a call of a reward function, and of `rollout` between two samples. A slower one is killed."""
    reward_errors: Literal["pause", "count"] = "pause"
    """If a function raises, takes too long, or returns nan, None or too few values. pause: save, and pause the run;
    count: the completions have advantage 0 and do not count in their group, and a metric counts them."""
    prompt: str = "prompt"
    """Column of the data with the prompt: a text, or a list of messages, which the chat template renders."""
    completions: Width = 8
    """Completions of each prompt. It divides train.global_batch, which counts completions."""
    max_tokens: Extent = 256
    """Maximum number of tokens of a completion. Prompts may have train.seq_len + 1 minus this many."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. The loss uses log probabilities at the same temperature."""
    top_k: Count = 0
    """Sample among this many most likely tokens; 0: all. All log probabilities are those over all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens whose probabilities add up to this. See `top_k`."""
    normalize: Literal["auto", "sequence", "tokens", "constant", "sum"] = "auto"
    """Weights of tokens in the loss. sequence: mean over each completion, then over completions; tokens: mean over all
    tokens of the global batch; constant: sum over each completion, divided by max_tokens; sum: sum over each
    completion. auto: sequence for grpo, constant for dr_grpo, sum for rloo, tokens for distill."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio that the loss clips. token: each token's; sequence: the geometric mean of a completion's tokens
    (GSPO, arXiv 2507.18071, with clip_low=3e-4 and clip_high=4e-4)."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped below at 1 minus this."""
    clip_high: NonNegative = 0.2
    """The probability ratio is clipped above at 1 plus this."""
    beta: NonNegative = 0.0
    """Weight of the KL divergence from the reference (estimator k3): the initial weights, or the base of an adapter."""
    updates_per_rollout: Width = 1
    """Optimizer steps on the completions of one rollout."""
    importance_cap: NonNegative = 0.0
    """Multiply the loss of a token by p(trainer) / p(sampler), at most this. 0: no correction."""
    teacher: str = ""
    """For distill: Hugging Face folder of the teacher, or its name on the hub. It has the model's tokenizer."""
    rollout: CodeName | None = Field(default=None, examples=["tools.py:rollout"])
    """Function rollout(prompt, sample) that returns the turns of one completion, for several turns and tools. By
    default one sample."""
    engine: Address | None = Field(default=None, examples=["http://127.0.0.1:8000"])
    """Address of a vLLM or SGLang server that samples the completions. By default the training ranks sample."""
    engine_kind: Literal["vllm", "sglang"] = "vllm"
    """Program behind `engine`."""
    engine_folder: str = ""
    """Hugging Face folder for the current weights, which the engine sees under the same path. vLLM is started with
    this folder. It is written before each rollout."""
    engine_token: SecretRef | None = None
    """Bearer token of `engine`: env:NAME or file:PATH."""
    engine_timeout: Duration = "10m"
    """Time limit of one request to `engine`."""


# Resources of the machine: pinned memory, GPU kernels.


class MemorySection(Section):
    pinned_limit: ShareOrSize = "60%"
    """Maximum host memory that the ranks of one machine pin in total for offload: a size, or a share of the machine's
    or container's memory."""


class KernelSection(Section):
    """Choice of GPU kernels if torch has several. Results differ by rounding."""

    attention: Literal["auto", "flash", "efficient", "cudnn", "fa3", "fa4"] = "auto"
    """Preferred kernels for attention in bf16 and fp16; calls that they cannot run (masks, wide heads) use the others.
    auto: torch's own order; flash, efficient, cudnn: these first; fa3, fa4: FlashAttention 3 (Hopper, package
    flash_attn_interface) or 4 (Hopper, Blackwell, package flash_attn.cute) instead of flash."""
    convolutions: Literal["auto", "measured", "guessed"] = "auto"
    """How cuDNN chooses convolution algorithms. measured: it tries them for each of the first 8 batch shapes and keeps
    the fastest, for faster steps, a slower first one, and possibly another choice in another run; guessed: by
    heuristics. auto: measured if the model has convolutions, tp is 1 and torch is not set to be deterministic; an
    earlier benchmark setting of torch stays."""


# Monitoring of a run: metrics, sinks, alerts and their recipients.


class MonitorSection(Section):
    """Metrics of ranks and machines."""

    figures: bool = True
    """Report metrics of each rank and machine (CPU, memory, GPU, disk, network, step phases); events.jsonl has their
    statistics over the ranks."""
    every: Duration = "10s"
    """Time between two reports."""
    update_ratio_every: Count = 10
    """Steps between measurements of the relative size of the weight update (`update_ratio`). 0: never."""

    def measures_update(self, step: int) -> bool:
        """Return True if this step (counted from 1) records the update ratio."""
        return self.update_ratio_every > 0 and step % self.update_ratio_every == 0


class SinkSection(Section):
    """A destination of metrics in addition to events.jsonl.

    A separate process sends them, so that a sink never delays training. Data that cannot be sent now is sent later.
    """

    kind: Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus", "pushgateway", "otlp", "http"] = Field(
        examples=["prometheus"]
    )
    """tensorboard: event files in the run folder; wandb, trackio: through their packages; mlflow, pushgateway, otlp (an
    OpenTelemetry collector) and http (JSON): posted to `url`; prometheus: /metrics on `port`, to be scraped."""
    name: Name | None = None
    """Name in messages, and of the file that records what was sent; by default the kind."""
    url: Address | None = None
    """Server, such as http://localhost:5000. A secret one is given as env:NAME or file:PATH."""
    host: str = "127.0.0.1"
    """prometheus: the address that /metrics listens on."""
    port: PositiveInt = 9464
    """prometheus: the port that /metrics listens on."""
    project: str = "weft"
    """Project of wandb and trackio, experiment of mlflow, job of a push gateway."""
    token: SecretRef | None = None
    """Bearer token of the server, or API key of wandb: env:NAME or file:PATH."""
    user: str = ""
    """User name for a server that wants a password."""
    password: SecretRef | None = None
    """Password of `user`: env:NAME or file:PATH."""
    timeout: Duration = "10s"
    """How long one request may take before it is tried again."""


class ChannelSection(Section):
    """A recipient of alerts."""

    name: Name = Field(examples=["ops"])
    """Name that `actions` of an alert use."""
    kind: Literal["mail", "webhook", "apprise", "command"] = Field(examples=["mail"])
    """mail: by SMTP; webhook: JSON posted to `url`; apprise: Slack, Teams, Feishu, DingTalk, Telegram and 130 more
    (extra `apprise`); command: a program that gets the message as JSON on its standard input."""
    to: tuple[str, ...] = Field(default=(), strict=False)
    """mail: addresses."""
    sender: str = "weft@localhost"
    """mail: the address that it comes from."""
    server: str = "localhost:25"
    """mail: host:port of the SMTP server."""
    security: Literal["none", "starttls", "tls"] = "none"
    """mail: encryption of the connection. It is required with a password."""
    user: str = ""
    """mail: user name of the server."""
    password: SecretRef | None = None
    """mail: password of `user`: env:NAME or file:PATH."""
    url: Address | None = None
    """webhook: where to post; apprise: its address. If it contains a secret, as most do: env:NAME or file:PATH."""
    command: tuple[str, ...] = Field(default=(), strict=False)
    """command: the program and its arguments, as a list."""
    timeout: Duration = "20s"
    """How long one try may take."""
    standard: bool = True
    """Receive the standard alerts of severity warning and above."""


class AlertSection(Section):
    """A condition over metrics, and the actions when it becomes true."""

    name: Name = Field(examples=["plateau"])
    """Name in messages and events."""
    when: str = Field(examples=["eval.loss no better for 3 evaluations"])
    """The condition, such as "eval.loss no better for 3 evaluations", "loss > 6 sigma over 200 steps" or "disk.free <
    20GiB"."""
    until: str | None = None
    """Condition that ends the alert; by default `when` is no longer true. A bound different from the one of `when`
    keeps an oscillating metric from repeating the alert."""
    severity: Literal["info", "warning", "critical"] = "warning"
    """Severity in messages and events."""
    actions: tuple[str, ...] = Field(default=(), strict=False)
    """Names of channels, and actions of the run: checkpoint, hold (save, release devices, wait for `weft runs resume`),
    stop, lower_lr, skip_data, roll_back."""
    quiet: Duration = "30m"
    """Time after an alert in which the same one is recorded and sends nothing."""
    after_step: Count = 0
    """First step of the run at which the alert is evaluated."""
    factor: PositiveFloat = Field(default=0.5, le=1)
    """lower_lr: factor on the learning rate."""
    says: str = ""
    """Additional text of the message."""


# The optimizer and its schedule.


class OptimizerGroup(Section):
    """Parameters with a separate learning rate or weight decay, chosen by name."""

    match: str = Field(min_length=1, examples=["embed.*"])
    """Pattern of parameter names, such as "embed.*"; `*` matches any text. The first matching group applies."""
    lr: NonNegative | None = None
    """Peak learning rate of these parameters; 0 freezes them. By default optimizer.lr."""
    weight_decay: NonNegative | None = None
    """Weight decay of these parameters, including vectors. By default optimizer.weight_decay for matrices and 0 for
    vectors."""


#: Names of optimizers in other tools, and the settings that replace them.
OPTIMIZER_NAMES: dict[str, dict[str, str]] = {
    **{name: {"name": "adamw"} for name in ("adamw_torch", "adamw_torch_fused")},
    **{name: {"name": "adamw", "states": "fp8"} for name in ("adamw_8bit", "adamw_bnb_8bit")},
    "lion": {"name": "weft.optim.lion:Lion"},
    "adafactor": {"name": "torch.optim:Adafactor"},
    **{
        name: {"name": "weft.optim.schedule_free:ScheduleFreeAdamW"}
        for name in ("schedule_free", "schedule_free_adamw")
    },
    **{name.lower(): {"name": f"pytorch_optimizer:{name}"} for name in ("SOAP", "Shampoo", "CAME", "ADOPT")},
}
OptimizerName = Annotated[
    str,
    _text(
        rf"^({'|'.join(OPTIMIZER_NAMES)}|{_CODE_NAME})$",
        f"{', '.join(OPTIMIZER_NAMES)}, or a class as package.module:Class",
    ),
]


class OptimizerSection(Section):
    """The optimizer, its learning rate over the steps, and its groups of parameters."""

    name: Literal["adamw", "sgd", "muon"] | OptimizerName = "adamw"
    """Muon updates the matrices between embedding and head, AdamW all other parameters. Give any other optimizer class
    as package.module:Class. Other names are short for settings: adamw_torch and adamw_torch_fused are adamw; adamw_8bit
    is adamw with states=fp8; lion and schedule_free are Weft's, adafactor torch's; soap, shampoo, came and adopt are
    classes of the package pytorch_optimizer (extra `optim`)."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """AdamW: decay rates of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the denominator of the update."""
    states: Literal["fp32", "bf16", "fp8"] = "fp32"
    """AdamW: number format of its two running means. bf16 uses half the memory, fp8 (one-byte floats without scales) a
    quarter; both take more time. Rounding is stochastic, by seed, step and position in the parameter, so every plan
    rounds identically."""
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices. Norms and biases are not decayed."""
    momentum: Fraction | None = None
    """SGD (default 0.9) and Muon (default 0.95): momentum."""
    nesterov: bool = False
    """SGD: Nesterov momentum."""
    options: dict[str, OptionValue] = Field(default={})
    """Further arguments of a package.module:Class, such as {rho = 0.9}."""
    groups: tuple[OptimizerGroup, ...] = Field(default=(), strict=False)
    """Parameter groups with their own settings; a parameter belongs to the first group whose `match` fits."""
    max_grad_norm: NonNegative = 1.0
    """Clip gradients to this global norm; 0: no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, values: Any) -> Any:
        """Replace a short name of OPTIMIZER_NAMES by its settings. Settings that are given too take precedence."""
        if not isinstance(values, dict):
            return values
        table = cast(dict[str, Any], values)
        name = table.get("name")
        known = OPTIMIZER_NAMES.get(name, {}) if isinstance(name, str) else {}
        return {**known, **table, "name": known["name"]} if known else table

    @property
    def is_foreign(self) -> bool:
        """True for an optimizer class that is given as package.module:Class."""
        return ":" in self.name


class ScheduleSection(Section):
    """Learning rate as a factor of optimizer.lr, by step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """linear and cosine fall to `final` at the last step; wsd: warm-up, stable, decay."""
    warmup_steps: Count | None = None
    """Steps over which the learning rate rises to its peak; by default 5 % of all steps, at most 1000."""
    warmup_ratio: Fraction | None = None
    """The warm-up as a share of all steps, instead of warmup_steps."""
    decay_steps: PositiveInt | None = None
    """wsd: steps of the decay at the end; by default 20 % of all steps."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a factor of optimizer.lr."""

    def warmup(self, num_steps: int) -> int:
        """Return the number of steps of the warm-up in a run of `num_steps`."""
        if self.warmup_ratio is not None:
            return int(self.warmup_ratio * num_steps)
        return min(1000, num_steps // 20) if self.warmup_steps is None else self.warmup_steps

    def decay(self, num_steps: int) -> int:
        """Return the number of steps of the wsd schedule's decay in a run of `num_steps`."""
        return self.decay_steps or max(1, num_steps // 5)


#: Services whose URLs are secrets, recognized by a part of the URL.
_SERVICES = re.compile(
    r"hooks\.slack\.com|discord(app)?\.com/api/webhooks|webhook\.office\.com|outlook\.office\.com/webhook|"
    r"logic\.azure\.com|powerplatform\.com|open\.feishu\.cn|open\.larksuite\.com|oapi\.dingtalk\.com|qyapi\.weixin|"
    r"api\.telegram\.org/bot|chat\.googleapis\.com|hooks\.zapier\.com|maker\.ifttt\.com|webhook\.site/|ntfy\.sh/|"
    r"\.pipedream\.net",
    re.IGNORECASE,
)
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/?#]*)(?P<path>[^?#]*)(?P<query>[?#].*)?", re.DOTALL
)
#: A readable part of a path: up to three capitalized terms and a short number.
_WORD = re.compile(r"([A-Z]?[a-z]{2,20}){1,3}\d{0,3}|[A-Za-z]\d{0,4}|[A-Z]{1,5}\d{0,3}|[A-Z]{2,4}[a-z]{1,12}|\d{1,5}|")
_BETWEEN_WORDS = re.compile(r"[-_.~ :,+]")
#: The path part after one of these is a secret, unless it is short and lowercase or one of the names below.
_BEFORE_SECRETS = re.compile(r"(?i)services?|(web)?hooks?|bot|robots?|tokens?|(api)?keys?|secrets?|auth|integrations?")
_PUBLIC = frozenset({"collector", "event", "events", "metrics", "messages", "training", "monitoring"})
_SHORT = 8


def holds_secret(url: str) -> bool:
    """Return True if a URL may contain a secret.

    This is so if it has user info, a query or an unreadable path, or belongs to a service whose URLs are secrets.
    """
    match = _URL.fullmatch(url)
    if match is None:
        return False
    return "@" in match["host"] or bool(match["query"]) or _SERVICES.search(url) is not None or _in_path(match["path"])


def hide_secret(url: str) -> str:
    """Return a URL with its user info and query, and its path if that may be a secret, replaced by "(hidden)"."""
    match = _URL.fullmatch(url)
    if match is None or not holds_secret(url):
        return url
    _, at, host = match["host"].rpartition("@")
    hides_path = _SERVICES.search(url) is not None or _in_path(match["path"])
    path = "/(hidden)" if hides_path else match["path"]
    return f"{match['scheme']}://{'(hidden)@' if at else ''}{host}{path}{'?(hidden)' if match['query'] else ''}"


def _in_path(path: str) -> bool:
    before = ""
    for part in unquote(path).split("/"):
        words = _BETWEEN_WORDS.split(part)
        if not all(_WORD.fullmatch(word) for word in words) or sum(word.isdigit() for word in words) > 3:
            return True
        is_short_word = len(part) < _SHORT and part.islower()
        if part and _BEFORE_SECRETS.fullmatch(before) and part not in _PUBLIC and not is_short_word:
            return True
        before = part or before
    return False
