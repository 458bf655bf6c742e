"""The plan of each order on an NVIDIA H200; written by bench_hadamard.py --tune.

The comment is the fraction of copy speed reached at 2^25 and at 2^27 elements; of small tensors,
2^13 and 2^17; one number is the first. Of codes, it is the fraction of 3 bytes an element at the
copy's speed.
"""

from quantrot.kernels.hadamard.hopper import Plan

PLANS: dict[tuple[str, int], Plan] = {
    ("bfloat16", 2): Plan("lanes", 4, 7),
    ("bfloat16", 4): Plan("lanes", 4, 7),
    ("bfloat16", 8): Plan("lanes", 4, 7),  # 1.00, 1.00
    ("bfloat16", 16): Plan("lanes", 4, 7, vectors=2, overlap=True),  # 1.00, 1.00
    ("bfloat16", 32): Plan("turn", 2, 14, vectors=2),  # 0.99, 0.99
    ("bfloat16", 64): Plan("turn", 8, 3, overlap=True),  # 1.02, 1.00
    ("bfloat16", 128): Plan("turn", 4, 7, vectors=2, overlap=True),  # 1.02, 1.00
    ("bfloat16", 256): Plan("warp", 1, 20, vectors=4),  # 0.99, 1.00
    ("bfloat16", 512): Plan("warp", 2, 14, vectors=2),  # 0.99, 0.98
    ("bfloat16", 576): Plan("held", 2, 8, tiles=2, overlap=True, ahead=8),  # 0.97
    ("bfloat16", 1024): Plan("warp", 1, 20, vectors=4),  # 0.97, 0.99
    ("bfloat16", 1536): Plan("held", 1, 20, overlap=True, ahead=20),  # 0.99
    ("bfloat16", 2048): Plan("share", 4, 3, vectors=2, precision="CUT", overlap=True, ahead=7),  # 1.03, 1.01
    ("bfloat16", 3072): Plan("held", 1, 16, precision="CUT", overlap=True, ahead=8, stream=False),  # 1.01
    ("bfloat16", 4096): Plan("share", 4, 8, vectors=4, precision="PAIR", overlap=True, ahead=4),  # 1.02, 1.01
    ("bfloat16", 4864): Plan("held", 1, 12, precision="CUT", overlap=True, ahead=8),  # 0.93
    ("bfloat16", 5120): Plan("held", 2, 8, tiles=16, precision="CUT", overlap=True, ahead=8),  # 0.95
    ("bfloat16", 8192): Plan("share", 8, 1, vectors=4, precision="CUT", overlap=True, ahead=2),  # 1.03, 1.01
    ("bfloat16", 11008): Plan("flow", 16, 1, stages=3, paced=True, shift=True, overlap=True),  # 0.92
    ("bfloat16", 12288): Plan("flow", 12, 1, stages=4, tiles=32, overlap=True),  # 0.96
    ("bfloat16", 13824): Plan("flow", 12, 1, stages=6, tiles=16, cluster=2, paced=True, overlap=True),  # 0.95
    ("bfloat16", 14336): Plan("flow", 12, 1, stages=4, tiles=16, cluster=2, paced=True, overlap=True),  # 0.96
    ("bfloat16", 16384): Plan("share", 16, 2, vectors=4, precision="CUT", overlap=True, ahead=1),  # 1.01, 1.01
    ("bfloat16", 17408): Plan("held", 4, 3, tiles=32, precision="CUT", overlap=True, ahead=2),  # 0.86
    ("bfloat16", 18944): Plan("flow", 16, 1, stages=3, tiles=16, paced=True, overlap=True),  # 0.87
    ("bfloat16", 25600): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, paced=True, overlap=True),  # 0.91
    ("bfloat16", 28672): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, paced=True, overlap=True),  # 0.93
    ("bfloat16", 29568): Plan("dense", 16, 1, stages=1, tiles=1, part=6),  # 0.22
    ("bfloat16", 32768): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, paced=True, overlap=True),  # 0.93, 0.96
    ("bfloat16", 53248): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, paced=True, overlap=True),  # 0.81
    ("float16", 2): Plan("lanes", 4, 7),
    ("float16", 4): Plan("lanes", 4, 7),
    ("float16", 8): Plan("lanes", 4, 7),  # 1.00, 1.00
    ("float16", 16): Plan("lanes", 4, 7, vectors=2, overlap=True),  # 1.01, 1.00
    ("float16", 32): Plan("turn", 2, 14, vectors=2),  # 1.00, 1.00
    ("float16", 64): Plan("turn", 8, 3, overlap=True),  # 1.01, 1.00
    ("float16", 128): Plan("turn", 4, 7, vectors=2, overlap=True),  # 1.01, 1.01
    ("float16", 256): Plan("warp", 1, 20, vectors=4),  # 0.99, 1.00
    ("float16", 512): Plan("warp", 2, 14, vectors=2),  # 0.99, 1.00
    ("float16", 576): Plan("held", 2, 8, tiles=2, overlap=True, ahead=8),  # 0.96
    ("float16", 1024): Plan("warp", 1, 20, vectors=4),  # 1.00, 1.00
    ("float16", 1536): Plan("held", 1, 20, overlap=True, ahead=20),  # 0.99
    ("float16", 2048): Plan("share", 4, 7, vectors=2, overlap=True, ahead=7),  # 1.03, 1.01
    ("float16", 3072): Plan("held", 1, 16, precision="PAIR", overlap=True, ahead=8, stream=False),  # 1.00
    ("float16", 4096): Plan("share", 4, 7, vectors=4, overlap=True, ahead=4),  # 1.03, 1.01
    ("float16", 4864): Plan("held", 1, 12, precision="PAIR", overlap=True, ahead=8),  # 0.93
    ("float16", 5120): Plan("held", 2, 8, tiles=16, precision="PAIR", overlap=True, ahead=6),  # 0.93
    ("float16", 8192): Plan("share", 8, 4, vectors=4, overlap=True, ahead=2),  # 1.03, 1.01
    ("float16", 11008): Plan("flow", 16, 1, stages=3, paced=True, shift=True, overlap=True),  # 0.87
    ("float16", 12288): Plan("flow", 12, 1, stages=4, tiles=32, overlap=True),  # 0.96
    ("float16", 13824): Plan("flow", 12, 1, stages=4, tiles=16, cluster=2, paced=True, overlap=True),  # 0.91
    ("float16", 14336): Plan("flow", 12, 1, stages=2, tiles=32, paced=True, overlap=True),  # 0.96
    ("float16", 16384): Plan("share", 16, 2, vectors=4, precision="PAIR", overlap=True, ahead=1),  # 0.98, 1.00
    ("float16", 17408): Plan("flow", 16, 1, stages=3, tiles=16, paced=True, overlap=True),  # 0.85
    ("float16", 18944): Plan("flow", 16, 1, stages=3, tiles=16, paced=True, overlap=True),  # 0.85
    ("float16", 25600): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, paced=True, overlap=True),  # 0.90
    ("float16", 28672): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, paced=True, overlap=True),  # 0.91
    ("float16", 29568): Plan("dense", 16, 1, stages=1, tiles=1, part=6),  # 0.22
    ("float16", 32768): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, paced=True, overlap=True),  # 0.92, 0.95
    ("float16", 53248): Plan("flow", 12, 1, stages=2, tiles=32, cluster=2, shift=True, overlap=True),  # 0.78
    ("float32", 4): Plan("lanes", 4, 6, vectors=2),
    ("float32", 8): Plan("lanes", 2, 12, vectors=2),  # 1.00
    ("float32", 16): Plan("lanes", 2, 8, vectors=4),  # 1.00
    ("float32", 32): Plan("lanes", 4, 4, vectors=2),  # 1.00
    ("float32", 64): Plan("lanes", 4, 6, vectors=2),  # 1.00
    ("float32", 128): Plan("lanes", 4, 4, vectors=2),  # 0.99
    ("float32", 256): Plan("lanes", 4, 6, vectors=2),  # 0.99
    ("float32", 512): Plan("lanes", 2, 3, vectors=2, share=2),  # 1.00
    ("float32", 1024): Plan("lanes", 2, 6, vectors=4, share=2, overlap=True, ahead=6),  # 1.02
    ("float32", 2048): Plan("lanes", 4, 6, vectors=4, share=4, overlap=True, ahead=3),  # 1.02
    ("float32", 4096): Plan("lanes", 4, 6, vectors=8, share=4, overlap=True, ahead=1),  # 1.02
    ("float32", 8192): Plan("lanes", 8, 1, vectors=8, share=8, overlap=True, ahead=1),  # 1.01
    ("float32", 16384): Plan("lanes", 8, 2, vectors=16, share=8, overlap=True, later=1),  # 0.98
    ("float32", 32768): Plan("lanes", 16, 1, vectors=16, share=16, overlap=True, later=1),  # 0.92
}

