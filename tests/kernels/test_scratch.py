"""Memory that stays: a thread's own, enough of it, writable in every mode; weights that pass through it in pieces."""

import threading

import pytest
import torch

from quantrot.kernels import fp8, mixed, scratch
from quantrot.kernels.scratch import LARGEST


def test_it_is_the_same_in_a_thread_grows_and_is_fresh_where_it_is_large(monkeypatch):
    monkeypatch.setattr(scratch, "_KEPT", threading.local())
    with torch.inference_mode(), torch.device("meta"):
        two = scratch.scratch(2, 64)
    two.fill_(1)  # out of inference mode, where numbers are
    assert two.shape == (2, 64) and scratch.scratch(2, 100).data_ptr() == two.data_ptr()
    five = scratch.scratch(5, LARGEST)
    assert five.shape == (5, LARGEST) and scratch.scratch(2, 64).data_ptr() == five.data_ptr()
    assert scratch.scratch(1, LARGEST + 1).data_ptr() != five.data_ptr()
    others = []
    thread = threading.Thread(target=lambda: others.append(scratch.scratch(2, 64)))
    thread.start()
    thread.join()
    assert others[0].data_ptr() != five.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (1, 0), (0, 0), (256, 256)], ids=str)
def test_fp8_dequantized_in_pieces_is_as_at_once(monkeypatch, dtype, block):
    qdata, scale = fp8.quantize_fp8_block(torch.randn(650, 1000, generator=torch.Generator().manual_seed(0)), block)
    with torch.no_grad(), torch.device("meta"):  # where new tensors would be
        pieces = fp8.dequantize_fp8_block(qdata, scale, block, dtype)
    monkeypatch.setattr(fp8.reference, "LARGEST", 1 << 30)
    assert torch.equal(pieces, fp8.dequantize_fp8_block(qdata, scale, block, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("group", [128, 1024])
def test_int8_dequantized_in_pieces_is_the_definition(dtype, group):
    qdata, scale = mixed.quantize_int8(torch.randn(650, 1024, generator=torch.Generator().manual_seed(0)), group)
    expected = (qdata.float() * scale.float().repeat_interleave(group, 1)).to(dtype)
    with torch.no_grad(), torch.device("meta"):
        assert torch.equal(mixed.dequantize_int8(qdata, scale, dtype), expected)
    scale.requires_grad_()
    assert mixed.dequantize_int8(qdata, scale, dtype).requires_grad
