"""The meter counts storages, once each, for as long as they really live."""

import gc

import torch

from megatron_offload.observe.live_bytes import LiveActivationMeter

KIB = 1024


def kib(count=1):
    return torch.randn(count * 256)


def test_a_storage_counts_once_until_it_is_freed():
    meter = LiveActivationMeter()
    tensor = kib(4)
    for alias in (tensor, tensor.detach(), tensor.view(2, -1).t(), tensor[5:9]):
        meter.observe(alias)
    assert meter.live_bytes == meter.peak_bytes == 4 * KIB
    del tensor
    assert meter.live_bytes == 4 * KIB, "an alias still holds the storage"
    del alias
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 4 * KIB


def test_parameters_are_no_activations_nor_is_what_was_swapped_away():
    weight, plain, output = torch.nn.Parameter(kib()), kib(), kib()
    meter = LiveActivationMeter([plain])
    for tensor in (weight, plain, plain[2:]):
        meter.observe(tensor)
    assert meter.peak_bytes == 0
    meter.observe(output)
    output.data = torch.empty(1)
    assert meter.live_bytes == 0


def test_saved_tensors_count_while_only_autograd_holds_them():
    meter = LiveActivationMeter()
    x = kib().requires_grad_()
    with meter:
        y = (x * 2).exp().exp()
    del y
    gc.collect()
    assert meter.live_bytes == 0
    with meter:
        y = (x * 2).exp().exp().sum()
    assert meter.live_bytes == 2 * KIB, "the outputs of both exp"
    y.backward()
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 2 * KIB


def test_an_emptied_storage_counts_again_once_it_is_filled():
    meter = LiveActivationMeter()
    tensor, other = kib(2), kib()
    meter.observe(tensor)
    tensor.untyped_storage().resize_(0)
    meter.observe(other)
    assert meter.live_bytes == KIB
    assert meter.peak_bytes == 2 * KIB
    tensor.untyped_storage().resize_(2 * KIB)
    meter.observe(kib())
    assert meter.peak_bytes == 4 * KIB


def test_a_new_peak_starts_at_what_is_alive():
    meter = LiveActivationMeter()
    kept = kib()
    meter.observe(kept)
    meter.observe(kib(3))
    assert meter.peak_bytes == 4 * KIB
    meter.reset_peak()
    assert meter.peak_bytes == KIB
    del kept
    for _ in range(50):  # a reused address is a new storage
        meter.observe(kib())
    assert (meter.live_bytes, meter.peak_bytes) == (0, KIB)
