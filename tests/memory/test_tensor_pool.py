from unittest.mock import Mock

import pytest
import torch

from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import SimulatedConfig
from megatron_offload.memory.tensor_pool import GPUTensorPool, OffloadTensorPool, TensorPool


@pytest.fixture
def backend():
    return SimulatedBackend(SimulatedConfig())


# Reload targets.


def lend(pool, num_bytes=1000):
    """Return one target of so many bytes, and the events of its former consumers."""
    [tensor], last_uses = pool.allocate([torch.empty(num_bytes, dtype=torch.uint8)])
    return tensor, last_uses


@pytest.mark.parametrize("retained_bytes", [0, 1000])
def test_a_target_is_like_its_host_tensor(backend, retained_bytes):
    pool = TensorPool(backend, retained_bytes=retained_bytes)
    for host in (torch.empty(5, 50), torch.empty(500, dtype=torch.bfloat16)):
        [tensor], last_uses = pool.allocate([host])
        assert (tensor.shape, tensor.dtype) == (host.shape, host.dtype)
        assert len(last_uses) == (retained_bytes > 0 and host.dtype is torch.bfloat16)
        pool.free(tensor)


def test_a_kept_target_waits_for_its_last_consumer_only(backend):
    pool = TensorPool(backend, retained_bytes=1000)
    tensor, _ = lend(pool)
    place = tensor.data_ptr()
    backend.advance_compute(5.0)
    pool.free(tensor)
    del tensor
    backend.advance_compute(5.0)
    again, [event] = lend(pool)
    assert again.data_ptr() == place
    assert event.time_us == 5.0


def test_kept_targets_are_served_in_the_order_they_were_freed(backend):
    pool = TensorPool(backend, retained_bytes=4000)
    tensors = [lend(pool)[0] for _ in range(3)]
    places = [tensor.data_ptr() for tensor in tensors]
    while tensors:
        pool.free(tensors.pop(0))
    again = [lend(pool)[0] for _ in range(3)]
    assert [tensor.data_ptr() for tensor in again] == places


def test_another_stream_is_not_served_from_a_kept_target(backend):
    pool = TensorPool(backend, retained_bytes=4000)
    tensor, _ = lend(pool)
    place = tensor.data_ptr()
    pool.free(tensor)
    del tensor
    with backend.computing_on(backend.side_stream):
        other, last_uses = lend(pool)
    assert (other.data_ptr() != place, last_uses) == (True, [])
    assert lend(pool)[0].data_ptr() == place


def test_another_size_is_not_served_from_a_kept_target(backend):
    pool = TensorPool(backend, retained_bytes=4000)
    pool.free(lend(pool)[0])
    tensor, _ = lend(pool, 999)
    assert (tensor.nbytes, pool.retained_bytes) == (999, 1000)


def test_kept_bytes_are_within_the_bound(backend):
    pool = TensorPool(backend, retained_bytes=2500)
    tensors = [lend(pool)[0] for _ in range(4)]
    while tensors:
        pool.free(tensors.pop())
        assert pool.retained_bytes <= 2500
    assert pool.retained_bytes == 2000


def test_a_target_that_someone_still_sees_is_not_kept(backend):
    pool = TensorPool(backend, retained_bytes=4000)
    tensor, _ = lend(pool)
    view = tensor[:8].view(torch.float32)
    pool.free(tensor)
    assert pool.retained_bytes == 0
    other, _ = lend(pool)
    assert other.data_ptr() != view.data_ptr()


