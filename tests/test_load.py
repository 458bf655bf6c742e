"""Loading: ready to use, and refused where it could be wrong. (Damaged files are in test_bad_checkpoints.)"""

import copy
import gc
import json
import pickle
import shutil
import sys
import threading
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import PagedAttentionCache

from quantrot import convert, load, verify
from quantrot.checkpoint import INDEX
from quantrot.device import devices_of
from quantrot.evals.logits import next_token_logits
from quantrot.load import open_model
from quantrot.modules import Fp8Linear, Fp8TrainingLinear, Int8Linear, Mxfp4Linear, QuantizedLinear, RotatedLinear

IDS = torch.arange(2, 26).view(2, 12)  # without 0, which generate would take for padding


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(
        tmp_path_factory.mktemp("model") / "source", hidden=128, intermediate=256, kv_heads=4, dtype=torch.bfloat16
    )


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "online"
    return convert(source, "quarot-mxfp4-online", out).out


@pytest.mark.parametrize(
    "recipe, kind", [("fp8-block", Fp8Linear), ("mxfp4", Mxfp4Linear), ("int8-weight-only", Int8Linear)]
)
def test_modules_hold_what_is_on_disk(source, tmp_path, recipe, kind):
    from safetensors.torch import load_file

    convert(source, recipe, tmp_path / "out")
    model = load(tmp_path / "out", device_map="cpu")
    linears = [m for name, m in model.named_modules() if isinstance(m, QuantizedLinear) and "merged" not in name]
    assert len(linears) == 14 and all(type(m) is kind for m in linears)
    stored = load_file(tmp_path / "out/model.safetensors")
    state = model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[k].view(torch.uint8), stored[k].view(torch.uint8)) for k in stored)


def test_what_turns_its_input_is_no_linear_for_others(tiny, tmp_path):
    """peft merges W + B A into an nn.Linear, where x A^T was of the input before it is turned."""
    source = tiny(tmp_path / "model", mlp_bias=True)
    out = convert(source, {"rotations": {"R4": {"kind": "hadamard"}}, "linear": []}, tmp_path / "out").out
    model, base = load(out, device_map="cpu"), AutoModelForCausalLM.from_pretrained(source)
    down = model.model.layers[0].mlp.down_proj
    assert type(down) is RotatedLinear and not isinstance(down, nn.Linear)
    assert list(down.state_dict()) == ["weight", "bias", "R4_input.weight"]
    assert down.weight.requires_grad and down.bias.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, base(IDS).logits, rtol=1e-3, atol=1e-3)


