"""What many prompts begin with, computed once: MMLU puts the same five examples in front of all questions of a subject.

lm-eval computes every prompt from its first token. Here prompts that begin alike are grouped; their beginning goes
through the model once, into its KV cache, and each batch of questions continues a copy of that. Only the logits that
are scored are computed. Prompts that share little, or are longer than the model's context, stay lm-eval's. Scores are
the same but for rounding: as with another batch size, sums have another order.

What a cache holds is quantized as the model does it: an FP8 cache's, or FP8 attention's, beginnings have a scale per
128 tokens and what follows one per token, as in a server that keeps beginnings.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.evals.logits import text_config
from quantrot.modules.cache import cache_name, other_layers

Tokens = tuple[int, ...]
Request = tuple[tuple[str, str], list[int], list[int]]  # lm-eval's: texts, context, continuation


def share_beginnings(lm: Any) -> None:
    """Have `lm`, an HFLM, score single-token continuations of prompts that begin alike as above.

    Does nothing for a model whose cache forgets (a sliding window, layers that are no attention), that cannot be asked
    for some logits alone, or whose positions are turned by other factors in a long prompt (longrope): a beginning
    would be cached by those of its own length, not of the prompt's.
    """
    model = lm.model
    asked = inspect.signature(model.forward).parameters
    config = text_config(model)
    stateful = getattr(model, "_is_stateful", False) or other_layers(config)
    forgets = stateful or getattr(config, "sliding_window", None) is not None
    by_length = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope"
    if forgets or by_length or "logits_to_keep" not in asked:
        return
    plain = lm._loglikelihood_tokens

    def scored(requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None) -> list[Any]:
        of_context: dict[Tokens, list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) == 1 and len(context) <= lm.max_length:
                of_context.setdefault(tuple(context), []).append(i)
        groups = alike(of_context)
        if not groups:
            return plain(requests, disable_tqdm, override_bs)
        size = override_bs or _batch_size(lm, requests)
        answers: list[Any] = [None] * len(requests)
        for shared, contexts in groups:
            for prompt, logprobs in _continued(lm, shared, contexts, size):
                likeliest = int(logprobs.argmax())
                for i in of_context[prompt]:
                    texts, _, (token,) = requests[i]
                    answers[i] = float(logprobs[token]), token == likeliest
                    lm.cache_hook.add_partial("loglikelihood", texts, answers[i])
        rest = [i for i, answer in enumerate(answers) if answer is None]
        if rest:
            for i, answer in zip(rest, plain([requests[i] for i in rest], disable_tqdm, size), strict=True):
                answers[i] = answer
        return answers

    lm._loglikelihood_tokens = scored


def alike(contexts: Iterable[Tokens]) -> list[tuple[int, list[Tokens]]]:
    """Groups of at least two contexts: (how many tokens all begin with, the contexts).

    A context joins the group before it, in sorted order, where at least half of it would be shared then.
    """
    groups: list[tuple[int, list[Tokens]]] = []
    for context in sorted(contexts):
        if groups:
            shared, members = groups[-1]
            # Of sorted sequences, neighbours share most. One token at least is left to continue with.
            shared = min(shared, _common(members[-1], context), len(context) - 1)
            if 2 * shared >= len(context):
                groups[-1] = shared, [*members, context]
                continue
        groups.append((len(context) - 1, [context]))
    return [group for group in groups if len(group[1]) > 1]


def _common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _batch_size(lm: Any, requests: list[Request]) -> int:
    """The one that was asked for, or that lm-eval finds for the longest prompt."""
    if lm.batch_size != "auto":
        return int(lm.batch_size)
    lm.batch_sizes = {}
    return int(lm._batch_scheduler(0, sorted(requests, key=lambda request: -len(request[1]))))


@torch.no_grad()
def _continued(lm: Any, shared: int, contexts: list[Tokens], size: int) -> Iterator[tuple[Tokens, Tensor]]:
    """Each context with the log probabilities [vocab] of what comes next."""
    start = torch.tensor([contexts[0][:shared]], device=lm.device)
    name = cache_name(lm.model)
    beginning = lm.model(start, use_cache=True, logits_to_keep=1)[name]
    longest_first = sorted(contexts, key=len, reverse=True)
    for first in range(0, len(contexts), size):
        batch = longest_first[first : first + size]
        cache = copy.deepcopy(beginning)
        cache.batch_repeat_interleave(len(batch))
        width = len(batch[0]) - shared
        ids = torch.tensor([[*c[shared:], *[0] * (width - len(c) + shared)] for c in batch], device=lm.device)
        last = torch.tensor([len(c) - shared - 1 for c in batch], device=lm.device)
        kept, place = last.unique(return_inverse=True)  # a row's padding is behind what is read
        logits = lm.model(ids, **{name: cache}, use_cache=True, logits_to_keep=kept).logits
        rows = logits[torch.arange(len(batch), device=lm.device), place]
        yield from zip(batch, F.log_softmax(rows, dim=-1, dtype=lm.softmax_dtype), strict=True)
