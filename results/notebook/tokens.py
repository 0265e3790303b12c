"""Draw the divergence from the teacher over the tokens of a response: docs/distill_tokens.png.

python distill.py --total-steps 1 --dump-rollouts-every 1 --output-dir runs/tokens
python results/notebook/tokens.py --dump runs/tokens/rollouts/step_000001.parquet --prompt 4
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.flags import call_program  # noqa: E402
from common.hub import load_tokenizer, resolve_model  # noqa: E402


def main(
    dump: Path, prompt: int = 0, model: str = "tiny", out: Path = ROOT / "docs/distill_tokens.png"
) -> None:
    """prompt: of which the first sample is drawn. model: whose tokenizer the dump was made with."""
    tokenizer = load_tokenizer(resolve_model(model))
    rows = pq.read_table(dump).to_pylist()
    row = next(row for row in rows if row["prompt_index"] == prompt)
    labels = [tokenizer.decode([token]).replace("\n", "↵") for token in row["response_ids"]]
    figure, axes = plt.subplots(figsize=(12, 2.4), layout="constrained")
    places = range(len(labels))
    axes.bar(places, row["divergences"], color="tab:orange")
    axes.set_xticks(places, labels, fontsize=7, family="monospace")
    axes.tick_params(axis="x", length=0)
    for label in axes.get_xticklabels():
        if len(label.get_text()) > 1:
            label.set_rotation(90)
    axes.set_ylabel("divergence (nats)")
    axes.set_title(row["prompt"].replace("\n", " "), fontsize=8, family="monospace")
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    call_program(main, "results.notebook.tokens", __doc__)