def test_generate_continues_as_the_forward_says(converted):
    model = load(converted, device_map="cpu", dtype="float32")
    out = model.generate(IDS[:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
    for position in range(IDS.shape[1], out.shape[1]):
        with torch.no_grad():
            full = model(out[:, :position], use_cache=False).logits[0, -1]
        assert full.argmax() == out[0, position]


def test_generate_is_exact_with_r3_in_the_cache(tiny, tmp_path):
    source = tiny(tmp_path / "model")
    convert(source, {"rotations": {"R3": {"kind": "hadamard"}}}, tmp_path / "out")
    model, base = load(tmp_path / "out", device_map="cpu"), AutoModelForCausalLM.from_pretrained(source)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(IDS[:1], **options), base.generate(IDS[:1], **options))


def test_torch_compile_gives_eager_logits(converted):
    model = load(converted, device_map="cpu", dtype=torch.float32)
    with torch.no_grad():
        eager = model(IDS, use_cache=False).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(IDS, use_cache=False).logits
    assert (eager - compiled).abs().max() <= 1e-4 * eager.abs().max()


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_sends_no_quantized_weights(source, tmp_path, alone):
    """e4m3 cannot be sent by gloo. What took the place of a quantized linear is DDP's, as its gradients are."""
    model = load(convert(source, "fp8-block", tmp_path / "out").out, device_map="cpu").requires_grad_(False)
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Fp8TrainingLinear.of(mlp.down_proj).requires_grad_(True)
    for each in (model, copy.deepcopy(model)):
        ddp = DistributedDataParallel(each)
        left = {name for name, _ in each.named_parameters()} & ddp.parameters_to_ignore
        assert len(left) == 2 * 13 and not any("layers.1.mlp.down_proj" in name for name in left)
        ddp(IDS).logits.sum().backward()
        assert each.model.layers[1].mlp.down_proj.weight.grad is not None


class Around(nn.Module):
    """As peft's modules, whose attributes are those of what they hold, too."""

    def __init__(self, **held):
        super().__init__()
        for name, module in held.items():
            self.add_module(name, module)

    def __getattr__(self, name):
        if name != "_ddp_params_and_buffers_to_ignore":
            return super().__getattr__(name)
        return getattr(next(self.children()), name)

    def forward(self, *args):
        return next(self.children())(*args)


@pytest.mark.parametrize("wrap", [lambda m: Around(base_model=m), lambda m: Around(base_model=Around(model=m))])
def test_ddp_sends_none_of_those_in_pefts_wrappers(source, tmp_path, wrap, alone):
    """Of prompt tuning and of LoRA."""
    model = load(convert(source, "fp8-block", tmp_path / "out").out, device_map="cpu").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    wrapped = wrap(model)
    ddp = DistributedDataParallel(wrapped)
    assert len({name for name, _ in wrapped.named_parameters()} & ddp.parameters_to_ignore) == 2 * 14
    ddp(IDS).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_accelerate_device_map_with_offload(converted, tmp_path):
    """A map of several devices goes through accelerate's hooks; the disk is the second device a CPU has."""
    whole = load(converted, device_map="cpu")
    split = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    split |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = load(converted, device_map=split, offload_folder=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, whole(IDS).logits)
        with pytest.raises(ValueError, match="holds tensors of a model that is in use; give each its own folder"):
            load(converted, device_map=split, offload_folder=tmp_path / "." / "")
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(OSError, match="Too many levels of symbolic links: .*loop"):
            load(converted, device_map=split, offload_folder=tmp_path / "loop")
        other = load(converted, device_map=split, offload_folder=tmp_path / "other")
        assert torch.equal(model(IDS).logits, other(IDS).logits)
    with pytest.raises(ValueError, match="device_map: modle is no module of this model; did you mean model?"):
        load(converted, device_map={"model": "cpu", "lm_head": "cpu", "modle": "cpu"})


def test_threads_load_and_others_build_their_modules_meanwhile(converted):
    """What has no memory is the model that is loaded, in the thread that loads it."""
    registers, stop, elsewhere, loaded = nn.Module.register_parameter, threading.Event(), set(), []

    def build():
        while not stop.is_set():
            elsewhere.add(nn.Linear(4, 4).weight.device.type)

    def read():
        for _ in range(3):
            loaded.append(load(converted, device_map="cpu"))

    builder, readers = threading.Thread(target=build), [threading.Thread(target=read) for _ in range(3)]
    for thread in (builder, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    builder.join()
    assert elsewhere == {"cpu"} and nn.Linear(2, 2).weight.device.type == "cpu" and len(loaded) == 9
    assert nn.Module.register_parameter is registers and torch.get_default_dtype() == torch.float32
    with torch.no_grad():
        assert all(torch.equal(model(IDS).logits, loaded[0](IDS).logits) for model in loaded)


def test_a_map_names_a_place_for_every_parameter_that_can_read_it(tiny, tmp_path):
    out = convert(tiny(tmp_path / "model", tied=True), "mxfp4", tmp_path / "out").out
    for device_map in ({}, {"model": "cpu"}):
        missing = "lm_head" if device_map else "model.embed_tokens"
        with pytest.raises(ValueError, match=f"device_map has no place for {missing}.weight; name its module"):
            load(out, device_map=device_map)
    places = {"model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    apart = places | {"model.embed_tokens": "disk", "lm_head": "cpu"}
    for head in ("cpu", "disk"):
        with pytest.raises(ValueError, match="sends model.embed_tokens to disk, and it is the head, too; keep both on"):
            load(out, device_map=apart | {"lm_head": head}, offload_folder=tmp_path / "offloaded")
    for within in ({"": "cpu", "model.norm": "disk"}, places | {"model": "disk", "lm_head": "cpu"}):
        with pytest.raises(ValueError, match="has several places for model.*, one of them disk; name modules apart"):
            load(out, device_map=within, offload_folder=tmp_path / "offloaded")
    with pytest.raises(ValueError, match="sends lm_head to disk, and it is the embedding, too; keep both on a device"):
        load(out, device_map=places | {"model.embed_tokens": "cpu", "lm_head": "disk"}, offload_folder=tmp_path)
    model = load(out, device_map=apart | {"model.embed_tokens": "cpu"}, offload_folder=tmp_path / "offloaded")
    assert model(IDS).logits.isfinite().all()


def test_float64_weights_are_decoded_to_float32(tiny, tmp_path):
    source = tiny(tmp_path / "model", hidden=128, intermediate=256, dtype=torch.float64)
    out = convert(source, "mxfp4-weight-only", tmp_path / "out").out
    with torch.no_grad():
        wide, single = (load(out, device_map="cpu", dtype=dtype)(IDS).logits for dtype in ("auto", "float32"))
    torch.testing.assert_close(wide.float(), single, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "hadamard-mxfp4", "fp8-attention", {"kv_cache": "int4"}])
def test_float64_is_loaded_as_float32_where_more_than_weights_is_quantized(tiny, tmp_path, recipe):
    """No quantizer takes float64. What narrows weights alone, or nothing, keeps it."""
    source = tiny(tmp_path / "model", hidden=128, intermediate=256, dtype=torch.float64)
    model = load(convert(source, recipe, tmp_path / "out").out, device_map="cpu")
    assert model.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, load(tmp_path / "out", device_map="cpu", dtype="float32")(IDS).logits)
    assert load(convert(source, "rotate-only", tmp_path / "wide").out, device_map="cpu").dtype == torch.float64


@pytest.mark.parametrize(
    ("field", "value", "fails"),
    [
        ("attention_dropout", "much", True),
        ("_attn_implementation", "flash_attention_2", False),
    ],
)
def test_a_config_that_transformers_refuses_is_an_error_of_the_user(tiny, tmp_path, field, value, fails):
    source = tiny(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {field: value}))
    out = convert(source, "rotate-only", tmp_path / "out").out
    if fails:
        with pytest.raises(ValueError, match=r"out/config\.json: transformers cannot build the model: "):
            load(out, device_map="cpu")
    else:
        assert load(out, device_map="cpu").config._attn_implementation != value


