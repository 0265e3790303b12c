"""The update on a real GPU: attention that skips a group's prompts, out of memory, an overflow, an
exact resume.

python -m pytest tests/gpu/test_update.py -q -s
"""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from episodes import random_episodes
from helpers import (
    ROOT,
    kill_once,
    relative_l2,
    run_script,
    skip_where_no_step_is_repeated,
    steps_of,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from common.models import Policy, load_model
from common.packing import Layout, TokenIndex, layout_of, pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

UNSHARED = Layout(share_prompts=False)
DEMO = ["--prompts-per-step", 8, "--samples-per-prompt", 4, "--engine-memory", 2]
DEMO += ["--eval-every", 0, "--eval-rows", 32]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Heads of 64 and grouped queries, which the kernels of flex attention are made for."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        vocab_size=97,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def values_and_gradients(
    policy: Policy, episodes, **options
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs and entropies [T, 2] of all trained tokens, and the gradients of a weighted sum of
    them."""
    index = TokenIndex(episodes)
    values = torch.zeros(len(index), 2, device="cuda")
    upstream = torch.randn(len(index), 2, generator=torch.Generator().manual_seed(1)).cuda()
    policy.zero_grad()
    for batch in pack(episodes, range(len(episodes)), index, **options):
        batch = batch.to(torch.device("cuda"))
        out = torch.stack(policy(batch, 0.9), dim=1)
        values[batch.token_index] = out.detach()
        (out * upstream[batch.token_index]).sum().backward()
    return values, [p.grad.float().clone() for p in policy.parameters()]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_packs_in_flex_attention_and_sdpa_are_single_samples(model_folder, dtype, bound):
    torch.backends.cuda.matmul.allow_tf32 = False
    episodes = random_episodes(5, prompts=6, samples=5)
    flex = load_model(model_folder, "flex", dtype=dtype).cuda()
    sdpa = load_model(model_folder, "sdpa", dtype=dtype).cuda()
    expected = values_and_gradients(sdpa, episodes, budget=1, layout=UNSHARED)
    repeated = Layout(share_prompts=False, multiple=128)
    cases = {
        "flex, shared prompts": (flex, {"budget": 512, "layout": layout_of("flex")}),
        "flex, prompts repeated": (flex, {"budget": 512, "layout": repeated}),
        "sdpa, shared prompts": (sdpa, {"budget": 512}),
    }
    for name, (policy, options) in cases.items():
        values, gradients = values_and_gradients(policy, episodes, **options)
        distances = relative_l2([values], [expected[0]]), relative_l2(gradients, expected[1])
        print(
            f"{dtype}, {name}: values {distances[0]:.2g}, gradients {distances[1]:.2g} from "
            "single samples"
        )
        assert max(distances) < bound, name


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn")
def test_packs_in_flash_attention_are_single_samples(model_folder):
    """It reads off the position ids where a sequence begins: each response repeats its prompt."""
    episodes = random_episodes(5, prompts=6, samples=5)
    flash = load_model(model_folder, "flash", dtype=torch.bfloat16).cuda()
    sdpa = load_model(model_folder, "sdpa", dtype=torch.bfloat16).cuda()
    expected = values_and_gradients(sdpa, episodes, budget=1, layout=UNSHARED)
    values, gradients = values_and_gradients(flash, episodes, budget=512, layout=UNSHARED)
    distances = relative_l2([values], [expected[0]]), relative_l2(gradients, expected[1])
    print(
        f"bf16, flash: values {distances[0]:.2g}, gradients {distances[1]:.2g} from single samples"
    )
    assert max(distances) < 0.03


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_out_of_memory_repeats_the_step_with_the_same_gradient(tmp_path, strategy):
    """The allocator itself refuses, in a backward of step 2."""
    skip_where_no_step_is_repeated(strategy)
    options = [*DEMO, "--dtype", "fp32", "--attention", "sdpa", "--total-steps", 3]
    options += ["--micro-batch-tokens", 2048, "--strategy", strategy]
    run_script("grpo.py", *options, "--output-dir", tmp_path / "plain")
    worker = ROOT / "tests" / "workers" / "out_of_memory.py"
    done = run_script(worker, *options, "--output-dir", tmp_path / "short")
    assert "--micro-batch-tokens is now 1024, the step is repeated" in done.stdout
    plain = steps_of(tmp_path / "plain")[2]
    short = steps_of(tmp_path / "short")[2]
    for metric in ("policy/loss", "policy/entropy", "optim/grad_norm"):
        assert short[metric] == pytest.approx(plain[metric], rel=1e-3, abs=1e-5), metric


def test_the_rehearsal_proves_the_plan(tmp_path):
    """Its line has what was free at the start as the sum of peak and rest."""
    done = run_script("grpo.py", *DEMO, "--total-steps", 2, "--output-dir", tmp_path)
    (line,) = re.findall("^rehearsal: .*", done.stdout, re.MULTILINE)
    print(line)
    numbers = re.search(r"peak ([\d.]+) GB, planned [\d.]+; ([\d.]+) GB are left", line)
    peak, left = map(float, numbers.groups())
    (free,) = re.findall(r"; free ([\d.]+) GB", done.stdout)
    assert peak + left == pytest.approx(float(free), abs=0.11)
    assert "out of" not in done.stdout


def test_fp16_skips_a_step_whose_gradient_overflows():
    done = run_script(ROOT / "tests" / "workers" / "overflow.py")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result == {"stepped": [False], "unchanged": True, "scale": [2.0**13], "then": [True]}


@pytest.mark.parametrize("script", ["sft.py", "grpo.py"])
def test_kill_and_resume_equals_an_uninterrupted_run(tmp_path, script):
    """fp32 and SDPA on one rank, with kernels that repeat their results."""
    options = ["--dtype", "fp32", "--attention", "sdpa", "--total-steps", 4, "--save-every", 1]
    options += DEMO if script == "grpo.py" else ["--eval-every", 0]
    command = [ROOT / "tests" / "workers" / "deterministic.py", script, *options, "--output-dir"]
    run_script(*command, tmp_path / "whole")
    kill_once(*command, tmp_path / "killed", ranks=1, after_step=2)
    run_script(*command, tmp_path / "killed", ranks=1)
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    weights = (tmp_path / "killed" / "model" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "whole" / "model" / "model.safetensors").read_bytes()
