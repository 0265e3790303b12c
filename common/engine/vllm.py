"""The colocated rollout engine: vLLM inside each rank. `common/engine/hf.py` is its twin without
vLLM.

The calls of one training step: wake("weights") -> sync_weights -> wake("kv_cache") -> submit, step
... -> sleep.

Apart from vllm_repairs.py and `try_vllm` in doctor.py no other file of common/ imports vLLM.
Tested with vLLM 0.32.0 and 0.26.0 (which drops the times of videos).
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import ceil
from pathlib import Path

import torch
from PIL import Image
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import nn

from common.engine.books import WeightBooks
from common.engine.protocol import Engine, EngineConfig, Weights, without_placeholder
from common.engine.refusals import ON_TRANSFORMERS_BACKEND, OTHER_ENGINE, Setting, why_refused
from common.engine.vllm_repairs import GptOssWeights, leave_transformers_alone, repair_cpu
from common.files import memory_advice
from common.hub import require_weights
from common.pictures import Media
from common.printing import printable
from common.processes import cpus_of_rank
from common.rotary import check_lengths
from common.types import Completion, Request
from common.vision import is_composite, placeholder_ids, skeleton
from common.weights import saved_sizes

# errors of vLLM that lengths or memory may have caused
LIMIT_ERROR = re.compile("max_model_len|max_num_batched_tokens|max.seq.len|memory", re.IGNORECASE)
MAX_GRAPH = 512  # samples of the largest CUDA graph that vLLM captures by default
GRAPH_STEP = 16  # sizes of larger graphs are multiples of this
# --engine-args by which a user chooses graphs: `largest_graph` chooses none then
CAPTURE_ARGS = {
    "compilation_config",
    "cudagraph_capture_sizes",
    "enforce_eager",
    "max_cudagraph_capture_size",
}
# Tokens of a block of the KV cache on CPUs, in place of vLLM's 128: samples of a prompt share its
# full blocks alone, and compute the rest of it each.
CPU_BLOCK_SIZE = 32
# Tokens computed together on CPUs, and with pictures; more if a prompt with its response has more.
# Otherwise vLLM chooses.
BATCH_TOKENS = 8192
FRAMES_PER_SECOND = 2.0  # of each video, as vLLM is told
# engines that live until the process ends: shutting vLLM down takes more than a second
_alive: list[object] = []


def prepare_import(on_gpu: bool, dtype: torch.dtype) -> None:
    """What must be set before vLLM is imported."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_COLOR": "0",
    }
    if not on_gpu:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # No compiler on CPUs: vLLM would still compile one function, which counts ranks of
        # log-probs, and that takes the C++ compiler 15 s.
        torch._dynamo.config.disable = True
        # with one memory node there is nothing to bind: vLLM's attempt would only warn
        if not os.path.exists("/sys/devices/system/node/node1"):
            torch.ops._C.init_cpu_memory_env = lambda nodes: None
    elif dtype == torch.float32:
        settings["TRITON_F32_DEFAULT"] = "ieee"  # tf32 would widen the gap to the trainer
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # vLLM uses names that torch has deprecated
    warnings.filterwarnings("ignore", category=FutureWarning)
    # vLLM configures its logger too late for the messages of its import
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