def test_what_goes_to_disk_needs_a_folder_and_the_files_dtype(converted, tmp_path):
    split = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    split |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    with pytest.raises(ValueError, match="offload_folder: None, but device_map sends modules to disk; give a folder"):
        load(converted, device_map=split)
    stored = load(converted, device_map="cpu").dtype
    for dtype in {torch.float32, torch.bfloat16} - {stored}:
        with pytest.raises(ValueError, match=f"dtype: {dtype}; modules on disk stay {stored}"):
            load(converted, device_map=split, dtype=dtype, offload_folder=tmp_path)
    model = load(converted, device_map=split, dtype=stored, offload_folder=tmp_path)
    assert torch.equal(model(IDS).logits, load(converted, device_map="cpu")(IDS).logits)


@pytest.mark.parametrize("device_map", [None, torch.device("cpu"), {"": torch.device("cpu")}])
def test_a_device_is_what_torch_and_transformers_call_one(converted, device_map):
    assert load(converted, device_map=device_map).device.type == "cpu"


def test_a_device_that_is_not_there_is_an_error_of_the_user(converted):
    with pytest.raises(ValueError, match="device is 'cuda:77', and there"):
        load(converted, device_map=77)
    with pytest.raises(ValueError, match="device_map sends the whole model to disk; keep a part of it on a device"):
        load(converted, device_map={"": "disk"})


@pytest.mark.parametrize("device_map", [{"": 7}, {"": "cuda:7"}, {"model": "cpu", "lm_head": 7}])
def test_a_device_of_a_map_that_is_not_there_is_one_too(converted, device_map):
    with pytest.raises(ValueError, match="^device is 'cuda:7', and there is"):
        load(converted, device_map=device_map)


