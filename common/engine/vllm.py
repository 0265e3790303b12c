"""The colocated rollout engine: vLLM inside each rank. `common/engine/hf.py` is its twin without
vLLM.

One step, each a named call:  wake("weights") -> sync_weights -> wake("kv_cache") -> submit, step
... -> sleep.

The vLLM attribute chain stands in this file alone. Tested with vLLM 0.32.0 and 0.26.0 (which drops
videos' times).
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image
from pydantic import ValidationError
from safetensors import SafetensorError

from common.engine.books import WeightBooks
from common.engine.protocol import EngineConfig, Weights, without_placeholder
from common.files import memory_advice, refuse
from common.hub import require_weights
from common.pictures import Media
from common.printing import printable
from common.rotary import check_lengths
from common.types import Completion, Request
from common.vision import skeleton

LIMITS = re.compile("max_model_len|max_num_batched_tokens|max.seq.len|memory", re.IGNORECASE)
_alive: list[object] = []  # until the process ends: taking vLLM down costs more than a second


def set_environment(on_gpu: bool, dtype: torch.dtype) -> None:
    """What vLLM must find when it is imported."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_COLOR": "0",
    }
    if not on_gpu:
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # Eager on CPUs: the only compiled function left counts ranks of log-probs, and costs 15 s
        # of C++ compiler.
        torch._dynamo.config.disable = True
        # one memory: nothing to bind, or to warn of
        if not os.path.exists("/sys/devices/system/node/node1"):
            torch.ops._C.init_cpu_memory_env = lambda nodes: None
    elif dtype == torch.float32:
        settings |= {"TRITON_F32_DEFAULT": "ieee"}  # not tf32, which would open the gap
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # vLLM looks at names that torch has deprecated
    warnings.filterwarnings("ignore", category=FutureWarning)
    # vLLM configures its logger too late for what it has to say while it is imported
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


def register_model(
    path: str, trust_remote_code: bool, ranks: int, max_model_len: int
) -> dict[str, int]:
    """{name: number of elements} of all that a sync must bring. SystemExit for a model that cannot
    be synced exactly.

    vLLM would inspect a lazily registered class in a subprocess, which lacks our repair of
    torchvision.
    """
    from vllm.model_executor.models import ModelRegistry

    model = skeleton(path, trust_remote_code)
    architecture = (model.config.architectures or [type(model).__name__])[0]
    registered = ModelRegistry.models.get(architecture)
    known = registered and registered.load_model_cls()
    # which changes transformers' classes in this process
    if known is None or ".transformers" in known.__module__:
        raise SystemExit(
            f"--model {path}: vLLM has no {architecture} of its own; --engine hf runs it"
        )
    if any(".experts." in name for name, _ in model.named_parameters()):
        reason = "transformers fuses experts, vLLM names them apart, and a sync would break them"
        raise SystemExit(
            f"--model {path}: {architecture} is a mixture of experts: {reason}; --engine hf runs it"
        )
    refuse_uneven(model.config, ranks)
    check_lengths(model.config.get_text_config(), "vllm", max_model_len)
    ModelRegistry.register_model(architecture, known)
    return {
        name: parameter.numel()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def refuse_uneven(config, ranks: int) -> None:
    """SystemExit for a model that vLLM cannot divide among so many ranks; what it would say itself
    names no flag."""
    for part in (config.get_text_config(), getattr(config, "vision_config", None)):
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "num_heads",
            "intermediate_size",
        ):
            size = getattr(part, name, None) or ranks
            copied = name == "num_key_value_heads" and ranks % size == 0
            refuse(
                size % ranks > 0 and not copied,
                f"--engine-parallel {ranks}: the model's {name} is {size}",
            )


