"""Calls of attention, of heads and of caches for recorded.py."""

import itertools
from functools import partial

import torch

from quantrot.kernels import attention, int4
from quantrot.kernels import hadamard as transforms
from quantrot.kernels.attention import Quantized, append, attend, int4_token, one_token, rope_hadamard_quantize, turn
from quantrot.kernels.attention.reference import Turn, key_rows
from quantrot.kernels.int4 import dequantize_int4, quantize_int4
from tests.kernels.operands import apart, e4m3, moved, operator, scales, wide
from tests.kernels.pretended import noted

READY = attention.READY, attention.PROMPTS, attention.QUANTIZERS, int4_token.READY, int4.READY, transforms.READY
INT4 = ("key", "key_scale", "key_low", "value", "value_scale", "value_low")


def of_attention():
    """One token's place in a cache, and its attention: by the operators, found, found again; and which of the operands
    a launch has the addresses of."""
    heads, groups, room = 8, 2, 256
    for batch, dim, turned in itertools.product((1, 4), (64, 128), (False, True)):
        caches = [
            {
                "key": scales(batch, groups, room, dim),
                "key_scale": scales(batch, groups, room),
                "value": scales(batch, groups, dim, room),
                "value_scale": scales(batch, groups, room),
            }
            for _ in "12"
        ]
        signs, count = torch.ones(dim, dtype=torch.int8) if turned else None, torch.zeros((), dtype=torch.int64)
        for cache, (length, advance) in itertools.product(caches, ((7, True), (count, True), (count, False))):
            how = {"limit": 250, "order": dim * turned, "signs": signs, "advance": advance, "length": length}
            found = []
            for call in (append.rope_hadamard_append, append.try_append, append.try_append):
                wide = torch.empty(batch, 1, heads + 2 * groups, dim, dtype=torch.bfloat16)
                moving = dict(zip("qkv", wide.split([heads, groups, groups], 2), strict=True))
                moving |= {name: torch.empty(1, 1, dim, dtype=torch.bfloat16) for name in ("cos", "sin")}
                with torch.no_grad():
                    found.append(noted(call, **moving, **cache, **how))
            place = ("count", "length") if length is count else ("at", 7)
            told = [*((name, name) for name in (*moving, *cache)), place, ("advance", int(length is count and advance))]
            yield ("append", batch, dim, turned, place, advance), found, [*told, *[("signs", "signs")] * turned]
    for batch, dim, masked, counted in itertools.product((1, 4), (64, 128), (False, True), (False, True)):
        cache = {"k": e4m3(batch, groups, room, dim), "k_scale": scales(batch, groups, room)}
        cache |= {"v": e4m3(batch, groups, dim, room), "v_scale": scales(batch, groups, room)}
        found = []
        for call in range(3):
            moving = {"q": e4m3(batch, heads, 1, dim), "q_scale": scales(batch, heads, 1)}
            moving["mask"] = torch.ones(batch, 1, 1, room, dtype=torch.bool) if masked else None
            moving["lengths"] = torch.full((batch,), 9, dtype=torch.int32) if counted else None
            with torch.enable_grad() if call == 0 else torch.no_grad():
                found.append(noted(attended, **moving, **cache))
        told = [(name, name if t is not None else None) for name, t in moving.items()]
        yield ("attend", batch, dim, masked, counted), found, [*told, ("k_scale", "k_scale"), ("v_scale", "v_scale")]


def of_turns():
    """RoPE and R3 of heads: of others each time, and which of them the launch has the addresses of."""
    for batch, tokens, dim, rope, signs in itertools.product((1, 3), (1, 40), (64, 128), (False, True), (False, True)):
        found = []
        for _ in "123":
            given = dict(zip("qkv", wide(batch, tokens, 12, dim).split([8, 2, 2], 2), strict=True))
            given |= {name: wide(1, tokens, dim) if rope else None for name in ("cos", "sin")}
            given["signs"] = torch.ones(dim, dtype=torch.int8) if signs else None
            with torch.no_grad():
                found.append(noted(turned_heads, **given))
        told = [(name, name if given[name] is not None else None) for name in ("q", "k", "cos", "sin", "signs")]
        yield ("turn", batch, tokens, dim, rope, signs), found, told


def turned_heads(q, k, v, cos, sin, signs):
    return turn.try_turn(q, k, Turn(cos, sin, q.shape[-1], signs))


def of_growing():
    """A token and a cache that grows: others each time."""
    for batch, dim, masked, norms, at in itertools.product((1, 3), (64, 128), (False, True), (False, True), (0, 99)):
        found = []
        for _ in "123":
            given = dict(zip("qkv", wide(batch, 1, 12, dim).split([8, 2, 2], 2), strict=True))
            given |= {name: wide(1, 1, dim) for name in ("cos", "sin")}
            given |= {name: wide(batch, 2, 256, dim) for name in ("keys", "values")}
            given |= {name: wide(dim) if norms else None for name in ("q_norm", "k_norm")}
            given["mask"] = torch.ones(batch, 1, 1, at + 1, dtype=torch.bool) if masked else None
            with torch.no_grad():
                found.append(noted(partial(grown, at=at), **given))
        told = [(name, name if given[name] is not None else None) for name in given]
        yield ("growing", batch, dim, masked, norms, at), found, [*told, ("at", at), ("count", None)]