def test_a_model_from_a_hub_whose_card_was_edited_is_loaded(converted, tmp_path, monkeypatch):
    snapshot = shutil.copytree(converted, tmp_path / "snapshot")
    (snapshot / "README.md").write_text("Better words.")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(snapshot))
    assert load("owner/name@main", device_map="cpu").config._name_or_path == str(snapshot)
    with pytest.raises(ValueError, match="is no directory; give one, a hub id"):
        load(tmp_path / "nothing here")


def test_dtype_is_of_what_is_not_quantized(converted):
    model = load(converted, device_map="cpu", dtype="float32")
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.down_proj.weight_packed.dtype == torch.uint8
    with pytest.raises(ValueError, match="dtype is 'int3'; allowed: auto, float32, bfloat16, float16"):
        load(converted, dtype="int3")
    with pytest.raises(ValueError, match="dtype is torch.float64; allowed: auto, float32, bfloat16, float16"):
        load(converted, dtype=torch.float64)


def test_open_model_takes_converted_and_plain(source, converted):
    for path in (source, converted):
        model, tokenizer = open_model(path, device="cpu")
        ids = tokenizer("hello", return_tensors="pt").input_ids
        with torch.no_grad():
            assert model(ids).logits.isfinite().all()
    assert not model.training


def test_a_model_that_is_none_or_is_cut_off_is_named(source, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: missing; a Hugging Face checkpoint directory has"):
        open_model(tmp_path, device="cpu")
    cut = shutil.copytree(source, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model '.*cut': transformers cannot load it: .*header"):
        open_model(cut.parent, device="cpu")


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}, {"metadata": []}])
def test_an_index_without_metadata_is_converted_and_named_where_transformers_reads_it(tiny, tmp_path, metadata):
    model = tiny(tmp_path / "model", max_shard_size="150KB")
    index = json.loads((model / INDEX).read_text())
    (model / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]} | metadata))
    out = convert(model, "int8-weight-only", tmp_path / "out").out
    with pytest.raises(ValueError, match=r'index\.json: metadata is .*: add "metadata": {} beside weight_map$'):
        open_model(model, device="cpu")
    assert not verify(out, device="cpu", seq_len=64, count=1).failures
    (model / INDEX).write_text(json.dumps({"weight_map": index["weight_map"], "metadata": {}}))
    open_model(model, device="cpu")


def test_a_model_of_which_a_part_would_be_drawn_at_random_is_not_evaluated(source, tmp_path):
    lacking, other = (Path(shutil.copytree(source, tmp_path / name)) for name in ("lacking", "other"))
    stored = load_file(lacking / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"], stored["model.norm.weight"]
    save_file(stored, lacking / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacking: 2 tensors are missing .*: model\.layers\.1\.mlp\.up_proj\."):
        open_model(lacking, device="cpu")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 7}))
    with pytest.raises(ValueError, match=r"other: .* has shape \(\d+, \d+\); its config implies \(\d+, \d+\)"):
        open_model(other, device="cpu")
    with pytest.raises(ValueError, match=r"quantrot\.json: missing, so this is no whole converted model; convert it"):
        load(source)


@pytest.mark.parametrize("recipe", ["quarot-mxfp4-online", {"attention": "fp8"}])
def test_an_adapter_for_what_transformers_does_not_run_is_put_on_our_model(source, recipe, tmp_path, monkeypatch):
    out, adapter = convert(source, recipe, tmp_path / "out").out, tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(source / "tokenizer.json", adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(out)}))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"adapter: an adapter of peft, which is not installed; pip install peft"):
        open_model(adapter, device="cpu")
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(__spec__=object()))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: missing; save the adapter as safetensors"):
        open_model(adapter, device="cpu")
    save_file({"b": torch.ones(1)}, adapter / "adapter_model.safetensors")
    missing: list[str] = []

    def load_adapter(model, path, **options):
        if missing == ["all"]:
            raise ValueError("Target module is not supported")
        model.lm_head.weight.data += load_file(Path(path) / "adapter_model.safetensors")["b"]
        return SimpleNamespace(missing_keys=missing, mismatched_keys=[])

    monkeypatch.setattr(LlamaForCausalLM, "load_adapter", load_adapter)
    model, _ = open_model(adapter, device="cpu")
    base = load(out, device_map="cpu")
    base.lm_head.weight.data += 1
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, base(IDS).logits)
    for name, said in ("lora_A", "a tensor is missing that its config implies: lora_A"), ("all", "not supported"):
        missing[:] = [name]
        with pytest.raises(ValueError, match=f"adapter: .*{said}"):
            open_model(adapter, device="cpu")


