"""The distillation loss between a student's and a teacher's next-token distributions.

    loss = (1 - a) t^2 KL(p || q) + a CE(q_1, label),   p = softmax(teacher / t), q = softmax(student / t), q_1 at t = 1

for each trained token, with the temperature t and the mix a: (Hinton et al. 2015, arXiv 1503.02531). The factor t^2
keeps gradients as large as the gradients of the cross-entropy. With k, the divergence is computed over the teacher's k
likeliest entries and one entry for the sum of all others. This divergence is never larger than the full one.

N tokens, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.shapes.traced_model import Limit
from weft.data.text.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.hub import local_folder
from weft.models.decoder import as_shapes
from weft.models.inspect import hugging_face
from weft.parallel.layers.documents import call_in_documents
from weft.planner.space.trained_part import FrozenWork
from weft.train.tasks.base import Metric, Report, setting_error
from weft.train.tasks.decoder import DecoderTask
from weft.train.tasks.decoder_loss import IGNORE, token_cross_entropy
from weft.train.tasks.description import Forwards, describe_folder
from weft.train.tasks.folder_model import refuse_mixed_documents
from weft.train.weights.published_weights import pretrained_source

if TYPE_CHECKING:
    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder


def distilled_losses(
    student_NV: Tensor, teacher_NV: Tensor, labels_N: Tensor, *, temperature: float, mix: float, top_k: int = 0
) -> Tensor:
    """Return the loss of each token in nats, (N,), fp32 (fp64 for fp64).

    Args:
        student_NV: logits, with a gradient.
        teacher_NV: logits of the same entries.
        labels_N: the next tokens.
        temperature: above 0.
        mix: 0 uses only the divergence, 1 only the cross-entropy.
        top_k: number of the teacher's likeliest entries in the divergence; all others are summed. 0 for all.
    """
    kept = torch.promote_types(student_NV.dtype, torch.float32)
    student_NV, teacher_NV = student_NV.to(kept), teacher_NV.to(kept)
    p_NV, q_NV = F.log_softmax(teacher_NV / temperature, 1), F.log_softmax(student_NV / temperature, 1)
    if 0 < top_k < p_NV.shape[1]:
        p_NV, places = p_NV.topk(top_k, 1)
        q_NV = q_NV.gather(1, places)
        p_NV, q_NV = (torch.cat([one, _log_rest(one)[:, None]], 1) for one in (p_NV, q_NV))
    losses = (1 - mix) * temperature**2 * F.kl_div(q_NV, p_NV, reduction="none", log_target=True).sum(1)
    if mix:
        losses = losses + mix * F.cross_entropy(student_NV, labels_N, reduction="none")
    return losses


def _log_rest(log_p_NK: Tensor) -> Tensor:
    """Return log(1 - sum of probabilities over K), (N,). The log of the sum is clamped to -eps to avoid -inf."""
    log_sum = log_p_NK.logsumexp(1).clamp(max=-torch.finfo(log_p_NK.dtype).eps)
    return torch.log(-torch.expm1(log_sum))


# Distillation: `task.name = "distill"` with a teacher's folder. The teacher is sharded like the student.

_NO_PP = Limit(
    (1,), "a teacher's logits are compared with the student's, and a pipeline has them on its last stage alone"
)


class Teacher:
    """The frozen causal language model of a Hugging Face folder with a tokenizer."""

    def __init__(self, folder: Path):
        self.folder = folder

    def shapes(self) -> Any:
        """Return a new model on the meta device."""
        with as_shapes(vectors=True):
            return hugging_face.causal_model(hugging_face.load_model_config(self.folder))

    def source(self, model: nn.Module) -> StateSource:
        """Return a source from which `model` can load the teacher's weights."""
        return pretrained_source(model, self.folder)[0]

    def check(self, seq_len: int) -> None:
        """Check that the teacher can be read, and supports sequences of `seq_len` tokens.

        Raises:
            CheckpointError, ModelError: if the teacher cannot be read.
            ConfigError: if it has no config.json, or its maximum length is below `seq_len`.
        """
        if not (self.folder / "config.json").is_file():
            raise _wrong_option(
                "teacher", self.folder, "it has no config.json. Use the folder of a Hugging Face model."
            )
        model = self.shapes()
        self.source(model)
        longest = hugging_face.longest_sequence(model)
        if longest is not None and seq_len > longest:
            rule = f"it reads at most {longest} tokens. Use train.seq_len={longest}."
            raise _wrong_option("teacher", self.folder, rule)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Check that token ids mean the same for the student's tokenizer as for the teacher.

        Raises:
            ConfigError: if the teacher has fewer logits than the tokenizer has entries, or its tokenizer.json has
                another entry for an id.
        """
        rows, entries = self.shapes().get_output_embeddings().weight.shape[0], tokenizer.vocab_size
        if rows < entries:
            rule = f"it has {rows} logits, and the student's tokenizer {entries} entries"
            raise _wrong_option("teacher", self.folder, f"{rule}. Give one of the same tokenizer.")
        if (other := self._other_entry(tokenizer)) is not None:
            rule = f"its tokenizer has {other} where the student's has another entry. Give one of the same tokenizer."
            raise _wrong_option("teacher", self.folder, rule)

    def _other_entry(self, tokenizer: Tokenizer) -> str | None:
        """Return the teacher's entry for an id for which the student has another one, as text such as "'the' at 12".

        Return None if there is no such id, or if the teacher has no tokenizer.json.
        """
        from tokenizers import Tokenizer as Library

        if not (self.folder / "tokenizer.json").is_file():
            return None  # only the number of entries can be compared
        ours = Library.from_str(tokenizer.library_json()).get_vocab(with_added_tokens=True)
        theirs = Library.from_file(str(self.folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
        places = {place: name for name, place in theirs.items()}
        found = next((place for name, place in ours.items() if places.get(place) != name), None)
        return None if found is None else f"{places.get(found, 'nothing')!r} at {found}"


class DistillTask(DecoderTask):
    """Distillation: trains a text decoder to predict next tokens like a teacher model.

    Args:
        teacher: a Hugging Face folder whose tokenizer the student uses.
        temperature: divides the logits of both models.
        mix: weight of the cross-entropy in the loss, 0 to 1.
        top_k: number of the teacher's likeliest entries in the divergence; all others are summed. 0 for all.

    Raises:
        ConfigError: for values out of range.
    """

    metrics = (Metric("cross_entropy", "nats", "cross-entropy of the tokens, without the teacher"),)
    sum_names = ("cross_entropy",)
    identity = (*DecoderTask.identity, "task.options")
    plan_limits: ClassVar[dict[str, Limit]] = {"pp": _NO_PP}

    def __init__(self, teacher: str, temperature: float = 1.0, mix: float = 0.5, top_k: int = 0):
        if temperature <= 0:
            raise _wrong_option("temperature", temperature, "it must be above 0. Use 1, or 2 for softer targets.")
        if not 0 <= mix <= 1:
            raise _wrong_option("mix", mix, "it is a share from 0 to 1. Use 0.5.")
        if top_k < 0:
            raise _wrong_option("top_k", top_k, "it is a number of entries, or 0 for all. Use 0.")
        self._teacher = Teacher(local_folder(teacher, "task.options.teacher"))
        self._settings = {"temperature": float(temperature), "mix": float(mix), "top_k": top_k}
        self._forwards: Forwards | None = None

    # --- preparing ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the teacher's weights and vocabulary, and prepare the run as `DecoderTask.prepare` does.

        Raises:
            CheckpointError, ModelError: also if the teacher cannot be read.
            ConfigError: also if the teacher has another tokenizer or a shorter maximum length, or its attention does
                not separate packed documents.
        """
        self._teacher.check(self.config.train.seq_len)
        refuse_mixed_documents(self._teacher.shapes(), self.config)
        super().prepare(folder, report)
        self._teacher.check_tokenizer(self.data.tokenizer)

    # --- model and step ---

    def second_model(self, plan: Plan) -> nn.Module | None:
        return self._teacher.shapes()

    def second_weights(self, model: nn.Module) -> StateSource | None:
        return self._teacher.source(model)

    def begin(self, forwards: Forwards) -> None:
        self._forwards = forwards

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        assert self._forwards is not None
        taught = self._forwards.second(lambda teacher: call_in_documents(teacher, batch).logits)
        trained = batch["labels"] != IGNORE
        # Embedding rows beyond the tokenizer's entries are unused, and the models may have different numbers of them.
        entries = self.data.vocab_size
        losses = distilled_losses(
            output[trained][:, :entries], taught[trained][:, :entries], batch["labels"][trained], **self._settings
        )
        weights = batch.get("weights")
        if weights is None:
            return losses.sum(), trained.sum()
        return losses @ weights[trained].to(losses), weights[trained].sum(dtype=torch.float64)

    # The loss needs the full logits of both models.
    loss.takes_head_loss = False

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"cross_entropy": token_cross_entropy(output, batch)[0]}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"cross_entropy": sums["cross_entropy"] / sums["count"] if sums["count"] else None}

    def describe(self) -> PlannedModel:
        """Describe the student for the planner, with the cost of the teacher's forward in each step."""
        teacher = describe_folder(self._teacher.folder, lambda _: self._teacher.shapes()).shape
        frozen = FrozenWork(shape=teacher, other=1, whole_logits=True)
        return replace(super().describe(), frozen=frozen, task_limits=self.plan_limits)

    def data_lines(self) -> Sequence[str]:
        said = ", ".join(f"{name} {value:g}" for name, value in self._settings.items())
        return [*super().data_lines(), f"teacher {self._teacher.folder}: {said}"]


def _wrong_option(name: str, value: object, rule: str) -> ConfigError:
    return setting_error(f"task.options.{name}", value, rule)