def give_back_compiler_threads() -> None:
    """vLLM leaves torch's compiler one thread in this process, where the trainer compiles its
    layers; give it as many as this rank has CPUs."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = cpus_of_rank()


def register_model(model: nn.Module, path: str) -> None:
    """Register with vLLM the class that runs this model: vLLM's own, or its transformers backend.
    SystemExit if neither runs it exactly.

    vLLM itself registers classes lazily, and would inspect this one in a subprocess, which lacks
    our repair of torchvision.
    """
    from vllm.model_executor.models import ModelRegistry

    architecture = (model.config.architectures or [type(model).__name__])[0]
    registered = ModelRegistry.models.get(architecture)
    model_class = registered.load_model_cls() if registered else None
    if model_class is None or ".transformers" in model_class.__module__:
        if model.config.model_type not in ON_TRANSFORMERS_BACKEND:
            raise SystemExit(
                f"--model {path}: vLLM has no {architecture} of its own; {OTHER_ENGINE}"
            )
        has_experts = any(".experts." in name for name, _ in model.named_parameters())
        backend = "TransformersMoEForCausalLM" if has_experts else "TransformersForCausalLM"
        model_class = ModelRegistry.models[backend].load_model_cls()
        leave_transformers_alone()
    ModelRegistry.register_model(architecture, model_class)


def check_model(model: nn.Module, config: EngineConfig, on_gpu: bool) -> None:
    """SystemExit for a model, given by its skeleton, that vLLM does not run exactly."""
    text_config = model.config.get_text_config()
    setting = Setting(
        config=model.config,
        text=text_config,
        dtype=config.dtype,
        on_gpu=on_gpu,
        max_model_len=config.max_model_len,
    )
    reason = why_refused(setting)
    if reason is not None:
        raise SystemExit(f"--model {config.path}: {model.config.model_type}: {reason}")
    refuse_uneven(model.config, config.ranks)
    check_lengths(text_config, "vllm", config.max_model_len)


def refuse_uneven(config, ranks: int) -> None:
    """SystemExit for a model that vLLM cannot divide among `ranks` ranks; vLLM's own error names no
    flag."""
    names = ("num_attention_heads", "num_key_value_heads", "num_heads", "intermediate_size")
    for part in (config.get_text_config(), getattr(config, "vision_config", None)):
        for name in names:
            size = getattr(part, name, None)
            if not size or size % ranks == 0:
                continue
            is_copied = name == "num_key_value_heads" and ranks % size == 0
            if not is_copied:
                raise SystemExit(f"--engine-parallel {ranks}: the model's {name} is {size}")


def refuse_other_files(path: str) -> None:
    """SystemExit for a file beside a model's weights that transformers ignores, and that vLLM would
    read because there is no index."""
    folder = Path(path)
    files = require_weights(path)
    if (folder / "model.safetensors.index.json").exists():
        return
    others = [file.name for file in sorted(folder.glob("*.safetensors")) if file not in files]
    if others:
        raise SystemExit(
            f"--model {path}: vLLM would read {' and '.join(others)}, too, which transformers does "
            "not: move it elsewhere, or --engine hf"
        )


@contextmanager
def start_errors(path: str) -> Iterator[None]:
    """An error of vLLM at its start ends the run with one line, and with the flags that it may
    depend on."""
    try:
        yield
    except (ValueError, OSError, LookupError, SafetensorError) as error:
        if isinstance(error, ValidationError):
            # its text shows all settings, those of lengths among them
            reason = "; ".join(problem["msg"] for problem in error.errors())
        elif isinstance(error, LookupError):
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = str(error)
        prefix = f"--model {path}: vLLM does not take it"
        if LIMIT_ERROR.search(reason.replace(path, "")):
            prefix = "--max-prompt-tokens, --max-response-tokens, --engine-memory"
        line = " ".join(reason.split())[:500]
        raise SystemExit(printable(f"{prefix}: {line}")) from error


def has_states(model: nn.Module) -> bool:
    """Whether a model has recurrent or convolutional layers."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return model._is_stateful or any("attention" not in kind for kind in layer_types)


def default_slots(device: torch.device) -> int:
    """How many samples vLLM runs together on this GPU, unless --engine-args says otherwise."""
    _, total = torch.cuda.mem_get_info(device)
    # vLLM's own rule
    is_large = total >= 70 * 2**30 and "A100" not in torch.cuda.get_device_name(device)
    return 1024 if is_large else 256


def largest_graph(config: EngineConfig) -> int | None:
    """Size of the largest CUDA graph, in samples; None leaves vLLM its own choice.

    By default vLLM captures graphs of up to 512 samples, and a larger batch launches its kernels
    one by one. So a graph is asked for that holds all samples of a step.
    """
    if not CAPTURE_ARGS.isdisjoint(config.args):
        return None
    num_slots = config.args.get("max_num_seqs", default_slots(config.world.device))
    if not isinstance(num_slots, int):  # vLLM refuses it
        return None
    num_samples = min(config.num_samples, num_slots)
    if num_samples <= MAX_GRAPH:
        return None
    return ceil(num_samples / GRAPH_STEP) * GRAPH_STEP