def test_evaluated_models_run_no_code_and_no_pickles(source, tmp_path, monkeypatch):
    """transformers asks the terminal whether to run a model's code, and reads pickles."""
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("somebody was asked"))
    pickled = shutil.copytree(source, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds only pickle weights \(pytorch_model\.bin\)"):
        open_model(pickled, device="cpu")
    coded = shutil.copytree(source, tmp_path / "coded")
    config = json.loads((coded / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "own.py").write_text("import pytest\npytest.fail('code was run')\n")
    with pytest.raises(ValueError, match="contains custom code"):
        open_model(coded, device="cpu")


def test_save_pretrained_is_an_error_and_not_a_directory_of_nonsense(converted, tmp_path):
    model = load(converted, device_map="cpu")
    for each in (model, model.model):
        for save in (each.save_pretrained, each.push_to_hub):
            with pytest.raises(ValueError, match="save_pretrained, push_to_hub: .* copy its directory"):
                save(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy.copy])
def test_a_model_whose_linears_are_dense_again_is_saved_and_converted(source, copied, tmp_path):
    """As peft's merge_and_unload leaves it: W + B A in the place of what was trained on."""
    first = convert(source, "int8-weight-only", tmp_path / "first").out
    loaded = load(first, device_map="cpu", merge=False)
    model = copied(loaded)
    names = [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    for name in names:
        old = model.get_submodule(name)
        new = nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16)
        new.weight.data = old.dequantized(torch.bfloat16) + 0.1 * torch.randn_like(new.weight)
        with pytest.raises(ValueError, match="save_pretrained, push_to_hub: Int8Linear in this model have no other"):
            model.save_pretrained(tmp_path / "saved")
        model.set_submodule(name, new)
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-2, atol=1e-2)
    again = load(convert(tmp_path / "saved", "int8-weight-only", tmp_path / "again").out, device_map="cpu", merge=False)
    for name in names:
        wanted, found = model.get_submodule(name).weight.float(), again.get_submodule(name).dequantized(torch.float32)
        assert (found - wanted).abs().max() <= wanted.abs().max() / 127


@pytest.mark.parametrize("recipe", ["quarot-mxfp4", "quarot-w4a4kv4"])
def test_continuous_batching_gives_the_tokens_of_generate(source, recipe, tmp_path):
    if "kwargs" not in signature(PagedAttentionCache.update).parameters:
        pytest.skip("this transformers' attention functions write the paged cache")
    model = load(convert(source, recipe, tmp_path / "out").out, device_map="cpu")
    rules = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # or it takes most of the memory there is
    options = {"generation_config": rules, "continuous_batching_config": small, "progress_bar": False}
    (found,) = model.generate_batch([[5, 6, 7, 8]], **options).values()
    assert not found.error and len(found.generated_tokens) == 4
    if recipe != "quarot-w4a4kv4":  # whose own cache is INT4, and the paged one wide
        expected = model.generate(torch.tensor([[5, 6, 7, 8]]), generation_config=rules)
        assert expected[0, 4:].tolist() == found.generated_tokens


