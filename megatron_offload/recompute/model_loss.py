"""A model's own loss replaced by `cross_entropy` by rows, for as long as a context is entered.

Only transformers' own function for causal models, as it is known, and where nothing has taken the
place of it or of torch's. On each device, for each dtype and form of its call, both are computed
once, of as many rows as show every kind of block, and compared bit by bit before the patch counts.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Hashable
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.model_map.module_hooks import compiled_parts
from megatron_offload.recompute.loss import (
    KERNEL_DTYPES,
    block_rows,
    cross_entropy,
    has_kernel,
    have_same_bits,
    may_compare,
)
from megatron_offload.recompute.patches import PatchStack

_logger = logging.getLogger(__name__)

_KNOWN = {
    "ForCausalLMLoss": (
        "logits labels vocab_size num_items_in_batch ignore_index shift_labels kwargs",
        "contiguous device fixed_cross_entropy float functional nn pad to view",
    ),
    "fixed_cross_entropy": (
        "source target num_items_in_batch ignore_index kwargs",
        "cross_entropy device functional is_tensor nn to torch",
    ),
}
"""Of the functions that are known, the arguments and all names that they use."""

_proven: dict[Hashable, bool] = {}
"""By device, dtype and form of the call, whether both have given the same bits."""


def owners_of_loss(model: nn.Module) -> list[ref[nn.Module]]:
    """Return which modules of a model call transformers' loss for causal models; compiled never."""
    original, parent = _known_loss(), sys.modules.get("transformers.modeling_utils")
    if original is None or parent is None:
        return []
    its_property, mapping = parent.PreTrainedModel.loss_function, _transformers().LOSS_MAPPING
    compiled = compiled_parts(model.modules())
    return [
        ref(module)
        for module in model.modules()
        if getattr(type(module), "loss_function", None) is its_property
        and mapping.get(getattr(module, "loss_type", None)) is original
        and module not in compiled
    ]


def patch_loss(owners: Collection[ref[nn.Module]], loss: Callable[..., Any]) -> PatchStack:
    """Let these modules call another loss until what is returned is undone."""
    patched = PatchStack()
    for owner in owners:
        module = owner()
        if module is not None and "_loss_function" not in vars(module):
            patched.replace(module, "_loss_function", loss)
    return patched


def causal_loss(
    logits: Any,
    labels: Any,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Any = None,
    **kwargs: Any,
) -> Any:
    """Return what transformers' ``ForCausalLMLoss`` returns, by rows where that is proven.

    Args:
        logits: of shape ``[..., vocab_size]``, taken in float32.
        labels: of shape ``[...]``; those of the next place in the last dimension are the targets.
        vocab_size: number of classes.
        num_items_in_batch: what the sum is divided by; None: the number of targets that count.
        ignore_index: targets that don't count.
        shift_labels: targets, in place of ``labels``.
        **kwargs: what transformers' own is given too.
    """
    original = _transformers().ForCausalLMLoss
    how = vocab_size, num_items_in_batch, ignore_index
    is_ours = not torch.compiler.is_compiling() and _known_loss() is original
    if is_ours and _is_proven(original, logits, how, shift_labels is not None, kwargs):
        return _by_rows(logits, labels, *how, shift_labels)
    return original(logits, labels, *how, shift_labels, **kwargs)


def large_causal_loss(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
    """As `causal_loss`, by rows where that takes no more time: large logits, in one kernel."""
    is_plain = not torch.compiler.is_compiling() and type(logits) is Tensor
    is_large = is_plain and 4 * logits.numel() >= _LARGE_BYTES
    if is_large and has_kernel(logits, torch.float32):
        return causal_loss(logits, labels, *args, **kwargs)
    return _transformers().ForCausalLMLoss(logits, labels, *args, **kwargs)


def is_by_rows() -> bool:
    """Whether a loss of this process was found to have the same bits by rows."""
    return any(_proven.values())


_LARGE_BYTES = 256 * 1024**2
"""Of logits in float32; below, the host's calls for the loss by rows take longer than it does."""


def _transformers() -> Any:
    return sys.modules.get("transformers.loss.loss_utils")


def _known_loss() -> Callable[..., Any] | None:
    """Return transformers' loss for causal models, if this and what it calls are as known."""
    home = _transformers()
    if home is None or getattr(F.cross_entropy, "__module__", "") != F.__name__:
        return None
    for name, (arguments, names) in _KNOWN.items():
        function = getattr(home, name, None)
        code = getattr(function, "__code__", None)
        if code is None or hasattr(function, "__wrapped__"):
            return None
        count = code.co_argcount + code.co_kwonlyargcount + 1
        known = code.co_varnames[:count] == (*arguments.split(),)
        if not (known and {*code.co_names} == {*names.split()}):
            return None
    return home.ForCausalLMLoss


def _by_rows(
    logits: Tensor, labels: Any, vocab_size: int, items: Any, ignore_index: int, targets: Any
) -> Tensor:
    if targets is None:
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    given = logits.reshape(-1, vocab_size), targets.reshape(-1).to(logits.device)
    how: dict[str, Any] = {"reduction": "mean" if items is None else "sum"}
    loss = cross_entropy(*given, ignore_index=ignore_index, dtype=torch.float32, **how)
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def _is_proven(
    original: Any, logits: Any, how: tuple[Any, ...], shifted: bool, kwargs: Any
) -> bool:
    vocab_size, items, ignore_index = how
    if type(logits) is not Tensor or logits.dtype not in KERNEL_DTYPES or logits.numel() == 0:
        return False
    if logits.device.type not in ("cpu", "cuda") or logits.shape[-1] != vocab_size:
        return False
    rows, step = logits.numel() // vocab_size, block_rows(logits, torch.float32)
    form = vocab_size, type(items), ignore_index, shifted, rows > step, *sorted(kwargs)
    key = logits.device, logits.dtype, form
    if key not in _proven:
        if not may_compare(logits.device):
            return False  # not here; maybe later
        rows = min(rows, step + step // 2 + 2)
        shape = (2, rows // 2) if rows > 1 else (1, 1)
        # Labels that meet most classes: of the user's all may be ignored here.
        labels = torch.arange(shape[0] * shape[1], device=logits.device) % vocab_size
        labels[::7] = ignore_index
        given = labels.view(shape), *how, labels.view(shape) if shifted else None
        some = logits.detach().reshape(-1, vocab_size)[: labels.numel()].view(*shape, vocab_size)
        _proven[key] = have_same_bits(
            lambda own: original(own, *given, **kwargs), lambda own: _by_rows(own, *given), some
        )
        if _proven[key] and rank_in() == 0:
            _logger.warning(
                "megatron-offload: the loss is computed by rows, with the same bits: some four "
                "copies of its logits in float32, here %.1f GiB each, aren't made. recompute=() "
                "leaves the model its own",
                4 * logits.numel() / 1024**3,
            )
        elif not _proven[key]:
            warnings.warn(
                f"the loss by rows isn't proven to be {original.__module__}.ForCausalLMLoss on "
                f"{logits.device}, for {vocab_size} classes in {logits.dtype}: transformers' own "
                "is used, with what that needs of memory; recompute=() says so from the start",
                stacklevel=4,
            )
    return _proven[key]
