"""A prompt without a mask is the prompt with one, and every other case keeps its mask."""

import copy
import pickle

import pytest
import torch
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from quantrot.modules import masks


@pytest.fixture
def models(monkeypatch):
    """The same small model in sdpa and without masks, and a list of whether each layer's call of the second had one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sdpa = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=97, **sizes)).eval()
    ours, masked = copy.deepcopy(sdpa), []

    def noted(module, q, k, v, mask, **options):
        masked.append(mask is not None)
        return masks.sdpa_attention_forward(module, q, k, v, mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, masks.IMPLEMENTATION, noted)
    masks.leave_masks_out(ours)
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
    assert ours.config._attn_implementation == masks.IMPLEMENTATION
    ours.save_pretrained(tmp_path)
    assert masks.IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    ours.set_attn_implementation("eager")
    masks.leave_masks_out(ours)
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
    assert ours.config._attn_implementation == masks.IMPLEMENTATION
    assert tokens(pickle.loads(pickle.dumps(ours))) == tokens(sdpa)