def engine_options(config: EngineConfig, on_gpu: bool, model: nn.Module) -> dict[str, object]:
    """Arguments of vLLM that depend on the machine, on pictures and on the model's layers (`model`
    is a skeleton); and --engine-args, which win."""
    max_batched_tokens = max(config.max_model_len, BATCH_TOKENS)
    options: dict[str, object] = {"enforce_eager": not on_gpu}
    if on_gpu:  # vLLM chooses the sizes of batches by the memory of the GPU
        free, total = torch.cuda.mem_get_info(config.world.device)
        # kv_cache_memory_bytes sets the size of the KV cache. gpu_memory_utilization only has to
        # pass vLLM's check of the free memory, even if another process takes some of it first.
        options["gpu_memory_utilization"] = 0.5 * free / total
        options["enable_sleep_mode"] = config.sleep_level > 0
        options["max_cudagraph_capture_size"] = largest_graph(config)
    else:
        # A prompt cut in chunks makes vLLM rewind the request's random generator, which CPU
        # generators cannot do.
        options["enable_chunked_prefill"] = False
        options["max_num_seqs"] = 256
        options["max_num_batched_tokens"] = max_batched_tokens
        if has_states(model):
            # vLLM caches the states at the ends of a prompt's chunks: without chunks there are none
            options["enable_prefix_caching"] = False
        else:
            options["block_size"] = CPU_BLOCK_SIZE
    if is_composite(model.config) and not config.vision:
        options["language_model_only"] = True
    if config.vision:
        # pictures are resized already: see common/vision.py
        options["mm_processor_kwargs"] = {
            "do_resize": False,
            "do_sample_frames": False,
            "cap_pixels_per_frame": False,
        }
        options["limit_mm_per_prompt"] = {"image": config.max_images, "video": config.max_images}
        options["skip_mm_profiling"] = True
        options["max_num_batched_tokens"] = max_batched_tokens  # a picture must fit into a batch
    return options | config.args


