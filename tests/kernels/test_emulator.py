"""The laws of the emulator that runs Hopper kernels on the host: right kernels are exact, wrong ones are caught."""

import ctypes

import pytest
import torch

BUGS = [
    "NO_LOAD_WAIT",
    "NO_PRODUCT_WAIT",
    "EARLY_RELEASE",
    "WRONG_PARITY",
    "TOO_FEW_BYTES",
    "NO_PRODUCT_FENCE",
    "NO_STORE_FENCE",
    "NO_STORE_SYNC",
    "NO_STORE_WAIT",
]


@pytest.fixture(scope="module")
def examples(emulated):
    library = emulated('#include "examples.cuh"\n')
    library.tiles.restype = library.shared_tile.restype = ctypes.c_char_p
    return library


def _operands(k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = (torch.randint(-8, 9, (rows, k)).float().to(torch.float8_e4m3fn) for rows in (64, 16))
    return a, b, a.float() @ b.float().T


def _pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def _tiles(library, bug: int, seed: int) -> tuple[str, bool]:
    """(message, whether the result is right) of the pipelined product."""
    a, b, expected = _operands(5 * 128)
    y = torch.full((64, 16), float("nan"))
    message = library.tiles(bug, *_pointers(a, b, y), 5, seed).decode()
    return message, torch.equal(y, expected)


def test_a_right_kernel_is_exact_whatever_runs_first(examples):
    torch.manual_seed(0)
    for seed in range(20):
        assert _tiles(examples, 0, seed) == ("", True)


@pytest.mark.parametrize("bug", BUGS)
def test_one_thing_left_out_is_caught(examples, bug):
    torch.manual_seed(0)
    outcomes = [_tiles(examples, 1 + BUGS.index(bug), seed) for seed in range(12)]
    caught = [message or "wrong result" for message, right in outcomes if message or not right]
    assert len(caught) >= 3, f"{bug} was caught in {len(caught)} of 12 runs: {set(caught)}"


def test_messages_say_what_is_wrong(examples):
    def message(bug):
        return _tiles(examples, 1 + BUGS.index(bug), 0)[0]

    assert "deadlock" in message("WRONG_PARITY") and "a barrier" in message("WRONG_PARITY")
    assert "fence" in message("NO_PRODUCT_FENCE")
    assert "wrote to shared memory without a fence" in message("NO_STORE_FENCE")


def test_multicast_registers_and_remote_shared_memory_are_exact(examples):
    torch.manual_seed(0)
    a, b, expected = _operands(128)
    for seed in range(6):
        y = torch.full((2, 64, 16), float("nan"))
        assert examples.shared_tile(*_pointers(a, b, y), seed) == b""
        assert torch.equal(y, expected.expand(2, 64, 16))