SMALL_PLANS: dict[tuple[str, int], Plan] = {
    ("bfloat16", 8): Plan("lanes", 8, 3, overlap=True),  # 1.35
    ("bfloat16", 16): Plan("lanes", 8, 3, overlap=True),  # 1.31
    ("bfloat16", 32): Plan("turn", 4, 7, vectors=2, overlap=True),  # 1.20
    ("bfloat16", 64): Plan("turn", 8, 3, overlap=True),  # 1.18
    ("bfloat16", 128): Plan("turn", 2, 14, overlap=True),  # 1.16, 1.24
    ("bfloat16", 256): Plan("warp", 4, 7, vectors=2, overlap=True),  # 1.03, 1.17
    ("bfloat16", 512): Plan("warp", 4, 7, vectors=2, overlap=True),  # 1.03, 1.17
    ("bfloat16", 1024): Plan("warp", 4, 5, vectors=4, overlap=True),  # 0.83, 1.06
    ("bfloat16", 2048): Plan("share", 4, 1, vectors=2, precision="CUT", overlap=True, ahead=1),  # 1.16, 1.47
    ("bfloat16", 4096): Plan("share", 8, 1, vectors=2, precision="PAIR", overlap=True, ahead=1),  # 0.85, 1.31
    ("float16", 8): Plan("lanes", 8, 3, overlap=True),  # as bfloat16
    ("float16", 16): Plan("lanes", 8, 3, overlap=True),  # as bfloat16
    ("float16", 32): Plan("turn", 4, 7, vectors=2, overlap=True),  # as bfloat16
    ("float16", 64): Plan("turn", 8, 3, overlap=True),  # as bfloat16
    ("float16", 128): Plan("turn", 2, 14, overlap=True),  # 1.16, 1.22
    ("float16", 256): Plan("warp", 4, 7, vectors=2, overlap=True),  # 1.03, 1.16
    ("float16", 512): Plan("warp", 4, 7, vectors=2, overlap=True),  # 1.03, 1.17
    ("float16", 1024): Plan("warp", 4, 5, vectors=4, overlap=True),  # 0.85, 1.07
    ("float16", 4096): Plan("share", 8, 1, vectors=2, overlap=True, ahead=1),  # 0.83, 1.27
    ("float16", 8192): Plan("share", 8, 1, vectors=4, overlap=True, ahead=1),  # 0.59, 0.98
    ("float32", 8): Plan("lanes", 4, 4, vectors=2, overlap=True),  # 1.24, 1.31
    ("float32", 16): Plan("lanes", 4, 4, vectors=2, overlap=True),  # 1.17, 1.29
    ("float32", 32): Plan("lanes", 4, 4, vectors=2, overlap=True),  # 1.17, 1.27
    ("float32", 64): Plan("lanes", 4, 4, vectors=2, overlap=True),  # 1.12, 1.26
    ("float32", 128): Plan("lanes", 4, 4, vectors=2, overlap=True),  # 1.09, 1.24
    ("float32", 256): Plan("lanes", 4, 6, vectors=2, overlap=True),  # 1.06, 1.22
    ("float32", 512): Plan("lanes", 2, 3, vectors=2, share=2, overlap=True, ahead=4),  # 1.27, 1.50
    ("float32", 1024): Plan("lanes", 2, 6, vectors=4, share=2, overlap=True, ahead=2),  # 1.10, 1.45
    ("float32", 2048): Plan("lanes", 4, 4, vectors=4, share=4, overlap=True, ahead=1),  # 1.05, 1.36
    ("float32", 4096): Plan("lanes", 4, 4, vectors=8, share=4, overlap=True, ahead=1),  # 0.81, 1.21
    ("float32", 16384): Plan("lanes", 8, 3, vectors=16, share=8, overlap=True, ahead=1),  # 0.51
}

