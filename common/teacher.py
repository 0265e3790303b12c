"""The teacher of a distillation: its predictions, prompts of its own, the responses of a data set,
and the check that it reads the student's tokens."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from common.data.columns import check_column, column_value, first_part, text_problems
from common.data.prompts import PromptData
from common.data.render import encode
from common.data.scan import KnownTokens
from common.divergence import MISSING_LOGPROB, Comparison, DivergenceTerms, Prediction, compare
from common.exactness import exact_attention, refuse_inexact
from common.files import DAMAGE, user_errors
from common.flags import Data, Machine, Rollout
from common.hub import load_tokenizer, resolve_model
from common.job import Job
from common.models import Policy, hidden_states, logit_transform
from common.packing import MicroBatch
from common.pictures import BadRow
from common.progress import say
from common.rollout.rollouts import Rollouts
from common.rotary import num_positions
from common.types import Episode, Row
from common.vision import load_vision, skeleton

if TYPE_CHECKING:
    from common.tools.pools import ToolPool

MAX_EXAMPLES = 20  # tokens that a message names


def find_teacher(job: Job, name: str | None, max_model_len: int) -> str:
    """The folder of the teacher; that of the student if there is no name. If --attention is auto
    and the teacher can only be read in rows, `job.attention` becomes rows, for the student too.

    max_model_len: longest prompt with its response (tokens) that it reads. SystemExit if it cannot
    judge the student's tokens.
    """
    if name is None:
        check_positions(max_model_len, job.num_positions, f"--model {job.model_folder}")
        return job.model_folder
    path = resolve_model(name, "--teacher")
    if path == job.model_folder and job.machine.lora_rank and "reference" in job.machine.offload:
        raise SystemExit("--offload reference has no effect: with LoRA the teacher is the base")
    label = f"--teacher {path}"
    trust_remote_code = job.machine.trust_remote_code
    model = skeleton(path, trust_remote_code, "--teacher")
    attention = exact_attention(model, job.attention, job.machine)
    if attention != job.attention:  # "rows": each length of a row would be compiled anew
        job.attention = attention
        job.compile = False
    refuse_inexact(model, job.attention, label)
    check_positions(max_model_len, num_positions(model.config.get_text_config()), label)
    with user_errors(f"{label}: its tokenizer cannot be read", DAMAGE):
        tokenizer = load_tokenizer(path, trust_remote_code)
    check_same_tokens(
        vocabulary(job.tokenizer),
        vocabulary(tokenizer),
        job.num_embeddings,
        model.get_input_embeddings().weight.shape[0],
        label,
    )
    if job.vision:
        vision = load_vision(path, job.limits, trust_remote_code)
        if vision is None or vision.family != job.vision.family:
            raise SystemExit(f"{label}: does not read pictures as --model {job.model_folder} does")
    job.check_weights(path, "--teacher")
    return path


def check_positions(max_model_len: int, positions: float, label: str) -> None:
    """SystemExit if the teacher, called `label`, would read beyond its positions."""
    if max_model_len > positions:
        raise SystemExit(
            f"--max-prompt-tokens and --max-response-tokens: the teacher reads {max_model_len} "
            f"tokens, and {label} has {positions:.0f} positions (config.json)"
        )


def check_same_shapes(job: Job, path: str) -> None:
    """SystemExit if the teacher is --model itself, or if the student's engine cannot take its
    weights."""
    problem = ""
    if path == job.model_folder:
        problem = "is --model itself"
    elif weight_shapes(path, job.machine) != weight_shapes(job.model_folder, job.machine):
        problem = "is no model of --model's shape"
    if problem:
        raise SystemExit(
            f"--eval-teacher: {path} {problem}; evaluate it by `python grpo.py --eval-only --model "
            f"{path} --eval-data FILES`"
        )


def weight_shapes(folder: str, machine: Machine) -> dict[str, torch.Size]:
    parameters = skeleton(folder, machine.trust_remote_code).named_parameters()
    return {name: parameter.shape for name, parameter in parameters}


def vocabulary(tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def check_same_tokens(
    student: dict[int, str],
    teacher: dict[int, str],
    student_size: int,
    teacher_size: int,
    label: str,
) -> None:
    """SystemExit if an id does not mean the same token to student and teacher. Sizes are those of
    the models' embeddings, which may have unused rows at the end.

    label: the teacher's flag and folder.
    """
    differing = []
    for token_id in sorted(student.keys() | teacher.keys()):
        student_token = student.get(token_id) if token_id < student_size else None
        teacher_token = teacher.get(token_id) if token_id < teacher_size else None
        if student_token != teacher_token:
            differing.append(f"{token_id}: {student_token!r}, {teacher_token!r}")
    if not differing:
        return
    if len(differing) > len(student) // 2:
        num_ids = len(student.keys() | teacher.keys())
        raise SystemExit(
            f"{label}: has another tokenizer altogether ({len(differing)} of {num_ids} ids mean "
            "another token): distillation compares distributions over the same tokens"
        )
    examples = "; ".join(differing[:MAX_EXAMPLES])
    raise SystemExit(
        f"{label}: {len(differing)} token ids mean something else than to the student (id: the "
        f"student's token, the teacher's): {examples}"
    )


def open_teacher_prompts(
    job: Job,
    data: Data,
    rollout: Rollout,
    tool_pool: "ToolPool | None",
    column: str,
    train_data: PromptData,
) -> PromptData:
    """The prompts that the teacher reads, of the same rows; `train_data` keeps those that both can
    use."""
    with user_errors():
        prompts = PromptData(
            data.train_data,
            data,
            rollout,
            tokenizer=job.tokenizer,
            flag=f"--teacher-prompt-column {column}",
            max_rows=data.max_rows,
            vision=job.vision,
            tools=tool_pool.tools if tool_pool else None,
            world=job.world,
            num_embeddings=job.num_embeddings,
            needs_truth=False,
            prompt_column=column,
        )
        train_data.keep(prompts.usable)
    return prompts


class Responses:
    """The responses of a data set: texts of a column of its rows."""

    def __init__(self, job: Job, data: Data, train_data: PromptData, column: str):
        """SystemExit for rows without a usable one, unless --bad-rows drop leaves them out."""
        self.tokenizer = job.tokenizer
        self.files = train_data.files
        self.column = column
        with user_errors(f"--response-column {column}"):
            check_column(self.files, column)
            problems = text_problems(self.files, column)
            indices = train_data.usable.tolist()
            reasons = {index: problems[index] for index in indices if index in problems}
            known_tokens = KnownTokens(job.tokenizer, job.num_embeddings)
            if known_tokens.unknown:  # else no text need be read
                for index in indices:
                    if index not in reasons:
                        try:
                            known_tokens.check(self.text(index))
                        except BadRow as error:
                            reasons[index] = str(error)
            self.files.refuse(reasons, "rows without a response", data.bad_rows == "drop")
            train_data.keep([index for index in indices if index not in reasons])

    def text(self, index: int) -> str:
        record = self.files.row(index, (self.column, first_part(self.column)))
        return column_value(record, self.column)

    def episode(self, prompt_index: int, row: Row, max_tokens: int) -> Episode:
        """The response of a row as an episode, cut to `max_tokens`; its log-probs are 0."""
        ids = encode(self.tokenizer, self.text(row.index))
        ids = [*ids, self.tokenizer.eos_token_id][:max_tokens]
        return Episode(
            prompt_index=prompt_index,
            sample_index=0,
            prompt_ids=row.prompt_ids,
            response_ids=ids,
            loss_mask=[1] * len(ids),
            logprobs=[0.0] * len(ids),
            finish_reason="data",
            media=list(row.media),
            row=row.index,
            truth=row.truth,
        )


class Predictor(Policy):
    """A policy that compares its prediction with a teacher's, or gives its own as a teacher: both
    inside of `forward`, where FSDP2 has gathered the head."""

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        teacher: Prediction | None = None,
        terms: DivergenceTerms | None = None,
        as_teacher: bool = False,
    ) -> Comparison | Prediction | tuple[Tensor, ...]:
        """Log-probs [N] and entropy [N], as `Policy` has them. With a `teacher`: the `Comparison`
        by the divergence of `terms`. With `as_teacher`: the model's own `Prediction`."""
        if teacher is None:
            # this may be a teacher, without the padding at the end of the student's vocabulary
            num_embeddings = self.model.get_input_embeddings().weight.shape[0]
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=num_embeddings - 1))
        if teacher is None and not as_teacher:
            return self.logprobs(batch, temperature)
        hidden = hidden_states(self.model.base_model, batch, self.attention, self.vision)
        head = self.model.get_output_embeddings().weight
        transform = logit_transform(self.model.config)
        if as_teacher:
            # a copy: FSDP2 frees the gathered head
            return Prediction(hidden, head.clone(), transform, temperature)
        student = Prediction(hidden, head, transform, temperature)
        return compare(student, teacher, batch.targets, terms)

    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, ...]:
        """`Policy`'s log-probs and entropy; a teacher may lack the last words of the student's
        vocabulary."""
        num_words = len(self.model.get_output_embeddings().weight)
        targets = batch.targets.clamp(max=num_words - 1)
        logprobs, entropy = super().forward(replace(batch, targets=targets), temperature)
        return torch.where(batch.targets < num_words, logprobs, MISSING_LOGPROB), entropy


