"""Tiles and plans of the MXFP4 kernels; bench_mxfp4.py --tune measures candidates and rewrites this file.

ROW_THREADS: threads of a program that quantizes along rows, by block. COLUMNS, RANDOM_COLUMNS, PACKED_COLUMNS: (blocks
of rows, columns, warps) of a program that quantizes a transpose, by block; with random rounding in the second, from
packed bytes, whose columns are bytes, in the third. Two columns a thread suit only the first: random numbers have a
layout of their own, and the compiler then carries every load through shared memory to it.

The CUDA kernels: HOPPER_ROWS, HOPPER_MASK_ROWS with a clip mask, HOPPER_RANDOM_ROWS with random rounding,
HOPPER_WIDE_ROWS of float32, and HOPPER_MASKED, clipped gradients turned back: (threads, thread blocks of a
multiprocessor, stages), by block; HOPPER_EXPANDED, which writes e4m3: (threads of a multiprocessor, stages);
HOPPER_COLUMNS, the transposes, HOPPER_WIDE_COLUMNS of float32: (thread blocks of a multiprocessor, stages, whether
tiles follow each other down the rows); HOPPER_PACKED_COLUMNS, from packed bytes, HOPPER_RANDOM_PACKED_COLUMNS with
random rounding: (threads of the one block, stages), by block; HOPPER_DECODE: the fields of hopper.Plan after its first,
up to `grouped`, by (tokens, rows, columns); one token by 6144 and 28672 x 4096 has those of bench_mxfp4_layer.py's
chain, not of products alone. Shapes that are not there follow the rules of `plan_for`.
"""

ROW_THREADS = {32: 128, 64: 128, 128: 128}
COLUMNS = {32: (4, 64, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
RANDOM_COLUMNS = {32: (4, 32, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
PACKED_COLUMNS = {32: (2, 64, 4), 64: (2, 64, 4)}
HOPPER_ROWS = {32: (512, 1, 2), 64: (256, 1, 2), 128: (384, 1, 2)}
HOPPER_MASK_ROWS = {32: (512, 1, 2), 64: (384, 1, 2), 128: (352, 1, 2)}
HOPPER_RANDOM_ROWS = {32: (512, 1, 3), 64: (320, 1, 2), 128: (384, 1, 2)}
HOPPER_WIDE_ROWS = {32: (512, 1, 3), 64: (320, 1, 2), 128: (192, 1, 2)}
HOPPER_MASKED = {32: (512, 1, 3), 64: (384, 1, 2), 128: (384, 1, 2)}
HOPPER_EXPANDED = (896, 2)
HOPPER_COLUMNS = (6, 2, True)
HOPPER_WIDE_COLUMNS = (3, 2, True)
HOPPER_PACKED_COLUMNS = {32: (512, 2), 64: (512, 2), 128: (512, 2)}
HOPPER_RANDOM_PACKED_COLUMNS = {32: (512, 2), 64: (512, 2), 128: (512, 2)}
HOPPER_DECODE: dict[tuple[int, int, int], tuple[int, int, int, int, int, bool, int, bool]] = {
    (1, 1536, 8960): (1, 2, 7, 35, 1, True, 1, False),
    (1, 3072, 2048): (2, 1, 8, 8, 1, True, 1, False),
    (1, 16384, 2048): (1, 4, 4, 8, 1, False, 1, False),
    (1, 4096, 4096): (2, 1, 8, 16, 1, True, 1, False),
    (1, 4096, 14336): (2, 1, 7, 28, 1, True, 1, False),
    (1, 6144, 4096): (3, 1, 8, 16, 1, True, 1, False),
    (1, 8192, 8192): (2, 2, 4, 12, 1, True, 1, False),
    (1, 10240, 8192): (2, 3, 4, 12, 1, True, 1, False),
    (1, 28672, 4096): (2, 2, 4, 20, 1, False, 1, False),
    (1, 57344, 8192): (2, 2, 4, 12, 1, False, 1, False),
    (1, 128256, 4096): (2, 2, 8, 16, 1, False, 1, False),
    (8, 4096, 4096): (1, 2, 4, 12, 1, True, 1, False),
    (8, 8192, 8192): (2, 2, 4, 12, 1, True, 1, False),
    (16, 4096, 4096): (1, 2, 4, 12, 1, True, 1, False),
    (16, 8192, 8192): (2, 2, 4, 8, 1, True, 1, False),
    (16, 28672, 4096): (4, 4, 2, 4, 1, True, 1, False),
    (32, 4096, 4096): (1, 2, 4, 8, 1, True, 1, False),
    (32, 4096, 14336): (2, 2, 4, 8, 2, True, 1, False),
    (32, 8192, 8192): (2, 2, 4, 8, 1, True, 1, False),
    (32, 28672, 4096): (2, 4, 2, 4, 1, False, 1, True),
}
