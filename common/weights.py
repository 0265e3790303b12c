"""What a checkpoint has of a model: the names, the parts and the sizes of its weights."""

import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from common.hub import load_on_meta
from common.torch_repair import transformers

# patterns of what older files have, and transformers computes
IGNORED_WEIGHTS = [r"rotary_emb\.inv_freq$", r"\.masked_bias$"]


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of the tensors that a checkpoint has beside the parameters: the biases of a
    router, the scales of Gemma 4's layers."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def transpose_back() -> None:
    """Have transformers write the experts of Qwen3-VL as they were published.

    It transposes an expert that it reads if the shape is not the module's, and applies the same
    condition to one that it writes. That always has the module's shape: none would be transposed
    back.
    """
    transpose = transformers.core_model_loading.Transpose
    transpose.reverse_op = property(lambda self: transpose(self.dim1, self.dim0))


def as_saved(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Weights of a model's modules under the names, and in the parts, of the checkpoint that it was
    loaded from: transformers renames some, and fuses experts. They are converted one by one.
    """
    transpose_back()
    revert = transformers.core_model_loading.revert_weight_conversion
    for name, tensor in weights:
        yield from revert(model, {name: tensor}).items()


def saved_sizes(model: nn.Module, path: str) -> dict[str, int]:
    """{name: number of elements} of the weights in a folder's files, as a sync sends them, and of a
    tied head, which most files lack. `model`: its skeleton.

    What transformers ignores in the files, since it is not part of the model, is left out. Files of
    a backbone alone lack the backbone's prefix, which is put in front of their names. SystemExit if
    transformers does not give back what it has read.
    """
    loaded_model, _, tensors_in_files = load_on_meta(model, path, "--model")
    weights = [*loaded_model.named_parameters(), *saved_buffers(loaded_model)]
    head = loaded_model.get_output_embeddings().weight
    is_tied = head is loaded_model.get_input_embeddings().weight
    if is_tied:
        weights.append(("lm_head.weight", head))
    sync_shapes = {name: tensor.shape for name, tensor in as_saved(loaded_model, weights)}
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *IGNORED_WEIGHTS]
    buffers = dict(model.named_buffers())
    sizes: dict[str, int] = {}
    for name_in_file, tensor in tensors_in_files.items():
        name = name_in_file
        whole_name = f"{model.base_model_prefix}.{name_in_file}"
        if name not in sync_shapes and whole_name in sync_shapes:
            name = whole_name
        is_ignored = name in buffers or any(re.search(pattern, name) for pattern in patterns)
        if name not in sync_shapes and is_ignored:
            continue
        sizes[name] = tensor.numel()
        if sync_shapes.get(name) != tensor.shape:
            raise SystemExit(
                f"--model {path}: its files have {name}, which transformers divides among several "
                "weights, or does not write again in this shape: a sync cannot send it; "
                "--engine hf runs it"
            )
    if is_tied:
        ((head_name, _),) = as_saved(loaded_model, [("lm_head.weight", head)])
        sizes[head_name] = head.numel()
    return sizes
