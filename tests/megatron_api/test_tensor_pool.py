import pytest
import torch

from megatron_offload.megatron_api.tensor_pool import GPUTensorPool, OffloadTensorPool


@pytest.fixture
def pool():
    return GPUTensorPool(device="cpu")


def test_both_names_are_one_class_and_the_default_device_is_cuda():
    assert OffloadTensorPool is GPUTensorPool
    assert GPUTensorPool().device == torch.device("cuda")


def test_a_freed_tensor_is_handed_out_again_for_its_shape_and_dtype_only(pool):
    tensor = pool.allocate((2, 3))
    assert (tensor.shape, tensor.dtype) == ((2, 3), torch.float32)
    pool.free(tensor)
    assert pool.allocate((3, 2)) is not tensor
    assert pool.allocate(torch.Size([2, 3]), dtype=torch.float16).dtype is torch.float16
    assert pool.allocate((2, 3)) is tensor
    assert pool.allocate((2, 3)) is not tensor


def test_the_status_of_one_shape(pool):
    with pytest.raises(ValueError, match="no pool exists"):
        pool.get_pool_status((2, 3), torch.float32)
    tensors = [pool.allocate((2, 3)) for _ in range(4)]
    pool.free(tensors[0])
    with pytest.raises(ValueError, match="needs its dtype"):
        pool.get_pool_status((2, 3))
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


def test_freeing_a_stranger_is_an_error(pool):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shape \(2, 3\).*doesn't belong"):
            pool.free(torch.empty(2, 3))
        pool.allocate((2, 3))


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
