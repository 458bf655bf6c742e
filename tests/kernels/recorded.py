"""What calls launch, recorded on a CPU that says it is a GPU: run as a program, it compares a call's launches in eager
mode, found and found again, with the operator's, and prints where they differ, how many it compared, and how many were
kept for such operands.

In a process of its own: what is remembered of a device would be wrong for other tests.
"""

import itertools
import math
import weakref
from functools import partial

import torch

from quantrot.kernels import attention, between, mixed
from quantrot.kernels.attention import append, one_token, rope_hadamard_quantize, turn
from quantrot.kernels.fp8 import (
    fp8_block_gemm,
    fp8_linear,
    fused,
    gemm,
    hadamard_quantize_fp8,
    operators,
    quantize_fp8_block,
    quantize_fp8_both_ways,
    quantize_fp8_normed,
)
from quantrot.kernels.fp8 import normed as fp8_norms
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.kernels.int4 import quantize_int4
from quantrot.kernels.mixed import mixed_gemm, mixed_linear
from quantrot.kernels.mxfp4 import fused as mxfp4
from quantrot.kernels.mxfp4 import gemm as packed
from quantrot.kernels.mxfp4 import (
    hadamard_quantize_mxfp4,
    masked_hadamard,
    mxfp4_fused,
    mxfp4_gemm,
    mxfp4_normed,
    mxfp4_product,
    requantize_mxfp4,
)
from quantrot.kernels.mxfp4 import normed as mxfp4_norms
from quantrot.kernels.mxfp4 import operators as making
from tests.kernels import recorded_heads
from tests.kernels.operands import apart, e4m3, moved, operator, scales, wide
from tests.kernels.pretended import its, noted, pretend
from tests.kernels.recorded_heads import (
    codes_of,
    of_attention,
    of_growing,
    of_int4,
    of_int4_groups,
    of_prompts,
    of_turns,
)


def fp8(x, residual=None, **given):
    rows = None if residual is None else residual.reshape(-1, len(given["b"]))
    return fp8_linear(x.reshape(-1, x.shape[-1]), residual=rows, b_settled=True, **given)


def fp8_codes(turned=False, **given):
    return (quantize_fp8_both_ways if turned else quantize_fp8_block)(**given)


def normed(x, norm, epsilon, beside, added, weight=(), biased=False, **how):
    given = {"": None, "added": beside, "turned": beside.T.contiguous().T}[added]
    rest = weight if biased else weight[:2]
    return (mxfp4_normed if rest else quantize_fp8_normed)(x, norm, epsilon, *rest, added=given, **how)


def turned(x, signs):
    return hadamard_quantize_fp8(x, block=128, signs=signs, transposed_scale=True)


