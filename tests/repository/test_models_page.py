"""docs/models.md says what the tables of the code say, and its numbers of GPUs are those of
tests/bench/models.py."""

import importlib
import re
from collections.abc import Iterable, Iterator

import pytest
from family_models import COMPOSITES
from helpers import ROOT
from model_configs import QWEN2, VISION, YOUNGER
from pages import text

from common.engine.refusals import ON_TRANSFORMERS_BACKEND, OTHER_ENGINE
from common.engine.refusals import REFUSALS as REFUSED_BY_VLLM
from common.exactness import REFUSALS, WITHOUT_OPTIONS
from common.recurrent import RECURRENT_MODELS
from common.vision import FAMILIES

PAGE = "docs/models.md"
# one that fits, one with each flag, pictures, recurrent layers, experts
EVERY_TIME = ["0.5B", "7B", "Qwen3-14B", "Qwen3-VL-4B", "Qwen3.5-4B", "gpt-oss-20b"]
SEE = set(FAMILIES)
# how the names of published configurations begin, by the first model_type of a row
STARTS = {
    "qwen2": "",
    "qwen2_5_vl": "VL-",
    "qwen3": "Qwen3-",
    "qwen3_moe": "Qwen3-",
    "qwen3_vl": "Qwen3-VL-",
    "qwen3_5": "Qwen3.5-",
    "qwen3_5_moe": "Qwen3.5-",
    "gpt_oss": "gpt-oss-",
    "llama": "Llama-",
    "gemma3": "gemma-3-",
}


def table(head: str) -> list[list[str]]:
    """Cells of the rows below a head that begins so."""
    lines = iter(text(PAGE).splitlines())
    while not next(lines).startswith(f"| {head}"):
        pass
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def kinds(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([a-z]\w+)`", cell))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, set[str]]:
    """{outcome: kinds} of tests/math/test_architectures.py."""
    source = (ROOT / "tests/math/test_architectures.py").read_text()
    namespace: dict = {}
    exec(re.search(r"^OUTCOMES = .*?^}", source, flags=re.MULTILINE | re.DOTALL)[0], namespace)
    return {outcome: set(names.split()) for outcome, names in namespace["OUTCOMES"].items()}


def test_how_a_family_is_exact_is_what_the_table_of_architectures_says(outcomes):
    in_packs = outcomes["packs"] | RECURRENT_MODELS | SEE | set(COMPOSITES)
    expected = {
        "packs": in_packs,
        "rows": outcomes["rows"],
        "refused": outcomes["head with a bias"] | outcomes["not supported here"],
    }
    rows = table("family")
    for family, _, reads, exact, *_ in rows:
        assert kinds(family), family
        assert set(kinds(family)) <= expected[exact], family
        assert (set(kinds(family)) <= SEE) == (reads == "pictures"), family
    assert {exact for _, _, _, exact, *_ in rows} == expected.keys()


def test_every_refusal_stands_on_the_page():
    rows = table("model | with vLLM")
    for refusal, (models, _, remedy) in zip(REFUSED_BY_VLLM, rows):
        assert kinds(models) == (refusal.model_types or ("quantization_config",))
        assert (OTHER_ENGINE in refusal.remedy) == ("`--engine hf`" in remedy), models
        assert ("on CPUs" in refusal.reason or "GPUs alone" in refusal.reason) == (
            "on CPUs" in models
        ), models
    assert len(rows) == len(REFUSED_BY_VLLM) + 1  # the last is that of the transformers backend
    assert len(ON_TRANSFORMERS_BACKEND) == 20 and "twenty" in rows[-1][0]
    by_trainer = {cell[0]: cell[1] for cell in table("model | why")}
    for kind, reason in REFUSALS.items():
        assert reason in by_trainer[f"`{kind}`"], kind
    for kind in WITHOUT_OPTIONS:
        assert f"`{kind}`" in text(PAGE), kind


def published() -> Iterator[tuple[str, str, str]]:
    """(name, GPUs, GPUs with LoRA) of the sizes on the page; the name has no configuration where
    there is a dash."""
    for family, sizes, _, _, _, gpus, with_lora in table("family"):
        if sizes == "–":
            assert gpus == with_lora == "–", family
            continue
        cells = [cell.split(", ") for cell in (sizes, gpus, with_lora)]
        for size, number, lora_number in zip(*cells, strict=True):
            yield STARTS[kinds(family)[0]] + size, number, lora_number


def test_sizes_without_a_configuration_have_a_dash():
    names = {name for name, *_ in published()}
    dashes = {name for name, *numbers in published() if numbers == ["–", "–"]}
    assert names - dashes == {*QWEN2, *YOUNGER, *VISION}


def check_numbers(names: Iterable[str], monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests/bench")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # which the benchmark extends
    bench = importlib.import_module("models")
    on_page = {name: numbers for name, *numbers in published()}
    for name in names:
        planned = [bench.fewest_gpus(name), bench.fewest_gpus(name, bench.RANK)]
        assert on_page[name] == planned, name


def test_numbers_of_gpus_are_those_of_the_plan(monkeypatch):
    check_numbers(EVERY_TIME, monkeypatch)


@pytest.mark.slow
def test_all_numbers_of_gpus_are_those_of_the_plan(monkeypatch):
    check_numbers([*QWEN2, *YOUNGER, *VISION], monkeypatch)
