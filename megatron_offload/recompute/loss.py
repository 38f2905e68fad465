"""Cross entropy by blocks of rows: backward keeps the logits as they came, and no copy of them.

Owns how a block is computed. Every row goes through torch's own kernels, which take each row by
itself, and the mean through torch's own over as many rows as there are: so all bits are torch's.
Blocks begin at multiples of 16 rows, where rows lie as they would in the whole tensor: kernels go
by how an address is aligned. What isn't known to give the same bits is torch's own function.

On a GPU one kernel makes the gradient, from the logits and two numbers of each row:
``exp(logit - top - log_sum) * factor`` in float32, as torch's own kernels compute it one after the
other; only the logits are read and only the gradient is written. Compiled with torch's NVRTC where
a version of torch offers that; its bits are compared with torch's before they are relied on.

What replaces a model's loss by this one: `megatron_offload.recompute.model_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from megatron_offload.engine.hooks import is_in_backward, others_hooks
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.recompute.call_state import are_captured

_BLOCK_BYTES = {"cuda": 512 * 1024**2, "cpu": 4 * 1024**2}
"""Of a block as it is computed, at most, on a CPU for each thread; three are alive at a time.
Smaller ones cost host time, a dozen calls each; on a CPU these fit its caches, which is faster
than whole tensors."""

_ALIGNED_ROWS = 16
_IGNORED = -100
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_aten = torch.ops.aten

_SOURCE = r"""
#if BITS == 32
typedef unsigned int word;
__device__ __forceinline__ float widen(word x) { return __uint_as_float(x); }
__device__ __forceinline__ word narrow(float x) { return __float_as_uint(x); }
#else
typedef unsigned short word;
#if IS_BFLOAT16
__device__ __forceinline__ float widen(word x) { return __uint_as_float((unsigned int)x << 16); }
#define NARROW "cvt.rn.bf16.f32 %0, %1;"
#else
__device__ __forceinline__ float widen(word x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}
#define NARROW "cvt.rn.f16.f32 %0, %1;"
#endif
__device__ __forceinline__ word narrow(float x) {
    word narrowed;
    asm(NARROW : "=h"(narrowed) : "f"(x));
    return narrowed;
}
#endif
#define VECTOR (128 / BITS)
#define OF(x) narrow(expf(widen(x) - top - log_sum) * factor)

extern "C" __global__ void gradient(const word* logits, const float* tops, const float* log_sums,
                                    const float* factors, word* result, int columns) {
    const long long row = blockIdx.x;
    const float top = tops[row], log_sum = log_sums[row], factor = factors[row];
    const word* from = logits + row * columns;
    word* to = result + row * columns;
    const bool is_aligned = ((unsigned long long)from | (unsigned long long)to) % 16 == 0;
    const int vectors = is_aligned ? columns / VECTOR : 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        uint4 vector = ((const uint4*)from)[i];
        word* words = (word*)&vector;
        #pragma unroll
        for (int k = 0; k < VECTOR; ++k) words[k] = OF(words[k]);
        ((uint4*)to)[i] = vector;
    }
    for (int i = vectors * VECTOR + threadIdx.x; i < columns; i += blockDim.x) to[i] = OF(from[i]);
}
"""
_NUM_THREADS = 512
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_proven: dict[tuple[Any, ...], bool] = {}
"""Whether the kernel's bits are torch's, by device, dtype and number of classes."""


def cross_entropy(
    input: Tensor,  # noqa: A002  # torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy`, bitwise, and the same gradient in less memory.

    The logits themselves are all that is saved for backward. Their copies in ``dtype``, logarithms
    of probabilities and gradients exist by blocks; torch has up to four of them whole.
    Change the logits in place before backward, and that raises, as it does for any saved tensor.

    By torch's own function, with what that needs of memory: class weights, label smoothing, class
    probabilities as target, logits of other than two dimensions, the deprecated arguments; logits
    in 16 bits without ``dtype`` under autocast; tensor subclasses, other devices than CPU and CUDA,
    `torch.compile`, tracing, transforms of `torch.func` and forward-mode gradients.
    Second derivatives (``create_graph=True``) and gradients in batches (``is_grads_batched=True``)
    are computed without blocks.

    Args:
        input: logits, of shape ``[rows, classes]``.
        target: classes, int64, of shape ``[rows]``.
        weight: as torch's.
        size_average: as torch's.
        ignore_index: rows with this target count for nothing.
        reduce: as torch's.
        reduction: ``mean`` over the rows that count, ``sum``, or ``none`` for one loss a row.
        label_smoothing: as torch's.
        dtype: what logits are taken in, as in ``cross_entropy(logits.to(dtype), target)``; the
            gradient has the dtype of ``input``. None: their own.

    Raises:
        RuntimeError: in backward, where the logits were changed in place since.
        IndexError: a target that is no class (on CPU; a device-side assertion on CUDA).
    """
    others = (weight, size_average, reduce)
    if others != (None,) * 3 or label_smoothing or not _takes(input, target, reduction, dtype):
        if dtype is not None:
            input = input.to(dtype)  # noqa: A001
        options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return F.cross_entropy(input, target, *options)
    of = dtype or input.dtype, _REDUCTIONS[reduction], ignore_index
    with _kept():
        return _ByRows.apply(input, target, *of)


