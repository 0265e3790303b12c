"""What pytest runs before the tests, and what they share as fixtures; functions are in helpers.py.

Nothing heavy is imported here: pytest-xdist's own process runs no test.
"""

import gc
import importlib
import os
import signal
import sys
from collections import Counter
from functools import partialmethod

import pytest
import zygote
from zygote import WARM, ZYGOTE, script_environment

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes of tests share the cores
# ignored by a shell's `&` and nohup; what the tests start inherits that
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )


def pytest_configure(config) -> None:
    # else extensions complain at exit that their objects have leaked; as the last cleanup, since
    # pytest's own collections of garbage would walk all that the tests have imported
    config.add_cleanup(gc.unfreeze)
    # pytest-xdist would begin with the files that have the most tests
    config.option.loadscopereorder = False
    if WARM and ZYGOTE not in os.environ:
        num_workers = getattr(config.option, "numprocesses", None)
        tests = config.args if num_workers else []
        config.zygote = zygote.Zygote(script_environment(), tests)
        os.environ[ZYGOTE] = config.zygote.address
    if not getattr(config.option, "numprocesses", None):  # not the one that only hands them out
        gc.disable()  # until the tests are collected: imports leave little to collect
        importlib.import_module("helpers")  # before any test imports transformers
    elif WARM:
        warm_python = f"{sys.executable} {zygote.__file__} worker"
        config.option.tx = [f"popen//python={warm_python}"] * len(config.option.tx)


# The files that take longest come first, so that the workers are done at the same time.
LONGEST = [
    "test_kill_series",
    "test_curiosity_runs",
    "test_grpo_runs",
    "test_ppo_runs",
    "test_sft_runs",
]
LONGEST += [
    "test_failing",
    "test_tiny_vl",
    "test_grpo_engines",
    "test_grpo_faults",
    "test_vision_runs",
]
LONGEST += ["test_ppo_math", "test_invariance"]
LONGEST += ["test_math_rewards", "test_reward_workers", "test_house", "test_zygote"]


def pytest_itemcollected(item) -> None:
    """A slow test of tests/math is marked slow_math, too: pytest -m slow_math."""
    if item.get_closest_marker("slow"):
        item.add_marker(f"slow_{item.path.parent.name}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """A collection of garbage need not walk what the tests have imported: that takes half a
    second, and some tests ask for many."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter) -> None:
    """The table of attacks, if any were run: what `record_property("attack", (attack, outcomes))`
    has noted."""
    table: dict[str, Counter] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "attack":
                table.setdefault(value[0], Counter()).update(value[1])
    if table:
        terminalreporter.section(
            f"{sum(map(Counter.total, table.values()))} attacks: attack, n, outcome"
        )
    for attack, outcomes in table.items():
        words = "; ".join(
            f"{n} x {what}" if len(outcomes) > 1 else what for what, n in outcomes.items()
        )
        terminalreporter.write_line(f"{attack:66} {outcomes.total():4}  {words}")


def pytest_unconfigure(config) -> None:
    if hasattr(config, "zygote"):
        config.zygote.close()
        del os.environ[ZYGOTE]


@pytest.fixture(scope="module", autouse=True)
def freeze_older_objects():
    """Nor what earlier files have left: it stays, and each file begins with a small heap."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world():
    """A process group of this process alone, which nobody watches: a session may take its time."""
    from common import distributed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "watch", lambda *_: None)
        return distributed.init_world()


@pytest.fixture(scope="session")
def tiny_config():
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )


@pytest.fixture
def eager_compiler(monkeypatch):
    """Compiled layers run as they were traced: flex attention has no backward to compile on a
    CPU. The fixture is the list of traced graphs."""
    import torch

    graphs = []

    def run_as_traced(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=run_as_traced)
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):  # an engine in this process may have set it
        yield graphs


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Flex attention as it is written: to compile it takes a CPU long."""
    from common import attention

    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: attention._attend_in_blocks)


@pytest.fixture
def float64(monkeypatch):
    """Casts to float32, which norms, softmax and recurrences of transformers make whatever they
    are given, become casts to float64."""
    import torch

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
