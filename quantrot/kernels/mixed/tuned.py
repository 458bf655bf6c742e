"""What was measured on an NVIDIA H200 (benchmarks/tune_mixed_hopper.py, benchmarks/bench_mixed.py).

DECODE: (N, K, columns of a group or 0, most tokens) -> `hopper.Decode`: tokens in eights, row warps, teams,
height, stages, columns of K kept, thread blocks a multiprocessor. The products for which a plan was more than 2 %
faster than the rule's; 128 stands for its multiples too. With groups, shared memory that is not taken is cache for the
scales: one token by 8192 x 8192 takes 19.2 us with 20 stages, 20.1 with 24.

EXPAND_FROM: rows of the wide operand from which "auto" on other GPUs expands the narrow one to multiply it by cuBLAS,
with a scale a channel or a group. An estimate: three bytes a code at copy speed are 247 / C of a product at 700
TFLOP/s; with groups, the tensor cores wait while a group's sums are scaled.
"""

DECODE: dict[tuple[int, int, int, int], tuple[int, ...]] = {
    (4096, 14336, 0, 1): (0, 2, 8, 1, 32, 0, 1),
    (4096, 14336, 0, 8): (1, 1, 8, 2, 32, 0, 1),
    (4096, 14336, 0, 16): (2, 2, 4, 1, 24, 0, 1),
    (4096, 14336, 128, 1): (0, 2, 8, 1, 24, 0, 1),
    (4096, 14336, 128, 8): (1, 1, 8, 1, 24, 0, 2),
    (4096, 14336, 128, 16): (2, 1, 8, 2, 16, 0, 1),
    (6144, 4096, 0, 16): (2, 3, 4, 1, 20, 0, 1),
    (6144, 4096, 128, 1): (0, 1, 16, 1, 32, 4096, 1),
    (6144, 4096, 128, 8): (1, 1, 16, 1, 32, 4096, 1),
    (6144, 4096, 128, 16): (2, 3, 4, 1, 20, 0, 1),
    (8192, 8192, 0, 1): (0, 4, 4, 1, 24, 0, 1),
    (8192, 8192, 0, 8): (1, 2, 4, 1, 16, 0, 2),
    (8192, 8192, 0, 16): (2, 2, 4, 1, 12, 0, 2),
    (8192, 8192, 128, 1): (0, 2, 4, 1, 20, 0, 2),
    (8192, 8192, 128, 8): (1, 2, 4, 1, 12, 0, 2),
    (8192, 8192, 128, 16): (2, 2, 4, 1, 8, 0, 2),
    (28672, 4096, 128, 1): (0, 7, 2, 2, 6, 0, 1),
    (28672, 4096, 128, 8): (1, 7, 2, 2, 6, 0, 1),
    (28672, 4096, 128, 16): (2, 7, 2, 1, 6, 4096, 1),
}

EXPAND_FROM = {"channel": 2048, "group": 512}
