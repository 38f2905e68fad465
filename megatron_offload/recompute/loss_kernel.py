"""One kernel for the gradient of a cross entropy, from the logits and two numbers of each row.

``exp(logit - top - log_sum) * factor`` in float32, as torch's own kernels compute it one after the
other; only the logits are read and only the gradient is written. Compiled with torch's NVRTC where
a version of torch offers that; its bits are compared with torch's before they are relied on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_offload.recompute.random_states import are_captured

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
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_proven: dict[tuple[Any, ...], bool] = {}
"""Whether the kernel's bits are torch's, by device, dtype and number of classes."""


def serves(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient of these logits, taken in this dtype, may be the kernel's."""
    is_known = dtype is torch.float32 and logits.dtype in _DTYPES and logits.is_contiguous()
    if logits.device.type != "cuda" or not is_known:
        return False
    known = _proven.get(_key(logits))
    if known is None and are_captured({logits.device.type}):
        return False
    return known is not False and _compiled(logits.device, logits.dtype) is not None


def run(logits: Tensor, top: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
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


def has_bits_of(gradient: Tensor, torchs: Callable[[], Tensor]) -> bool:
    """Whether a gradient has torch's bits, as far as one of its kind was compared.

    ``torchs`` computes the first rows. It is called once for each kind, and the host waits for the
    result.
    """
    key = _key(gradient)
    if key not in _proven:
        expected, bits = torchs(), torch.int16 if gradient.itemsize == 2 else torch.int32
        _proven[key] = torch.equal(expected.view(bits), gradient[: len(expected)].view(bits))
    return _proven[key]


def _key(logits: Tensor) -> tuple[Any, ...]:
    return logits.device, logits.dtype, logits.shape[-1]


@functools.cache
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
