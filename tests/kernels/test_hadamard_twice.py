import ctypes, sys, torch, pytest
sys.path.insert(0, "/work/wt/rotquant/tests/kernels")
from quantrot.kernels.fp8.reference import hadamard_quantize_reference
from quantrot.kernels.hadamard.hopper import Plan
from quantrot.orthogonal import random_signs
RUN = """
static std::string message;
extern "C" const char* run(const void* x, void* y, const signed char* signs, long long rows, long long x_stride,
                           long long y_stride, float scale, unsigned blocks, unsigned seed, float* scales) {{
  const unsigned long long tall = (rows - 1) * x_stride / {columns} + {base};
  const quantrot::TensorMap map{{(unsigned char*)x, {columns}, tall, 2 * {columns}, 64, {base}, 2, 1}};
  message = emulator::launch({{blocks, 1, 1}}, 1, {threads}, {shared}, seed, [&] {{
    quantrot::{call}(map, {{x, y, signs, rows, x_stride, y_stride, 1, scale, scales, {order} / 128, 1, {order} / 128}});
  }});
  return message.c_str();
}}
"""
@pytest.mark.parametrize(("n","plan","rule","signed"),[
 (4096, Plan("twice",4,1,tiles=8,vectors=2,stages=1), "exact", False),
 (4096, Plan("twice",4,1,tiles=8,vectors=2,stages=2, held=False), "exact", True),
 (8192, Plan("twice",4,1,tiles=16,vectors=1,stages=2,held=False), "exact", False),
 (56*256, Plan("twice",4,1,tiles=32,vectors=1,stages=2, held=False), "exact", True),
 (112*256, Plan("twice",8,1,tiles=32,vectors=1,stages=2,held=False), "exact", False),(112*128, Plan("twice",8,1,tiles=16,vectors=1,stages=2,held=False), "exact", False),
])
def test_twice(emulated, n, plan, rule, signed):
    torch.manual_seed(0)
    columns = 8*plan.tiles
    source = plan.source(n, torch.bfloat16, signed, rule=rule)
    run = RUN.format(shared=plan.shared_bytes(n), call=plan.call(n, torch.bfloat16, signed, torch.bfloat16), order=n, columns=columns, base=n//columns, threads=32*plan.warps)
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    rows = 19 if n < 20000 else 7
    x = torch.randn(rows, n).bfloat16()
    x[1], x[2, 7], x[3, 9] = 0, float("inf"), float("nan")
    signs = random_signs(n, 1)
    expected, expected_scales = hadamard_quantize_reference(x, signs if signed else None, n, n**-0.5, (1, 128), rule)
    for seed in range(2):
        q, scales = torch.full((rows, n), 0.5).to(torch.float8_e4m3fn), torch.zeros(rows, n // 128)
        sizes = [ctypes.c_longlong(v) for v in (rows, n, n)]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, q, signs)]
        blocks = plan.grid(rows, 1, n, torch.bfloat16, 2)
        assert library.run(*pointers, *sizes, ctypes.c_float(n**-0.5), blocks, seed, ctypes.c_void_p(scales.data_ptr())) == b""
        wrong = q.view(torch.uint8) != expected.view(torch.uint8)
        print(n, wrong.float().mean(), ((scales-expected_scales)/expected_scales).nan_to_num().abs().max())
        torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
        assert wrong.float().mean() < 1e-3 and not wrong[[1, 2, 3]].any()