def block_rows(logits: Tensor, dtype: torch.dtype) -> int:
    """Return how many rows of logits are computed at a time."""
    kind = logits.device.type
    most_bytes = _BLOCK_BYTES[kind] * (torch.get_num_threads() if kind == "cpu" else 1)
    rows = most_bytes // (logits.shape[-1] * dtype.itemsize)
    return max(rows - rows % _ALIGNED_ROWS, _ALIGNED_ROWS)


def _takes(logits: Any, target: Any, reduction: str, dtype: torch.dtype | None) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if {type(logits), type(target)} - {Tensor, torch.nn.Parameter}:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    device, computed = logits.device.type, dtype or logits.dtype
    if device not in ("cpu", "cuda") or target.device != logits.device:
        return False
    is_known = computed in _DTYPES and logits.dtype in _DTYPES and reduction in _REDUCTIONS
    is_plain = logits.dim() == 2 and target.dim() == 1 and target.dtype is torch.int64
    is_plain &= logits.numel() > 0 and logits.shape[:1] == target.shape
    return (
        is_known and is_plain and not (torch.is_autocast_enabled(device) and computed.itemsize < 4)
    )


def _kept() -> Any:
    """Keep the logits on the device inside this package's contexts: backward needs them first."""
    if _top_saved_tensors_default_hooks(True) is None or others_hooks():
        return nullcontext()
    return saved_tensors_hooks(_keep, SavedTensor.unpack)


_keep = partial(SavedTensor, group_name="loss")


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, dtype: torch.dtype, reduction: int, ignored: int
    ) -> Tensor:
        blocks: list[Tensor] = []
        log_sums: list[Tensor] = []
        is_one_kernel = has_kernel(logits, dtype)
        top, place = logits.max(1, keepdim=True) if is_one_kernel else (logits, logits)
        for rows, chances in _log_softmax(logits, dtype):
            blocks.append(_aten.nll_loss_forward(chances, target[rows], None, 0, ignored)[0])
            if is_one_kernel:
                # Of the largest logit the logarithm is that of the sum, negated.
                log_sums.append(-chances.gather(1, place[rows]))
        loss = torch.cat(blocks)
        total = loss.new_empty(())
        if reduction:
            # Their negatives are what torch adds up, row by row: as of one class, with no others.
            only = torch.where(target == ignored, _IGNORED, 0)
            loss, total = _aten.nll_loss_forward(-loss[:, None], only, None, reduction, _IGNORED)
        of_rows = (top.to(dtype), torch.cat(log_sums)) if is_one_kernel else ()
        ctx.save_for_backward(logits, target, total, *of_rows)
        ctx.how = dtype, reduction, ignored
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, total, *of_rows = ctx.saved_tensors
        dtype, reduction, ignored = ctx.how

        def of_block(rows: slice, chances: Tensor) -> Tensor:
            own = gradient if reduction else gradient[rows]
            of = target[rows], None, reduction, ignored, total
            own = _aten.nll_loss_backward(own, chances, *of)
            return _aten._log_softmax_backward_data(own, chances, 1, dtype).to(logits.dtype)

        is_batch = is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient)
        if torch.is_grad_enabled() or is_batch:  # in one piece, for derivatives or vmap
            whole = slice(None)
            chances = _aten._log_softmax(logits.to(dtype).contiguous(), 1, False)
            return of_block(whole, chances), *(None,) * 4
        if of_rows:
            top, log_sum = of_rows
            # What torch has at each row's target, before its softmax, where all else is 0.
            only = torch.where(target == ignored, _IGNORED, 0)
            of = only, None, reduction, _IGNORED, total
            own = _aten.nll_loss_backward(gradient, torch.empty_like(top), *of)
            found = _run_kernel(logits, top, log_sum, 0 - own)
            place = torch.where(target == ignored, 0, target)[:, None]
            chance = logits.gather(1, place).to(dtype) - top - log_sum
            at_target = _aten._log_softmax_backward_data(own, chance, 1, dtype)
            found.scatter_(1, place, at_target.to(found.dtype))
            blocks = (of_block(*one) for one in _log_softmax(logits, dtype))
            if _has_bits_of(found, partial(next, blocks)):
                return found, *(None,) * 4
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for rows, chances in _log_softmax(logits, dtype):
            result[rows] = of_block(rows, chances)
        return result, *(None,) * 4


