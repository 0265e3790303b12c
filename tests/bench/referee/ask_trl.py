"""TRL's GRPOTrainer and GKDTrainer, under python or `torchrun --nproc_per_node 2`: one step of
their `train` for each objective and split that they can be given; the loss of DistillationTrainer.

What is ours: the sampled batch, its scores, advantages and old log-probs, and its order in place of
the shuffle; the gradient is read after DDP has averaged it, before the optimizer's step.
"""

import os
import tempfile
from functools import partial

import torch
from answers import (
    answer,
    answer_divergences,
    averaged_over_ranks,
    compare_advantages,
    print_answers,
)
from batch import LONGEST, OBJECTIVES, SAMPLES, SEQUENCES, WORDS, Batch, Split, frozen_batch
from datasets import Dataset
from datasets.table import InMemoryTable
from oracle import group_advantages
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    TrainerCallback,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.trainer import distillation_trainer, grpo_trainer

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
STEP = {  # of any trainer
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
LOSS_TYPES = {"tokens": "dapo", "sequences": "grpo", "constant": "dr_grpo"}


class TableBackbone(PreTrainedModel):
    """The table as a model: a prompt is a sequence's number, padding stands on the right."""

    config_class = Qwen2Config

    def __init__(self, config: Qwen2Config, shape: torch.Size):
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(shape, dtype=torch.float64))

    def forward(self, input_ids: Tensor, **_) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(
            last_hidden_state=self.table[input_ids[:, 0], : input_ids.shape[1]]
        )


class TableModel(PreTrainedModel, GenerationMixin):
    config_class = Qwen2Config
    base_model_prefix = "model"

    def __init__(self, batch: Batch, table: Tensor):
        config = Qwen2Config(
            vocab_size=WORDS, hidden_size=batch.head.shape[1], tie_word_embeddings=False
        )
        super().__init__(config)
        self.model = TableBackbone(config, table.shape)
        self.lm_head = nn.Linear(*reversed(batch.head.shape), bias=False, dtype=torch.float64)
        self.post_init()
        with torch.no_grad():
            self.model.table.copy_(table)
            self.lm_head.weight.copy_(batch.head)
        self.lm_head.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_) -> CausalLMOutput:
        """For GKDTrainer; GRPOTrainer puts its fused head in place of it."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


class FrozenTrainer(GRPOTrainer):
    """The trainer, whose policy has sampled and whose rewards are the frozen batch; then with the
    definition's advantages, and old log-probs of another policy."""

    def __init__(self, batch: Batch, sequences: list[int], scaled: bool, **options):
        super().__init__(TableModel(batch, batch.table), reward_funcs=self.score, **options)
        self.batch = batch
        self.sequences = sequences
        advantages = group_advantages(batch, scaled)
        self.advantages = torch.tensor(advantages, dtype=torch.float64)[sequences]
        self.losses: list[float] = []

    def score(self, completions, **_) -> list[float]:
        return [self.batch.scores[s] for s in self.sequences]

    def _generate(self, prompts):
        ids = [self.batch.ids[s] for s in self.sequences]
        masks = [self.batch.masks[s] for s in self.sequences]
        texts = [""] * len(ids)
        return [[s] for s in self.sequences], ids, masks, texts, None, {}, None, None

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        self.own_advantages = rollout["advantages"]
        width = rollout["completion_ids"].shape[1]
        old_logprobs = self.batch.old_logprobs[self.sequences, :width]
        return rollout | {"advantages": self.advantages, "old_per_token_logps": old_logprobs}

    def compute_loss(self, *arguments, **options):
        loss = super().compute_loss(*arguments, **options)
        self.losses.append(loss.item())
        return loss


class Gradient(TrainerCallback):
    """Reads the gradient before the step."""

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.table_grad = model.get_parameter("model.table").grad.clone()


def train(
    batch: Batch, name: str, micro_batches: list[list[int]], by_default: bool = False
) -> tuple[FrozenTrainer, Tensor]:
    """A step of the trainer on this rank's micro-batches, all of one size; and its gradient.
    by_default: with the `loss_type` of GRPOConfig."""
    objective = OBJECTIVES[name]
    options = {"loss_type": LOSS_TYPES[objective.mean], "epsilon_high": objective.clip_high}
    if objective.loss == "cispo":
        # its docstring: the bound itself, ScaleRL's epsilon_max
        options = {"loss_type": "cispo", "epsilon_high": 1 + objective.clip_high}
    if objective.loss == "gspo":
        options["importance_sampling_level"] = "sequence"
    if by_default:
        del options["loss_type"]
    reader = Gradient()
    prompts = InMemoryTable.from_pydict({"prompt": ["0"] * SEQUENCES})
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(micro_batches[0]),
            gradient_accumulation_steps=len(micro_batches),
            num_generations=SAMPLES,
            max_completion_length=LONGEST,
            epsilon=objective.clip_low,
            delta=objective.dual_clip or None,
            **STEP,
            **options,
        )
        trainer = FrozenTrainer(
            batch,
            [s for sequences in micro_batches for s in sequences],
            scaled=name != "Dr. GRPO",
            args=config,
            train_dataset=Dataset(prompts, fingerprint="frozen"),
            processing_class=tokenizer(),
            callbacks=[reader],
        )
        trainer.train()
    return trainer, reader.table_grad