class VllmEngine(Engine):
    """vLLM in this process. With tensor parallelism `config.ranks` consecutive ranks share it, and
    must make the same calls."""

    def __init__(self, config: EngineConfig):
        on_gpu = config.world.device.type == "cuda"
        prepare_import(on_gpu, config.dtype)
        from vllm import LLM
        from vllm.distributed import get_tp_group

        if not on_gpu:
            repair_cpu()
        model = skeleton(config.path, config.trust_remote_code)
        check_model(model, config, on_gpu)
        register_model(model, config.path)
        options = engine_options(config, on_gpu, model)
        refuse_other_files(config.path)
        self.books = WeightBooks(saved_sizes(model, config.path))
        with memory_advice("the rollout"), start_errors(config.path):
            self.llm = LLM(
                config.path,
                skip_tokenizer_init=config.vision is None,
                dtype=str(config.dtype).removeprefix("torch."),
                max_model_len=config.max_model_len,
                kv_cache_memory_bytes=int(config.memory_gib * 2**30),
                logprobs_mode="processed_logprobs",
                use_tqdm_on_load=False,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=config.ranks,
                trust_remote_code=config.trust_remote_code,
                seed=0,
                **options,
            )
        # Each rank has a scheduler of its own, so nothing needs broadcasting; and the broadcaster
        # would use vLLM's shared memory, too (`share_the_machine` in vllm_repairs.py).
        get_tp_group().mq_broadcaster = None
        _alive.append(self.llm)
        if on_gpu:
            give_back_compiler_threads()
        self.dtype = config.dtype
        self.weight_names = "checkpoint"
        self.vision = config.vision
        self.sleep_level = config.sleep_level if on_gpu else 0
        self.placeholders = placeholder_ids(model.config)
        # a placeholder of a picture ends the response: see without_placeholder
        self.end_ids = [*config.end_ids, *self.placeholders]
        self.model_type = model.config.model_type
        (self.has_head,) = self.llm.apply_model(has_head)
        # key of an incomplete request -> its prompt's ids
        self.open_prompts: dict[int, list[int]] = {}
        self.asleep = False

    def wake(self, part: str) -> None:
        if self.sleep_level == 0:
            return
        # vLLM maps memory by itself, and cannot use what torch has cached for the trainer
        torch.cuda.empty_cache()
        with memory_advice("the weight sync" if part == "weights" else "the rollout"):
            self.llm.wake_up(tags=[part])
        if part == "kv_cache":  # the last part to wake
            self.asleep = False

    def sleep(self) -> None:
        """Free the KV cache; move the weights to the host (level 1) or free them, too (level 2)."""
        if self.sleep_level == 0 or self.asleep:
            return
        try:
            self.llm.sleep(level=self.sleep_level)
        except AssertionError as error:  # vLLM compares the free memory of the whole GPU
            raise SystemExit(
                f"{error} Where others use the GPU at the same time: --sleep-level 0"
            ) from error
        self.asleep = True
        if self.sleep_level == 2:
            self.books.forget()

    @memory_advice("the weight sync")
    def sync_weights(self, weights: Weights, step: int) -> None:
        """Replace all weights in place, and drop every cache made with the old ones.

        `weights` is consumed in one call: a second reload_weights would wipe what the first has
        loaded.
        """
        # lazy: the books count a weight when vLLM takes it
        stream = self.books.record(weights)
        if not self.has_head:
            # vLLM's Gemma 2 has no module for the head, which is tied to the embeddings
            stream = ((name, w) for name, w in stream if not name.endswith("lm_head.weight"))
        if self.model_type == "gpt_oss":
            stream = GptOssWeights(stream)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        if isinstance(stream, GptOssWeights):
            self.llm.apply_model(stream.copy_sinks)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "weight sync: vLLM kept its prefix cache (are requests still running?)"
            )
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.books.close(step)

    def submit(self, request: Request) -> None:
        self.books.check(request.weights_step)
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            **asdict(request.sampling),
            seed=request.seed,
            stop_token_ids=self.end_ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logprobs=0,  # that of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )
        prompt: dict[str, object] = {"prompt_token_ids": request.prompt_ids}
        if request.media:
            pictures: dict[str, list] = {}
            uuids: dict[str, list[str]] = {}
            for media in request.media:
                pictures.setdefault(media.kind, []).append(_media_data(media))
                uuids.setdefault(media.kind, []).append(media.uuid)
            prompt["prompt_token_ids"] = self.vision.collapse(request.prompt_ids, request.media)
            prompt["multi_modal_data"] = pictures
            prompt["multi_modal_uuids"] = uuids
        self.open_prompts[request.key] = request.prompt_ids
        self.llm.llm_engine.add_request(str(request.key), prompt, params)

    @property
    def busy(self) -> bool:
        return bool(self.open_prompts)

    @memory_advice("the rollout")
    def step(self) -> list[tuple[int, list[Completion]]]:
        """Sample one more token of each sample that vLLM has begun; returns (key, completions) of
        the requests that this completed."""
        finished = []
        for output in self.llm.llm_engine.step():
            if not output.finished:
                continue
            key = int(output.request_id)
            sent_ids = self.open_prompts.pop(key)
            if output.prompt_token_ids != sent_ids:
                raise RuntimeError(
                    "the engine has seen a different prompt than the trainer: pictures of another "
                    "size?"
                )
            completions = []
            for sample in output.outputs:
                completion = Completion(
                    token_ids=list(sample.token_ids),
                    logprobs=_sampled_logprobs(sample),
                    finish_reason=str(sample.finish_reason),
                )
                completions.append(without_placeholder(completion, self.placeholders))
            finished.append((key, completions))
        return finished


def has_head(model: nn.Module) -> bool:
    """Whether vLLM's model has a module for its head; else its embeddings are the head."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def _media_data(media: Media) -> object:
    """A picture, or the frames of a video with their times, in the form that vLLM expects."""
    if media.kind == "image":
        return Image.fromarray(media.pixels[0])
    num_frames = len(media.pixels)
    metadata = {
        "fps": FRAMES_PER_SECOND,
        "duration": num_frames / FRAMES_PER_SECOND,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return media.pixels, metadata


def _sampled_logprobs(sample) -> list[float]:
    """The log-prob of each sampled token. With greedy sampling vLLM may list a second candidate at
    a position."""
    flat = sample.logprobs
    if len(flat.logprobs) == len(sample.token_ids):
        return list(flat.logprobs)
    return [candidates[token].logprob for candidates, token in zip(flat, sample.token_ids)]