def grown(q, k, v, cos, sin, keys, values, q_norm, k_norm, mask, at):
    norms = None if q_norm is None else (q_norm, k_norm)
    how = {"mask": mask, "norms": norms, "epsilon": 1e-5, "scale": 0.1, "settled": True}
    return one_token.try_attend_one(q, k, v, cos, sin, keys, values, at, **how)


def codes_of(batch, tokens, dim, angles):
    q, k, v = wide(batch, tokens, 12, dim).split([8, 2, 2], 2)
    return {"q": q, "k": k, "v": v} | {name: wide(1, tokens, dim) if angles else None for name in ("cos", "sin")}


def quantized(batch, tokens, dim, counted, as_they_are):
    """Of eight heads' queries, in codes or as they are, and two heads' keys and values."""
    blocks = -(-tokens // 128)
    given = {"q": e4m3(batch, 8, tokens, dim), "q_scale": scales(batch, 8, tokens)}
    if as_they_are:
        given = {"q": wide(batch, tokens, 8, dim).transpose(1, 2), "q_scale": scales(batch, 8, 0)}
    given |= {"k": e4m3(batch, 2, key_rows(tokens), dim)[:, :, :tokens], "v": e4m3(batch, 2, dim, 128 * blocks)}
    given |= {name: scales(batch, 2, blocks) for name in ("k_scale", "v_scale")}
    return given | {"mask": None, "lengths": torch.full((batch,), 9, dtype=torch.int32) if counted else None}


def attended(mask, lengths, **given):
    return attend(Quantized(**given), causal=mask is None, mask=mask, lengths=lengths)


def of_prompts():
    """A prompt's codes, and its attention."""
    for batch, dim, tokens, turns in itertools.product((1, 2), (64, 128), (65, 300), (False, True)):
        call = operator(rope_hadamard_quantize, order=dim if turns else None)
        same = [codes_of(batch, tokens, dim, angles) for angles in (True, True, False, False)]
        yield ("codes", batch, dim, tokens, turns), call, same, list(same[0])
        kinds = itertools.product((False, True), (False, True), "12")
        same = [quantized(batch, tokens, dim, counted, as_they_are) for counted, as_they_are, _ in kinds]
        told = ["q", "q_scale", "k", "k_scale", "v", "v_scale"]
        yield ("attention", batch, dim, tokens, turns), attended, same, told


def of_int4():
    """A token and an INT4 cache."""
    for batch, dim, counted, advance in itertools.product((1, 3), (64, 96, 128), (False, True), (False, True)):
        same = [token_and_int4(batch, dim, counted, *how) for how in ((9, 0), (100, 0), (9, 1), (100, 3), (9, batch))]
        told = ["q", "k", "v", *(("cos", "sin") if dim != 96 else ()), *INT4]
        yield ("int4", batch, dim, counted), operator(int4_attended, advance=advance), same, told


def token_and_int4(batch, dim, counted, at, rows):
    """rows: of the mask; 3: one that lies once for all sequences."""
    given = dict(zip("qkv", (t.transpose(1, 2) for t in wide(batch, 1, 12, dim).split((8, 2, 2), 2)), strict=True))
    turned = dim != 96  # whose kernel is Triton's
    given |= {name: wide(batch if rows == 1 else 1, 1, dim) if turned else None for name in ("cos", "sin")}
    for name in INT4:
        size = batch, 2, 256
        given[name] = wide(*size, dim // 64) if "_" in name else torch.empty(*size, dim // 2, dtype=torch.uint8)
    mask = torch.ones(1 if rows == 3 else rows, 1, 1, 256 if counted else at + 1, dtype=torch.bool) if rows else None
    given["mask"] = mask.expand(batch, -1, -1, -1) if rows == 3 else mask
    return given | {"length": torch.tensor(at) if counted else at}


def int4_attended(q, k, v, cos, sin, mask, length, advance, **cache):
    how = {
        "limit": 256,
        "turn": Turn(cos, sin, 0 if cos is None else q.shape[-1]),
        "mask": mask,
        "scale": 0.1,
        "advance": advance,
    }
    return int4_token.try_attend_one(q, k, v, tuple(cache.values()), length, **how)


def of_int4_groups():
    """Keys quantized and back, where heads lie beside tokens, in a part of a cache's room, and apart."""
    for width, group in ((64, 64), (128, 64), (96, 32), (160, 80)):
        heads = 2, 3, 40
        same = [{"x": place(wide(*heads, width))} for place in (torch.clone, apart, moved, swapped, room_of)]
        yield ("to int4", width, group), operator(quantize_int4, group=group), same, ["x"]
        names = dict(zip(("codes", "scale", "low"), (width // 2, width // group, width // group), strict=True))
        kinds = [dict(zip(names, (torch.uint8, kind, kind), strict=True)) for kind in (torch.bfloat16, torch.float32)]
        for dtype in (torch.bfloat16, torch.float32):
            same = [
                {name: place(torch.empty(*heads, names[name], dtype=kind[name])) for name in names}
                for kind, place in itertools.product(kinds, (torch.clone, swapped, room_of))
            ]
            yield ("from int4", width, group, dtype), operator(dequantize_int4, dtype=dtype), same, list(names)


def swapped(t):
    """The same, of which tokens are outside and heads inside."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def room_of(t):
    """The same with room for more tokens behind."""
    return torch.empty(*t.shape[:2], 100, t.shape[3], dtype=t.dtype)[:, :, : t.shape[2]]
