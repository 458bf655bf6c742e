"""What holds for every operator."""

import subprocess
import sys

import torch

from quantrot.kernels.operators import constant, implement


def test_both_devices_are_registered_and_the_function_stays_itself():
    torch.library.define("quantrot_test::twice", "(Tensor x, int times) -> Tensor")

    @implement("quantrot_test::twice")
    def twice(x, times):
        return x * (2 * times)

    x = torch.ones(3)
    assert torch.equal(torch.ops.quantrot_test.twice(x, 3), twice(x, 3)) and twice(x, 3)[0] == 6
    assert torch._C._dispatch_has_kernel_for_dispatch_key("quantrot_test::twice", "CUDA")


def test_constant_is_torchs_own_mark():
    def answer():
        return 42

    marked = vars(torch.compiler.assume_constant_result(lambda: 42))
    assert marked and vars(constant(answer)) == marked


def test_converting_imports_neither_dynamo_nor_transformers_models():
    names = "torch._dynamo transformers.modeling_utils triton"
    code = f"import sys, quantrot; quantrot.convert; assert not {{*{names.split()}}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)