def blocks(n, k):
    return {"b": e4m3(n, k), "b_scale": torch.empty(n // 128, k // 128)}


def e4m3_by_row(rows, k, name="a"):
    return {name: e4m3(rows, k), f"{name}_scale": torch.empty(rows, k // 128)}


def groups(n, k):
    return {"packed": scales(n, k // 2), "scale": scales(n, k // 32)}


def weighted(n, k):
    return *groups(n, k).values(), wide(n)


def channels(n, k):
    return {"weight": torch.empty(n, k // 4, dtype=torch.int32), "scale": torch.empty(n, 1, dtype=torch.bfloat16)}


def zeros_of(n, k):
    size = n, k // 128
    offsets = torch.empty(size, dtype=torch.int8)
    return {"weight": torch.empty(n, k, dtype=torch.int8), "scale": torch.empty(size), "zero_point": offsets}


def by(activations, hadamard=0):
    return {"activations": activations, "hadamard": hadamard, "settled": True}


LINEAR_READY = fused.READY, gemm.READY, operators.READY, mxfp4.READY, packed.READY, mixed.READY
NORMS_READY = fp8_norms.READY, mxfp4_norms.READY
TRAINING = making.QUANTIZERS, making.REQUANTIZERS, making.MASKED, packed.PRODUCTS
READY = *recorded_heads.READY, *LINEAR_READY, *NORMS_READY, *TRAINING
AROUND = ("", "residual", "residual turned", "norm", "norm, residual")
LINEARS = {  # and what may be around each
    "fp8": (fp8, blocks, (*AROUND, "gates")),
    "mxfp4": (operator(mxfp4_fused, **by("mxfp4", 32)), groups, (*AROUND, "gated")),
    "mxfp4 by fp8": (operator(mxfp4_fused, **by("fp8")), groups, (*AROUND, "gated")),
    "mxfp4 by bf16": (operator(mxfp4_fused, **by("none")), groups, (*AROUND, "gated")),
    "mxfp4 alone": (operator(mxfp4_gemm, **by("mxfp4", 32)), groups, ("", "bias", "gated")),
    "mxfp4 alone by fp8": (operator(mxfp4_gemm, **by("fp8")), groups, ("", "bias")),
    "mxfp4 alone by bf16": (operator(mxfp4_gemm, **by("none")), groups, ("", "bias")),
    "int8": (operator(mixed_linear, weight_ready=True), channels, (*AROUND, "gates")),
    "int8 alone": (operator(mixed_gemm, weight_ready=True), zeros_of, ("", "bias")),
}
SMALL, LARGE, MANY = (512, 1024), (4096, 14336), 4100
LEADING = ((1,), (1, 1), (2,), (8, 1), (2, 4), (16,), (32, 1), (40,), (0,), (65,), (3, 100), (1, MANY))
FEWER = ((1,), (2, 4), (32, 1), (1, MANY))
SHAPES = *((SMALL, leading) for leading in LEADING), *((LARGE, leading) for leading in FEWER), ((4096, 4096), (1,))


def around_of(kind, leading, n, k):
    given = {}
    if "norm" in kind:
        given |= {"norm": torch.ones(k, dtype=torch.bfloat16), "epsilon": 1e-5}
    if "residual" in kind:
        given["residual"] = torch.empty(*leading, n, dtype=torch.bfloat16)
    if "turned" in kind and len(leading) == 2:
        given["residual"] = torch.empty(*leading[::-1], n, dtype=torch.bfloat16).transpose(0, 1)
    if kind == "bias":
        given["bias"] = torch.empty(n, dtype=torch.bfloat16)
    return given | ({kind: True} if kind in ("gates", "gated") else {})


def of_linears():
    """Calls of a linear, of operands that are others each time, also where they lie otherwise."""
    for (name, (call, weight, kinds)), ((n, k), leading) in itertools.product(LINEARS.items(), SHAPES):
        tokens = math.prod(leading)
        for kind in kinds if tokens < MANY else ("", "residual") if "residual" in kinds else ("",):
            weights = [weight(n, k) for _ in "123"]
            width = k << (kind == "gated")
            same = [{"x": wide(*leading, width), **w, **around_of(kind, leading, n, k)} for w in weights]
            if not kind and tokens < 64 and (n, k) == SMALL:
                for lies in (moved, apart):
                    same.append(same[0] | {"x": lies(same[0]["x"])})
                same += [same[1] | {key: moved(t)} for key, t in same[1].items() if key != "x"]
                same.append(same[2])
            told = [*weights[0], *(["norm"] if "norm" in kind and tokens <= 16 else [])]
            yield (name, n, k, leading, kind), call, same, told if tokens else []


def of_normed():
    """Products behind a norm and an addition, of operands that are others each time and lie otherwise."""
    for (n, k), leading, kind, activations in itertools.product(
        (SMALL, (512, 4096)), ((40,), (3, 100), (1, MANY)), ("", "bias"), ("mxfp4", "fp8")
    ):
        call = operator(mxfp4_normed, epsilon=1e-5, activations=activations, settled=True)
        for adds in (False, True):
            same = []
            for _ in "12":
                given = {"x": wide(*leading, k), "norm": wide(k), **groups(n, k), **around_of(kind, leading, n, k)}
                same.append(given | ({"added": wide(*leading, k)} if adds else {}))
            same += [same[0] | {name: moved(same[0][name])} for name in same[0] if name != "bias"]
            told = [name for name in same[0] if name != "bias"]
            yield ("normed", n, k, leading, kind, activations, adds), call, same, told


def of_nothing():
    """Calls of weights without columns or rows, which launch nothing."""
    narrow = ((name, 512, 0, "") for name in LINEARS if "mxfp4" in name)
    for name, n, k, kind in (*narrow, ("int8", 0, 1024, "residual")):
        call, weight, _ = LINEARS[name]
        given = {"x": wide(3, 100, k)} | weight(n, k) | around_of(kind, (3, 100), n, k)
        yield (name, n, k), call, [given] * 2, []


def of_fp8():
    """Its quantizers and products in other blocks."""
    n, k = SMALL
    for tokens in (1, 16, 65, 300, MANY):
        for rows, turns, gated in ((1, True, False), (1, True, True), (1, False, False), (128, False, False)):
            how = {"block": (rows, 128), "transposed_scale": turns, "gated": gated}
            same = [{"x": x} for x in (wide(tokens, k), wide(tokens, k), apart(wide(tokens, k)))]
            yield (rows, turns, gated, k, tokens), operator(quantize_fp8_block, **how), same, ["x"]
        for kind, rows in itertools.product(("", "bias"), (1, 128)):
            how, size = {"a_block": (rows, 128), "b_settled": True}, (-(-tokens // rows), k // 128)
            held = ({"a": e4m3(tokens, k), "a_scale": torch.empty(size)} for _ in "12")
            same = [codes | blocks(n, k) | around_of(kind, (tokens,), n, k) for codes in held]
            yield (kind, rows, n, k, tokens), operator(fp8_block_gemm, **how), same, list(same[0])
        for size in (0, 128, k):
            ones = (torch.ones(size, dtype=torch.int8) if size else None for _ in "12")
            same = [{"x": wide(tokens, k), "signs": signs} for signs in ones]
            yield ("turned", size, k, tokens), turned, same, ["x", *["signs"] * bool(size)]


def placed(rows, columns, dtype, **given):
    """x where it lies in one way and another, as often as what else is given."""
    places = itertools.cycle((torch.clone, apart, moved, torch.clone))
    each = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)] or [{}] * 4
    return [{"x": place(wide(rows, columns).to(dtype))} | more for more, place in zip(each, places, strict=False)]


def of_training():
    """What a linear that trains calls: quantizers of x and of gradients, forth and turned, masks, products."""
    n, k = SMALL
    random, other = (3, 1 << 40), (1 << 40, 7)
    sizes = itertools.product(((32, 32), (96, 32), (256, 128)), (torch.bfloat16, torch.float32))
    for (tokens, width), dtype in sizes:
        what, how, rows = (tokens, width, dtype), {"hadamard": width}, partial(placed, tokens, k, dtype)
        quest = operator(hadamard_quantize_mxfp4, scale_rule="quest", clip_mask=True, **how)
        yield ("quest", what), quest, rows(), ["x"]
        for turned in (False, True):
            halves = operator(hadamard_quantize_mxfp4, scale_rule="absmax34", transpose=turned, **how)
            yield ("random", what, turned), halves, rows(random=[random, other, other, None, None]), ["x"]
            signs = [torch.ones(width) for _ in "1234"]
            yield ("signs", what, turned), halves, rows(signs=signs, random=[random] * 4), ["x", "signs"]
            del signs
        masks = [place(scales(tokens, k // 8)) for place in (torch.clone, apart, torch.clone)]
        yield (
            ("masked", what),
            operator(masked_hadamard, **how),
            rows(mask=masks, factor=[1.0, 1.0, 2.0]),
            ["x", "mask"],
        )
        del masks
        kinds = itertools.product((torch.clone, apart, moved), (torch.clone, moved), (random, other, None))
        same = [
            {"packed": a(scales(tokens, k // 2)), "scale": b(scales(tokens, k // 32)), "random": c} for a, b, c in kinds
        ]
        yield ("requantize", what), operator(requantize_mxfp4, **how), same, ["packed", "scale"]
        del same
        for exact in (False, True):
            of_both = (groups(tokens, k) | {f"b_{name}": t for name, t in groups(n, k).items()} for _ in "123")
            same = [dict(zip(("a", "a_scale", "b", "b_scale"), both.values(), strict=True)) for both in of_both]
            same += [same[0] | {name: moved(t)} for name, t in same[0].items()]
            yield ("product", what, exact), operator(mxfp4_product, exact=exact, dtype=dtype), same, list(same[0])
            del same
        for block, turned in (((1, 128), True), ((128, 128), False)):
            both_ways = operator(quantize_fp8_both_ways, block=block, transposed_scale=turned)
            yield ("both ways", what, block), both_ways, rows(), ["x"]
    for kind, tokens, width in itertools.product(("", "bias"), (64, 300), (128, 1024)):  # cuBLAS' and Triton's
        fastest = operator(fp8_block_gemm, a_block=(1, 128), b_block=(1, 128), backend="fastest")
        of_both = ({"a": e4m3(tokens, width), "b": e4m3(n, width)} | around_of(kind, (tokens,), n, width) for _ in "12")
        steps = {"a_scale": (tokens, width // 128), "b_scale": (n, width // 128)}
        same = [codes | {name: torch.empty(size) for name, size in steps.items()} for codes in of_both]
        yield ("fastest", kind, tokens, width), fastest, same, []
        del same


def options(**each):
    """All combinations of options, by name."""
    return [dict(zip(each, chosen, strict=True)) for chosen in itertools.product(*each.values())]


def of_options():
    """The same operands in calls that differ in an option: none finds what another was decided for."""
    n, k = SMALL
    flags, dtypes = (False, True), (torch.bfloat16, torch.float32)

    def calls(call, make, *kinds):
        operands = make()
        given = [operands | how for kind in kinds for how in kind]
        return call.__name__, call, given + given[::-1], []

    def x():
        return {"x": wide(256, k)}

    def both():
        parts = *groups(256, k).values(), *groups(n, k).values()
        return dict(zip(("a", "a_scale", "b", "b_scale"), parts, strict=True))

    turns = {"hadamard": (32, 64, 128), "transpose": flags}
    random = None, (1, 2), (1, 2, torch.zeros(2, dtype=torch.int64))
    quest = options(scale_rule=("quest", "even"), clip_mask=flags, **turns)
    yield calls(hadamard_quantize_mxfp4, x, quest, options(scale_rule=("absmax34",), random=random, **turns))
    turned = options(scale_rule=("absmax34", "floor"), hadamard=(32, 64), random=(None,))
    yield calls(requantize_mxfp4, lambda: groups(256, k), turned, options(hadamard=(32, 64), random=random[1:]))
    back = options(hadamard=(32, 64), factor=(1.0, 0.5), dtype=(None, *dtypes))
    yield calls(masked_hadamard, lambda: x() | {"mask": scales(256, k // 8)}, back)
    yield calls(mxfp4_product, both, options(exact=flags, dtype=dtypes))
    ways = options(block=((1, 128), (128, 128)), scale_rule=("exact", "bf16"), transposed_scale=flags, turned=flags)
    yield calls(fp8_codes, x, ways, options(gated=flags), options(block=((1, 0),)))
    added = options(added=("", "added", "turned"), epsilon=(1e-5, 1e-6), scale_rule=("exact", "bf16"))
    yield calls(normed, lambda: {"x": wide(256, k), "norm": wide(k), "beside": wide(256, k)}, added)
    into = options(activations=("mxfp4",), hadamard=(0, 32), added=("", "added", "turned"), epsilon=(1e-5, 1e-6))
    into += options(activations=("fp8",), scale_rule=("exact", "bf16"), added=("", "added"), epsilon=(1e-5,))
    into = [how | more for how in into for more in options(biased=flags, settled=flags)]
    for m in (256, MANY):
        behind = partial(
            lambda m: {"x": wide(m, k), "norm": wide(k), "beside": wide(m, k), "weight": weighted(n, k)}, m
        )
        yield calls(normed, behind, into)
    sizes = options(block=(128, k), scale=(None, 0.5), scale_rule=("exact", "bf16"), transposed_scale=flags)
    yield calls(hadamard_quantize_fp8, x, sizes)
    product = options(backend=("auto", "fastest"), out_dtype=dtypes, b_settled=flags)
    yield calls(fp8_block_gemm, lambda: e4m3_by_row(256, k) | blocks(n, k), product)
    by_rows = options(backend=("auto", "fastest"), a_block=((1, 128),), b_block=((1, 128),))
    yield calls(fp8_block_gemm, lambda: e4m3_by_row(256, k) | e4m3_by_row(n, k, "b"), by_rows)
    yield calls(hadamard_transform, x, options(block=(32, 128, None), scale=(None, 0.5)))
    codes = options(order=(None, 64), granularity=("block", "token"), scores=("fp8", "int8"))
    yield calls(rope_hadamard_quantize, lambda: codes_of(1, 300, 64, True), codes)
    yield calls(quantize_int4, lambda: {"x": wide(2, 3, 40, 128)}, options(group=(32, 64, 128)))
    kinds = options(activations=("mxfp4",), scale_rule=("even", "quest"), hadamard=(0, 32), settled=flags)
    kinds += options(activations=("fp8",), scale_rule=("exact", "bf16"), settled=flags)
    kinds += options(activations=("none",), settled=flags)
    yield calls(mxfp4_gemm, lambda: {"x": wide(1, k)} | groups(n, k), kinds)
    yield calls(mxfp4_gemm, lambda: {"x": wide(300, k)} | groups(n, k), kinds)
    gated = options(activations=("mxfp4", "fp8"), gated=(True,))
    yield calls(mxfp4_gemm, lambda: {"x": wide(MANY, 2 * 28672)} | groups(n, 28672), gated)


def of_transforms():
    """Rows turned: heads where they lie, blocks of a row, orders of one kernel and of several."""
    for width, block, dtype in (
        *itertools.product((64, 128, 512, 4096, 14336), (None,), (torch.bfloat16, torch.float16, torch.float32)),
        *((14336, block, torch.bfloat16) for block in (32, 128, 512, 1792)),
        (172 * 64, None, torch.bfloat16),
        (12, None, torch.bfloat16),
    ):
        for signs, rest in ((None, {}), (torch.int8, {}), (torch.float32, {}), (None, {"scale": 0.5})):
            x = torch.empty(1, 40, 8, width, dtype=dtype)
            places = [x, torch.zeros_like(x), x.transpose(1, 2), moved(x), apart(x), x[:, :0]]
            del x
            same = [{"x": t, "signs": signs and torch.ones(width, dtype=signs)} for t in places]
            del places
            call = operator(hadamard_transform, block=block, **rest)
            several = (width, dtype) in ((14336, torch.float32), (12, torch.bfloat16))  # kernels, of another copy
            told = ["x", "signs"] if signs == torch.int8 and not several else []
            yield (width, block, dtype, signs, rest), call, same, told


def behind_norms():
    """What linears launch behind a kernel of the norm's own, of tokens in adjacent rows and in others."""
    n, k = SMALL
    for (name, (call, weight, kinds)), tokens in itertools.product(LINEARS.items(), (2, 8, 20)):
        if "norm" in kinds:
            given = weight(n, k) | around_of("norm", (tokens,), n, k)
            of_both = (noted(call, x=x, **given)[0] for x in (wide(tokens, k), apart(wide(tokens, k))))
            yield name, tokens, *(launched[1:] for launched in of_both)


def of_between():
    """Norms and gates: of others each time."""
    for tokens, columns, added in itertools.product((1, 70), (256, 4096), (False, True)):
        found = []
        for _ in "123":
            given = {"x": wide(2, tokens, columns), "weight": wide(columns)}
            given["added"] = wide(2, tokens, columns) if added else None
            with torch.no_grad():
                found.append(noted(partial(between.try_norm, epsilon=1e-5), **given))
        yield (
            ("norm", tokens, columns, added),
            found,
            [("x", "x"), ("norm", "weight"), ("added", added and "added" or None)],
        )
        with torch.no_grad():
            found = [noted(between.try_gate, x=wide(tokens, columns)) for _ in "123"]
        yield ("gate", tokens, columns), found, [("x", "x")]


CALLS = (
    of_linears,
    of_normed,
    of_nothing,
    of_fp8,
    of_training,
    of_options,
    of_transforms,
    of_prompts,
    of_int4,
    of_int4_groups,
)


def main():
    pretend()
    compared = again = 0
    for what, found, told in itertools.chain(of_attention(), of_turns(), of_between(), of_growing()):
        compared += 1
        pairs = ((field, its(value) if isinstance(value, str) else value) for field, value in told)
        if found[1:] != found[:1] * 2 or any(repr(each) not in repr(found[0]) for each in pairs):
            print("differs:", what)
    apart_from_calls = append.READY, attention.READY, attention.PROMPTS, turn.READY, one_token.READY
    again += sum(map(len, (*apart_from_calls, between.NORMS, between.GATES)))
    for name, tokens, of_adjacent, of_others in behind_norms():
        if of_adjacent != of_others:
            print("differs:", name, tokens, "behind a norm of rows that lie apart")
    before, seen = None, []
    for what, call, same, told in itertools.chain(*(of() for of in CALLS)):
        if any(ref() is not None for ref in seen):
            print("differs:", before, "is held")
        before, seen = what, [weakref.ref(t) for given in same for t in given.values() if isinstance(t, torch.Tensor)]
        for ready in READY:
            ready.clear()
        for place, given in enumerate(same):
            with torch.enable_grad():  # by the operator
                expected = noted(call, **given)
            if place == 0 and any(repr(its(name)) not in repr(expected) for name in told):
                print("differs:", what, "launches nothing with one of", told)
            with torch.no_grad():
                compared += 1
                if noted(call, **given) != expected:
                    print("differs:", what, place)
        del given
        again += sum(len(ready) for ready in READY)
    print(f"compared {compared}, {again} of them kept")


if __name__ == "__main__":
    main()
