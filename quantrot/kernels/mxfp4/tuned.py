"""Tiles and plans of the MXFP4 kernels; bench_mxfp4.py --tune measures candidates and rewrites this file.

ROW_THREADS: threads of a program that quantizes along rows, by block. COLUMNS, RANDOM_COLUMNS, PACKED_COLUMNS: (blocks
of rows, columns, warps) of a program that quantizes a transpose, by block; with random rounding in the second, from
packed bytes, whose columns are bytes, in the third. Two columns a thread suit only the first: random numbers have a
layout of their own, and the compiler then carries every load through shared memory to it. DECODE: (rows of the weight,
columns a step, slices, warps, stages) by (tokens, rows, columns); HOPPER_DECODE: (row_warps, slice_warps, depth,
slices, resident) of the CUDA kernel. Shapes that are not there follow the rules of `plan_for`.
"""

ROW_THREADS = {32: 128, 64: 128, 128: 128}
COLUMNS = {32: (4, 64, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
RANDOM_COLUMNS = {32: (4, 32, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
PACKED_COLUMNS = {32: (2, 64, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
DECODE: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
HOPPER_ROWS = (128, 6, 3)
HOPPER_EXPANDED = (768, 3)
HOPPER_DECODE: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
