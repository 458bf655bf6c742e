"""The plan of each order on an NVIDIA H200 and what it reached; written by bench_hadamard.py --tune."""

from quantrot.kernels.hadamard.hopper import Plan

PLANS = {
    ("bfloat16", 2): Plan("lanes", 4, 7),
    ("bfloat16", 4): Plan("lanes", 4, 7),
    ("bfloat16", 8): Plan("lanes", 4, 7),  # 1.09 of copy at 2^25 elements, 0.98 at 2^27
    ("bfloat16", 16): Plan("lanes", 4, 7, vectors=2),  # 1.07 of copy at 2^25 elements, 0.99 at 2^27
    ("bfloat16", 32): Plan("turn", 2, 14, vectors=2),  # 1.08 of copy at 2^25 elements, 0.98 at 2^27
    ("bfloat16", 64): Plan("turn", 8, 3),  # 1.09 of copy at 2^25 elements, 0.98 at 2^27
    ("bfloat16", 128): Plan("turn", 4, 7, vectors=2),  # 1.08 of copy at 2^25 elements, 0.98 at 2^27
    ("bfloat16", 256): Plan("warp", 1, 20, vectors=4),  # 1.09 of copy at 2^25 elements, 0.98 at 2^27
    ("bfloat16", 512): Plan("warp", 2, 14, vectors=2),  # 1.09 of copy at 2^25 elements, 0.98 at 2^27
    ("bfloat16", 576): Plan("dense", 1, 8, tiles=3, part=2),  # 0.59 of copy at 2^25 elements, 0.88 at 2^27
    ("bfloat16", 1024): Plan("warp", 1, 20, vectors=4),  # 1.10 of copy at 2^25 elements, 0.98 at 2^27
    ("bfloat16", 1536): Plan("block", 4, 8, stages=2, tiles=4, part=4),  # 0.85 of copy at 2^25 elements, 0.82 at 2^27
    ("bfloat16", 2048): Plan("share", 4, 3, vectors=2, precision="CUT"),  # 1.09 of copy at 2^25 elements, 0.99 at 2^27
    ("bfloat16", 3072): Plan("block", 2, 6, stages=1, tiles=16),  # 0.87 of copy at 2^25 elements, 0.89 at 2^27
    ("bfloat16", 4096): Plan("share", 4, 7, vectors=4),  # 1.07 of copy at 2^25 elements, 0.95 at 2^27
    ("bfloat16", 4864): Plan("dense", 2, 8, tiles=5, part=4),  # 0.60 of copy at 2^25 elements, 0.62 at 2^27
    ("bfloat16", 5120): Plan("block", 4, 4, stages=2),  # 0.87 of copy at 2^25 elements, 0.83 at 2^27
    ("bfloat16", 8192): Plan("share", 8, 1, vectors=4, precision="CUT"),  # 1.05 of copy at 2^25 elements, 0.94 at 2^27
    ("bfloat16", 11008): Plan("dense", 11, 2, stages=1, tiles=2, part=4),  # 0.32 of copy at 2^25 elements, 0.32 at 2^27
    ("bfloat16", 12288): Plan("block", 8, 2, stages=1, tiles=16),  # 0.83 of copy at 2^25 elements, 0.83 at 2^27
    ("bfloat16", 13824): Plan("dense", 6, 2, stages=1, tiles=3),  # 0.44 of copy at 2^25 elements, 0.44 at 2^27
    ("bfloat16", 14336): Plan("block", 8, 2, stages=1),  # 0.79 of copy at 2^25 elements, 0.82 at 2^27
    ("bfloat16", 16384): Plan(
        "share", 16, 1, vectors=4, precision="CUT"
    ),  # 0.96 of copy at 2^25 elements, 0.91 at 2^27
    ("bfloat16", 17408): Plan("dense", 8, 2, stages=1, tiles=5, part=4),  # 0.56 of copy at 2^25 elements, 0.54 at 2^27
    ("bfloat16", 18944): Plan("dense", 8, 2, tiles=5, part=4),  # 0.45 of copy at 2^25 elements, 0.48 at 2^27
    ("bfloat16", 25600): Plan("dense", 10, 1, tiles=2),  # 0.33 of copy at 2^25 elements, 0.30 at 2^27
    ("bfloat16", 28672): Plan("block", 8, 1, stages=2, tiles=16),  # 0.75 of copy at 2^25 elements, 0.76 at 2^27
    ("bfloat16", 29568): Plan("dense", 16, 1, stages=1, tiles=1, part=6),  # 0.26 of copy at 2^25 elements, 0.23 at 2^27
    ("bfloat16", 32768): Plan(
        "share", 16, 1, vectors=8, stages=1, precision="CUT"
    ),  # 0.90 of copy at 2^25 elements, 0.86 at 2^27
    ("float16", 2): Plan("lanes", 4, 7),
    ("float16", 4): Plan("lanes", 4, 7),
    ("float16", 8): Plan("lanes", 4, 7),  # as bfloat16
    ("float16", 16): Plan("lanes", 4, 7, vectors=2),  # as bfloat16
    ("float16", 32): Plan("turn", 2, 14, vectors=2),  # as bfloat16
    ("float16", 64): Plan("turn", 8, 3),  # as bfloat16
    ("float16", 128): Plan("turn", 4, 7, vectors=2),  # as bfloat16
    ("float16", 256): Plan("warp", 1, 20, vectors=4),  # as bfloat16
    ("float16", 512): Plan("warp", 2, 14, vectors=2),  # as bfloat16
    ("float16", 576): Plan("dense", 1, 8, tiles=3, part=2),  # as bfloat16
    ("float16", 1024): Plan("warp", 1, 20, vectors=4),  # as bfloat16
    ("float16", 1536): Plan("block", 4, 8, stages=2, tiles=4, part=4),  # as bfloat16
    ("float16", 2048): Plan("warp", 1, 20, vectors=8),  # 1.04 of copy at 2^25 elements, 0.96 at 2^27
    ("float16", 3072): Plan("block", 2, 6, stages=1, tiles=16),  # as bfloat16
    ("float16", 4096): Plan("share", 4, 7, vectors=4),  # 1.07 of copy at 2^25 elements, 0.95 at 2^27
    ("float16", 4864): Plan("dense", 2, 8, tiles=5, part=4),  # as bfloat16
    ("float16", 5120): Plan("block", 4, 4, stages=2),  # as bfloat16
    ("float16", 8192): Plan("share", 8, 4, vectors=4),  # 1.04 of copy at 2^25 elements, 0.95 at 2^27
    ("float16", 11008): Plan("dense", 11, 2, stages=1, tiles=2, part=4),  # as bfloat16
    ("float16", 12288): Plan("block", 8, 2, stages=1, tiles=16),  # as bfloat16
    ("float16", 13824): Plan("dense", 6, 2, stages=1, tiles=3),  # as bfloat16
    ("float16", 14336): Plan("block", 8, 2, stages=1),  # as bfloat16
    ("float16", 16384): Plan("share", 8, 2, vectors=8, stages=1),  # 0.91 of copy at 2^25 elements, 0.85 at 2^27
    ("float16", 17408): Plan("dense", 8, 2, stages=1, tiles=5, part=4),  # as bfloat16
    ("float16", 18944): Plan("dense", 8, 2, tiles=5, part=4),  # as bfloat16
    ("float16", 25600): Plan("dense", 10, 1, tiles=2),  # as bfloat16
    ("float16", 28672): Plan("block", 8, 1, stages=2, tiles=16),  # as bfloat16
    ("float16", 29568): Plan("dense", 16, 1, stages=1, tiles=1, part=6),  # as bfloat16
    ("float16", 32768): Plan("share", 16, 1, vectors=8, stages=1),  # 0.84 of copy at 2^25 elements, 0.84 at 2^27
    ("float32", 4): Plan("lanes", 4, 6, vectors=2),
    ("float32", 8): Plan("lanes", 2, 12, vectors=2),  # 1.10 of copy at 2^25 elements, 1.56 at 2^27
    ("float32", 16): Plan("lanes", 2, 8, vectors=4),  # 1.11 of copy at 2^25 elements, 1.56 at 2^27
    ("float32", 32): Plan("lanes", 4, 4, vectors=2),  # 1.11 of copy at 2^25 elements, 1.56 at 2^27
    ("float32", 64): Plan("lanes", 4, 6, vectors=2),  # 1.10 of copy at 2^25 elements, 1.56 at 2^27
    ("float32", 128): Plan("lanes", 4, 4, vectors=2),  # 1.12 of copy at 2^25 elements, 1.56 at 2^27
    ("float32", 256): Plan("lanes", 4, 6, vectors=2),  # 1.11 of copy at 2^25 elements, 1.56 at 2^27
    ("float32", 512): Plan("lanes", 2, 3, vectors=2, share=2),  # 1.12 of copy at 2^25 elements, 1.56 at 2^27
    ("float32", 1024): Plan("lanes", 2, 6, vectors=4, share=2),  # 1.11 of copy at 2^25 elements, 1.55 at 2^27
    ("float32", 2048): Plan("lanes", 4, 6, vectors=4, share=4),  # 1.08 of copy at 2^25 elements, 1.52 at 2^27
    ("float32", 4096): Plan("lanes", 4, 3, vectors=8, share=4),  # 0.94 of copy at 2^25 elements, 1.47 at 2^27
    ("float32", 8192): Plan("lanes", 8, 1, vectors=8, share=8),  # 0.98 of copy at 2^25 elements, 1.50 at 2^27
    ("float32", 16384): Plan("lanes", 8, 3, vectors=16, share=8),  # 0.72 of copy at 2^25 elements, 1.18 at 2^27
    ("float32", 32768): Plan("lanes", 16, 1, vectors=16, share=16),  # 0.77 of copy at 2^25 elements, 1.22 at 2^27
}
