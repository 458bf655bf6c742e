"""MXFP4 linears."""

from quantrot.modules.linear import QuantizedLinear


class Mxfp4Linear(QuantizedLinear):
    """Packed e2m1 weights with an e8m0 scale per 32."""
