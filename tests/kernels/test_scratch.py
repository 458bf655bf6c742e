"""Memory that stays: a thread's own, enough of it, writable in every mode."""

import threading

import torch

from quantrot.kernels import scratch
from quantrot.kernels.scratch import LARGEST


def test_it_is_the_same_in_a_thread_grows_and_is_fresh_where_it_is_large(monkeypatch):
    monkeypatch.setattr(scratch, "_KEPT", threading.local())
    with torch.inference_mode():
        two = scratch.scratch(2, 64)
    two.fill_(1)  # out of inference mode
    assert two.shape == (2, 64) and scratch.scratch(2, 100).data_ptr() == two.data_ptr()
    five = scratch.scratch(5, LARGEST)
    assert five.shape == (5, LARGEST) and scratch.scratch(2, 64).data_ptr() == five.data_ptr()
    assert scratch.scratch(1, LARGEST + 1).data_ptr() != five.data_ptr()
    others = []
    thread = threading.Thread(target=lambda: others.append(scratch.scratch(2, 64)))
    thread.start()
    thread.join()
    assert others[0].data_ptr() != five.data_ptr()
