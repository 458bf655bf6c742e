"""A prompt without a mask is the prompt with one, and every other case keeps its mask; cuDNN where its plans pay."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from quantrot.modules import sdpa as attention


@pytest.fixture
def models(monkeypatch):
    """The same small model in sdpa and without masks, and a list of whether each layer's call of the second had one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sdpa = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=97, **sizes)).eval()
    ours, masked = copy.deepcopy(sdpa), []

    def noted(module, q, k, v, mask, **options):
        masked.append(mask is not None)
        return attention.sdpa_attention_forward(module, q, k, v, mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.IMPLEMENTATION, noted)
    attention.leave_masks_out(ours)
    return sdpa, ours, masked


@torch.no_grad()
@pytest.mark.parametrize("case", ["plain", "no cache", "padded", "packed", "second part"])
@pytest.mark.parametrize("compiled", [False, True])
def test_logits_are_sdpas_with_a_mask_only_where_it_says_something(models, case, compiled):
    sdpa, ours, masked = models
    ids = torch.randint(0, 97, (2, 9))
    options, keep = {}, torch.ones(2, 9, dtype=torch.bool)
    if case == "no cache":
        options["use_cache"] = False
    elif case == "padded":
        keep[0, :3] = False
        options["attention_mask"] = keep.long()
    elif case == "packed":
        options |= {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), "use_cache": False}
    run = torch.compile(ours.forward, backend="eager", fullgraph=True) if compiled else ours.forward
    if case == "second part":  # queries that see earlier keys, too
        expected = sdpa(ids[:, 5:], past_key_values=sdpa(ids[:, :5]).past_key_values).logits
        past = ours(ids[:, :5]).past_key_values
        masked.clear()
        assert torch.equal(run(ids[:, 5:], past_key_values=past).logits, expected) and masked == [True, True]
        return
    assert torch.equal(run(ids, **options).logits[keep], sdpa(ids, **options).logits[keep])
    # Compiled and without a cache, transformers asks for packed sequences' mask whatever the positions are.
    assert masked == [case in ("padded", "packed") or (compiled and case == "no cache")] * 2


def test_another_implementation_is_left_alone_and_nothing_is_saved(models, tmp_path):
    _, ours, _ = models
    assert ours.config._attn_implementation == attention.IMPLEMENTATION
    ours.save_pretrained(tmp_path)
    assert attention.IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    ours.set_attn_implementation("eager")
    attention.leave_masks_out(ours)
    assert ours.config._attn_implementation == "eager"


def test_continuous_batching_runs_on_sdpa_and_a_copy_is_its_own(models):
    sdpa, ours, _ = models
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5, 6, 7, 8], [1, 2, 3]]

    def tokens(model):
        small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # or it takes most of the memory there is
        options = {"generation_config": config, "continuous_batching_config": small, "progress_bar": False}
        found = model.generate_batch(prompts, **options)
        return [each.generated_tokens for _, each in sorted(found.items())]

    other = copy.deepcopy(ours)
    assert tokens(other) == tokens(sdpa)
    assert ours.config._attn_implementation == attention.IMPLEMENTATION
    assert tokens(pickle.loads(pickle.dumps(ours))) == tokens(sdpa)


# --- cuDNN's plans ---------------------------------------------------------------------------------------------------


def heads(tokens: int, count: int = 32, batch: int = 1):
    return torch.empty(batch, count, tokens, 128, dtype=torch.bfloat16, device="meta")


LLAMA_8B = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=32))


@pytest.mark.parametrize(
    ("queries", "keys", "mask", "left_out"),
    [
        (1, 70000, False, True),
        (1, 70000, True, True),
        (512, 512, False, True),
        (8192, 8192, False, True),
        (16384, 16384, False, False),
        (2048, 2048, True, True),
        (8192, 8192, True, False),
    ],
)
def test_a_plan_is_made_where_a_prompt_gains_more(queries, keys, mask, left_out):
    q, k = heads(queries), heads(keys, 8)
    assert attention.leaves_cudnn_out(LLAMA_8B, q, k, heads(queries) if mask else None) == left_out
    assert attention.leaves_cudnn_out(LLAMA_8B, heads(queries, batch=64), k, None) == (queries == 1 or queries == 512)


@pytest.mark.parametrize(("turned_off", "mask"), [("cudnn", False), ("flash", False), ("mem_efficient", True)])
def test_what_somebody_turned_off_stays_off(turned_off, mask):
    given = LLAMA_8B, heads(1), heads(9, 8), heads(1) if mask else None
    assert attention.leaves_cudnn_out(*given)
    enable = getattr(torch.backends.cuda, f"enable_{turned_off}_sdp")
    enable(False)
    try:
        assert not attention.leaves_cudnn_out(*given)
    finally:
        enable(True)


@pytest.mark.gpu
@torch.no_grad()
def test_tokens_and_prompts_run_without_cudnn_and_it_comes_back():
    config = LlamaConfig(num_hidden_layers=1, vocab_size=97, hidden_size=512, num_attention_heads=4, head_dim=128)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 97, (2, 100), device="cuda")

    def kernels(**given):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            past = model(ids, **given).past_key_values
            model(ids[:, :1], past_key_values=past)
        return [
            event.name
            for event in seen.events()
            if "sdpa" in event.name or "fmha" in event.name or "flash" in event.name
        ]

    padded = {"attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0], device="cuda"), 0)}
    theirs = [kernels(), kernels(**padded)]
    attention.leave_masks_out(model)
    ours = [kernels(), kernels(**padded)]
    assert all(ours) and not any("cudnn" in name for names in ours for name in names), ours
    if torch.cuda.get_device_capability() == (9, 0):
        assert any("cudnn" in name for names in theirs for name in names), theirs
    assert torch.backends.cuda.cudnn_sdp_enabled()


@torch.no_grad()
def test_cudnn_comes_back_after_an_error_too(models, monkeypatch):
    _, ours, _ = models
    seen = []

    def sdpa(module, query, key, value, mask, **kwargs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        raise RuntimeError("out of memory")

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    q = torch.ones(1, 4, 3, 16).as_subclass(OnGpu)
    for grad, expected in ((False, False), (True, True)):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="memory"):
            attention.attend(ours.model.layers[0].self_attn, q, q, q, None)
        assert seen.pop() is expected and torch.backends.cuda.cudnn_sdp_enabled()
