"""Tiles and plans of the MXFP4 kernels; bench_mxfp4.py --tune measures candidates and rewrites this file.

ROW_THREADS: threads of a program that quantizes along rows, by block. COLUMNS, RANDOM_COLUMNS, PACKED_COLUMNS: (blocks
of rows, columns, warps) of a program that quantizes a transpose, by block; from packed bytes, whose columns are bytes,
in the last. DECODE: (rows of the weight, columns a step, slices, warps, stages) by (tokens, rows, columns); shapes that
are not here follow `triton_gemm.plan_for`'s rule.
"""

ROW_THREADS = {32: 128, 64: 128, 128: 128}
# Two columns a thread only where nothing but the loads sets the layout: random numbers do too, and the compiler then
# carries every load through shared memory to theirs
COLUMNS = {32: (4, 64, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
RANDOM_COLUMNS = {32: (4, 32, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
PACKED_COLUMNS = {32: (2, 64, 4), 64: (2, 64, 4), 128: (1, 128, 4)}
DECODE: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
