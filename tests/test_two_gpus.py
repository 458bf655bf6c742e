"""A model on the second GPU, and one that is spread over two, is the model on the first."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from quantrot import convert
from quantrot.kernels.fp8 import quantize_fp8_block
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.load import load
from quantrot.modules import train_in_fp8, train_in_mxfp4

RECIPES = ("fp8-block", "int8-weight-only", "hadamard-mxfp4", "quarot-w4a4kv4", "fp8-attention-rotated")
TOKENS = 24

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA GPU, and a second one"),
]


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    sizes = {"hidden": 512, "intermediate": 1024, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64}
    return tiny(tmp_path_factory.mktemp("two") / "model", dtype=torch.bfloat16, **sizes)


@pytest.fixture(scope="module", params=RECIPES)
def converted(source, tmp_path_factory, request):
    return convert(source, request.param, tmp_path_factory.mktemp(request.param) / "out").out


def answers(model, **options):
    """The logits of a prompt, then of each token that continues it."""
    prompt = torch.arange(2, 66, device=model.device).view(1, -1)
    given = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "return_dict_in_generate": True}
    with torch.no_grad():
        logits = model(prompt).logits
    made = model.generate(prompt, output_logits=True, pad_token_id=1, **given, **options)
    return logits.cpu(), made.sequences.cpu(), torch.stack(made.logits).cpu()


@pytest.mark.parametrize("cache", [None, "static"])
def test_the_second_gpu_gives_the_firsts_bits(converted, cache):
    first, second = (answers(load(converted, device_map=f"cuda:{i}"), cache_implementation=cache) for i in (0, 1))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_layers_on_two_gpus_continue_each_other(converted):
    # Several devices run a layer's norms and gate apart from its products: another order of the norm's sum.
    places = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    places |= {f"model.layers.{i}": i // 2 for i in range(4)}
    spread = load(converted, device_map=places)
    assert {str(p.device) for p in spread.parameters()} == {"cuda:0", "cuda:1"}
    logits, tokens, steps = answers(load(converted, device_map="cuda:0"))
    spread_logits, spread_tokens, spread_steps = answers(spread)
    assert torch.equal(spread_logits, logits)
    same = int((tokens == spread_tokens).int().cumprod(-1).sum()) - 64  # as long as both continue the same text
    assert same > 0
    torch.testing.assert_close(spread_steps[:same], steps[:same], rtol=0, atol=0.02 * steps.abs().max())


def test_automatic_places_use_both(converted):
    model = load(converted, device_map="balanced")
    assert {str(p.device) for p in model.parameters()} == {"cuda:0", "cuda:1"}
    assert torch.isfinite(answers(model)[0]).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_second_gpu_converts_to_the_firsts_bytes(source, tmp_path, recipe):
    files = [convert(source, recipe, tmp_path / str(i), device=f"cuda:{i}").out for i in (0, 1)]
    names = [[path.name for path in sorted(out.glob("*.safetensors"))] for out in files]
    assert names[0] == names[1] and names[0]
    assert all((files[0] / name).read_bytes() == (files[1] / name).read_bytes() for name in names[0])


def test_kernels_run_on_the_device_of_their_tensors():
    x = torch.randn(64, 1024)
    for run in (hadamard_transform, lambda t: quantize_fp8_block(t)[1]):
        first, second = (run(x.to(f"cuda:{i}", torch.bfloat16)).cpu() for i in (0, 1))
        assert torch.equal(first, second)


# --- Training --------------------------------------------------------------------------------------------------------


def in_training(kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=512, **sizes)).to("cuda", torch.bfloat16)
    (train_in_fp8 if kind == "fp8" else train_in_mxfp4)(model)
    return model


def texts(rank):
    return (torch.arange(4 * 128).view(4, 128) * 7 + rank * 13).cuda() % 512


def trained(run, model, ranks):
    """The mean loss of five steps, each on the texts of these ranks."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(5):
        losses.append(0.0)
        for rank in ranks:
            loss = run(texts(rank), labels=texts(rank)).loss / len(ranks)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses)


def one_of_two(rank, kind, how, folder):
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    model = run = in_training(kind)
    if how == "ddp":
        run = DistributedDataParallel(model, device_ids=[rank])
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=policy)
    losses = trained(run, model, [rank]).cuda()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    if rank == 0:
        torch.save(losses.cpu(), folder / "losses")
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_two_gpus_train_as_one(tmp_path, kind, how):
    """MXFP4's gradients are rounded by other random numbers on each rank."""
    model = in_training(kind)
    alone = trained(model, model, [0, 1])
    processes.spawn(one_of_two, (kind, how, tmp_path), nprocs=2)
    together = torch.load(tmp_path / "losses")
    assert together[-1] < together[0] - 1
    torch.testing.assert_close(together, alone, rtol=0.005 if kind == "fp8" else 0.05, atol=0)