def is_usable(episode: Episode) -> bool:
    return episode.finish_reason not in ("tool_failed", "unreadable")


def store_divergences(episodes: list[Episode], divergences: Tensor) -> None:
    """Write the divergences [T] of the trained tokens, in their order, into the episodes."""
    values = iter(divergences.tolist())
    for episode in episodes:
        episode.divergences = []
        for is_trained in episode.loss_mask:
            episode.divergences.append(next(values) if is_trained else 0.0)


def check_replayed_prompts(episodes: list[Episode], path: Path, column: str | None) -> None:
    """SystemExit if the dump at `path` has prompts of the teacher's own and the flag is missing, or
    the other way round."""
    has_prompts = any(episode.teacher_prompt_ids for episode in episodes)
    if episodes and has_prompts != (column is not None):
        raise SystemExit(
            f"--replay {path}: give the --teacher-prompt-column of that run, and none if it had "
            "none"
        )


def with_teacher_prompts(episodes: list[Episode]) -> list[Episode]:
    """The episodes as the teacher reads them."""
    return [replace(episode, prompt_ids=episode.teacher_prompt_ids) for episode in episodes]


def evaluate_teacher(teacher: nn.Module, rollouts: Rollouts, accuracy: float | None) -> dict:
    """eval/teacher_*: the teacher answers --eval-data, with the student's engine. accuracy: the
    student's, if it is known."""
    samples_file = rollouts.output_dir / f"eval_teacher{rollouts.eval_data.files.suffix}"
    teacher.to(rollouts.world.device)
    metrics = rollouts.evaluate(teacher, 0, samples_file)
    teacher_accuracy = metrics.get("eval/accuracy")
    if teacher_accuracy is not None and accuracy is not None:
        line = f"teacher: eval/accuracy {teacher_accuracy:.3f}, the student's {accuracy:.3f}"
        if teacher_accuracy <= accuracy:
            line = f"warning: {line}: nothing to learn from it on --eval-data"
        say(line)
    return {name.replace("eval/", "eval/teacher_", 1): value for name, value in metrics.items()}