def ask(
    batch: Batch, name: str, split: Split, by_default: bool = False
) -> tuple[float, Tensor] | str:
    if problem := reason_against(split):
        return problem
    trainer, gradient = train(batch, name, split[RANK], by_default)
    return mean_over_ranks(trainer), gradient


def reason_against(split: Split) -> str:
    """Why this process cannot be asked for a split, or nothing."""
    if len(split) != RANKS:
        return "asked with another number of processes"
    if len({len(sequences) for micro_batches in split for sequences in micro_batches}) > 1:
        return "per_device_train_batch_size is one number"
    return ""


def mean_over_ranks(trainer: FrozenTrainer | GKDTrainer) -> float:
    losses = torch.tensor([sum(trainer.losses)], dtype=torch.float64)
    return trainer.accelerator.gather(losses).mean().item()


def advantages(batch: Batch) -> dict[str, float]:
    trainer, _ = train(batch, "GRPO", [list(range(SEQUENCES))])
    return compare_advantages(batch, trainer.own_advantages.double())


def tokenizer() -> PreTrainedTokenizerFast:
    words = {str(i): i for i in range(WORDS)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )


class CountedGKDTrainer(GKDTrainer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.losses: list[float] = []

    def compute_loss(self, *arguments, **options):
        loss = super().compute_loss(*arguments, **options)
        self.losses.append(loss.item())
        return loss


def ask_gkd(batch: Batch, kind: str, beta: float, split: Split) -> tuple[float, Tensor] | str:
    """A step of GKDTrainer's `train` on the responses as rows of a data set (lmbda 0)."""
    if problem := reason_against(split):
        return problem

    def collate(rows: list[dict]) -> dict[str, Tensor]:
        sequences = [row["sequence"] for row in rows]
        ids, masks, present = batch.padded(sequences)
        prompts = torch.tensor(sequences)[:, None]
        labels = ids.masked_fill(masks == 0, -100)
        return {
            "prompts": prompts,
            "prompt_attention_mask": torch.ones_like(prompts),
            "input_ids": torch.cat([prompts, ids], 1),
            "attention_mask": torch.cat([torch.ones_like(prompts), present], 1),
            "labels": torch.cat([torch.full_like(prompts, -100), labels], 1),
        }

    # processes take batches of the data set in turn
    order = [s for sequences in zip(*split) for own in sequences for s in own]
    reader = Gradient()
    with tempfile.TemporaryDirectory() as folder:
        config = GKDConfig(
            output_dir=folder,
            per_device_train_batch_size=len(split[0][0]),
            gradient_accumulation_steps=len(split[0]),
            train_sampling_strategy="sequential",
            lmbda=0.0,
            beta={"reverse-kl": 1.0, "forward-kl": 0.0}.get(kind, beta),
            **STEP,
        )
        trainer = CountedGKDTrainer(
            model=TableModel(batch, batch.table),
            teacher_model=TableModel(batch, batch.teacher_table),
            args=config,
            data_collator=collate,
            train_dataset=Dataset(
                InMemoryTable.from_pydict({"sequence": order}), fingerprint="frozen"
            ),
            processing_class=tokenizer(),
            callbacks=[reader],
        )
        trainer.train()
    return mean_over_ranks(trainer), reader.table_grad


def ask_distillation(batch: Batch, kind: str, beta: float, split: Split) -> tuple[float, Tensor]:
    """`_chunked_divergence_loss` of DistillationTrainer, called as its `_compute_loss` does; the
    number of items is that of its `compute_loss`, lines 1796 and 1797."""
    beta = {"reverse-kl": 1.0, "forward-kl": 0.0}.get(kind, beta)

    def loss_of(table: Tensor, sequences: list[int], split: Split, rank: int) -> Tensor:
        ids, masks, _ = batch.padded(sequences)
        places = sequences, slice(ids.shape[1])
        loss, _, _ = distillation_trainer._chunked_divergence_loss(
            table[places],
            batch.teacher_table[places],
            batch.head,
            batch.head,
            masks,
            beta,
            num_items_in_batch=num_trained(batch) / len(split),
        )
        return loss

    return averaged_over_ranks(batch, split, loss_of)


def num_trained(batch: Batch) -> Tensor:
    return torch.tensor(sum(map(sum, batch.masks)))


if __name__ == "__main__":
    # sequences stay in the micro-batches of the split
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    results = {
        "objectives": answer(ask),
        "variants": {
            "TRL, default loss_type": answer(partial(ask, by_default=True), ["GSPO"]),
        },
    }
    results["divergences"] = {"TRL, GKDTrainer": answer_divergences(ask_gkd)}
    if RANKS == 1:
        results["advantages"] = advantages(frozen_batch())
        distillation = answer_divergences(ask_distillation)
        results["divergences"]["TRL, DistillationTrainer"] = distillation
    print_answers("TRL", ["trl", "transformers", "torch"], **results)
