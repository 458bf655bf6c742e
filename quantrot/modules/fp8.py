"""FP8 linears."""

from quantrot.modules.linear import QuantizedLinear


class Fp8Linear(QuantizedLinear):
    """e4m3 weights with float32 scales per 128 x 128 block or per channel."""
