import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from quantrot.evals.harness import subject_names

VOCAB = 262


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(seed: int, heads: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        initializer_range=0.5,  # large enough that the answers of a random model differ from question to question
        bos_token_id=260,
        eos_token_id=261,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model():
    return make_model(0)


@pytest.fixture(scope="session")
def other_model():
    return make_model(1)


@pytest.fixture(scope="session")
def composite():
    """A model for pictures and text, whose config has one for each."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": VOCAB, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"max_position_embeddings": 512}
    vision = {**sizes, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, and one for each of MMLU's answers, as in real vocabularies: " A", " B", " C", " D"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    answers = [("Ġ", letter) for letter in "ABCD"]
    tokens = [*alphabet, *("".join(answer) for answer in answers)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=answers))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def model_dir(model, tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def questions():
    """57 subjects, 2 few-shot examples and 3 questions each, with texts that a careless CSV reader would break."""
    data = {}
    for s, subject in enumerate(subject_names()):
        data[subject] = {
            split: [
                {
                    "question": f'{subject[:9]} {split} {i}: "a, b"\n or c?',
                    "subject": subject,
                    "choices": [f"{(7 * s + 3 * i + k) % 11}" for k in range(3)] + ["None, of these 🙂"],
                    "answer": (s + i) % 4,
                }
                for i in range(rows)
            ]
            for split, rows in (("dev", 2), ("test", 3))
        }
    return data


@pytest.fixture(scope="session")
def mmlu_dir(questions, tmp_path_factory):
    """Laid out and described as the dataset on the hub is, so that lm-eval itself can read it too."""
    directory = tmp_path_factory.mktemp("mmlu")
    configs = []
    for subject, splits in questions.items():
        (directory / subject).mkdir()
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(rows), directory / subject / f"{split}.parquet")
        files = [{"split": split, "path": f"{subject}/{split}.parquet"} for split in splits]
        configs.append({"config_name": subject, "data_files": files})
    (directory / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    return directory
