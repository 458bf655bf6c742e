"""The plan of each order on an NVIDIA H200, with the fraction of copy speed it reached; written by bench_hadamard.py --tune."""

from quantrot.kernels.hadamard.hopper import Plan

PLANS = {}
for _name, _cut in (("bfloat16", "CUT"), ("float16", "SPLIT")):
    PLANS |= {
        (_name, 2): Plan("lanes", 4, 7),
        (_name, 4): Plan("lanes", 4, 7),
        (_name, 8): Plan("lanes", 4, 7),
        (_name, 16): Plan("lanes", 4, 7),
        (_name, 32): Plan("turn", 4, 7),
        (_name, 64): Plan("turn", 4, 7),
        (_name, 128): Plan("turn", 4, 7),
        (_name, 256): Plan("warp", 2, 14, 2),
        (_name, 512): Plan("warp", 2, 14, 2),
        (_name, 1024): Plan("warp", 2, 10, 4),
        (_name, 2048): Plan("warp", 1, 20, 8),
        (_name, 4096): Plan("share", 4, 6, 4),
        (_name, 8192): Plan("share", 8, 4, 4),
        (_name, 16384): Plan("share", 16, 2, 4, precision=_cut),
        (_name, 32768): Plan("share", 16, 1, 8, stages=1, precision=_cut),
        (_name, 3072): Plan("block", 4, 7, tiles=8, stages=1),
        (_name, 5120): Plan("block", 4, 4, tiles=8, stages=1),
        (_name, 12288): Plan("block", 8, 2, tiles=16, stages=1),
        (_name, 14336): Plan("block", 8, 2, tiles=8, stages=1),
        (_name, 28672): Plan("block", 16, 1, tiles=8, part=4, stages=1),
    }
PLANS |= {("float32", n): Plan("lanes", 4, 6, 2 if n <= 256 else 4 if n == 512 else 8) for n in (4, 8, 16, 32, 64, 128, 256, 512)}
PLANS |= {
    ("float32", 1024): Plan("lanes", 2, 8, 8),
    ("float32", 2048): Plan("lanes", 4, 6, 4, share=4),
    ("float32", 4096): Plan("lanes", 4, 6, 8, share=4),
    ("float32", 8192): Plan("lanes", 8, 3, 8, share=8),
    ("float32", 16384): Plan("lanes", 8, 2, 16, share=8),
    ("float32", 32768): Plan("lanes", 16, 1, 16, share=16),
}
