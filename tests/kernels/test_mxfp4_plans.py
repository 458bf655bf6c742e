"""The rule of MXFP4 products of few tokens on Hopper: its launches fit the device."""

import torch

from quantrot.kernels.mxfp4 import hopper, tuned
from quantrot.kernels.nvrtc import MAX_SHARED


def test_plans_fit_the_multiprocessor():
    """The rule's and the measured ones."""
    small = [
        (32, 128),
        (1000, 384),
        (1024, 8192),
        (2112, 4096),
        (6144, 4096),
        (8320, 2048),
        (10240, 8192),
        (14336, 4096),
    ]
    large = [(16384, 2048), (57344, 8192), (128256, 4096)]
    for tokens in range(1, 33):
        for rows, columns in [*small, *large, *(key[1:] for key in tuned.HOPPER_DECODE)]:
            plan = hopper.plan_for(tokens, rows, columns)
            assert plan.tokens >= tokens and (plan.tiles > 0) == (tokens > 1)
            assert plan.split == 1 or plan.once
            shared = plan.shared_bytes(columns)
            assert plan.threads <= 1024 and shared <= 227 << 10 and plan.stages % plan.teams == 0
            assert plan.resident * (shared + 1024) <= 228 << 10 and plan.resident * plan.threads <= 2048
            if plan.once:
                assert plan.grid(rows, 132) * plan.rows >= rows * plan.split
                ring = plan.stages * (plan.rows * 144 + 4096 * plan.tiles)
                assert plan.teams * plan.tokens * (plan.rows + 4) * 4 <= ring


def test_few_columns_are_not_shared_by_a_cluster():
    """What a cluster costs, however few columns it shares, is more than such a product takes in one block."""
    for columns in (128, 2048, 3968, 4096, 8192):
        plan = hopper.plan_for(32, 2048, columns)
        assert plan.split == (2 if columns >= 4096 else 1)
    assert all(hopper.plan_for(tokens, 2048, 8192).split == 1 for tokens in range(1, 17))


def test_a_token_for_which_no_block_has_room_takes_the_plan_of_eight():
    held, long = (hopper.plan_for(1, 4096, columns) for columns in (1 << 16, 1 << 17))
    assert (held.tiles, long.tiles) == (0, 1) and long == hopper.plan_for(8, 4096, 1 << 17)
    assert all(plan.shared_bytes(columns) <= MAX_SHARED for plan, columns in ((held, 1 << 16), (long, 1 << 17)))


def test_the_copy_engine_takes_one_tokens_scales_and_those_of_tall_tiles():
    one, few, tall = hopper.Plan(0, 2, 1, 8, 16), hopper.Plan(1, 2, 1, 8, 16), hopper.Plan(1, 2, 2, 4, 12)
    for groups, taken in ((48, [True, False, True]), (36, [False, False, False])):  # rows of 36 bytes it cannot take
        scale = torch.empty(64, groups, dtype=torch.uint8)
        assert [hopper.maps_scale(plan, scale) for plan in (one, few, tall)] == taken
