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
    (8192, 8192, 128, 16): (2, 2, 4, 1, 12, 0, 2),
    (28672, 4096, 128, 1): (0, 7, 2, 2, 6, 0, 1),
    (28672, 4096, 128, 8): (1, 7, 2, 2, 6, 0, 1),
    (28672, 4096, 128, 16): (2, 7, 2, 1, 6, 4096, 1),
}

EXPAND_FROM = {"channel": 2048, "group": 512}

# Of (teams, groups, passes): cycles that a block of 64 columns of K takes, of all teams, by the columns of a tile;
# with groups so many more, and for each of its columns; cycles of all else, and more where two thread blocks share K.
# Fitted on an H200 to the plans of seven shapes by 24 to 512 tokens, 5 % (standard deviation) off; those with teams
# again to those of 13 shapes by 96 to 256 tokens: of these 104 products it chooses the fastest plan measured or one
# within 4 %, but for two, within 6 %. Two passes: from six shapes by 257 to 1536 tokens; with groups 0.1 more than
# measured, since tiles of 256 columns gain by turns (multiply.cuh), which is not in these numbers.
CYCLES: dict[tuple[int, int, int], tuple[dict[int, int], tuple[int, float], int, int]] = {
    (0, 2, 1): (
        {64: 600, 96: 676, 112: 729, 128: 747, 144: 778, 160: 819}
        | {176: 867, 192: 895, 208: 940, 224: 1000, 240: 1060, 256: 1125},
        *((0, 0.66), 5250, 0),
    ),
    (0, 2, 2): (
        {272: 1205, 288: 1265, 304: 1335, 320: 1405, 336: 1480, 352: 1550, 368: 1605, 384: 1670},
        *((0, 0.76), 5250, 0),
    ),
    (0, 3, 1): ({64: 688, 96: 838, 112: 888, 128: 946, 144: 1005, 160: 1081}, (0, 1.47), 6930, 0),
    (0, 4, 1): ({64: 1077, 96: 1153, 112: 1197, 128: 1303}, (0, 1.66), 5400, 0),
    (1, 2, 1): ({96: 637, 128: 730, 160: 812, 192: 924, 224: 1068, 256: 1229}, (115, 0), 2680, 2680),
    (1, 2, 2): ({288: 1390, 320: 1550}, (0, 0.65), 2680, 2680),
    (1, 3, 1): ({64: 723, 96: 846, 128: 969, 144: 1001, 160: 1085, 192: 1284}, (75, 0.5), 5960, 2250),
    (2, 1, 1): ({64: 545, 96: 637, 128: 700, 160: 834, 192: 1040}, (75, 0.18), 4250, 3000),
    (2, 2, 1): ({64: 1024, 96: 1185, 128: 1319}, (0, 1.5), 6080, 560),
}
TURN = 900  # cycles of a tile beside its blocks, of persistent thread blocks
APART = (800, 0.19)  # cycles, and for each of a tile's sums, where clusters halve K through memory