def _log_softmax(logits: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows, each with the logarithms of its probabilities, for one turn."""
    step = block_rows(logits, dtype)
    for first in range(0, len(logits), step):
        rows = slice(first, first + step)
        yield rows, _aten._log_softmax(logits[rows].to(dtype), 1, False)


def may_compare(device: torch.device) -> bool:
    """Whether two losses can be compared here: not in backward, inference or a captured graph."""
    return not (is_in_backward() or torch.is_inference_mode_enabled() or are_captured({device}))


def have_same_bits(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], logits: Tensor
) -> bool:
    """Whether two losses of logits, and their gradients, are equal bit by bit.

    The host waits for the device once.
    """

    def results(loss_of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        own = logits.detach().requires_grad_()
        loss = loss_of(own)
        yield from (loss.detach(), *torch.autograd.grad(loss, own, torch.ones_like(loss)))

    try:
        with torch.enable_grad(), saved_tensors_hooks(_keep, SavedTensor.unpack):
            pairs = list(zip(results(one), results(other), strict=True))
    except (RuntimeError, TypeError, ValueError):
        return False  # if that was not of the comparison, the program's own call raises it next
    if any(a.dtype is not b.dtype or a.shape != b.shape for a, b in pairs):
        return False
    unequal = [(a.view(_BITS[a.itemsize]) != b.view(_BITS[b.itemsize])).any() for a, b in pairs]
    return not bool(torch.stack(unequal).any())


def has_kernel(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient of these logits, taken in this dtype, may be the kernel's."""
    is_known = dtype is torch.float32 and logits.dtype in KERNEL_DTYPES and logits.is_contiguous()
    if logits.device.type != "cuda" or not is_known:
        return False
    known = _proven.get(_key(logits))
    if known is None and are_captured({logits.device}):
        return False
    return known is not False and _compiled(logits.device, logits.dtype) is not None


def _run_kernel(logits: Tensor, top: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient at all classes but the targets.

    ``top``, ``log_sum`` and ``factor`` are float32, of one number for each row.
    """
    kernel = _compiled(logits.device, logits.dtype)
    assert kernel is not None
    result = torch.empty_like(logits)
    with torch.get_device_module(logits.device).device(logits.device):
        grid, block = (len(logits), 1, 1), (_NUM_THREADS, 1, 1)
        kernel(grid, block, (logits, top, log_sum, factor, result, logits.shape[1]))
    return result


def _has_bits_of(gradient: Tensor, torchs: Callable[[], Tensor]) -> bool:
    """Whether a gradient has torch's bits, as far as one of its kind was compared.

    ``torchs`` computes the first rows. It is called once for each kind, and the host waits for the
    result.
    """
    key = _key(gradient)
    if key not in _proven:
        expected, bits = torchs(), _BITS[gradient.itemsize]
        _proven[key] = torch.equal(expected.view(bits), gradient[: len(expected)].view(bits))
    return _proven[key]


def _key(logits: Tensor) -> tuple[Any, ...]:
    return logits.device, logits.dtype, logits.shape[-1]


@cache
def _compiled(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    home = torch.get_device_module(device)
    compile_kernel = getattr(home, "_compile_kernel", None)
    if compile_kernel is None or torch.version.hip is not None:
        return None
    defines = (
        f"#define BITS {8 * dtype.itemsize}\n#define IS_BFLOAT16 {dtype == torch.bfloat16:d}\n"
    )
    try:
        with home.device(device):
            return compile_kernel(defines + _SOURCE, "gradient")
    except (RuntimeError, OSError):  # no NVRTC here, or a device older than its instructions
        return None
