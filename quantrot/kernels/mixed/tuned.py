"""What was measured on an NVIDIA H200; written by bench_mixed.py --tune.

PLANS: (R, K, group or 0, C's bucket) -> plan; other shapes go by the rules of `plans`. EXPAND_FROM: rows of the wide
operand from which "auto" expands the narrow one. Until a run has measured them, PLANS is empty and EXPAND_FROM an
estimate: three bytes a code at copy speed are 247 / C of a product at 700 TFLOP/s; with groups, the tensor cores
wait while a group's sums are scaled.
"""

from quantrot.kernels.mixed.plans import Decode, Prefill

EXPAND_FROM = {"channel": 2048, "group": 512}

PLANS: dict[tuple[int, int, int, int], Decode | Prefill] = {}
