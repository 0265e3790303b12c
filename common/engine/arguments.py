"""--engine-args: which arguments of vLLM a user may set."""

from collections.abc import Iterable

# What --engine-args may set: how vLLM uses the machine, not which weights or settings it samples
# with. A kv_cache_dtype of fewer bits moves log-probs, which --max-logprob-gap bounds.
FREE_ARGS = [
    "async_scheduling",
    "attention_backend",
    "attention_config",
    "block_size",
    "compilation_config",
    "cudagraph_capture_sizes",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "long_prefill_token_threshold",
    "mamba_block_size",
    "max_cudagraph_capture_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "mm_encoder_attn_backend",
    "mm_processor_cache_gb",
    "moe_backend",
    "num_gpu_blocks_override",
    "performance_mode",
    "scheduling_policy",
]
ARGS_WITH_FLAGS = {
    "dtype": "--dtype",
    "enable_sleep_mode": "--sleep-level",
    "gpu_memory_utilization": "--engine-memory",
    "kv_cache_memory_bytes": "--engine-memory",
    "max_model_len": "--max-prompt-tokens and --max-response-tokens",
    "model": "--model",
    "seed": "--seed",
    "tensor_parallel_size": "--engine-parallel",
    "trust_remote_code": "--trust-remote-code",
}
NOT_THE_POLICY = "the samples would not be the policy's"
OTHER_WEIGHTS = "the engine's weights would not be the trainer's"
HARMFUL_ARGS = {
    "enable_lora": OTHER_WEIGHTS,
    "generation_config": NOT_THE_POLICY,
    "hf_overrides": OTHER_WEIGHTS,
    "load_format": OTHER_WEIGHTS,
    "logits_processors": NOT_THE_POLICY,
    "logprobs_mode": NOT_THE_POLICY,
    "override_generation_config": NOT_THE_POLICY,
    "quantization": OTHER_WEIGHTS,
    "quantization_config": OTHER_WEIGHTS,
    "speculative_config": "a draft model would not follow the policy",
}


def check_engine_args(names: Iterable[str], on_gpu: bool) -> None:
    """SystemExit for a name in --engine-args that is not in `FREE_ARGS`, or that needs a GPU
    where there is none."""
    for name in names:
        if name == "enable_chunked_prefill" and not on_gpu:
            # it makes vLLM rewind a request's random generator, which CPU generators cannot do
            raise SystemExit(f"--engine-args: {name} works on a GPU alone")
        if name in FREE_ARGS:
            continue
        if name in ARGS_WITH_FLAGS:
            reason = f"this is {ARGS_WITH_FLAGS[name]}"
        elif name in HARMFUL_ARGS:
            reason = HARMFUL_ARGS[name]
        else:
            reason = f"vLLM's arguments that may be set are {', '.join(FREE_ARGS)}"
        raise SystemExit(f"--engine-args: {name} is refused: {reason}")
