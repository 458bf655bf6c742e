"""What a converted model is made of: state as it is on disk, and a forward. No policy, no files, no names of models.

A quantized linear holds exactly its tensors of the checkpoint. Its forward turns the input (where a rotation runs
online), quantizes it, and multiplies. Without a kernel for the device the multiplication uses the dequantized weight:
`decode()` keeps that weight, in the dtype of the model, instead of making it in every forward. Linears of one input may
share a product (`merged`); their tensors are then slices of one.
"""

from quantrot.modules.attention import QuantizedAttention
from quantrot.modules.cache import KVCache
from quantrot.modules.fp8 import Fp8Linear, Fp8TrainingLinear
from quantrot.modules.int8 import Int8Linear
from quantrot.modules.layer import fuse_layer
from quantrot.modules.linear import OnlineHadamard, QuantizedLinear, RotatedLinear, quantize_dequantize
from quantrot.modules.merged import QuantizedMLP
from quantrot.modules.mxfp4 import Mxfp4Linear, Mxfp4TrainingLinear
from quantrot.modules.training import train_in_fp8, train_in_mxfp4

LINEARS: dict[str, type[QuantizedLinear]] = {"fp8": Fp8Linear, "mxfp4": Mxfp4Linear, "int8": Int8Linear}

__all__ = [
    "LINEARS",
    "Fp8Linear",
    "Fp8TrainingLinear",
    "Int8Linear",
    "KVCache",
    "Mxfp4Linear",
    "Mxfp4TrainingLinear",
    "OnlineHadamard",
    "QuantizedAttention",
    "QuantizedLinear",
    "QuantizedMLP",
    "RotatedLinear",
    "fuse_layer",
    "quantize_dequantize",
    "train_in_fp8",
    "train_in_mxfp4",
]