def test_what_was_found_is_undone_where_the_rest_can_not_be_had(backend, monkeypatch):
    pool = TensorPool(backend, retained_bytes=4000)
    pool.free(lend(pool)[0])
    monkeypatch.setattr(backend, "empty_device_like", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        pool.allocate([torch.empty(1000, dtype=torch.uint8)] * 2)
    assert pool.retained_bytes == 1000


@pytest.mark.parametrize("limit_bytes", [0, 1500])
def test_clear_drops_what_is_kept_and_nothing_else(backend, limit_bytes):
    pool = TensorPool(backend, retained_bytes=limit_bytes)
    kept, lent = lend(pool)[0], lend(pool)[0]
    pool.free(kept)
    pool.clear()
    assert pool.retained_bytes == 0
    pool.free(lent)
    assert pool.retained_bytes == min(1000, limit_bytes)


# The documented pool.


@pytest.fixture
def pool():
    return GPUTensorPool(device="cpu")


def test_both_names_are_one_class_and_the_default_device_is_cuda():
    assert OffloadTensorPool is GPUTensorPool
    assert GPUTensorPool().device == torch.device("cuda")


def test_a_tensor_has_the_shape_and_dtype_asked(pool):
    assert pool.allocate((2, 3)).dtype is torch.float32
    tensor = pool.allocate(torch.Size([2, 3]), dtype=torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == ((2, 3), torch.bfloat16)


def test_a_freed_tensor_is_handed_out_again_for_its_shape_and_dtype_only(pool):
    tensor = pool.allocate((2, 3))
    pool.free(tensor)
    assert pool.allocate((3, 2)) is not tensor
    assert pool.allocate((2, 3), torch.float16) is not tensor
    assert pool.allocate((2, 3)) is tensor
    assert pool.allocate((2, 3)) is not tensor


def test_the_status_of_one_shape(pool):
    tensors = [pool.allocate((2, 3)) for _ in range(4)]
    pool.free(tensors[0])
    assert pool.get_pool_status((2, 3), torch.float32) == {
        "shape": (2, 3),
        "dtype": torch.float32,
        "total_count": 4,
        "allocated_count": 3,
        "free_count": 1,
        "utilization": 75.0,
    }


def test_the_status_of_everything(pool):
    first, _ = pool.allocate((2,)), pool.allocate((3,))
    pool.free(first)
    pool.allocate((2,))
    status = pool.get_pool_status()
    assert status["global_stats"] == {
        "total_allocated": 2,
        "current_in_use": 2,
        "allocation_requests": 3,
        "free_requests": 1,
        "pool_hits": 1,
        "pool_misses": 2,
    }
    assert set(status["pools"]) == {((2,), torch.float32), ((3,), torch.float32)}
    assert status["pools"][((2,), torch.float32)]["allocated_count"] == 1


def test_a_status_needs_a_dtype_and_a_shape_that_was_asked_for(pool):
    with pytest.raises(ValueError, match="needs its dtype"):
        pool.get_pool_status((2, 3))
    with pytest.raises(ValueError, match="no pool exists"):
        pool.get_pool_status((2, 3), torch.float32)


def test_freeing_a_stranger_is_an_error(pool):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shape \(2, 3\).*doesn't belong"):
            pool.free(torch.empty(2, 3))
        pool.allocate((2, 3))


def test_a_second_free_is_an_error_and_the_tensor_is_not_handed_out_twice(pool):
    tensor = pool.allocate((2, 3))
    pool.free(tensor)
    with pytest.raises(ValueError, match="freed before"):
        pool.free(tensor)
    assert pool.allocate((2, 3)) is not pool.allocate((2, 3))


def test_reset_marks_all_tensors_free_those_still_out_too(pool):
    out = [pool.allocate((2, 3)) for _ in range(2)]
    pool.reset()
    status = pool.get_pool_status((2, 3), torch.float32)
    assert (status["free_count"], status["allocated_count"]) == (2, 0)
    assert pool.get_pool_status()["global_stats"]["current_in_use"] == 0
    with pytest.raises(ValueError, match="freed before"):
        pool.free(out[0])
    assert pool.allocate((2, 3)) is out[0]


def test_clear_forgets_everything(pool):
    tensor = pool.allocate((2, 3))
    pool.free(pool.allocate((2, 3)))
    pool.clear()
    assert pool.get_pool_status()["pools"] == {}
    with pytest.raises(ValueError, match="doesn't belong"):
        pool.free(tensor)
