"""TRL's SFTTrainer, in an environment of its own, on the work that curves.py writes down:
WORK.json.

Appends one JSON object a step to the file WORK names, with the keys of sft.py's metrics.jsonl. The
trainer's code is untouched: a callback reads the clock around each optimizer step, and evaluates
between steps.
"""

import json
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.data_utils import maybe_convert_to_chatml

# SmolLM2's template with marks around what the assistant says and the token that ends its turn
TEMPLATE = """\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful AI assistant named \
SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


class Clock(TrainerCallback):
    """Seconds, loss and trained tokens of each step; the loss of held-out rows in between."""

    def __init__(self, work: dict):
        self.work, self.metrics, self.trainer, self.record = work, Path(work["metrics"]), None, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.write({"step": 0, "eval/loss": held_out_loss(self.trainer)})

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        seconds = time.perf_counter() - self.start
        rows = self.work["rows_of_a_step"]
        labels = self.trainer.train_dataset[
            (state.global_step - 1) * rows : state.global_step * rows
        ]["labels"]
        tokens = sum(label != -100 for row in labels for label in row[1:])
        self.record = {"step": state.global_step, "time/step_s": seconds, "data/tokens": tokens}
        if state.global_step % self.work["eval_every"] == 0:
            self.record["eval/loss"] = held_out_loss(self.trainer)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:  # of a step; at the end there is another
            self.write(
                self.record | {"policy/loss": logs["loss"], "optim/lr": logs["learning_rate"]}
            )

    def write(self, record: dict) -> None:
        if self.trainer.accelerator.is_main_process:
            with self.metrics.open("a") as file:
                file.write(json.dumps(record) + "\n")


@torch.no_grad()
def held_out_loss(trainer: SFTTrainer) -> float:
    """Nats a token, over all processes; TRL's own would be a mean of the batches' means."""
    trainer.model.eval()
    total, count = 0.0, 0
    for batch in trainer.get_eval_dataloader():
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        total += trainer.compute_loss(trainer.model_wrapped, dict(batch)).item() * tokens
        count += tokens
    trainer.model.train()
    sums = gather_object([(total, count)])
    return sum(t for t, _ in sums) / sum(c for _, c in sums)


def main(work: dict) -> None:
    clock = Clock(work)
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    chat = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    given = tokenizer.apply_chat_template(chat, tokenize=False)
    assert given == tokenizer.apply_chat_template(chat, tokenize=False, chat_template=TEMPLATE), (
        given
    )
    chats = "prompt" not in work["rows"][0]
    if chats:
        tokenizer.chat_template = TEMPLATE
    config = SFTConfig(
        per_device_train_batch_size=work["batch"],  # sequences of one forward and backward
        per_device_eval_batch_size=work["batch"],
        gradient_accumulation_steps=work["rows_of_a_step"] // work["batch"] // work["processes"],
        max_steps=work["steps"],
        max_length=1024,
        assistant_only_loss=chats,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        # the rows stand in the order in which sft.py takes them
        train_sampling_strategy="sequential",
        output_dir=work["output_dir"],
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **work["options"],
    )
    # SFTTrainer does this, too, but refuses assistant_only_loss for conversations of {from, value}
    # before
    rows, held_out = (
        [maybe_convert_to_chatml(row) for row in work[name]] for name in ("rows", "eval_rows")
    )
    data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(held_out)}
    trainer = SFTTrainer(
        work["model"], args=config, processing_class=tokenizer, callbacks=[clock], **data
    )
    clock.trainer = trainer
    factors, optimizer = work["lr_factors"], trainer.create_optimizer()
    trainer.lr_scheduler = LambdaLR(optimizer, lambda step: factors[min(step, len(factors) - 1)])
    trainer.train()
    trainer.accelerator.end_training()  # else gloo may abort where one process ends before another


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