def refuse_other_files(path: str) -> None:
    """SystemExit for a file beside a model's weights that transformers leaves alone, and vLLM reads
    for want of an index."""
    folder, files = Path(path), require_weights(path)
    if (folder / "model.safetensors.index.json").exists():
        return
    others = [file.name for file in sorted(folder.glob("*.safetensors")) if file not in files]
    told = (
        f"--model {path}: vLLM would read {' and '.join(others)}, too, which transformers does not"
    )
    refuse(bool(others), f"{told}: move it elsewhere, or --engine hf")


@contextmanager
def start_errors(path: str) -> Iterator[None]:
    """What vLLM refuses at its start ends the run in a line, with the flags that it may depend
    on."""
    try:
        yield
    except (ValueError, OSError, LookupError, SafetensorError) as error:
        # its text shows all settings, those of lengths among them
        if isinstance(error, ValidationError):
            reason = "; ".join(problem["msg"] for problem in error.errors())
        else:
            reason = (
                f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
            )
        flags = f"--model {path}: vLLM does not take it"
        if LIMITS.search(reason.replace(path, "")):
            flags = "--max-prompt-tokens, --max-response-tokens, --engine-memory"
        raise SystemExit(printable(f"{flags}: {' '.join(reason.split()):.500}")) from error


class VllmEngine:
    """vLLM in this process, weights replaced in place; consecutive `ranks` share it (tensor
    parallel), doing alike."""

    def __init__(self, config: EngineConfig):
        on_gpu = config.world.device.type == "cuda"
        set_environment(on_gpu, config.dtype)
        from vllm import LLM
        from vllm.distributed import get_tp_group
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        from vllm.platforms import cpu

        # On CPUs gloo: vLLM's shared memory has one name for all runs of a machine, and outlives
        # them.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        # It would look for libraries that all processes started from here preload. None is of its
        # own; and of a path with a space each would complain, half by half.
        cpu.glob = SimpleNamespace(glob=lambda pattern: [])
        sizes = register_model(
            config.path, config.trust_remote_code, config.ranks, config.max_model_len
        )
        # A prompt cut in chunks makes vLLM rewind the request's random generator, which CPU
        # generators cannot do.
        batched = {"max_num_batched_tokens": max(config.max_model_len, 8192)}
        options: dict = {"enable_chunked_prefill": False, "max_num_seqs": 256, **batched}
        if on_gpu:  # vLLM chooses sizes of batches by the memory there is
            free, total = torch.cuda.mem_get_info(config.world.device)
            # The KV cache has a size of its own: this only has to pass vLLM's check, while another
            # process may start.
            options = {
                "gpu_memory_utilization": 0.5 * free / total,
                "enable_sleep_mode": config.sleep_level > 0,
            }
        if config.vision:  # pictures come resized: see common/vision.py
            unchanged = {
                "do_resize": False,
                "do_sample_frames": False,
                "cap_pixels_per_frame": False,
            }
            most = dict.fromkeys(["image", "video"], config.max_images)
            options |= {
                "mm_processor_kwargs": unchanged,
                "limit_mm_per_prompt": most,
                "skip_mm_profiling": True,
            }
            options |= batched  # no picture may exceed one
        refuse_other_files(config.path)
        with memory_advice("the rollout"), start_errors(config.path):
            self.llm = LLM(
                config.path,
                skip_tokenizer_init=config.vision is None,
                dtype=str(config.dtype).removeprefix("torch."),
                max_model_len=config.max_model_len,
                kv_cache_memory_bytes=int(config.memory_gib * 2**30),
                enforce_eager=not on_gpu,
                logprobs_mode="processed_logprobs",
                use_tqdm_on_load=False,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=config.ranks,
                trust_remote_code=config.trust_remote_code,
                seed=0,
                **options,
            )
        # shared memory too; of no use where each rank has a scheduler
        get_tp_group().mq_broadcaster = None
        _alive.append(self.llm)
        self.dtype, self.vision = config.dtype, config.vision
        self.sleep_level = config.sleep_level if on_gpu else 0
        self.end_ids = [*config.end_ids, *(config.vision.forbidden_ids if config.vision else ())]
        self.books = WeightBooks(sizes)
        self.prompts: dict[int, list[int]] = {}  # of the requests under way, by key
        self.asleep = False

    def wake(self, part: str) -> None:
        """part: "weights" before a sync, "kv_cache" before generating."""
        if self.sleep_level == 0:
            return
        # vLLM maps memory by itself: what torch keeps for the trainer would not be there
        torch.cuda.empty_cache()
        with memory_advice("the weight sync" if part == "weights" else "the rollout"):
            self.llm.wake_up(tags=[part])
        self.asleep = part != "kv_cache"

    def sleep(self) -> None:
        """Free the KV cache, and the weights: to the host (level 1) or altogether (level 2)."""
        if self.sleep_level == 0 or self.asleep:
            return
        try:
            self.llm.sleep(level=self.sleep_level)
        except AssertionError as error:  # it has looked at the memory of the whole GPU
            raise SystemExit(
                f"{error} Where others use the GPU at the same time: --sleep-level 0"
            ) from error
        self.asleep = True
        if self.sleep_level == 2:
            self.books.step = None  # nothing to generate with before the next sync

    @memory_advice("the weight sync")
    def sync_weights(self, weights: Weights, step: int) -> None:
        """Replace all weights in place by those of optimizer step `step`, and drop every cache made
        with the old ones.

        `weights` is lazy, and consumed in one call: a second reload_weights would wipe what the
        first has loaded.
        """
        recorded = self.books.record(weights, self.dtype)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": recorded})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "weight sync: vLLM kept its prefix cache (are requests still running?)"
            )
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.books.close(step)

    def submit(self, request: Request) -> None:
        """Ask for completions; `step` does the work."""
        self.books.check(request.weights_step)
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        raw = {
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        }
        params = SamplingParams(
            **asdict(request.sampling), seed=request.seed, stop_token_ids=self.end_ids, **raw
        )
        prompt: dict = {"prompt_token_ids": request.prompt_ids}
        if request.media:
            data, uuids = {}, {}
            for m in request.media:
                data.setdefault(m.kind, []).append(_as_vllm_takes_it(m))
                uuids.setdefault(m.kind, []).append(m.uuid)
            prompt = {"prompt_token_ids": self.vision.collapse(request.prompt_ids, request.media)}
            prompt |= {"multi_modal_data": data, "multi_modal_uuids": uuids}
        self.prompts[request.key] = request.prompt_ids
        self.llm.llm_engine.add_request(str(request.key), prompt, params)

    @property
    def busy(self) -> bool:
        return bool(self.prompts)

    @memory_advice("the rollout")
    def step(self) -> list[tuple[int, list[Completion]]]:
        """Sample one more token of each request; (key, completions) of those that are complete."""
        finished = []
        for output in [output for output in self.llm.llm_engine.step() if output.finished]:
            key = int(output.request_id)
            if output.prompt_token_ids != self.prompts.pop(key):
                raise RuntimeError(
                    "the engine has seen another prompt than the trainer: pictures of another size?"
                )
            made = (
                Completion(list(o.token_ids), _sampled_logprobs(o), str(o.finish_reason))
                for o in output.outputs
            )
            finished.append(
                (key, [without_placeholder(completion, self.vision) for completion in made])
            )
        return finished


def _as_vllm_takes_it(media: Media):
    if media.kind == "image":
        return Image.fromarray(media.pixels[0])
    frames = len(media.pixels)
    times = {
        "fps": 2.0,
        "duration": frames / 2,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
    }
    return media.pixels, {**times, "video_backend": "opencv", "do_sample_frames": False}


def _sampled_logprobs(output) -> list[float]:
    """Of each position's candidates the sampled token's (with greedy sampling there may be two)."""
    flat = output.logprobs
    if len(flat.logprobs) == len(output.token_ids):
        return list(flat.logprobs)
    return [position[token].logprob for position, token in zip(flat, output.token_ids)]