CODE_PLANS: dict[tuple[str, int], Plan] = {
    ("bfloat16", 32): Plan("stream", 4, 5, vectors=4, stages=2, overlap=True),  # 0.97, 0.91
    ("bfloat16", 64): Plan("stream", 4, 5, vectors=4, stages=2, overlap=True),  # 0.96, 0.93
    ("bfloat16", 128): Plan("stream", 4, 5, vectors=4, stages=2, overlap=True),  # 0.96, 0.94
    ("bfloat16", 256): Plan("stream", 4, 5, vectors=4, stages=2, overlap=True),  # 0.95, 0.91
    ("bfloat16", 512): Plan("stream", 4, 5, vectors=4, stages=2, overlap=True),  # 0.94, 0.91
    ("bfloat16", 1024): Plan("stream", 4, 3, vectors=8, stages=2, overlap=True),  # 0.93, 0.87
    ("bfloat16", 1536): Plan("twice", 4, 4, vectors=2, stages=2, overlap=True),  # 0.62, 0.62
    ("bfloat16", 2048): Plan("stream", 4, 3, vectors=8, stages=2, overlap=True),  # 0.91, 0.87
    ("bfloat16", 2560): Plan("twice", 4, 4, vectors=2, stages=2, overlap=True),  # 0.88, 0.92
    ("bfloat16", 3072): Plan("twice", 4, 4, vectors=2, stages=1, overlap=True),  # 0.92, 0.96
    ("bfloat16", 4096): Plan("twice", 4, 4, vectors=2, stages=1, counted=True, overlap=True),  # 0.89, 0.96
    ("bfloat16", 4864): Plan("twice", 8, 2, vectors=2, stages=2, overlap=True),  # 0.74, 0.77
    ("bfloat16", 5120): Plan("twice", 4, 4, stages=2, tiles=16, overlap=True),  # 0.86, 0.88
    ("bfloat16", 5632): Plan("twice", 4, 4, stages=1, tiles=16, overlap=True),  # 0.89, 0.92
    ("bfloat16", 6144): Plan("twice", 4, 4, stages=1, tiles=16, overlap=True),  # 0.90, 0.94
    ("bfloat16", 8192): Plan("twice", 4, 4, stages=1, tiles=16, counted=True, overlap=True),  # 0.87, 0.94
    ("bfloat16", 9728): Plan("twice", 12, 1, vectors=2, stages=2, overlap=True),  # 0.74, 0.80
    ("bfloat16", 10240): Plan("twice", 12, 1, vectors=2, stages=2, overlap=True),  # 0.77, 0.85
    ("bfloat16", 11008): Plan("twice", 12, 1, vectors=2, stages=2, overlap=True),  # 0.77, 0.82
    ("bfloat16", 12288): Plan("twice", 8, 2, stages=2, tiles=16, overlap=True),  # 0.84, 0.89
    ("bfloat16", 13824): Plan("twice", 8, 2, stages=2, tiles=16, overlap=True),  # 0.85, 0.91
    ("bfloat16", 14336): Plan("twice", 4, 2, stages=1, tiles=32, overlap=True),  # 0.85, 0.92
    ("bfloat16", 16384): Plan("twice", 4, 2, stages=1, tiles=32, overlap=True),  # 0.88, 0.91
    ("bfloat16", 17408): Plan("twice", 12, 1, stages=2, tiles=16, overlap=True),  # 0.70, 0.74
    ("bfloat16", 18944): Plan("twice", 12, 1, stages=2, tiles=16, overlap=True),  # 0.70, 0.75
    ("bfloat16", 20480): Plan("twice", 12, 1, stages=2, tiles=16, overlap=True),  # 0.75, 0.82
    ("bfloat16", 24576): Plan("twice", 12, 1, stages=2, tiles=16, overlap=True),  # 0.76, 0.85
    ("bfloat16", 25600): Plan("twice", 8, 1, stages=2, tiles=32, overlap=True),  # 0.76, 0.83
    ("bfloat16", 27648): Plan("twice", 8, 1, stages=2, tiles=32, overlap=True),  # 0.76, 0.87
    ("bfloat16", 28672): Plan("twice", 8, 1, stages=2, tiles=32, overlap=True),  # 0.83, 0.89
    ("bfloat16", 32768): Plan("twice", 8, 1, stages=2, tiles=32, overlap=True),  # 0.83, 0.88
}