def test_loading_leaves_what_others_froze(converted):
    for frozen in (False, True):
        if frozen:
            gc.freeze()
        before = gc.get_freeze_count()
        load(converted, device_map="cpu")
        after = gc.get_freeze_count()
        assert after <= before and (after > 0) == frozen  # of hundreds of thousands some may die meanwhile
        gc.unfreeze()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_config_whose_dtype_is_auto_means_the_embeddings(source, tmp_path, key):
    shutil.copytree(source, tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    del config["dtype"]
    (tmp_path / "source/config.json").write_text(json.dumps(config | {key: "auto"}))
    out = convert(tmp_path / "source", "int8-weight-only", tmp_path / "out").out
    assert load(out, device_map="cpu").dtype == torch.bfloat16
    assert load(out, device_map="cpu", dtype="float16").dtype == torch.float16


@pytest.mark.parametrize("recipe", ["mxfp4", "quarot-mxfp4-online"])
def test_mxfp4_passes_gradients_unchanged(source, tmp_path, recipe):
    """Without no_grad a forward runs, too, and is the same one."""
    model = load(convert(source, recipe, tmp_path / "out").out, device_map="cpu", dtype="float32")
    down = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, down.in_features, requires_grad=True)
    y = down(x)
    with torch.no_grad():
        assert torch.equal(down(x), y)
    grad = torch.randn_like(y)
    y.backward(grad)
    through = grad @ down.dequantized(torch.float32)
    torch.testing.assert_close(x.grad, through if recipe == "mxfp4" else down.turned(through), rtol=1e-4, atol=1e-5)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_a_config_without_a_dtype_means_the_files_own(source, tmp_path):
    plain = shutil.copytree(source, tmp_path / "model")
    config = json.loads((plain / "config.json").read_text())
    del config["dtype"]
    (plain / "config.json").write_text(json.dumps(config))
    model = load(convert(plain, "int8-weight-only", tmp_path / "out").out, device_map="cpu")
    assert model.model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16


def test_a_model_cast_to_a_dtype_that_its_format_does_not_have_can_be_cast_back(source, tmp_path):
    model = load(convert(source, "mxfp4", tmp_path / "out").out, device_map="cpu").float()
    ids = torch.arange(20).view(1, 20)
    expected = model(ids).logits
    with pytest.raises(ValueError, match="x: dtype torch.float64; allowed"):
        model.double()(ids)
    assert torch.equal(model.float()(ids).logits, expected)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("kind", ["source", "converted"])
def test_auto_is_a_gpu_or_of_a_model_without_room_there_all_that_there_is(request, monkeypatch, tmp_path, kind, dtype):
    path, seen = request.getfixturevalue(kind), []
    tensors = [t for file in path.glob("*.safetensors") for t in load_file(file).values()]
    wide = sum(t.numel() for t in tensors if t.is_floating_point() and t.itemsize > 1) * (4 if dtype != "auto" else 2)
    needed = wide + sum(t.nbytes for t in tensors if not t.is_floating_point() or t.itemsize == 1)

    def plain(path, **options):
        seen.append(options["device_map"])
        model = SimpleNamespace(eval=lambda: None, to=lambda where: seen.append(where) or model)
        return model, {"missing_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(sys.modules["quantrot.load"], "load", lambda path, device_map, dtype: seen.append(device_map))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", plain)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for free, device, placed in (
        (10 * needed // 8 + 2, "auto", "cuda"),
        (10 * needed // 8 - 2, "auto", "auto"),
        (0, "cuda", "cuda"),
        (0, "cuda:1", "cuda:1"),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1 << 40))
        open_model(path, device, dtype)
        assert seen == ([placed] if placed == "auto" or kind == "converted" else [None, placed])
        seen.clear()
    file = next(path.glob("*.safetensors"))
    header = file.read_bytes().replace(b'"BF16"', b'"B16F"', 1)  # as of a dtype that only transformers knows
    copied = shutil.copytree(path, tmp_path / "copied")
    (copied / file.name).write_bytes(header)
    open_model(copied, dtype=dtype)
    assert seen[-1] == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["source", "converted"])
def test_gpu_a_model_that_it_has_no_room_for_computes_the_same(request, monkeypatch, kind):
    path = request.getfixturevalue(kind)
    whole, _ = open_model(path)
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (100_000, total))
    # Else transformers adds what the allocator keeps.
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    spread, _ = open_model(path)
    assert devices_of(whole) == "cuda:0" and "cpu" in devices_of(spread).split(", ")
    ids = IDS[0].cuda()
    with torch.no_grad():
        expected, found = (torch.cat([*next_token_logits(model, ids)]) for model in (whole, spread))
    assert torch.allclose(found.cpu(), expected.cpu(), atol=2e-2)
